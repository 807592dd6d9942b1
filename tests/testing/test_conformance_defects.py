"""The conformance kit finds a planted defect, names the rule to mend, and raises no other alarm."""

import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import other_checks
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


RULES = "eager", "jit", "vmap", "jvp", "vjp", "gradient per example"


def failures(fn, reference=reference, args=(X, W), checks=RULES, **options):
    report = testing.check_op(fn, reference, args, show=False, skip=other_checks(*checks), **options)
    return {row.check: row.rule for row in report.failures}


def test_a_dropped_varying_axis():
    """Forward all is right; the gradient of what is replicated is not added up.  The same abstract eval drops an explicit sharding."""
    checks = (*RULES, *(check for check in testing.CHECKS if "shard_map" in check or "mesh" in check))
    assert failures(doubled(), checks=checks, linear=(0, 1)) == {}
    found = failures(doubled(abstract=lambda x: core.ShapedArray(x.shape, x.dtype)), checks=checks)
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

    found = failures(leaking, checks=(*RULES, "checking_leaks"), devices=ONE)
    assert set(found) == {"checking_leaks"}
    assert "outlives its trace" in found["checking_leaks"]


def test_a_result_that_depends_on_what_was_traced_before():
    """A constant that was computed when it was first traced, and a switch that is read while tracing."""
    seen = {}

    def keeping(x, w):
        if not isinstance(x, core.Tracer):
            seen["w"] = np.asarray(w)
        return reference(x, seen["w"] if isinstance(w, core.Tracer) else w)

    assert "depends on what was traced before" in failures(keeping, checks=(*RULES, "jit again"), devices=ONE)["jit again"]


def test_a_callback_cannot_be_split():
    """Its result's type drops the varying axes; XLA gathers its operand, and cannot be left a part of a mesh."""

    @jax.custom_jvp
    def triple(x):
        return jax.pure_callback(lambda x: 3 * np.asarray(x), jax.ShapeDtypeStruct(x.shape, x.dtype), x, vmap_method="expand_dims")

    triple.defjvp(lambda primals, tangents: (triple(*primals), 3 * tangents[0]))
    by_type = {"gradient inside shard_map", "gradient of shard_map"}
    expected = {"export", "automatic mesh", "shard_map over one axis of two"} | by_type
    found = failures(triple, lambda x: 3 * x, (X,), checks=(*RULES, "shard_map", *expected))
    assert set(found) == expected
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
    skip = other_checks("eager", "jit", "shard_map", "splits, automatic mesh")
    report = testing.check_op(rows(gather), lambda x: 2 * x, (x,), splits=[testing.Split((P("x"),), P("x"))], skip=skip, show=False)
    assert report["shard_map"].outcome == "passed"
    assert report["splits, automatic mesh"].outcome == ("failed" if gather else "passed")
    if gather:
        assert "all-gather" in report["splits, automatic mesh"].detail and "custom_partitioning" in report["splits, automatic mesh"].rule
        with pytest.raises(AssertionError, match="all-gather"):
            report.raise_if_failed()


def test_export_without_the_package_that_writes(monkeypatch):
    monkeypatch.setitem(sys.modules, "flatbuffers", None)
    skip = other_checks("eager", "jit", "vjp", "export", "gradient of export")
    report = testing.check_op(jnp.sin, jnp.sin, (jnp.ones(2),), show=False, devices=ONE, skip=skip)
    assert report.passed and not report.complete
    assert {row.check for row in report.rows if "flatbuffers" in row.detail} == {"export", "gradient of export"}
    assert "2: the package flatbuffers, which JAX needs for export, is not installed (pip install flatbuffers)" in report.summary


def test_what_one_device_leaves_out_is_said():
    """The last line says it, with the fix; `complete=True` raises an error with the rows."""
    skip = other_checks("eager", "jit", "pmap", "shard_map", "halves")
    report = testing.check_op(jnp.sin, jnp.sin, (jnp.ones(2),), show=False, devices=ONE, skip=skip)
    assert report.passed and not report.complete
    assert str(report).splitlines()[-1] == report.summary
    assert report.summary.startswith(
        f"check_op: 2 passed, 0 failed, {3 + len(skip)} skipped ({len(skip)}: not in this test; 2: one device only"
    )
    assert "one device only (XLA_FLAGS=--xla_force_host_platform_device_count=8 simulates 8 on a CPU" in report.summary
    assert "1: no splits are declared (pass `splits=`, or an operation of jaxext.extend as fn" in report.summary
    report.raise_if_failed()
    with pytest.raises(AssertionError, match=r"pmap +skipped  one device only\nshard_map +skipped  one device only\ncheck_op: 2 passed"):
        report.raise_if_failed(complete=True)
    accepted = testing.check_op(jnp.sin, jnp.sin, (jnp.ones(2),), show=False, devices=ONE, skip={**skip, "pmap": "-", "shard_map": "-"})
    assert accepted.complete


def test_what_needs_a_skipped_check_is_said():
    """Each check has its own reason, and the report is not complete: nobody asked to leave out the derivative, which is wrong."""

    @jax.custom_jvp
    def wrong(x):
        return jnp.sin(x)

    wrong.defjvp(lambda primals, tangents: (wrong(*primals), 3 * tangents[0]))
    x = np.arange(3, dtype=np.float32)
    report = testing.check_op(wrong, jnp.sin, (x,), skip={"jit": "slow", "jacfwd": "large"}, devices=ONE, show=False)
    assert report.passed and not report.complete
    assert {row.check for row in report.rows if row.outcome == "passed"} == {"eager", "disable_jit"}
    assert (report["jit"].detail, report["jacfwd"].detail) == ("slow", "large")
    for name in ("vmap", "jvp", "vjp", "grad of jvp", "finite differences", "gradient per example"):
        assert report[name].detail == "needs jit, which was skipped"
    assert report["hessian"].detail == "needs jacfwd, which was skipped"
    assert ": needs jit, which was skipped; " in report.summary and "; 1: slow" in report.summary
    with pytest.raises(AssertionError, match="jvp +skipped  needs jit, which was skipped"):
        report.raise_if_failed(complete=True)


def test_a_split_that_some_devices_cannot_make_is_said():
    """Two devices have no mesh axis "y", and halves need two elements: the rows that pass say what they leave out."""
    split = [testing.Split((P("x"),), P("x")), testing.Split((P(None, "y"),), P(None, "y"))]
    skip = other_checks("eager", "jit", "halves", "splits, automatic mesh")
    x = np.ones((2, 1), np.float32)
    report = testing.check_op(jnp.sin, jnp.sin, (x,), splits=split, show=False, devices=jax.devices()[:2], skip=skip)
    assert report["splits, automatic mesh"].detail == "no split over y on 2 devices"
    assert report["halves"].detail == "not along axis 1 of argument 0: want 2 elements or more"
    assert report.summary.count("partly: ") == 2
    report.raise_if_failed()


def test_halves_of_a_split():
    """A declared split without collectives claims that the function is independent there, also in the gradient of what all parts share."""
    names = ("eager", "jit", "jvp", "vjp", "jvp of grad", "halves", "jvp of halves", "vjp of halves", "jvp of grad of halves")
    split = [testing.Split((P("x"), P()), P("x"))]
    x, w = np.arange(12, dtype=np.float32).reshape(4, 3) / 8, W
    report = testing.check_op(reference, reference, (x, w), splits=split, devices=ONE, show=False, skip=other_checks(*names))
    report.raise_if_failed()
    assert all(report[name].outcome == "passed" for name in names)
    coupled = lambda x, w: reference(x, w) - x.mean(0, keepdims=True)
    assert failures(coupled, coupled, (x, w), splits=split, devices=ONE, checks=names).keys() == {"halves"}

    @jax.custom_vjp
    def forgetful(x, w):
        return reference(x, w)

    def backward(residuals, ct):
        x, w = residuals
        whole = jax.vjp(reference, x, w)[1](ct)
        return whole[0], whole[1] * float(x.shape[0] == 4)

    forgetful.defvjp(lambda x, w: (reference(x, w), (x, w)), backward)
    reverse = [name for name in names if "jvp" not in name]
    assert failures(forgetful, reference, (x, w), splits=split, devices=ONE, checks=reverse).keys() == {"vjp of halves"}


def test_what_the_kit_is_given_is_checked():
    with pytest.raises(ValueError, match="args is empty"):
        testing.check_op(reference, reference, ())
    with pytest.raises(ValueError, match=r"skip names \['vamp'\]"):
        testing.check_op(reference, reference, (X, W), skip={"vamp": ""})
    for specs in ((P(),), (P("x"), P()), (P(), P("data")), (P(), P(None, "x"))):
        with pytest.raises(ValueError, match=r"does not fit arguments of shapes \(2, 3\), \(3,\): .* {'x': 4, 'y': 2} divides"):
            testing.check_op(reference, reference, (X, W), splits=[testing.Split(specs, P())])
    for collectives in ("all-reduce", ("allreduce",)):
        with pytest.raises(ValueError, match="want a sequence of all-gather"):
            testing.Split((P(),), P(), collectives)  # pyright: ignore[reportArgumentType]
    wrong: dict[str, list[Any]] = {"splits": [testing.Split((P(), P()), P()), [(P(), P())]], "linear": [0, "0"], "skip": [["export"]]}
    for name, values in wrong.items():
        for value in values:
            with pytest.raises(TypeError, match=f"check_op: {name} is .*, want a "):
                testing.check_op(reference, reference, (X, W), **{name: value})
    with pytest.raises(TypeError, match=r"args is (?s:.*), want a sequence"):
        testing.check_op(reference, reference, X)  # pyright: ignore[reportArgumentType]
    with pytest.raises(TypeError, match=r"args\[1\] is 'w', want an array"):
        testing.check_op(reference, reference, (X, "w"))  # pyright: ignore[reportArgumentType]
    with pytest.raises(TypeError, match=r"args\[0\] is traced"):
        jax.jit(lambda x: testing.check_op(reference, reference, (x, W)).passed)(X)
    with pytest.raises(TypeError, match="a number that reference closes over is traced"):
        jax.grad(lambda a: testing.check_op(lambda x: a * x, lambda x: a * x, (X,)).passed * a)(np.float32(2))
    with pytest.raises(TypeError, match=r"args has random keys at \[0\]"):
        testing.check_op(jax.random.normal, jax.random.normal, (jax.random.key(0),))
    with pytest.raises(ValueError, match=r"devices is \(\), want one device or more"):
        testing.check_op(reference, reference, (X, W), devices=())
    for name, values in {"devices": [5, [0], ONE[0]], "tolerance": ["0.1", X], "examples": [3, lambda i: 3]}.items():
        for value in values:
            with pytest.raises(TypeError, match=rf"check_op: {name}(\(1\))? is .*, want "):
                testing.check_op(reference, reference, (X, W), **{name: value})
    for name in ("fn", "reference"):
        functions: Any = {"fn": reference, "reference": reference, name: "jnp.dot"}
        with pytest.raises(TypeError, match=f"check_op: {name} is 'jnp.dot', want a function"):
            testing.check_op(args=(X, W), **functions)
    for fields in ({"args": 3}, {"part": "product"}):
        with pytest.raises(TypeError, match=r"Split: (args|part) is .*, want "):
            testing.Split(**({"args": (P(),), "result": P()} | fields))  # pyright: ignore[reportArgumentType]
    for tolerance in (-1.0, np.nan):
        with pytest.raises(ValueError, match=f"tolerance is {tolerance}"):
            testing.check_op(reference, reference, (X, W), tolerance=tolerance)
    with pytest.raises(ValueError, match=r"linear has \[2\]"):
        testing.check_op(reference, reference, (X, W), linear=(2,))
    with pytest.raises(ValueError, match="several shapes"):
        testing.check_op(reference, reference, (X, W), examples=lambda i: (X[:1], W))


UNFIT = {
    "itself fails in 'vjp'": lambda x, w: lax.while_loop(lambda v: v.sum() < 1, lambda v: v + 1, 2 * x * w[None]),
    "fails in float64 in 'eager'": lambda x, w: lax.fori_loop(0, 2, lambda i, y: y * w[None], np.ones(X.shape, np.float32)),
    "gives NaN in 'eager'": lambda x, w: jnp.sqrt(x) * w[None],
}


@pytest.mark.parametrize("words", UNFIT)
def test_an_unfit_reference(words):
    with pytest.raises(ValueError, match=f"`reference` {words}"):
        testing.check_op(reference, UNFIT[words], (X, W), devices=ONE, skip=other_checks(*RULES))


def test_a_batching_rule_that_only_the_transpose_needs():
    """Rolled back it takes the mapped axis for the first."""
    roll, back = Primitive("roll"), Primitive("roll_back")
    for p, other, by in ((roll, back, 1), (back, roll, -1)):
        p.def_abstract_eval(lambda x, axis: lax.neg_p.abstract_eval(x)[0])
        mlir.register_lowering(p, mlir.lower_fun(lambda x, axis, by=by: jnp.roll(x, by, axis), multiple_results=False))
        p.def_impl(lambda x, axis, p=p: xla.apply_primitive(p, x, axis=axis))
        ad.deflinear2(p, lambda ct, x, axis, other=other: [other.bind(ct, axis=axis)])
        batching.primitive_batchers[p] = lambda args, dims, axis, p=p: (p.bind(*args, axis=axis + (p is back or dims[0] <= axis)), dims[0])
    found = failures(lambda x: roll.bind(x, axis=0), lambda x: jnp.roll(x, 1, 0), (X,), devices=ONE)
    assert found == {"gradient per example": "the batching rule of the transpose"}


def test_a_derivative_that_is_wrong_in_second_order():
    @jax.custom_jvp
    def cube(x):
        return x**3

    cube.defjvp(lambda primals, tangents: (cube(*primals), 3 * lax.stop_gradient(primals[0]) ** 2 * tangents[0]))
    skip = other_checks(*RULES, "jvp of grad", "grad of grad", "jvp of jvp", "jacfwd", "jacrev", "hessian")
    report = testing.check_op(cube, lambda x: x**3, (X,), devices=ONE, show=False, skip=skip)
    assert all(" of " in row.check and "a stop_gradient" in row.rule for row in report.failures)
    assert report["hessian"].detail == "needs jvp of grad, which failed"


def test_a_psum_too_many_and_a_carry_that_does_not_vary():
    x, w = np.arange(8, dtype=np.float32)[None], np.ones((8, 2), np.float32)

    def rule(part):
        split = testing.Split((P(None, "x"), P("x")), P(), ("all-reduce",), part)
        return failures(jnp.matmul, jnp.matmul, (x, w), splits=[split], checks=("eager", "jit", "shard_map"))["shard_map"]

    zeros = np.zeros((1, 2), np.float32)
    assert "Split.part" in rule(lambda x, w: lax.psum(lax.psum(x @ w, "x"), "x"))
    assert "lax.pcast" in rule(lambda x, w: lax.psum(lax.fori_loop(0, 1, lambda i, y: y + x @ w, jnp.asarray(zeros)), "x"))


def test_sound_functions_of_unusual_results():
    """Numbers of Python, and two dtypes under strict promotion; what checks nothing does not pass."""
    mixed = lambda x, w: {"x": x * x, "w": w * w, "number": 0.5}
    args = X.astype(jnp.bfloat16), W
    skip = other_checks(*RULES, "scan", "jvp of grad", "export", "gradient of remat")
    testing.check_op(mixed, mixed, args, tolerance=0.1, devices=ONE, show=False, skip=skip).raise_if_failed()
    report = testing.check_op(mixed, mixed, args, devices=ONE, show=False, skip={"eager": "works under jit only"})
    assert not report.passed
    with pytest.raises(AssertionError, match="works under jit only"):
        report.raise_if_failed()


def test_a_sound_function_that_normalizes():
    """The squares of its results add up to a constant, whose gradient is zero: so do those of examples that are rolled."""
    normalized = lambda x, g: x * lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6) * g[None]
    args = np.random.default_rng(0).standard_normal((1, 8), np.float32) / 8, np.linspace(0.5, 1.5, 8, dtype=np.float32)
    derived = ("eager", "jit", "vjp", "vmap", "automatic mesh", "gradient, automatic mesh")
    assert failures(normalized, normalized, args, checks=derived) == {}
