"""The layers of the design: the imports of every file are read and compared with what is allowed.

A room is a folder of jaxext/, one of an operation in jaxext/ops/, or a file that lies in jaxext/ directly.  Files of one room may import
one another, without a circle.
Kernels see neither jax nor jaxext.  Of csrc/ the includes are read.
"""

import ast
import pathlib
import re
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[2]

BUILT = {"_cuda_module", "_cuda_build"}  # what CMake makes
BINDINGS = {"backends.triton", "backends.cuda"}
BELOW_OPERATIONS = {"lax", "backends", *BINDINGS, "core", "_compat", "_messages", "kernels"}
OPERATIONS = {f"ops.{path.parent.name}" for path in ROOT.glob("jaxext/ops/*/__init__.py")}
CSRC = ROOT / "csrc"
FAMILIES = {path.stem.removesuffix("_target") for path in CSRC.glob("*/*_target.cc")}  # of CUDA kernels

# Room -> the rooms that it may import.  A new one is a breach until it is here, but for an operation of matrix products and epilogues.
MAY = {
    "_messages": set(),
    "_scope": {"_messages"},
    "_target": {"_scope", "_messages"},
    "_compat": {"_scope", "_target"},
    "tables": {"_compat", "_scope", *BUILT},
    "core": {"tables", "kernels", "_compat", "_scope", "_target", "_messages"},
    "backends": {"core", "tables", "kernels", "_messages", *BUILT},
    "backends.triton": {"backends", "core", "kernels", "_compat", "_target"},
    "backends.cuda": {"backends", "core", "kernels", "_target", *BUILT},
    "lax": {"core", "_compat", "_scope", "_messages"},
    "ops": set(),
    "ops.matmul": BELOW_OPERATIONS,
    "ops.conv": BELOW_OPERATIONS,
    "ops.fused": {"ops.matmul", "ops.conv", *BELOW_OPERATIONS},
    "ops.causal_conv": {"ops.conv", *BELOW_OPERATIONS},
    "ops.long_conv": {"ops.conv", *BELOW_OPERATIONS},
    "ops.quantized": {"ops.scaled", *BELOW_OPERATIONS},
    "ops.ragged_gather": {"ops.ragged", "ops.fused", *BELOW_OPERATIONS},
    "ops.ragged_scaled": {"ops.ragged", "ops.scaled", *BELOW_OPERATIONS},
    "export": {"core", "backends", "backends.cuda", "_target", "_messages"},
    "quantization": {"ops.quantized"},
    "extend": {"ops", "ops.matmul", "ops.conv", "lax", "backends", "core", "_compat", "_target", "_messages"},
    "checkpoint_policies": {"core", "_compat", "_messages"},
    "tuning": {"core", "tables", "_compat", "_target", "_messages"},
    "verify": {"__init__", "ops", "extend", "tuning", "backends", "core", "tables"},
    "bench": {
        *("__init__", "ops", *OPERATIONS, "extend", "verify", "tuning", "backends", *BINDINGS, "core", "tables", "kernels"),
        *("_target", "_messages", *BUILT),
    },
    "hazards": {"tuning", "lax", "core", "_compat", "_messages"},
    "parallel": {
        *("ops.matmul", "ops.conv", "ops.ragged", "ops.causal", "ops.causal_conv", "ops.long_conv"),
        *("core", "_compat", "_messages"),
    },
    "mixture": {"parallel", "ops.ragged", "ops.ragged_gather", "ops.ragged_scaled", "ops.scaled", "lax", "core", "_compat", "_messages"},
    "privacy": {"lax", "core", "_compat", "_messages"},
    "testing": {"_messages"},  # it tests any function
    "cli": {
        "__init__",
        "bench",
        "verify",
        "tuning",
        "backends",
        "backends.cuda",
        "tables",
        "core",
        "_compat",
        "_target",
        "_messages",
        *BUILT,
    },
    "__init__": {
        *OPERATIONS,
        *("extend", "parallel", "mixture", "privacy", "testing", "checkpoint_policies", "tuning", "hazards", "lax", "tables", "export"),
        *("quantization", "_target", "_compat", "_messages"),
    },
    "__main__": {"cli"},
}
# What an operation may import of another one, besides its `form`.
BESIDE_FORMS = {
    *("ops.fused.__init__", "ops.scaled.blocks"),
    *("ops.conv.fft", "ops.conv.xla", "ops.conv.xla_views"),
    *(f"ops.{of}.{file}" for of in ("ragged", "scaled") for file in ("cuda", "triton", "xla", "problem")),
}
ELSEWHERE = {"kernels"}  # a folder of jaxext/ that lies elsewhere in the repository
WITHOUT_JAX = {
    *("core.window", "parallel.shards", "tables.table_file", "tables.table_format", "verify.controller", "verify.events"),
    *("ops.matmul.cuda", "ops.matmul.cuda_pieces", "ops.conv.cuda", "ops.conv.cuda_dense", "ops.conv.cuda_depthwise"),
}
SEES_INTERNALS = {"_compat"}
THIRD_PARTIES = {"jax", "numpy"}
THIRD_PARTIES_OF = {
    "backends": {"platformdirs"},
    "backends.triton": {"jax_triton", "triton", "ml_dtypes"},
    "tables": {"filelock", "msgspec", "platformdirs"},
    "extend": {"ptxsim"},
    "verify": {"ml_dtypes"},
    "bench": {"msgspec", "rich", "triton", "cupy", "cupy_backends"},
    "cli": {"msgspec", "rich"},
}
OF_KERNELS = {"triton"}
# Files of kernels/ that hold functions under triton.jit and nothing else; others do without Triton.
JITTED = {"kernel", "tile", "tile_epilogue"}
# Headers of others -> the files of csrc/ that include them.  Device code (*.cu, *.cuh) may include those of CUDA and CUTLASS.
INCLUDED = {
    r"xla/": {"common/ffi.cc", "launcher/launcher.cc"},
    r"pybind11/|Python\.h": {"module.cc"},
    r"(?:cuda|driver_types|vector_types|cooperative_groups|nv)\w*[./]": {
        *(f"common/{name}" for name in ("ffi.cc", "load.h", "tensor_map.h")),
        *(min((f"{family}/{family}_launch.h", f"{family}/{family}.h"), key=lambda name: not (CSRC / name).exists()) for family in FAMILIES),
    },
    r"cut(?:e|lass)/": {"common/tensor_map.h"},
}
DEVICE_CODE, OF_DEVICE_CODE = {".cu", ".cuh"}, [*INCLUDED][2:]


def modules(root):
    """Path of each file of the package -> its name below jaxext, and its room."""
    for path in sorted((root / "jaxext").rglob("*.py")):
        *folders, stem = path.relative_to(root / "jaxext").with_suffix("").parts
        if not ELSEWHERE & {*folders} and stem not in BUILT:
            yield path, ".".join([*folders, stem]), ".".join(folders) or stem


def imports(path, package, within=ast.walk):
    """Every module that a file of a package imports, anywhere in it, by full name; relative ones as they would be named."""
    for node in within(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            here = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            base = ".".join(filter(None, [*here, node.module]))
            # `from jaxext import _compat` imports jaxext._compat; of other packages the name may be a module too
            yield from (f"{base}.{alias.name}" for alias in node.names)


def target(root, name):
    """The module and the room of a name that is imported from jaxext."""
    parts = name.split(".")[1:]
    if parts and parts[0] in ELSEWHERE:
        return parts[0], parts[0]
    for end in range(len(parts), 0, -1):
        path = root / "jaxext" / pathlib.Path(*parts[:end])
        if path.is_dir():
            return ".".join([*parts[:end], "__init__"]), ".".join(parts[:end])
        if path.with_suffix(".py").is_file():
            return ".".join(parts[:end]), ".".join(parts[: end - 1]) or parts[0]
    return (parts[0], parts[0]) if parts and parts[0] in BUILT else ("__init__", "__init__")


def breaches(root):
    """A sentence for each import that is not allowed."""
    for path, module, room in modules(root):
        may = MAY.get(room, {"ops.matmul", "ops.fused", *BELOW_OPERATIONS} if room.startswith("ops.") else None)
        if may is None:
            yield f"{module} has no place in the design"
            continue
        for name in imports(path, ".".join(["jaxext", *module.split(".")[:-1]])):
            top = name.partition(".")[0]
            if top == "jaxext":
                file, wanted = target(root, name)
                of_others = room in OPERATIONS and wanted.startswith("ops.") and not file.endswith(".form")
                if wanted != room and (wanted not in may or of_others and file not in BESIDE_FORMS):
                    yield f"{module} imports {name}"
            elif name.startswith("jax._src") and module not in SEES_INTERNALS:
                yield f"{module} imports {name}"
            elif top == "jax" and module in WITHOUT_JAX:
                yield f"{module} imports jax"
            elif top not in THIRD_PARTIES | THIRD_PARTIES_OF.get(room, set()) and top not in sys.stdlib_module_names:
                yield f"{module} imports {name}"
    for path in sorted((root / "kernels").rglob("*.py")):
        for name in imports(path, ".".join(path.parent.relative_to(root).parts)):
            top = name.partition(".")[0]
            if top not in OF_KERNELS | {"kernels"} and top not in sys.stdlib_module_names:
                yield f"{path.relative_to(root)} imports {name}"
        if path.stem in JITTED:
            yield from (f"{path.relative_to(root)} defines {name}" for name in host_code(ast.parse(path.read_text())))
            continue
        for name in imports(path, ".".join(path.parent.relative_to(root).parts), within=ast.iter_child_nodes):
            if {"triton", *JITTED} & {*name.split(".")}:
                yield f"{path.relative_to(root)} imports {name} at once"
    for path in sorted([*(root / "tests").rglob("*.py"), *(root / "benchmarks").glob("*.py")]):
        if path.name != "test_harness.py" and any(name.startswith("jax._src") for name in imports(path, "")):
            yield f"{path.relative_to(root)} imports jax._src"


def host_code(tree):
    """Yield the definitions of a module that are neither functions under triton.jit nor constants for them."""
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            if not any(ast.unparse(decorator).startswith("triton.jit") for decorator in node.decorator_list):
                yield node.name
        elif isinstance(node, ast.Assign):
            values = node.value.elts if isinstance(node.value, ast.Tuple) else [node.value]
            if not all(ast.unparse(value).startswith("tl.constexpr(") for value in values):
                yield ast.unparse(node.targets[0])
        elif not isinstance(node, ast.Import | ast.ImportFrom | ast.Expr):
            yield ast.unparse(node)


def included(root):
    """Read the includes of the sources in a folder, in the form of INCLUDED."""
    found = {headers: set() for headers in INCLUDED}
    for path in (root / "csrc").rglob("*.*"):
        for header in re.findall(r"^\s*#\s*include\s*[<\"]([^>\"]+)", path.read_text(), re.MULTILINE):
            for headers, files in found.items():
                if re.match(headers, header) and not (headers in OF_DEVICE_CODE and path.suffix in DEVICE_CODE):
                    files.add(str(path.relative_to(root / "csrc")))
    return found


def circle(below):
    """The names that cannot be put in an order in which each comes after those that it imports."""
    done: set[str] = set()
    while free := [name for name, others in below.items() if name not in done and others & below.keys() <= done]:
        done |= set(free)
    return below.keys() - done


def test_layers():
    assert list(breaches(ROOT)) == []


def test_includes():
    """XLA's headers are those of two files, Python's those of one; host code that only computes is plain C++."""
    assert included(ROOT) == INCLUDED


@pytest.mark.parametrize(
    ("file", "line"),
    [
        ("ragged/ragged.cc", '#include "xla/ffi/api/ffi.h"'),
        ("ragged/ragged_sm90.cuh", '#include "xla/ffi/api/ffi.h"'),
        ("common/ffi.cc", "#include <pybind11/pybind11.h>"),
        ("ragged/ragged_sm90.cuh", "#include <Python.h>"),
        ("module.cc", "#  include <cuda_runtime.h>"),
        ("common/schema.h", "#include <cuda/std/array>"),
        ("ragged/ragged.h", '#include "cutlass/cutlass.h"'),
    ],
)
def test_an_include_is_found(tmp_path, file, line):
    write(tmp_path, {f"../csrc/{file}": f"#include <string>\n{line}\n"})
    (headers,) = (headers for headers, files in included(tmp_path).items() if files == {file})
    assert file not in INCLUDED[headers]


def test_device_code_includes_cuda(tmp_path):
    write(tmp_path, {"../csrc/ragged/ragged.cu": "#include <cuda_bf16.h>\n", "../csrc/ragged/x.cuh": '#include "cute/tensor.hpp"\n'})
    assert not any(included(tmp_path).values())


def test_every_room_exists():
    """A rule for a room that is gone guards nothing."""
    rooms = {room for _, _, room in modules(ROOT)}
    assert rooms - OPERATIONS < set(MAY) < rooms
    assert {module for _, module, _ in modules(ROOT)} >= WITHOUT_JAX


def test_the_rules_have_no_circle():
    assert not circle(MAY)


def test_files_have_no_circle_and_names_of_their_own():
    below = {
        module: {target(ROOT, name)[0] for name in imports(path, f"jaxext.{room}") if name.partition(".")[0] == "jaxext"} - {module}
        for path, module, room in modules(ROOT)
        if room not in ("__init__", "__main__", "cli")
    }
    assert not circle(below)
    tests = (path for path in (ROOT / "tests").rglob("*.py") if path.stem != "conftest")  # pytest imports them by their names alone
    package = (path for path, _, room in modules(ROOT) if path.stem != "__init__" and room not in OPERATIONS)  # whose files are alike
    for files in (package, tests):
        stems = [path.stem for path in files]
        assert len({*stems}) == len(stems)


@pytest.mark.parametrize(
    ("file", "line", "breach"),
    [
        ("ops/conv/form.py", "from jaxext.ops.fused import form", "ops.conv.form imports jaxext.ops.fused.form"),
        ("ops/conv/form.py", "from ..fused.form import linear", "ops.conv.form imports jaxext.ops.fused.form.linear"),
        ("ops/fused/form.py", "from jaxext.ops.conv import cuda", "ops.fused.form imports jaxext.ops.conv.cuda"),
        ("ops/conv/form.py", "import jax_triton", "ops.conv.form imports jax_triton"),
        ("tuning/tune.py", "from jaxext.bench import problems", "tuning.tune imports jaxext.bench.problems"),
        ("bench/cells.py", "from jaxext.cli import terminal", "bench.cells imports jaxext.cli.terminal"),
        ("bench/cells.py", "from benchmarks import race", "bench.cells imports benchmarks.race"),
        ("tables/table_file.py", "import jax", "tables.table_file imports jax"),
        ("core/form.py", "from jaxext.ops.conv import form", "core.form imports jaxext.ops.conv.form"),
        ("core/form.py", "from jaxext.ops.conv.form import conv_form", "core.form imports jaxext.ops.conv.form.conv_form"),
        ("core/form.py", "from ..lax import dispatch", "core.form imports jaxext.lax.dispatch"),
        ("core/form.py", "import jaxext", "core.form imports jaxext"),
        ("lax/dispatch.py", "import jaxext.ops.conv.form", "lax.dispatch imports jaxext.ops.conv.form"),
        ("lax/dispatch.py", "from jax._src import core", "lax.dispatch imports jax._src.core"),
        ("lax/dispatch.py", "def f():\n    import jax._src.core", "lax.dispatch imports jax._src.core"),
        ("lax/dispatch.py", "from jax import _src", "lax.dispatch imports jax._src"),
        ("lax/dispatch.py", "import flax", "lax.dispatch imports flax"),
        ("testing/kit.py", "from jaxext.ops.conv import conv", "testing.kit imports jaxext.ops.conv.conv"),
        ("core/window.py", "import jax.numpy", "core.window imports jax"),
        ("novelty/form.py", "", "novelty.form has no place in the design"),
        ("ops/novelty/form.py", "from jaxext.ops.conv import form", "ops.novelty.form imports jaxext.ops.conv.form"),
        ("_novelty.py", "", "_novelty has no place in the design"),
        ("attic/novelty.py", "", "attic.novelty has no place in the design"),
        ("../kernels/gemm.py", "import jax", "kernels/gemm.py imports jax"),
        ("../kernels/matmul/plan.py", "from jaxext import ops", "kernels/matmul/plan.py imports jaxext.ops"),
        ("../kernels/matmul/plan.py", "import triton", "kernels/matmul/plan.py imports triton at once"),
        ("../kernels/launch.py", "from triton import language as tl", "kernels/launch.py imports triton.language at once"),
        ("../kernels/matmul/problem.py", "from . import kernel", "kernels/matmul/problem.py imports kernels.matmul.kernel at once"),
        ("../kernels/matmul/__init__.py", "from ..tile import exists", "kernels/matmul/__init__.py imports kernels.tile.exists at once"),
        ("../kernels/matmul/kernel.py", "@dataclasses.dataclass\nclass Config:\n    tile: int", "kernels/matmul/kernel.py defines Config"),
        ("../kernels/matmul/kernel.py", "def launch():\n    pass", "kernels/matmul/kernel.py defines launch"),
        ("../kernels/matmul/kernel.py", "LEAST = 16", "kernels/matmul/kernel.py defines LEAST"),
        ("../kernels/tile.py", "if True:\n    import triton", "kernels/tile.py defines if True:\n    import triton"),
        ("../tests/core/test_x.py", "import jax._src.core", "tests/core/test_x.py imports jax._src"),
        ("../benchmarks/x.py", "import jax._src.core", "benchmarks/x.py imports jax._src"),
    ],
)
def test_a_breach_is_found(tmp_path, file, line, breach):
    there = dict.fromkeys(("ops/conv/form.py", "ops/fused/form.py", "lax/dispatch.py", "cli/terminal.py"), "")
    write(tmp_path, {**there, file: f'"""A file."""\n\n{line}\n'})
    assert list(breaches(tmp_path)) == [breach]


def test_what_is_allowed_is_no_breach(tmp_path):
    write(
        tmp_path,
        {
            "core/form.py": "import math\n\nimport jax\n\nfrom jaxext import _compat\nfrom . import partition\nfrom .choose import run\n",
            "core/partition.py": "from .. import _compat\n",
            "_compat.py": "from jax._src import core\n",
            "../kernels/conv/kernel.py": "import triton\n\nA, B = tl.constexpr(1), tl.constexpr(2)\n\n@triton.jit\ndef f():\n    pass\n",
            "../kernels/conv/plan.py": "import dataclasses\nfrom ..launch import Launch\n\ndef launch():\n    from . import kernel\n",
            "../tests/ops/test_harness.py": "from jax._src.internal_test_util import test_harnesses\n",
        },
    )
    assert list(breaches(tmp_path)) == []


def test_a_circle_is_found():
    assert circle({"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": set()}) == {"a", "b", "c"}


def write(root, files):
    for name, text in files.items():
        path = (root / "jaxext" / name).resolve()
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
