"""Who may import whom: the imports of every file are read and compared with what the design allows.

_command -> __init__ -> parallel, extend
                     -> ops, _explain, _tune, checkpoint_policies -> _products -> _conv, _matmul
         -> _form -> _partition, _tuned, _implementation -> _table, _measurements, _compat, _window
testing and what it is made of know no other module: they test any function.
benchmarks/ may import all of the package, and only _command imports it.
_measure, which times, is known to _trial and the benchmarks, that is to tune and the command line alone: no operation can reach a clock.
_conv_xla and what it is made of are known to _conv alone; only _compat sees jax._src; only _triton sees jax_triton, only _cuda the compiled
module; the kernels are known to _kernel, _triton, _interpreter and _cuda's files, which import what needs Triton late; kernels see neither
jax nor jaxext.
"""

import ast
import pathlib
import sys

import pytest

ROOT = pathlib.Path(__file__).parent.parent

BUILT = {"_cuda_module", "_cuda_build"}  # what CMake makes

# Module -> the modules of the package that it may import.  A new file is a breach until it is here.
MAY = {
    "__init__": {"ops", "extend", "parallel", "checkpoint_policies", *("_compat _dispatch _explain _export _target _tune _tuned".split())},
    "parallel": {"_collective_matmul", "_cost", "_halo"},
    "_axes": set(),
    "_by_platform": set(),
    "_collective_matmul": {"ops", "_axes", "_by_platform", "_compat"},
    "_halo": {"ops", "_axes", "_form", "_shards", "_compat"},
    "_cost": {"_conv", "_matmul", "_form", "_shards", "_window"},
    "_shards": {"_window"},
    "extend": {"_conv", "_dispatch", "_form", "_implementation", "_matmul", "_tuned"},
    "testing": {f"_conformance{part}" for part in ("", "_derivatives", "_layouts", "_programs", "_sharded", "_vmap")},
    "_conformance_sharded": {"_conformance", "_conformance_layouts"},
    "_conformance_layouts": {"_conformance", "_conformance_derivatives", "_conformance_vmap"},
    "_conformance_derivatives": {"_conformance", "_conformance_programs", "_conformance_vmap"},
    "_conformance_programs": {"_conformance"},
    "_conformance_vmap": {"_conformance"},
    "_conformance": set(),
    "ops": {"_dispatch"},
    "_dispatch": {"_roofline", "_scope", "_products", "_conv", "_matmul", "_form"},
    "__main__": {"_command"},
    "_cache": {"_environment", "_info", "_table", "_terminal", "_tuned"},
    "_command": {
        "__init__",
        "_arguments",
        "_cache",
        "_compat",
        "_environment",
        "_info",
        "_measure",
        "_table",
        "_terminal",
        "_tune",
        "_tuned",
    },
    "_info": {"__init__", "_arguments", "_cuda", "_environment", "_terminal", "_tuned", *BUILT},
    "_arguments": {"_target", "_terminal"},
    "_terminal": set(),
    "_tune": {"_environment", "_implementation", "_measure", "_table", "_trial", "_tuned"},
    "_trial": {"_form", "_implementation", "_measure", "_measurements", "_operands"},
    "_explain": {"_form", "_implementation", "_layout", "_tuned", "_compat", "_target", "_window"},
    "_layout": {"_form"},
    "checkpoint_policies": {"_form", "_compat"},
    "_products": {"_conv", "_matmul", "_form", "_compat", "_window"},
    "_export": {"_cuda", "_triton"},
    "_conv": {"_conv_xla", "_form", "_implementation", "_cuda", "_triton", "_window"},
    "_conv_xla": {"_conv_rewrites", "_window"},
    "_conv_rewrites": {"_window"},
    "_matmul": {"_form", "_implementation", "_cuda", "_triton"},
    "_cuda": {"_implementation", "_kernel", "_preference", "_target", "_cuda_matmul", "_cuda_conv", "_cuda_depthwise", *BUILT},
    "_cuda_matmul": set(),
    "_cuda_conv": set(),
    "_cuda_depthwise": set(),
    "_triton": {"_implementation", "_kernel", "_interpreter", "_preference"},
    "_preference": {"_implementation", "_window"},
    "_kernel": {"_implementation"},
    "_interpreter": set(),
    "_form": {"_roofline", "_partition", "_implementation", "_tuned", "_compat"},
    "_tuned": {"_scope", "_table", "_environment", "_compat"},
    "_table": {"_measurements"},
    "_measurements": set(),
    "_measure": set(),
    "_operands": set(),
    "_environment": {*BUILT},
    "_partition": {"_compat"},
    "_implementation": {"_measurements", "_window"},
    "_window": set(),
    "_compat": {"_target"},
    "_target": {"_scope"},
    "_scope": set(),
    "_roofline": {"_shards"},
}
WITHOUT_JAX = {"_window", "_shards", "_table", "_measurements", "_cuda_matmul", "_cuda_conv", "_cuda_depthwise"}
SEES_INTERNALS = {"_compat"}
SEES_BENCHMARKS = {"_command"}
SEES_KERNELS = {"_triton", "_interpreter", "_kernel", "_cuda", "_cuda_matmul", "_cuda_conv", "_cuda_depthwise"}
FOLDERS = {"kernels": SEES_KERNELS, "benchmarks": SEES_BENCHMARKS}
THIRD_PARTIES = {"jax", "numpy"}
THIRD_PARTIES_OF = {
    "_triton": {"jax_triton"},
    "_interpreter": {"triton", "ml_dtypes"},
    "_table": {"filelock", "platformdirs"},
    "_terminal": {"rich"},
}
OF_KERNELS = {"triton"}


def imports(path):
    """Every module that a file imports, anywhere in it, by full name; relative ones as they would be named."""
    here = path.parent.name
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(filter(None, [here if node.level else "", node.module]))
            # `from jaxext import _form` imports jaxext._form; of other packages the name may be a module too
            yield from (f"{base}.{alias.name}" for alias in node.names)


def breaches(root):
    """A sentence for each import that is not allowed."""
    for path in sorted((root / "jaxext").glob("*.py")):
        module = path.stem
        if module not in MAY:
            yield f"{module} has no place in the design"
            continue
        for name in imports(path):
            top, _, rest = name.partition(".")
            if top == "jaxext":
                wanted = rest.partition(".")[0] or "__init__"
                of_folders = {folder for folder, seen_by in FOLDERS.items() if module in seen_by}
                if wanted not in MAY[module] | of_folders:
                    yield f"{module} imports jaxext.{wanted}"
            elif name.startswith("jax._src") and module not in SEES_INTERNALS:
                yield f"{module} imports {name}"
            elif top == "jax" and module in WITHOUT_JAX:
                yield f"{module} imports jax"
            elif top not in THIRD_PARTIES | THIRD_PARTIES_OF.get(module, set()) and top not in sys.stdlib_module_names:
                yield f"{module} imports {name}"
    for path in sorted((root / "kernels").rglob("*.py")):
        for name in imports(path):
            top = name.partition(".")[0]
            if top not in OF_KERNELS | {"kernels"} and top not in sys.stdlib_module_names:
                yield f"kernels/{path.name} imports {name}"
    for path in sorted([*(root / "tests").glob("*.py"), *(root / "benchmarks").glob("*.py")]):
        if path.name != "test_harness.py" and any(name.startswith("jax._src") for name in imports(path)):
            yield f"{path.parent.name}/{path.name} imports jax._src"


def test_layers():
    assert list(breaches(ROOT)) == []


def test_every_layer_exists():
    """A rule for a file that is gone guards nothing."""
    assert {path.stem for path in (ROOT / "jaxext").glob("*.py")} == set(MAY)


def test_the_rules_have_no_circle():
    done: set[str] = set()
    while free := [module for module, below in MAY.items() if module not in done and below - BUILT <= done]:
        done |= set(free)
    assert done == set(MAY)


@pytest.mark.parametrize(
    ("file", "line", "breach"),
    [
        ("jaxext/_conv.py", "from jaxext.kernels import conv", "_conv imports jaxext.kernels"),
        ("jaxext/_conv.py", "import jax_triton", "_conv imports jax_triton"),
        ("jaxext/_tune.py", "from jaxext.benchmarks import problems", "_tune imports jaxext.benchmarks"),
        ("jaxext/_table.py", "import jax", "_table imports jax"),
        ("jaxext/_form.py", "from jaxext import _conv", "_form imports jaxext._conv"),
        ("jaxext/_form.py", "from jaxext._matmul import MATMUL", "_form imports jaxext._matmul"),
        ("jaxext/_form.py", "from . import ops", "_form imports jaxext.ops"),
        ("jaxext/_form.py", "from .ops import matmul", "_form imports jaxext.ops"),
        ("jaxext/ops.py", "import jaxext._conv_xla", "ops imports jaxext._conv_xla"),
        ("jaxext/ops.py", "from jax._src import core", "ops imports jax._src.core"),
        ("jaxext/ops.py", "def f():\n    import jax._src.core", "ops imports jax._src.core"),
        ("jaxext/ops.py", "from jax import _src", "ops imports jax._src"),
        ("jaxext/ops.py", "import flax", "ops imports flax"),
        ("jaxext/_window.py", "import jax.numpy", "_window imports jax"),
        ("jaxext/_novelty.py", "", "_novelty has no place in the design"),
        ("kernels/gemm.py", "import jax", "kernels/gemm.py imports jax"),
        ("kernels/gemm.py", "from jaxext import ops", "kernels/gemm.py imports jaxext.ops"),
        ("tests/test_x.py", "import jax._src.core", "tests/test_x.py imports jax._src"),
        ("benchmarks/x.py", "import jax._src.core", "benchmarks/x.py imports jax._src"),
    ],
)
def test_a_breach_is_found(tmp_path, file, line, breach):
    for folder in ("jaxext", "kernels", "tests", "benchmarks"):
        (tmp_path / folder).mkdir()
    (tmp_path / file).write_text(f'"""A file."""\n\n{line}\n')
    assert list(breaches(tmp_path)) == [breach]


def test_what_is_allowed_is_no_breach(tmp_path):
    for folder in ("jaxext", "kernels", "tests"):
        (tmp_path / folder).mkdir()
    (tmp_path / "jaxext/_form.py").write_text("import math\n\nimport jax\n\nfrom jaxext import _compat\nfrom . import _partition\n")
    (tmp_path / "jaxext/_compat.py").write_text("from jax._src import core\n")
    (tmp_path / "kernels/gemm.py").write_text("import dataclasses\n\nimport triton.language as tl\nfrom . import tiles\n")
    (tmp_path / "tests/test_harness.py").write_text("from jax._src.internal_test_util import test_harnesses\n")
    assert list(breaches(tmp_path)) == []
