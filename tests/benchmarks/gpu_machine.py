"""A machine with a GPU, of stand-ins: a checkout with one file in each folder, its wheel, nvidia-smi, ncu, and a Python that answers by its
arguments."""

import hashlib
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import time
import zipfile

SCRIPTS = pathlib.Path(__file__).parents[2] / "benchmarks"
SMI = """#!/bin/bash
echo "one GPU"
while [[ "$*" == *-lms* ]]; do echo "1980, 650"; sleep 0.1; done
"""
NCU = """#!/bin/bash
echo "ncu $*" | sed 's/--profile-from-start.*//'
while [ $# -gt 0 ] && [ "$1" != off ]; do shift; done
shift && "$@"
"""


class Machine:
    """`commands` is a shell's cases of a Python's arguments; what they do not know goes to this Python, without its packages."""

    def __init__(self, folder: pathlib.Path, commands: str, tag: str = "cp{}{}".format(*sys.version_info[:2])):
        self.checkout, self.bin, self.out, self.before = (folder / name for name in ("checkout", "bin", "out", "before"))
        for name in ("jaxext", "kernels", "benchmarks", "csrc", "tests", "wheels"):
            (self.checkout / name).mkdir(parents=True)
            (self.checkout / name / "a.py").write_text(f"# of {name}\n")
        (self.checkout / "jaxext/__init__.py").touch()
        for script in SCRIPTS.glob("*.sh"):
            shutil.copy(script, self.checkout / "benchmarks")
        csrc = hashlib.sha256((self.checkout / "csrc/a.py").read_bytes()).hexdigest()
        with zipfile.ZipFile(self.checkout / f"wheels/jaxext-0.1.0-{tag}-{tag}-linux_x86_64.whl", "w") as wheel:
            wheel.writestr("jaxext/_cuda_build.py", f'SOURCES = "{hashlib.sha256(csrc.encode()).hexdigest()}"')
            for name, place in (("jaxext/__init__.py", ""), ("jaxext/a.py", ""), ("kernels/a.py", "jaxext/")):
                wheel.write(self.checkout / name, place + name)
        self.bin.mkdir()
        python = f'#!/bin/bash\ncase "$*" in\n{commands}\n*) exec {sys.executable} -S "$@" ;;\nesac\n'
        for name, text in {"python": python, "nvidia-smi": SMI, "ncu": NCU}.items():
            (self.bin / name).write_text(text)
            (self.bin / name).chmod(0o755)

    def start(self, script: str, *arguments: str, **settings: str) -> subprocess.Popen:
        """Start a script in a session of its own."""
        paths = {"PATH": f"{self.bin}:{os.environ['PATH']}", "PYTHON": str(self.bin / "python")}
        environment = paths | {"OUT": str(self.out), "BEFORE": str(self.before), "COMMIT": "abc"} | settings
        command, pipes = ["bash", str(self.checkout / "benchmarks" / script), *arguments], {"stdout": subprocess.PIPE, "text": True}
        return subprocess.Popen(command, env=environment, start_new_session=True, stderr=subprocess.STDOUT, **pipes)

    def run(self, script: str, *arguments: str, **settings: str) -> tuple[int, str]:
        """The status and the output of a script."""
        process = self.start(script, *arguments, **settings)
        output, _ = process.communicate(timeout=60)
        return process.returncode, output


def serve(pipe, hello, answers):
    """Answer requests in place of the process that measures, without importing jax.

    `answers` maps a place and a library, or () for all others, to a pickled answer, a signal that ends the process, or seconds to sleep.
    """
    pipe.send_bytes(hello)
    while True:
        answer = answers.get(tuple(pipe.recv()[1:3]), answers[()])
        if isinstance(answer, signal.Signals):
            os.kill(os.getpid(), answer)
        elif isinstance(answer, int):
            time.sleep(answer)
        else:
            pipe.send_bytes(answer)
