"""A Mamba (Gu and Dao, 2023) whose recurrence is a scan, written in flax.linen.   pip install flax; python examples/models/mamba_flax.py"""

import compare
import jax.numpy as jnp
from jax import lax


def make(layers, width, inner, state, *batch):
    from flax import linen as nn

    class Mamba(nn.Module):
        @nn.compact
        def __call__(self, x):
            for layer in range(layers):
                v, gate = jnp.split(nn.Dense(2 * inner, use_bias=False)(nn.RMSNorm()(x)), 2, -1)
                v = nn.silu(nn.Conv(inner, (4,), padding="CAUSAL", feature_group_count=inner)(v))
                delta = nn.softplus(nn.Dense(inner)(nn.Dense(width // 16, use_bias=False)(v)))
                b, c = jnp.split(nn.Dense(2 * state, use_bias=False)(v), 2, -1)
                decay = -jnp.exp(self.param(f"decay {layer}", nn.initializers.normal(), (inner, state)))

                def step(h, now, decay=decay):
                    v, delta, b, c = now
                    h = jnp.exp(delta[..., None] * decay) * h + (delta * v)[..., None] * b[:, None]
                    return h, jnp.einsum("ncs,ns->nc", h, c)

                _, y = lax.scan(step, jnp.zeros((len(x), inner, state), x.dtype), [z.swapaxes(0, 1) for z in (v, delta, b, c)])
                x = x + nn.Dense(width, use_bias=False)((y.swapaxes(0, 1) + v) * nn.silu(gate))
            return nn.Dense(compare.CLASSES)(nn.RMSNorm()(x).mean(1))

    return compare.of_linen(Mamba(), compare.images(*batch, width))


CPU, GPU = (12, 256, 512, 16, 2, 128), (12, 1024, 2048, 16, 8, 512)
NETWORKS = [compare.Network("Mamba, 12 layers", "flax", make, (1, 64, 128, 4, 2, 64), CPU, GPU)]
if __name__ == "__main__":
    raise SystemExit(compare.main(NETWORKS))
