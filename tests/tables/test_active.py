"""The active table: which one it is, what it says of a call, and that the processes of a run have the same."""

import concurrent.futures
import dataclasses
import functools
import importlib.metadata
import json
import pathlib
import sys
import threading
import time
import types

import jax
import jax.numpy as jnp
import pytest
from msgspec.structs import replace

import jaxext
from jaxext.backends import kernel, xla_products
from jaxext.backends.cuda import cuda_binding
from jaxext.core import implementation
from jaxext.core.call import Partitioner
from jaxext.core.family import families
from jaxext.ops.conv import xla as xla_conv
from jaxext.tables import active, environment, table_file
from jaxext.tables.table_format import Measurement, Table

ROOT = pathlib.Path(jaxext.__file__).parent.parent
HERE = active.context("cpu")
ELSEWHERE = replace(HERE, device="NVIDIA H200", capability=90)
OLDER = replace(HERE, versions={**HERE.versions, "jax": "0.1.0"})


def matmul(rows=4):
    return jnp.ones((rows, 5)), jnp.ones((5, 6))


def call(rows=4):
    with active.collecting() as calls, jaxext.use_table(None):
        jax.jit(lambda a, b: jaxext.matmul(a, b)).lower(*matmul(rows))
    (found,) = calls
    return found


CALL = call()
CONFIG = {"algorithm": "dot_general"}


def row(ms=1.0, call=CALL):
    """A row of the problem, with that time."""
    return {call.problem: (Measurement("xla", CONFIG, (ms, ms, ms), 0.0),)}


def times(call=CALL):
    return [m.ms[1] for m in active.measured(call)]


@pytest.fixture(autouse=True)
def fresh(tmp_path, monkeypatch):
    """A process that has read nothing yet, and neither its user nor its package has a table.  Returns the path of the user's."""
    path = tmp_path / "cache" / "tables.json"
    monkeypatch.setattr(table_file, "default_path", lambda: path)
    monkeypatch.setattr(active, "_SHIPPED", tmp_path / "package")
    for name in ("_tables", "_agreed"):
        monkeypatch.setattr(active, name, {})
    return path


@pytest.fixture
def shipped(tmp_path):
    return tmp_path / "package" / "this.json"


# ---- what is active


def test_the_users_own_is_read_once(fresh):
    table_file.write(fresh, HERE, row(2.0))
    assert times() == [2.0]
    fresh.unlink()
    assert times() == [2.0]


def test_the_users_own_goes_before_the_packages(fresh, shipped):
    table_file.write(shipped, HERE, row(2.0) | row(7.0, call(rows=3)))
    table_file.write(fresh, HERE, row(3.0))
    assert (times(), times(call(rows=3))) == ([3.0], [7.0])
    table = active.active_on("cpu")
    assert (table.source, len(table.rows), table.ignored) == (str(fresh), 2, None)


def test_other_versions_are_warned_of_once(fresh, shipped):
    """Only those of the user's own table are: the user can do nothing about the package's."""
    table_file.write(shipped, OLDER, row(2.0))
    assert times() == []
    active._tables.clear()
    table_file.write(fresh, OLDER, row(2.0))
    assert "jax 0.1.0" in str(active.active_on("cpu").ignored)  # which does not warn
    with pytest.warns(UserWarning, match=rf"jaxext ignores measurements in {fresh}: .* jax 0.1.0 \(here ") as caught:
        assert times() == times() == []
    assert len(caught) == 1


def test_threads_read_once(monkeypatch):
    """Processes compare what they read, and each may tell the others only once."""
    reads = []

    def slowly(path, read=table_file.try_load):
        reads.append(path)
        time.sleep(0.02)  # in which the other threads come by
        return read(path)

    monkeypatch.setattr(table_file, "try_load", slowly)
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        assert [*pool.map(lambda _: times(), range(8))] == [[]] * 8
    assert len(reads) == 1


# ---- use_table


def test_use_table(fresh, tmp_path):
    """A file is read when it is named."""
    table_file.write(fresh, HERE, row(2.0))
    table_file.write(named := tmp_path / "named.json", HERE, row(3.0))
    tables = [(str(named), [3.0]), (named, [3.0]), (None, []), (Table(HERE, row(4.0), "memory"), [4.0])]
    contexts = [(jaxext.use_table(table), want) for table, want in tables]
    named.unlink()
    for context, want in contexts:
        with context:
            assert times() == want
    assert times() == [2.0]
    with pytest.raises(FileNotFoundError, match=f"use_table: there is no file {named}"):
        jaxext.use_table(named)
    with pytest.raises(TypeError, match="os.PathLike"):
        jaxext.use_table(3)  # type: ignore[arg-type]
    with pytest.raises(RuntimeError):
        active.active_on("cuda")


@pytest.mark.parametrize(("context", "why"), [
    (None, "it is not a table"),
    (OLDER, r"jax 0.1.0 \(here "),
    (replace(HERE, sources={**HERE.sources, "xla": "00"}), "it measured other code of xla"),
    (ELSEWHERE, "it is of NVIDIA H200, this is"),
], ids=["false", "older", "code", "foreign"])  # fmt: skip
def test_a_named_table_that_does_not_hold(context, why, tmp_path):
    path = tmp_path / "named.json"
    path.write_text("{}") if context is None else table_file.write(path, context, row())
    for table in (path, *([Table(context, row(), "memory")] if context else [])):
        with pytest.warns(UserWarning, match=f"(named.json|memory): .*{why}"), jaxext.use_table(table):
            assert times() == []


def test_a_table_of_a_gpu_on_its_host(monkeypatch):
    """It is expected to have nothing for the CPU of the same process."""
    monkeypatch.setattr(environment, "default_platform", lambda: "cuda")
    with jaxext.use_table(Table(ELSEWHERE, row(), "memory")):
        assert times() == []


def test_lowering_does_not_fail_for_want_of_a_table(fresh):
    fresh.parent.mkdir(mode=0o700)
    fresh.write_text("[" * 100_000)
    with pytest.warns(UserWarning, match="jaxext ignores measurements in .*not a table") as caught:
        for rows in (4, 3):
            jax.jit(lambda a, b: jaxext.matmul(a, b)).lower(*matmul(rows))
    assert len(caught) == 1


def test_without_sources_nothing_holds(fresh, monkeypatch):
    """A frozen program has no files of them."""
    table_file.write(fresh, HERE, row())
    codes = functools.partial(environment.codes.__wrapped__, "cpu")
    monkeypatch.setattr(pathlib.Path, "read_bytes", lambda path: (_ for _ in ()).throw(FileNotFoundError(path)))
    assert codes() == {}
    monkeypatch.setattr(environment, "codes", lambda platform: {})
    with pytest.warns(UserWarning, match="other code of xla"):
        assert times() == []


def test_the_table_is_part_of_the_cache_key():
    """A program is made anew for another table, and for the same one only once."""
    traced = []

    @jax.jit
    def product(a, b):
        traced.append(1)
        return jaxext.matmul(a, b)

    for ms, programs in ((1.0, 1), (2.0, 2), (1.0, 2), (2.0, 2)):
        with jaxext.use_table(Table(HERE, row(ms), "memory")):
            product(*matmul())
        assert len(traced) == programs


# ---- of which calls it speaks


@pytest.mark.parametrize("other", [
    dict(platform="cuda", arch=90), dict(platform="other"), dict(arch=90),
    dict(partitioner=Partitioner.XLA), dict(partitioner=Partitioner.LATER),
], ids=str)  # fmt: skip
def test_other_calls_were_not_measured(other):
    """A measurement on the CPU says nothing of a program for a GPU, nor of one whose parts are not known yet."""
    with jaxext.use_table(Table(HERE, row(), "memory")):
        assert times(dataclasses.replace(CALL, partitioner=Partitioner.LABELS)) == [1.0]
        assert times(dataclasses.replace(CALL, **other)) == []
        assert times(call(rows=3)) == []


def test_a_symbolic_size_was_not_measured():
    rows = jax.export.symbolic_shape("rows")[0]
    with active.collecting() as calls:
        shapes = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((rows, 5), (5, 6))]
        jax.export.export(jax.jit(lambda a, b: jaxext.matmul(a, b)))(*shapes)
    assert [call.problem for call in calls] == [None]


def test_calls_are_collected():
    """Calls of other threads count too, until the context is left; contexts may be nested, and are not taken for each other."""
    with active.collecting() as outer:
        with active.collecting() as inner:
            thread = threading.Thread(target=times)
            thread.start()
            thread.join()
        times(call(rows=3))
    times()
    assert inner == [CALL]
    assert [c.sizes["M"] for c in outer] == [4, 3, 3]


# ---- what it holds for


def test_the_context(monkeypatch):
    """XLA for GPUs is a package of its own, on which measurements of a CPU do not depend."""
    assert HERE.capability is None
    assert HERE.device == f"{environment.processor()}, {environment.cores()} threads"
    assert HERE.versions == {"jax": jax.__version__, "jaxlib": importlib.metadata.version("jaxlib")}
    assert set(HERE.sources) == {"xla", "triton", "cuda", "fft"} and len(set(HERE.sources.values())) == 4
    with pytest.raises(RuntimeError):
        active.context("cuda")
    monkeypatch.setattr(environment.importlib.metadata, "version", lambda package: f"of {package}")
    monkeypatch.setattr(environment, "_installed", environment._installed.__wrapped__)
    versions = environment.versions_for("cuda")
    assert all(versions[package] == f"of {package}" for package in ("jax-cuda12-pjrt", "jax-cuda13-pjrt", "jax-cuda13-plugin", "triton"))
    assert environment.versions_for("cpu") == {"jax": "of jax", "jaxlib": "of jaxlib"}


def test_a_hash_changes_with_each_file(tmp_path):
    hashes = set()
    for texts in ("11", "21", "12", "22"):
        for file, text in zip(files := [tmp_path / "a.py", tmp_path / "b.py"], texts, strict=True):
            file.write_text(text)
        hashes |= {implementation.hash_of(files), implementation.hash_of(files, b"more")}
    assert len(hashes) == 8


@pytest.mark.parametrize(("name", "files"), [
    ("xla", {"ops/conv/xla_plan.py", "ops/conv/xla_rates.json", "ops/matmul/xla.py", "ops/ragged/xla.py", "core/window.py"}),
    ("triton", {"backends/triton/triton_binding.py", "backends/fields.py", "kernels/matmul/kernel.py"}),
    ("cuda", {"backends/cuda/cuda_binding.py", "ops/conv/cuda_dense.py", "ops/ragged/problem.py", "kernels/geometry.py"}),
])  # fmt: skip
def test_the_files_of_which_an_implementation_is_known(name, files, monkeypatch):
    """The files are those that decide what it computes with, and no others."""
    seen = set()
    for module in (xla_conv, xla_products, kernel, cuda_binding):
        monkeypatch.setattr(module, "hash_of", lambda files, *more: seen.update(map(str, files)) or "")
    for family in families.values():
        for each in family.implementations:
            if each.name == name:
                each.code("cpu")
    here = {file.rpartition(f"{ROOT.name}/")[2].removeprefix("jaxext/") for file in seen}
    assert here >= files
    assert not {"ops/conv/__init__.py", "ops/conv/form.py", "core/form.py", "ops/conv/preference.py"} & here
    assert ("kernels/conv/kernel.py" in here) == (name == "triton")


@pytest.mark.parametrize("other", [dict(cuda_version="13.1", archs="90a"), dict(cuda_version="12.9", archs="90a,100a")])
def test_the_hash_changes_with_the_compiler(other, monkeypatch):
    """The hash of CUDA kernels alone changes, on CUDA devices, where the compiled module loads."""
    hashes = environment.codes.__wrapped__
    monkeypatch.setattr(jaxext, "_cuda_module", None, raising=False)

    def built(**facts):
        module = types.SimpleNamespace(**facts)
        monkeypatch.setitem(sys.modules, "jaxext._cuda_module", module)
        monkeypatch.setattr(jaxext, "_cuda_module", module)
        return hashes("cuda"), hashes("cpu")

    before, after = built(cuda_version="12.9", archs="90a"), built(**other)
    assert {name for name in before[0] if after[0][name] != before[0][name]} == {"cuda"}
    assert after[1] == before[1]


PROCESSORS = {
    "AMD EPYC (family 25, model 17)": "processor : 0\ncpu family\t: 25\nmodel\t\t: 17\nmodel name\t: AMD EPYC\n\nmodel name\t: another\n",
    "aarch64 (implementer 0x41, part 0xd0c)": "CPU implementer\t: 0x41\nCPU part\t: 0xd0c\n\nCPU implementer\t: 0x41\nCPU part\t: 0xd05\n",
    "aarch64": "nothing that is known",
}


@pytest.mark.parametrize(("name", "cpuinfo"), PROCESSORS.items(), ids=PROCESSORS.keys())
def test_processors_are_told_apart(name, cpuinfo, monkeypatch):
    monkeypatch.setattr(pathlib.Path, "read_text", lambda path, **_: cpuinfo)
    monkeypatch.setattr(environment.machine, "machine", lambda: "aarch64")
    assert environment.processor() == name


def test_the_report(monkeypatch):
    """It is data, says what a reader of results asks, and not where we are installed or where files lie."""
    inside = str(ROOT / "benchmarks/results/cpu.json")
    for arguments, want in (
        (["/opt/jaxext/__main__.py", "bench"], "python -m jaxext bench"),
        (["/opt/bin/jaxext", "info"], "jaxext info"),
        (["/opt/loops.py", "--json", "/scratch/me/loops.json", "--rounds=9"], "loops.py --json loops.json --rounds=9"),
        (["a.py", f"--json={inside}", "--plot", "docs/cpu.svg"], "a.py --json=benchmarks/results/cpu.json --plot docs/cpu.svg"),
        (["a.py", "--only", "cube, 512x512 nn"], "a.py --only 'cube, 512x512 nn'"),
    ):
        monkeypatch.setattr(sys, "argv", arguments)
        report = json.loads(json.dumps(environment.report()))
        assert report["command"] == want
    assert report["device"] == HERE.device
    assert {"python", "jax", "jaxlib", "numpy"} <= set(report["versions"])
    assert report["commit"] is None or len(report["commit"].removesuffix("-dirty")) == 40


# ---- several processes


def test_processes_that_cannot_compare(monkeypatch):
    """Processes without a table have nothing to compare.  Those that can compare are in `process_checks.tables`."""
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    assert times() == []
    with jaxext.use_table(Table(HERE, row(), "memory")), pytest.raises(RuntimeError, match="memory: .* without jax.distributed.initialize"):
        times()
