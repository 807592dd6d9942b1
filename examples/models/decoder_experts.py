"""A decoder of Mamba-like layers and mixtures of experts (examples/decoder.py): jaxext's operations are injected, lax's has `ragged_dot`.

python examples/models/decoder_experts.py
"""

import pathlib
import sys

import compare
import jax

sys.path.append(str(pathlib.Path(__file__).parents[1]))

import decoder


def make(count, length):
    tokens, after = compare.text(count, length, len(decoder.ALPHABET))
    sides = []
    for ops in (decoder.LAX, decoder.JAXEXT):
        apply = lambda params, x, training, ops=ops: decoder.logits_of(ops, params, x)[0]  # noqa: E731
        sides.append(compare.model(apply, jax.tree.map(jax.numpy.asarray, decoder.init()), (tokens, after)))
    return sides[0]._replace(injected=sides[1].functions)


NETWORKS = [compare.Network("decoder with experts", "jax", make, (2, 16), (16, 96), (64, 512))]
if __name__ == "__main__":
    raise SystemExit(compare.main(NETWORKS))
