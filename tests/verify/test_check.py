"""The check of a case in this process, with stand-ins that fail, and the laws by which it judges."""

import dataclasses
import re

import jax
import numpy as np
import pytest

import jaxext
from jaxext.verify import cases, check, laws, results, stand_ins, worker
from jaxext.verify.check import Wrong
from jaxext.verify.events import Verdict


@pytest.fixture(scope="module")
def planted():
    """Name of a stand-in -> its case."""
    with jax.numpy_dtype_promotion("standard"), jax.enable_x64(False):
        found, _ = cases.listed(stand_ins.contacts()[:1], "cpu", list(stand_ins.PLANTS))
    return {case.implementation: case for case in found}


def checked(case):
    with jax.enable_x64(False), jax.numpy_dtype_promotion("standard"):
        return check.check(case)


def test_what_is_right_is_right(planted):
    launched = []
    with jax.enable_x64(False):
        right = check.check(planted["planted_right"], lambda: launched.append(1))
    assert right.norm < 1e-6 and right.worst < 1e-6 and right.graph == "no GPU" and launched == [1]


@pytest.mark.parametrize("name", [name for name, (_, outcome, _) in stand_ins.PLANTS.items() if outcome == "wrong"])
def test_what_is_wrong_is_told(planted, name):
    with pytest.raises(Wrong) as wrong:
        checked(planted[name])
    assert wrong.value.check == stand_ins.PLANTS[name][2]
    assert "(23, 39)" in wrong.value.reason or "[[3, 5]]" in wrong.value.reason


def test_integers_alone_do_not_do(planted):
    """A product of numbers of few bits is exact for small integers."""

    class Coarse(stand_ins.StandIn):
        def __init__(self):
            super().__init__("planted_coarse", lambda y: np.copyto(y, y.astype(np.float16)))

    case = planted["planted_right"]
    plan = Coarse().planned(case.call)
    assert not isinstance(plan, str)
    with pytest.raises(Wrong, match="numbers"):
        checked(dataclasses.replace(case, plan=plan, config=plan.configs[0]))


def test_results_lie_in_poisoned_memory(planted, monkeypatch):
    order = []
    monkeypatch.setattr(check.random_operands, "poison", lambda results: order.append(("poison", [x.shape for x in results])))
    monkeypatch.setattr(np, "matmul", lambda *args, matmul=np.matmul: order.append("run") or matmul(*args))
    checked(planted["planted_right"])
    assert order == [("poison", [(24, 40)]), "run"] * (1 + check.REPEATS)


def test_sums_on_tensor_cores_are_cut_off_whatever_precision_is_named():
    """Sums of 16-bit factors are too, which kernels call exact ("ieee"): 528 squares of them were 1.2e-6 too small on an H100."""
    names = "matmul bfloat16 into float32", "matmul highest"
    with jaxext.use_target("sm_90a"):
        found, _ = cases.listed([contact for contact in cases.contacts() if contact.name in names], "cuda", ["triton"])
    of_halves, of_floats = (next(case for case in found if f"{name}, picked" in case.name) for name in names)
    assert check.allowance(of_halves) == {"stray": laws.SUMS}
    assert check.allowance(of_floats) == {"stray": laws.FLOAT32}


ONES = np.ones((2, 3))


@pytest.mark.parametrize(
    ("got", "reason"),
    [
        (ONES.astype(np.float32), None),
        (np.where(np.arange(3) == 1, np.nan, ONES).astype(np.float32), "never written"),
        (np.where(np.arange(3) == 1, 1 + 2.0**-10, ONES).astype(np.float32), r"2 of 6 are wrong, the first at \(0, 1\)"),
        (ONES[:1].astype(np.float32), "has the shape"),
    ],
)
def test_laws(got, reason):
    for law in (laws.exact, lambda got, truth: laws.near(got, truth, truth, laws.SUMS)):
        told = law(got, ONES)
        assert told is None if reason is None else told is not None and re.search(reason, told)


def test_a_rounding_is_allowed_and_no_more():
    truth = np.array([1 + 2.0**-11])
    assert laws.near(np.array([1], np.float16), truth, truth, laws.SUMS) is None
    assert laws.near(np.array([1 + 2.0**-9], np.float16), truth, truth, laws.SUMS) is not None
    assert laws.near(np.array([1 + 2.0**-9], np.float16), truth, truth, laws.SUMS, largest=2.0**-8) is None
    assert laws.near(np.array([3], np.int32), np.array([3.0]), truth, 0) is None
    assert laws.errors(np.array([1.0, 2.5]), np.array([1.0, 2.0])) == (0.5 / np.sqrt(5), 0.25)


def verdicts(cases, *outcomes):
    return {case.name: Verdict(of, {"errors": {"norm": 0.25}}) for case, of in zip(cases, outcomes, strict=False)}


def test_a_kind_is_right_if_its_first_case_is_and_none_fails(planted, monkeypatch):
    monkeypatch.setattr(stand_ins.StandIn, "compiler", lambda self: "none 1", raising=False)
    one = planted["planted_right"]
    pair = [one, dataclasses.replace(one, name="another")]
    of = lambda *outcomes: results.verified(pair, verdicts(pair, *outcomes)).get(one.key)
    right, wrong = of("right", "right"), of("right", "wrong")
    assert right is not None and (right.right, right.error, right.compiler) == (True, 0.25, "none 1")
    assert wrong is not None and not wrong.right
    for others in ((), ("refused",)):
        seen = of("right", *others)
        assert seen is not None and seen.right
    assert results.verified(pair, verdicts(pair[1:], "right")) == results.verified(pair, verdicts(pair, "refused", "right")) == {}
    slow = {one.name: Verdict("hung", {"launched": False})}
    assert results.verified(pair, slow) == {} and not results.verified(pair, {one.name: Verdict("hung", {"launched": True})})[one.key].right
    assert results.verified(pair, {one.name: Verdict("raised", {"harness": True})}) == {}
    died = results.verified(pair, {one.name: Verdict("died", {})})[one.key]
    assert (died.right, died.error) == (False, None)


def test_the_table_has_a_mark_for_each_kind(planted):
    few = [planted["planted_right"], planted["planted_wrong"], planted["planted_hang"]]
    found = {**verdicts(few, "right"), few[1].name: Verdict("wrong", {"check": "bits", "reason": "x" * 3000})}
    columns, rows = results.table(few, found)
    assert columns == ("family", "role", "planted_right", "planted_wrong", "planted_hang")
    assert [row[2:] for row in rows] == [("float32 +", "float32 x", "float32 .")]
    (line,) = results.failures(few, found, 10_000)
    assert line.startswith("wrong: planted_wrong matmul_nn: planted, picked\n  bits: xxx") and len(line) < 1000
    every = {case.name: Verdict("wrong", {"reason": "y" * 3000}) for case in few}
    many = [dataclasses.replace(case, kind=f"family{i} role float32", name=f"{i} {case.name}") for i in range(30) for case in few]
    lines = results.failures(many, {case.name: every[case.name.partition(" ")[2]] for case in many}, 5000)
    assert sum(map(len, lines)) < 5000 and "more families" in lines[-1]


def test_what_a_graph_holds_is_read_from_what_xla_dumped(tmp_path):
    assert check.held(tmp_path) == (0, "XLA made no command buffer")
    file = tmp_path / "module_0001.jit_f.thunk_sequence_after_thunk_passes.txt"
    file.write_text("000: kCommandBuffer\n  000: kCustomCall a\n  001: kCustomCall b\n")
    assert check.held(tmp_path) == (2, None)
    file.write_text(file.read_text() + "001: kCustomCall c\n")
    assert check.held(tmp_path) == (2, "outside of it are 1 of 3 kernels")


def test_magnitudes_of_numbers_of_four_bits():
    assert check._size(jax.numpy.array([-3, 2], "int4")).tolist() == [3, 2]


def test_what_the_harness_cannot_check_says_nothing_of_the_kernel(planted, monkeypatch):
    def of(reason):
        def raises(*_):
            raise RuntimeError(reason)

        return raises

    case = planted["planted_right"]
    for place, reason, is_harness in (("_truths", "x", True), ("_run", "RESOURCE_EXHAUSTED: Out of memory", True), ("_run", "x", False)):
        with monkeypatch.context() as patched, jax.enable_x64(False), jax.numpy_dtype_promotion("standard"):
            patched.setattr(check, place, of(reason))
            event = worker._checked(lambda: case, lambda: None)
        assert (event["event"], event["harness"]) == ("raised", is_harness)
