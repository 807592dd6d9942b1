"""The plugin for tests on a GPU, with a device that is only said to be broken: in processes of pytest and pytest-xdist of their own.

The plugin imports jax only to query the device, so these five processes have a stand-in for it.
"""

import os
import pathlib
import re
import subprocess
import sys

CONFTEST = """
import broken_device
import cases

broken_device.works = lambda: not cases.broken

def pytest_configure(config):
    config.pluginmanager.register(broken_device)
"""
CASES = "broken = False"
TESTS = """
import time
import cases

def test_before(): pass
def test_plain_failure(): assert 1 == 2, "a plain failure"
def test_illegal_access():
    cases.broken = True
    assert 3 == 4, "an illegal access"
def test_after(): assert not cases.broken
def test_hangs(): time.sleep(60)
def test_last(): pass
"""


def run(tmp_path, *arguments):
    for name, text in (("conftest", CONFTEST), ("cases", CASES), ("test_all", TESTS), ("jax", "")):
        (tmp_path / f"{name}.py").write_text(text)
    own = {"PYTHONPATH": f"{tmp_path}:{pathlib.Path(__file__).parents[1]}", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "JAX_PLATFORMS": "cpu"}
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")} | own
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--rootdir", str(tmp_path), "-ra", *arguments, str(tmp_path)]
    done = subprocess.run(command, env=environment, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=120)
    return done.returncode, done.stdout


def test_a_worker_whose_device_is_broken_or_that_hangs_is_replaced(tmp_path):
    workers = ("-p", "xdist", "-n", "1", "--max-worker-restart=40", "-o", "faulthandler_timeout=3", "-o", "faulthandler_exit_on_timeout=1")
    code, said = run(tmp_path, *workers)
    assert code == 1 and "3 failed, 3 passed" in said, said
    assert "crashed while running 'test_all.py::test_illegal_access'" in said and "an illegal access" in said
    assert "crashed while running 'test_all.py::test_hangs'" in said and re.search(r"line \d+ in test_hangs", said)
    assert "AssertionError: a plain failure" in said
    for name in ("plain_failure", "illegal_access", "hangs"):
        assert f"FAILED test_all.py::test_{name}" in said, said


def test_without_workers_every_failure_is_a_report(tmp_path):
    code, said = run(tmp_path, "--deselect", "test_all.py::test_hangs")
    assert code == 1 and "3 failed, 2 passed, 1 deselected" in said, said
