"""The list of cases: it has every kind of kernels that is offered on an H100, and the first of each kind come first."""

import importlib.util
import pathlib

import jax
import jax.numpy as jnp
import pytest

import jaxext
from jaxext.backends.cuda import cuda_binding
from jaxext.backends.kernel import KernelPlan
from jaxext.benchmarks.problems import PROBLEMS
from jaxext.verify import cases, contact_list
from jaxext.verify.contact_list import Contact

ROOT = pathlib.Path(__file__).parents[2]
KERNELS = [name for name in contact_list.IMPLEMENTATIONS if name != "cuda" or not cuda_binding.missing()]


@pytest.fixture(scope="module")
def found():
    """The cases for an H100, by the kernels that are here."""
    with jaxext.use_target("sm_90a"), jax.enable_x64(False), jax.numpy_dtype_promotion("standard"):
        return cases.listed(contact_list.contacts(), "cuda", KERNELS)[0]


def documented():
    """The sample calls of the documentation."""
    spec = importlib.util.spec_from_file_location("refusals", ROOT / "docs/refusals.py")
    assert spec is not None and spec.loader is not None
    refusals = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(refusals)
    for page, calls in refusals.CALLS.items():
        for title, (function, operands) in calls.items():
            if operands[0].dtype not in (jnp.float64, jnp.complex64):
                yield Contact(f"{page}: {title}", function, tuple(operands))


def benchmarked():
    """Of the suite, a problem for each class, role, numbers and set of tags that choose a kernel."""
    seen = set()
    for problem in PROBLEMS:
        for case in problem.cases():
            tags = case.tags & {"depthwise", "grouped", "batched", "skinny", "one-axis", "two-axes", "three-axes", "gated", "ragged", "mlp"}
            if (key := (type(problem), case.operation, case.role, case.numbers, tags)) not in seen:
                seen.add(key)
                operands = [jax.ShapeDtypeStruct(*of) for of in zip(case.shapes, case.dtypes, strict=True)]
                yield Contact(case.name, case.build("jaxext"), tuple(operands))


@pytest.mark.parametrize("source", [documented, benchmarked])
def test_every_kind_that_is_offered_has_a_case(found, source):
    listed = {case.key for case in found}
    missing = {}
    with jaxext.use_target("sm_90a"), jax.enable_x64(False), jax.numpy_dtype_promotion("standard"):
        for contact in source():
            for family, call in cases.calls_of(contact, "cuda"):
                for implementation in family.implementations[:-1]:
                    plan = implementation.planned(call) if implementation.name in KERNELS else "not here"
                    if isinstance(plan, KernelPlan) and not call.empty:
                        missing.setdefault(f"{implementation.name} {plan.kind(plan.configs[0])}", contact.name)
    missing = [f"{kind}: {name}" for kind, name in missing.items() if kind not in listed]
    assert not missing, "\n".join(missing)
