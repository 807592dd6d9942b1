"""The files of docs/adding-an-operation.md, put into a copy of the sources, are an operation with kernels that JAX and all tools find.

Needs nvcc, pybind11 and the folder in which jaxext was built; no GPU and no driver.
"""

import concurrent.futures
import importlib.util
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import sysconfig

import jax
import mutations
import pytest
import test_layering

from benchmarks import compiled_cuda, cuda_laws
from jaxext.backends.cuda import cuda_binding

ROOT = pathlib.Path(__file__).parents[2]
PAGE, FILES = ROOT / "docs" / "adding-an-operation.md", ROOT / "docs" / "rowscale"
NVCC = shutil.which("nvcc") or shutil.which("nvcc", path="/usr/local/cuda/bin")
LIBRARIES = sorted(ROOT.glob("build/*/libjaxext_kernels.a"), key=lambda path: path.stat().st_mtime)
LACKING = cuda_binding.missing() or (not NVCC and "no nvcc here") or (not LIBRARIES and "jaxext was not built in this checkout")
LACKING = LACKING or (shutil.which("g++") is None and "no g++ here") or (not importlib.util.find_spec("pybind11") and "no pybind11 here")
needs_cuda = pytest.mark.skipif(bool(LACKING), reason=f"no CUDA kernels to link: {LACKING}")


def files() -> list[pathlib.Path]:
    return sorted(path.relative_to(FILES) for path in FILES.rglob("*.*") if path.suffix in (".cu", ".h", ".py"))


@pytest.fixture(scope="module")
def tree(tmp_path_factory):
    """A copy of the sources, and the page's files."""
    root = tmp_path_factory.mktemp("page") / "jaxext"
    mutations.copy(root)
    for path in files():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        assert not (root / path).exists(), f"{path} would take the place of another"
        shutil.copy(FILES / path, root / path)
    return root


def run(*command, **options):
    """Run a command, which must succeed; returns its output."""
    done = subprocess.run([*map(str, command)], capture_output=True, text=True, **options)
    assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]
    return done.stdout


def python(tree, *arguments, path=(), **more):
    """Run Python, which imports the copy; returns its output."""
    environment = mutations.environment(tree, **more)
    found = os.pathsep.join([environment["PYTHONPATH"], *(str(tree / folder) for folder in path)])
    return run(sys.executable, *arguments, cwd=tree, env=environment | {"PYTHONPATH": found})


def passed(tree, test, **environment):
    """The number of tests that pass, and all do."""
    printed = python(tree, "-m", "pytest", "-q", "-p", "no:xdist", "-p", "no:cacheprovider", test, **environment)
    return int(re.findall(r"^(\d+) passed in", printed, re.MULTILINE)[0])


@pytest.fixture(scope="module")
def built(tree):
    """The copy with its compiled module and library, as CMakeLists.txt would make them, of this checkout's library and the unit."""
    import pybind11

    from jaxext import _cuda_module

    objects, made = tree / "build" / "objects", tree / "jaxext" / f"_cuda_module{sysconfig.get_config_var('EXT_SUFFIX')}"
    objects.mkdir(parents=True)
    system = [jax.ffi.include_dir(), pybind11.get_include(), sysconfig.get_paths()["include"]]
    facts = {"ARCHS": _cuda_module.archs, "VERSION": _cuda_module.cuda_version}
    flags = [NVCC, "-std=c++17", "-Xcompiler=-fPIC,-fvisibility=hidden", f"-I{tree / 'csrc'}", *(f"-isystem={path}" for path in system)]
    flags += [f'-DJAXEXT_CUDA_{name}="{value}"' for name, value in facts.items()]
    units = {"csrc/module.cc": ["-O0"], "csrc/common/ffi.cc": ["-O0"]}
    units |= {"csrc/rowscale/rowscale.cu": ["-O3", "-gencode=arch=compute_80,code=[compute_80,sm_80]"]}
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        compile = lambda unit: run(*flags, *units[unit], "-c", tree / unit, "-o", objects / f"{pathlib.Path(unit).name}.o")
        list(pool.map(compile, units))
    whole = f"-Xlinker=--whole-archive,{LIBRARIES[-1]},--no-whole-archive"
    own = [objects / f"{name}.o" for name in ("module.cc", "ffi.cc", "rowscale.cu")]
    made.unlink()  # a link to this checkout's
    run(NVCC, "-shared", "-cudart", "static", *own, whole, "-o", made)
    run("ar", "rc", shutil.copy(LIBRARIES[-1], objects), objects / "rowscale.cu.o")
    return tree


def test_the_page_counts_its_files():
    """The counts include the CHANGELOG, and for a kernel the form, which names it.  The page shows each file."""
    text, triton, cuda = (
        PAGE.read_text(),
        *(
            [path for path in files() if {*folders} & {*path.parts} or path.name == name]
            for name, *folders in (("triton.py", "kernels"), ("cuda.py", "csrc", "ptx"))
        ),
    )
    operation = {*files()} - {*triton, *cuda}
    for what, count in (
        ("an operation", len(operation) + 1),
        ("a Triton kernel for it", len(triton) + 2),
        ("a CUDA kernel for it", len(cuda) + 2),
    ):
        assert f"| {what} | {count} |" in text
    assert {pathlib.Path(path) for path in re.findall(r"\]\(rowscale/(\S+)\) <!-- include -->", text)} == {*files()}


def test_the_files_lie_where_the_design_wants_them(tree):
    assert {*test_layering.breaches(tree)} <= {*test_layering.breaches(ROOT)} and test_layering.included(tree) == test_layering.INCLUDED


@pytest.mark.slow
def test_the_operation_has_the_rules_of_jax(tree):
    assert passed(tree, "tests/ops/test_rowscale.py") == 4


@pytest.mark.slow
def test_tools_find_the_operation(tree):
    """The folder suffices: `verify` finds its calls, and the report of compiled kernels its programs."""
    pytest.importorskip("jax_triton")
    code = """
import json, jaxext
from benchmarks import compiled
from jaxext.verify import cases
with jaxext.use_target("sm_90a"):
    found, _ = cases.listed(cases.contacts(), "cuda", ["triton"])
print(json.dumps([[case.key for case in found if case.family == "rowscale"], [each.kernel for each in compiled.programs("rowscale")]]))
"""
    verified, compiled = json.loads(python(tree, "-c", code))
    assert {*verified} == {f"triton rowscale rowscale {dtypes},ieee" for dtypes in ("bf16xfp32->bf16", "fp32")} and {*compiled} == {
        "rowscale"
    }


@needs_cuda
@pytest.mark.slow
def test_the_module_knows_the_target(built):
    """Its target beside those of the library, both stages of its handler, and its table."""
    code = """
import json
from jaxext import _cuda_module as module
schema, handlers = module.schema(), module.handlers()
print(json.dumps([len(schema), schema["rowscale"], list(handlers["jaxext_rowscale_v1"]), module.kernels("rowscale")[1]]))
"""
    from jaxext import _cuda_module

    count, fields, stages, row = json.loads(python(built, "-c", code))
    assert count == len(_cuda_module.schema()) + 1 and fields == ["B", "M", "N", "lanes"] and stages == ["initialize", "execute"]
    assert row == {"operands": "float32", "lanes": 4, "stages": 1, "shared": 0}


@needs_cuda
@pytest.mark.slow
def test_its_tests_pass(built):
    """They are refusals, `explain`, the custom call, and the PTX against numpy."""
    assert passed(built, "tests/ptx/test_cuda_rowscale.py") == 10


@needs_cuda
@pytest.mark.slow
def test_tools_know_its_kernels(built):
    table = [{"family": "rowscale", "operands": "float32", "lanes": 4, "stages": 1, "shared": 0}]
    rows = list(compiled_cuda.rows_of(built / "build/objects/rowscale.cu.o", table, ()))
    assert {(row["operands"], row["config"]) for row in rows if row["told"]} == {("float32", "4")}
    assert {(row["kernel"], row["operands"], row["config"]) for row in rows} == {
        ("rowscale", operands, lanes) for operands, lanes in [("float32", "1"), ("float32", "4"), ("bfloat16", "1"), ("bfloat16", "8")]
    }
    assert not [row for row in rows if row["spills"] or cuda_laws.offences(row)]
    assert {"16"} == {width for row in rows if row["config"] != "1" for width in row["stores"]}


@pytest.mark.slow
def test_the_triton_kernel_is_the_reference(tree):
    pytest.importorskip("triton")
    assert passed(tree, "tests/kernels/test_triton_rowscale.py", TRITON_INTERPRET="1") == 4


@pytest.mark.slow
def test_the_triton_kernel_compiles_for_hopper(tree):
    """Its custom call is jax-triton's."""
    pytest.importorskip("jax_triton")
    code = """
import jax, jaxext, lowered
from jaxext.ops.rowscale import rowscale
with jaxext.use_target("sm_90a"), jaxext.use_implementation("triton"):
    for dtype in ("float32", "bfloat16"):
        program = jax.jit(rowscale).trace(lowered.struct(2, 3, 1100, dtype=dtype), lowered.struct(3, dtype="float32"))
        print(*lowered.custom_calls(program.lower(lowering_platforms=("cuda",))))
"""
    found = python(tree, "-c", code, path=("tests",), XLA_FLAGS="--xla_force_host_platform_device_count=8")
    assert {*found.split()} <= {"triton_kernel_call", "triton_kernel_call_ffi"} and len(found.split()) == 2
