"""The conformance kit's whole matrix of a product, bit for bit against lax in float64, and most of it of a function that is not linear."""

import jax.numpy as jnp
import numpy as np
from bilinear import DOT, LAX, OURS, Problem, integers
from jax import lax
from jax.sharding import PartitionSpec as P

import jaxext
from jaxext import testing

SMALL = Problem("dot", (4, 2), (2, 4), DOT.axes, DOT.call)  # so that Jacobians and Hessians in full are compared too
SPLITS = [
    testing.Split((P("x"), P(None, "y")), P("x", "y")),
    testing.Split((P(None, "y"), P("y")), P(), ("all-reduce",), lambda x, w: lax.psum(SMALL.call(OURS, x, w), "y")),
]


def test_a_product(capsys):
    """All checks pass; the table is printed row by row and is the report's text."""
    fn, reference = SMALL.role("fprop"), SMALL.role("fprop", LAX)
    report = testing.check_op(fn, reference, SMALL.operands("fprop"), tolerance=0, linear=(0, 1), splits=SPLITS)
    report.raise_if_failed(complete=True)
    assert [(row.check, row.outcome) for row in report.rows] == [(check, "passed") for check in testing.CHECKS]
    assert capsys.readouterr().out == f"{report}\n"


def test_a_function_that_is_not_linear():
    """Several arguments, one of integers, several results, in bfloat16."""

    k = jnp.asarray(integers((4, 5), 1, jnp.bfloat16))

    def attention(q, index):
        scores = jnp.tanh(jaxext.matmul(q, k) / 4)
        return {"scores": scores, "best": jnp.argmax(scores, -1), "scaled": scores * index.astype(scores.dtype)}

    def reference(q, index):
        scores = jnp.tanh((q[:, :, None] * k[None].astype(q.dtype)).sum(1) / 4)
        return {"scores": scores, "best": jnp.argmax(scores, -1), "scaled": scores * index.astype(scores.dtype)}

    args = integers((3, 4), 0, jnp.bfloat16), np.int32(1)
    checks = "jvp of jvp of grad", "grad of grad of grad", "gradient of shard_map without check_vma"
    skipped = {name: "test_a_product has it" for name in checks}
    report = testing.check_op(attention, reference, args, tolerance=0.1, skip=skipped)
    report.raise_if_failed()
    assert "16-bit" in report["shard_map over one axis of two"].detail
