"""The package alone: a wheel of it runs a kernel where neither jax nor jaxext can be imported."""

import importlib.util
import pathlib
import subprocess
import sys
import zipfile

import pytest
from snippets import HEAD

ROOT = pathlib.Path(__file__).parents[1]
CODE = f"""
import sys
sys.modules |= dict.fromkeys(["jax", "jaxlib", "jaxext", "ml_dtypes", "triton"])
import numpy as np, ptxsim
module = ptxsim.Module(\"\"\"{HEAD}.visible .entry kernel(.param .b64 p) {{
.reg .b64 %d; ld.param.b64 %d, [p]; st.global.b32 [%d], 7; ret; }}\"\"\")
result = ptxsim.Output(np.zeros(1, np.uint32))
module.run("kernel", (1,), (1,), [result])
print(result.values[0], ptxsim.__file__, len(ptxsim.verified_opcodes()) > 1000)
"""


def run(path) -> str:
    """Return what the code prints with the package of a folder, which an editable installation must not hide."""
    here = "sys.meta_path[:] = [finder for finder in sys.meta_path if not type(finder).__name__.startswith('ScikitBuild')]"
    code = f"import sys\n{here}\nsys.path.insert(0, {str(path)!r})\n{CODE}"
    return subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True).stdout.strip()


def test_a_checkout_needs_neither_jax_nor_jaxext():
    assert run(ROOT) == f"7 {ROOT}/ptxsim/__init__.py True"


@pytest.mark.skipif(importlib.util.find_spec("scikit_build_core") is None, reason="scikit-build-core is not installed")
def test_a_wheel_has_all_that_a_run_needs(tmp_path):
    build = ["pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir", tmp_path, ROOT]
    subprocess.run([sys.executable, "-m", *build], check=True)
    (wheel,) = tmp_path.glob("ptxsim-*-py3-none-any.whl")
    zipfile.ZipFile(wheel).extractall(tmp_path / "site")
    assert run(tmp_path / "site") == f"7 {tmp_path}/site/ptxsim/__init__.py True"
    assert {path.name for path in (tmp_path / "site").iterdir()} == {"ptxsim", wheel.name.removesuffix("-py3-none-any.whl") + ".dist-info"}


def test_the_code_is_one_that_can_fail():
    """The names that are blocked cannot be imported."""
    with pytest.raises(subprocess.CalledProcessError):
        subprocess.run(
            [sys.executable, "-c", CODE.replace("import numpy as np", "import jax, numpy as np")], stderr=subprocess.DEVNULL, check=True
        )
