"""The language model of nano-moe-jax, unchanged.   pip install nano-moe-jax; python examples/models/moe_language_model.py"""

import compare


def make(count, length):
    from nano_moe.config import NanoMoEConfig
    from nano_moe.model import NanoMoE

    network = NanoMoE(NanoMoEConfig(dropout_rate=0.0))
    batch = compare.text(count, length, 256)
    params = network.init(compare.key(), batch[0])
    return compare.model(lambda params, x, training: network.apply(params, x)[0], params, batch)


# every token passes all experts
NETWORKS = [compare.Network("NanoMoE", "nano-moe-jax", make, (1, 16), (4, 128), (64, 128), rewritten=False, float64=False)]
if __name__ == "__main__":
    raise SystemExit(compare.main(NETWORKS))
