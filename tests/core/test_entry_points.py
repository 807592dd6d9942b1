"""Kernels that an installed package declares by the entry-point group `jaxext.kernels`."""

import os
import re
import subprocess
import sys

PROGRAM = """
import sys, threading, warnings
import jax, jax.numpy as jnp, jaxext

assert not {"broken", "theirs"} & {*sys.modules}
with warnings.catch_warnings(record=True) as warned:
    warnings.simplefilter("always")
    if sys.argv[1] == "named":
        with jaxext.use_implementation("theirs"):
            pass
    else:
        jax.jit(jaxext.matmul)(jnp.ones((2, 3)), jnp.ones((3, 4)))
    (warned,) = warned
assert str(warned.message) == "broken-kernels 1.0: a = broken:register of jaxext.kernels does not load: ZeroDivisionError: of theirs"
assert warned.filename == "<string>", warned.filename  # this program
print(jax.jit(lambda a, b: jaxext.matmul(a, b))(jnp.ones((2, 3)), jnp.ones((3, 5)))[0, 0])
import theirs

for thread in threading.enumerate():
    if thread is not threading.current_thread():
        thread.join()
assert theirs.of_threads == [7.0] * 3, theirs.of_threads  # those that began while it was loaded
"""
THEIRS = """
import threading, time
import jax.numpy as jnp
import jaxext
from jaxext import extend

NUMBER = jnp.float32(7)  # an array, though a program is traced now

class Theirs(extend.Implementation):
    name, version = "theirs", "1"

    def refuses(self, call):
        return None

    def run(self, call, config, operands):
        return jnp.full(call.shape, NUMBER)

of_threads = []

def call():
    of_threads.append(float(jaxext.matmul(jnp.ones((4, 3)), jnp.ones((3, 4)), implementation="theirs")[0, 0]))

def register():
    threads = [threading.Thread(target=call) for _ in range(3)]
    for thread in threads:
        thread.start()
    time.sleep(0.2)  # they wait for what is loaded
    extend.register("matmul", Theirs())
"""
PACKAGES = {"broken": "def register():\n    raise ZeroDivisionError('of theirs')\n", "theirs": THEIRS}


def test_they_are_loaded_on_first_use(tmp_path):
    for entry, (name, code) in zip("ab", PACKAGES.items(), strict=True):
        (tmp_path / f"{name}.py").write_text(code)
        info = tmp_path / f"{name}_kernels-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}-kernels\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(f"[jaxext.kernels]\n{entry} = {name}:register\n")
    env = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])]),
        "JAX_PLATFORMS": "cpu",
    }
    done = subprocess.run([sys.executable, "-m", "jaxext", "info"], env=env, cwd=tmp_path, capture_output=True, text=True)
    assert re.search(r"broken-kernels 1.0: a = broken:register +ZeroDivisionError: of theirs", done.stdout)
    assert re.search(r"theirs-kernels 1.0: b = theirs:register +loaded", done.stdout)
    for way in ("named", "called"):
        done = subprocess.run([sys.executable, "-P", "-c", PROGRAM, way], env=env, cwd=tmp_path, capture_output=True, text=True)
        assert (done.returncode, done.stdout) == (0, "7.0\n"), done.stderr
