"""The record of verified kernels: what of it holds, and that no kernel computes an unnamed call without it."""

import dataclasses
import datetime
import json
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from lowered import struct
from msgspec.structs import replace

import jaxext
from jaxext.backends import kernel
from jaxext.core.form import owner
from jaxext.tables import active, environment, record, table_file
from jaxext.tables.table_format import Context, Entry, Measurement, Verified
from jaxext.tuning.explain import chosen
from jaxext.tuning.walk import walk

pytest.importorskip("triton")
from jaxext.ops.conv.triton import TritonConv  # noqa: E402
from jaxext.ops.matmul.triton import TritonMatmul  # noqa: E402
from jaxext.ops.ragged.triton import TritonRagged  # noqa: E402
from jaxext.ops.ragged_gather import ragged_gather_linear  # noqa: E402
from jaxext.ops.ragged_gather.triton import TritonRaggedGather  # noqa: E402

SOURCES = environment.codes("cuda")
H100 = Context("NVIDIA H100 80GB HBM3", 90, {"jax": "0.11.2"}, SOURCES)
DAY = datetime.date(2026, 11, 26)
KIND = "triton depthwise conv2d_dgrad bf16"


COMPILER = TritonConv().compiler()


def entry(context=H100, kind=KIND, **outcome):
    return Entry.of(context, DAY, {}, {kind: Verified(**{"right": True, "error": 1e-3, "compiler": COMPILER} | outcome)})


@pytest.fixture(autouse=True)
def own(tmp_path, monkeypatch):
    """A process that has read no record yet, where no CUDA kernel answers.  Returns the path of the user's."""
    path = tmp_path / "cache" / "tables.json"
    monkeypatch.setattr(table_file, "default_path", lambda: path)
    monkeypatch.setattr(record, "SHIPPED", tmp_path / "package.json")
    monkeypatch.setattr(record, "_records", {})
    monkeypatch.setattr(active, "_agreed", {})
    return table_file.record_path()


def dgrad(channels=512):
    """A depthwise convolution's gradient in x, which takes some 50 µs on an H100, as a function of w and the cotangent, and these two."""

    def gradient(w, y):
        def conv(x):
            numbers = ("NHWC", "HWIO", "NHWC")
            return jaxext.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=numbers, feature_group_count=channels)

        return jax.linear_transpose(conv, y)(y)

    return gradient, struct(3, 3, 1, channels, dtype=jnp.bfloat16), struct(64, 56, 56, channels, dtype=jnp.bfloat16)


def choice(fun, *arrays):
    """The call of the only product of a function on an H100, and the choice of its implementation."""
    with jaxext.use_target("sm_90a"):
        jaxpr = jax.make_jaxpr(fun)(*arrays).jaxpr
        (found,) = (chosen(step.eqn, "cuda") for step in walk(jaxpr) if step.eqn.primitive in owner and not step.left)
    return found[0], found[2]


def taken(channels=512):
    return choice(*dgrad(channels))[1].implementation


def unverified():
    _, found = choice(*dgrad())
    assert found.implementation == "xla"
    return found.refusals["triton"]


def test_no_kernel_is_taken_that_nobody_verified():
    assert unverified() == "not yet verified on 9.0: `python -m jaxext verify` takes three minutes there, or name it"


def test_a_named_kernel_needs_no_record():
    with jaxext.use_implementation("triton"):
        assert taken() == "triton"


@pytest.mark.parametrize("where", ["own", "package"])
def test_a_verified_kernel_is_preferred_again(where, own):
    table_file.merge(own if where == "own" else record.SHIPPED, [entry()])
    assert taken() == "triton"
    assert record.unverified("triton", "conv conv2d_wgrad bf16", 90, COMPILER) is not None  # another kind


def test_the_record_of_the_package_holds_whatever_the_sources(own):
    table_file.merge(record.SHIPPED, [entry(replace(H100, sources={}))])
    assert taken() == "triton"


def test_what_was_wrong_here_goes_before_the_package(own):
    table_file.merge(record.SHIPPED, [entry()])
    table_file.merge(own, [entry(right=False, error=None)])
    assert unverified() == "`python -m jaxext verify` found it wrong on 9.0"
    table_file.merge(own, [entry()])  # verified again
    record._records.clear()
    assert taken() == "triton"


def test_a_kernel_that_is_wrong_on_one_of_two_devices_is_wrong(own):
    table_file.merge(own, [entry(replace(H100, device="NVIDIA H200"), right=False), entry()])
    assert "found it wrong" in unverified()


def test_the_last_outcome_on_a_device_counts(own):
    """A kernel that was wrong may be right later, after an upgrade of jaxlib, say."""
    table_file.merge(own, [entry(replace(H100, versions={"jax": "0.11.1"}), right=False), entry()])
    assert choice(*dgrad())[1].implementation == "triton"


IGNORED = {
    "another capability": (entry(replace(H100, capability=80)), "it is of compute capability 8.0, this program is for 9.0"),
    "another build": (
        entry(replace(H100, sources=SOURCES | {"triton": "other"})),
        "for 9.0 it verified another build of jaxext: verify again",
    ),
}


@pytest.mark.parametrize("name", IGNORED)
def test_a_record_of_something_else_is_ignored_with_one_warning(name, own):
    other, reason = IGNORED[name]
    table_file.merge(own, [other])
    with pytest.warns(UserWarning, match="jaxext ignores the record of verified kernels in .*verified.json") as told:
        assert "not yet verified" in unverified() and "not yet verified" in unverified()
    assert [str(each.message).partition(".json: ")[2] for each in told] == [reason]


@pytest.mark.parametrize("text", [b"", b"{}", b"\xff\x00", b'{"format": "jaxext table 1", "entries": [{"verified": 3}]}'])
def test_a_damaged_record_is_ignored_with_one_warning(text, own):
    own.parent.mkdir()
    own.write_bytes(text)
    with pytest.warns(UserWarning, match="it is not a table of this version") as told:
        assert "not yet verified" in unverified() and "not yet verified" in unverified()
    assert len(told) == 1


def test_a_record_that_others_can_write_is_ignored(own):
    table_file.merge(own, [entry()])
    own.chmod(0o666)
    with pytest.warns(UserWarning, match="can be written by others"):
        assert "not yet verified" in unverified()


def test_another_compiler_makes_other_kernels(own):
    table_file.merge(own, [entry(compiler="triton 3.5.0")])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert "not yet verified" in unverified()


def test_a_record_of_the_package_that_is_damaged_is_ignored_with_a_warning(own):
    record.SHIPPED.write_text("{")
    table_file.merge(own, [entry()])
    with pytest.warns(UserWarning, match="package.json"):
        assert choice(*dgrad())[1].implementation == "triton"  # by the user's own


def test_small_calls_are_left_to_xla(own):
    table_file.merge(own, [entry()])
    _, found = choice(*dgrad(channels=8))
    assert found.implementation == "xla" and found.refusals["triton"].endswith("µs at least, and XLA fuses what takes less than 10")


def least(fun, *arrays, implementation: Any = TritonMatmul):
    """Seconds, by the model of an H100 or H200."""
    call, _ = choice(fun, *arrays)
    plan = implementation().planned(call)
    assert isinstance(plan, kernel.KernelPlan)
    return kernel.least_seconds(call, plan.problem, "ieee")


def test_the_least_time_is_that_of_the_products_or_of_the_bytes():
    """1.1e12 operations, some 0.9e15 of which an H100 or H200 does in a second; and 2.1 GB, of which they move 3.0 or 4.1 TB."""
    square = struct(8192, 8192, dtype=jnp.bfloat16)
    assert 0.8e-3 < least(jaxext.matmul, square, square) < 1.6e-3
    row, matrix = struct(1, 1 << 15, dtype=jnp.bfloat16), struct(1 << 15, 1 << 15, dtype=jnp.bfloat16)
    assert 0.4e-3 < least(jaxext.matmul, row, matrix) < 0.9e-3


@pytest.mark.parametrize("groups", [1, 4])
def test_each_row_of_a_ragged_product_meets_one_group(groups):
    """6.9e10 operations, however many groups there are."""
    x, w = struct(8192, 2048, dtype=jnp.bfloat16), struct(groups, 2048, 2048, dtype=jnp.bfloat16)
    assert 50e-6 < least(jaxext.ragged_dot, x, w, struct(groups, dtype=jnp.int32), implementation=TritonRagged) < 100e-6


def test_each_place_of_gathered_rows_meets_one_row():
    """6.9e10 operations, of 4096 rows at two places each, or of one row at all 8192."""
    w, sizes = struct(4, 2048, 2048, dtype=jnp.bfloat16), struct(4, dtype=jnp.int32)
    for rows, places in ((4096, 2), (1, 8192)):
        x, row, place = struct(rows, 2048, dtype=jnp.bfloat16), struct(8192, dtype=jnp.int32), struct(rows, places, dtype=jnp.int32)
        assert 50e-6 < least(ragged_gather_linear, x, w, sizes, row, place, implementation=TritonRaggedGather) < 100e-6


@pytest.mark.parametrize("family", ["ragged", "ragged_found"])
def test_a_config_of_a_verified_kind_comes_first(family, monkeypatch):
    """Kernels whose programs find their visits are of another kind than those with a list of visits.  `tune` tries both, as ranked."""
    monkeypatch.setattr(record, "unverified", lambda name, kind, *_: None if kind.startswith(f"{family} ") else "not yet verified")
    x, w = struct(512, 256, dtype=jnp.bfloat16), struct(4, 256, 256, dtype=jnp.bfloat16)
    plan = TritonRagged().planned(choice(jaxext.ragged_dot, x, w, struct(4, dtype=jnp.int32))[0])
    assert isinstance(plan, kernel.KernelPlan)
    ranked = [*plan.implementation.configs(plan.problem)]
    first = next(config for config in ranked if config.finds_visit == (family == "ragged_found"))
    assert [*plan.configs] == [first, *(config for config in ranked if config != first)]


def test_measured_kernels_count_as_verified(monkeypatch):
    """`tune` compares results with float64."""

    def measured(call):
        plan = TritonConv().planned(call)
        assert isinstance(plan, kernel.KernelPlan)
        ours = Measurement("triton", dataclasses.asdict(plan.configs[0]), (1.0, 1.0, 1.0), 0.0)
        return [Measurement("xla", {"algorithm": "lax"}, (2.0, 2.0, 2.0), 0.0), ours]

    monkeypatch.setattr(active, "measured", measured)
    assert taken() == "triton"


def test_processes_with_different_records_are_an_error(own, monkeypatch):
    table_file.merge(own, [entry()])
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    other = json.dumps(["0123456789abcdef", "/other/verified.json", 0])
    monkeypatch.setattr(active, "published", lambda key, text: {0: text, 1: other})
    with pytest.raises(
        RuntimeError,
        match=r"processes have different records of verified kernels \(process 0 has 1 rows.*copy one to all of them, or remove it$",
    ):
        taken()


def test_programs_in_the_persistent_cache_depend_on_the_record(own):
    before = record.known_as(90)
    table_file.merge(own, [entry()])
    record._records.clear()
    assert record.known_as(90) != before and record.known_as(None) == ""


def test_the_packages_own_record_can_be_read(monkeypatch):
    monkeypatch.undo()
    assert record.SHIPPED.exists() and isinstance(table_file.load(record.SHIPPED), tuple)
