"""The Mamba2 of mamba2-jax and of bonsai, unchanged, in flax.nnx.   pip install mamba2-jax; python examples/models/mamba2.py"""

import compare


def make(layers, width, count, length):
    from flax import nnx
    from mamba2_jax import Mamba2Config, Mamba2ForCausalLM

    config = Mamba2Config(vocab_size=1000, hidden_size=width, num_hidden_layers=layers, state_size=64, head_dim=32, chunk_size=64)
    graph, params, rest = nnx.split(Mamba2ForCausalLM(config, rngs=nnx.Rngs(0)), nnx.Param, ...)

    def apply(params, x, training):
        return nnx.merge(graph, params, rest)(x)["logits"]

    return compare.model(apply, params, compare.text(count, length, 1000))


CLAIMS = {"rewritten": False, "float64": False}  # its convolution is a sum of slices, and its norms compute in float32
NETWORKS = [compare.Network("Mamba2, 8 layers", "mamba2-jax", make, (1, 64, 1, 128), (8, 256, 2, 128), (8, 1024, 8, 1024), **CLAIMS)]
if __name__ == "__main__":
    raise SystemExit(compare.main(NETWORKS))
