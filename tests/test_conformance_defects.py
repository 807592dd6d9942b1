"""The conformance kit finds a planted defect, names the rule to mend, and raises no other alarm."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import core, lax
from jax.experimental.custom_partitioning import custom_partitioning
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir, xla
from jax.sharding import PartitionSpec as P

from jaxext import testing

ONE = jax.devices()[:1]
X = np.array([[1.0, -2.0, 3.0], [0.5, 2.0, -1.0]], np.float32)
W = np.array([2.0, -1.0, 1.0], np.float32)


def doubled(
    abstract: Callable = lambda x: lax.neg_p.abstract_eval(x)[0],
    jvp: Callable | None = lambda p, t: p.bind(t),
    transpose: Callable | None = lambda ct, x: [2 * ct],
    batch: Callable | None = lambda args, dims: dims[0],
):
    """(x, w) -> 2 x w, where 2 x is a user's primitive; each rule may be another or, being None, missing."""
    p = Primitive("doubled")
    p.def_impl(lambda x: xla.apply_primitive(p, x))
    p.def_abstract_eval(abstract)
    mlir.register_lowering(p, mlir.lower_fun(lambda x: 2 * x, multiple_results=False))
    if transpose is not None:
        ad.primitive_transposes[p] = transpose
    if jvp is not None:
        ad.primitive_jvps[p] = lambda primals, tangents: (p.bind(*primals), jvp(p, *map(ad.instantiate_zeros, tangents)))
    if batch is not None:
        batching.primitive_batchers[p] = lambda args, dims: (p.bind(*args), batch(args, dims))
    return lambda x, w: p.bind(x) * w[None]


def reference(x, w):
    return 2 * x * w[None]


def failures(fn, reference=reference, args=(X, W), **options):
    return {row.check: row.rule for row in testing.check_op(fn, reference, args, show=False, **options).failures}


def test_a_sound_primitive_passes(capsys):
    """On several devices too; the table is printed row by row and is the report's text."""
    report = testing.check_op(doubled(), reference, (X, W), linear=(0, 1))
    assert report.passed
    assert {row.detail for row in report.rows if row.outcome == "skipped"} == {"no splits are declared"}
    assert [row.check for row in report.rows] == list(testing.CHECKS)
    assert capsys.readouterr().out == f"{report}\n"
    report.raise_if_failed()


def test_a_dropped_varying_axis():
    """Forward all is right; the gradient of what is replicated is not added up.  The same abstract eval drops an explicit sharding."""
    found = failures(doubled(abstract=lambda x: core.ShapedArray(x.shape, x.dtype)))
    assert set(found) == {"gradient inside shard_map", "gradient of shard_map", "explicit mesh"}
    assert "drops the varying manual axes" in found["gradient inside shard_map"]
    assert "sharding rule of the types" in found["explicit mesh"]


WRONG_ON_ONE_DEVICE = {
    "no JVP": (doubled(jvp=None), {"jvp": "no JVP of doubled", "vjp": "no JVP of doubled"}),
    "no transpose": (
        doubled(transpose=None),
        {"vjp": "no transpose rule for doubled"},
    ),
    "no batching": (doubled(batch=None), {"vmap": "no batching rule for doubled: batching.primitive_batchers"}),
    "wrong transpose": (doubled(transpose=lambda ct, x: [3 * ct]), {"vjp": "the transpose rule is wrong"}),
    "wrong JVP": (
        doubled(jvp=lambda p, t: p.bind(3 * t)),
        {"jvp": "the JVP rule is wrong", "vjp": "the JVP rule is wrong"},
    ),
    "an axis ignored": (doubled(batch=lambda args, dims: 0), {"vmap": "the batching rule (batching.primitive_batchers"}),
    "NaN": (lambda x, w: jnp.where(x > 1, jnp.nan, reference(x, w)), {"eager": "NaN"}),
    "dtype": (lambda x, w: reference(x, w).astype(np.float16), {"eager": "dtype rule"}),
    "shape": (lambda x, w: reference(x, w)[:1], {"eager": "shape rule"}),
}


@pytest.mark.parametrize("defect", WRONG_ON_ONE_DEVICE)
def test_a_wrong_rule(defect):
    fn, wanted = WRONG_ON_ONE_DEVICE[defect]
    found = failures(fn, devices=ONE)
    assert set(found) == set(wanted)
    for check, words in wanted.items():
        assert words in found[check]


def test_custom_vjp_has_no_forward_mode():
    """Reverse mode of any order is there; a wrong one of it is told too."""

    def make(factor):
        product = jax.custom_vjp(reference)
        product.defvjp(
            lambda x, w: (reference(x, w), (x, w)),
            lambda r, ct: (factor * jax.vjp(reference, *r)[1](ct)[0], jax.vjp(reference, *r)[1](ct)[1]),
        )
        return product

    assert {check: rule.split(":")[0] for check, rule in failures(make(1), devices=ONE).items()} == {
        "jvp": "jax.custom_vjp has no forward mode"
    }
    assert "the reverse rule is wrong" in failures(make(3), devices=ONE)["vjp"]


def test_a_leaked_tracer():
    leaked = []

    def leaking(x, w):
        leaked.append(x)
        return reference(x, w)

    found = failures(leaking, devices=ONE)
    assert set(found) == {"checking_leaks"}
    assert "outlives its trace" in found["checking_leaks"]


def test_a_result_that_depends_on_what_was_traced_before():
    """A constant that was computed when it was first traced, and a switch that is read while tracing."""
    seen = {}

    def keeping(x, w):
        if not isinstance(x, core.Tracer):
            seen["w"] = np.asarray(w)
        return reference(x, seen["w"] if isinstance(w, core.Tracer) else w)

    assert "depends on what was traced before" in failures(keeping, devices=ONE)["jit again"]


def test_a_callback_cannot_be_split():
    """Its result's type drops the varying axes; XLA gathers its operand, and cannot be left a part of a mesh."""

    @jax.custom_jvp
    def triple(x):
        return jax.pure_callback(lambda x: 3 * np.asarray(x), jax.ShapeDtypeStruct(x.shape, x.dtype), x, vmap_method="expand_dims")

    triple.defjvp(lambda primals, tangents: (triple(*primals), 3 * tangents[0]))
    found = failures(triple, lambda x: 3 * x, (X,), skip={"explicit mesh": "not supported by jax"})
    by_type = {"gradient inside shard_map", "gradient of shard_map"}
    assert set(found) == {"export", "automatic mesh", "shard_map over one axis of two"} | by_type
    assert all("drops the varying manual axes" in found[check] for check in by_type)
    assert "a Python callback" in found["export"]
    assert "custom_partitioning" in found["automatic mesh"]
    assert "XLA does not split callbacks" in found["shard_map over one axis of two"]


def rows(gather):
    """(x,) -> 2 x by custom_partitioning, whose rows are split, or gathered for no reason."""
    product = custom_partitioning(lambda x: 2 * x)

    def partition(mesh, avals, result):
        whole = jax.NamedSharding(mesh, P())
        place = whole if gather else avals[0].sharding
        return mesh, lambda x: 2 * x, place, (place,)

    product.def_partition(partition=partition, sharding_rule="i j -> i j")
    return product


@pytest.mark.parametrize("gather", [False, True])
def test_an_accidental_all_gather(gather):
    x = np.arange(16, dtype=np.float32).reshape(8, 2)
    missing: dict[str, str] = dict.fromkeys(
        ("vmap", "jvp", "vjp", "export", "splits, explicit mesh", "splits, shard_map over one axis of two"),
        "custom_partitioning has no such rule",
    )
    report = testing.check_op(rows(gather), lambda x: 2 * x, (x,), splits=[testing.Split((P("x"),), P("x"))], skip=missing, show=False)
    assert report["shard_map"].outcome == "passed"
    assert report["splits, automatic mesh"].outcome == ("failed" if gather else "passed")
    if gather:
        assert "all-gather" in report["splits, automatic mesh"].detail and "custom_partitioning" in report["splits, automatic mesh"].rule
        with pytest.raises(AssertionError, match="all-gather"):
            report.raise_if_failed()


def test_what_the_kit_is_given_is_checked():
    with pytest.raises(ValueError, match="args is empty"):
        testing.check_op(reference, reference, ())
    with pytest.raises(ValueError, match=r"skip names \['vamp'\]"):
        testing.check_op(reference, reference, (X, W), skip={"vamp": ""})
    with pytest.raises(ValueError, match="a split has 1 specs"):
        testing.check_op(reference, reference, (X, W), splits=[testing.Split((P(),), P())])
    with pytest.raises(ValueError, match=r"linear has \[2\]"):
        testing.check_op(reference, reference, (X, W), linear=(2,))
    with pytest.raises(ValueError, match="several shapes"):
        testing.check_op(reference, reference, (X, W), examples=lambda i: (X[:1], W))
    with pytest.raises(ValueError, match="`reference` itself fails"):
        testing.check_op(
            reference,
            lambda x, w: lax.while_loop(lambda v: v.sum() < 1, lambda v: v + 1, 2 * x * w[None]),
            (X, W),
            devices=ONE,
        )
