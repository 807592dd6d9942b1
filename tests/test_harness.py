"""jax's own catalogue of products, run on ours: each of its `dot_general` and `conv_general_dilated` harnesses against float64.

The catalogue is inside the jax wheel and has no public name: this file and jaxext/_compat.py are the only importers of `jax._src`.  It
compares nothing with anything by itself, so truth is the same equation of lax on operands cast up.
"""

import jax
import numpy as np
import pytest
from cases import check, wide
from jax import lax
from jax._src.internal_test_util.test_harnesses import all_harnesses

import jaxext

HARNESSES = {
    primitive: [harness for harness in all_harnesses if harness.group_name == primitive.name]
    for primitive in (lax.dot_general_p, lax.conv_general_dilated_p)
}
OURS = {lax.dot_general_p: "matmul_", lax.conv_general_dilated_p: "conv"}


@pytest.mark.parametrize(
    ("primitive", "harness"), [pytest.param(p, h, id=h.fullname) for p, harnesses in HARNESSES.items() for h in harnesses]
)
def test_harness(primitive, harness):
    args = harness.dyn_args_maker(np.random.RandomState(0))
    (eqn,) = jax.make_jaxpr(harness.dyn_fun)(*args).eqns
    assert eqn.primitive is primitive
    common = np.result_type(*map(wide, args))
    exact = dict(eqn.params, preferred_element_type=None, precision=None)
    true = primitive.bind(*(wide(x).astype(common) for x in args), **exact)
    by_lax = harness.dyn_fun(*args)
    with jaxext.in_place_of_lax():
        (row,) = jaxext.explain(harness.dyn_fun, *args).rows
        got = harness.dyn_fun(*args)
    assert row.op.startswith(OURS[primitive])
    check(got, by_lax, true)


def test_the_catalogue_is_there():
    """Should a jax rename its groups, no harness would be run and none would fail."""
    assert len(HARNESSES[lax.dot_general_p]) >= 246
    assert len(HARNESSES[lax.conv_general_dilated_p]) >= 110
