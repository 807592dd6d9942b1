"""A WaveNet of 20 layers (van den Oord et al., 2016), written in haiku.   pip install dm-haiku; python examples/models/wavenet.py"""

import compare
import jax
import jax.numpy as jnp


def make(width, *batch):
    import haiku as hk

    def network(x, training):
        x, skips = hk.Conv1D(width, 1)(x), 0
        for rate in [1 << layer for layer in range(10)] * 2:
            filtered, gate = jnp.split(hk.Conv1D(2 * width, 2, rate=rate, padding=hk.pad.causal)(x), 2, -1)
            y = jnp.tanh(filtered) * jax.nn.sigmoid(gate)
            skips, x = skips + hk.Conv1D(4 * width, 1)(y), x + hk.Conv1D(width, 1)(y)
        return hk.Conv1D(compare.CLASSES, 1)(jax.nn.relu(hk.Conv1D(4 * width, 1)(jax.nn.relu(skips)))).mean(1)

    return compare.of_haiku(network, compare.images(*batch, 1))


NETWORKS = [compare.Network("WaveNet", "dm-haiku", make, (8, 1, 64), (64, 2, 2048), (128, 8, 8192), rewritten=False)]
if __name__ == "__main__":
    raise SystemExit(compare.main(NETWORKS))
