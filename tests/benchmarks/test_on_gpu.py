"""The script for a machine with a GPU, step by step, with stand-ins for its Python and its nvidia-smi: what it says and how it ends."""

import os
import pathlib
import re
import shutil
import subprocess
import sys

import pytest

SCRIPT = pathlib.Path(__file__).parents[2] / "benchmarks/on_gpu.sh"
# Does by its arguments what a machine's Python would: installs this checkout, says that it is compiled, collects and tests.
PYTHON = """#!/bin/bash
case "$*" in
  *version_info*) echo cp312 ;;
  *Python.h*) ${REAL:-true} "$@" ;;
  *find_spec*) exit 1 ;;
  *"pip install"*)
    ${PIP:-true} || exit
    mkdir -p build/site && cp -r jaxext build/site && cp -r kernels benchmarks build/site/jaxext
    [ -z "$WHEEL" ] || echo "$WHEEL" >build/site/jaxext/a.py
    ;;
  *hashlib*) exit 0 ;;
  *importlib.metadata*) echo ${KERNELS:-compiled} ;;
  *--collect-only*) echo "5/7 tests collected" && exit ${COLLECTED:-0} ;;
  *tests/test_fails.py) echo "FAILED tests/test_fails.py::test_a - off by one" && exit 1 ;;
  *tests/test_hangs.py) exec sleep 60 ;;
  *tests/test_passes.py | *tests/backends/test_gpu_suite.py) echo "2 passed" ;;
  *tests/test_empty.py) exit 5 ;;
  *'jax.devices("gpu")'*) ${JAX:-true} ;;
  *) echo "not expected: $*" && exit 99 ;;
esac
"""


def run(tmp_path, *parts, gpu=True, **settings):
    """Status and output of the script in a checkout with one file in each folder; and its folder of results."""
    checkout, bin = tmp_path / "checkout", tmp_path / "bin"
    for folder in ("jaxext", "kernels", "benchmarks", "csrc", "tests", "wheels"):
        (checkout / folder).mkdir(parents=True)
        (checkout / folder / "a.py").write_text(f"# of {folder}\n")
    (checkout / "wheels/jaxext-0.1.0-cp312-cp312-linux_x86_64.whl").touch()
    shutil.copy(SCRIPT, checkout / "benchmarks")
    bin.mkdir()
    for name, text in (("python", PYTHON), ("nvidia-smi", "#!/bin/bash\necho one GPU\n")):
        if name == "python" or gpu:
            (bin / name).write_text(text)
            (bin / name).chmod(0o755)
    environment = {"PATH": f"{bin}:{os.environ['PATH']}", "PYTHON": str(bin / "python"), "OUT": str(tmp_path / "out"), "COMMIT": "abc"}
    command = ["bash", str(checkout / "benchmarks/on_gpu.sh"), *parts]
    done = subprocess.run(command, env=environment | settings, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=60)
    return done.returncode, done.stdout, tmp_path / "out"


@pytest.mark.skipif(shutil.which("nvidia-smi") is not None, reason="a GPU may be here")
def test_where_there_is_no_gpu_a_sentence_says_so_after_all_else_is_ready(tmp_path):
    status, said, _ = run(tmp_path, "tests", gpu=False)
    assert status == 3
    assert said.splitlines()[-1].startswith("NO GPU: nvidia-smi finds none.  Prepared in ")
    assert "CUDA kernels: compiled; collected: 5/7 tests collected." in said and "===" not in said


def test_a_gpu_that_jax_does_not_see_is_none(tmp_path):
    status, said, _ = run(tmp_path, "tests", JAX="false")
    assert status == 3 and "NO GPU: nvidia-smi finds one, jax does not." in said


def test_a_slow_preparation_leaves_jax_time_to_look_for_a_gpu(tmp_path):
    status, said, _ = run(tmp_path, "suite", PIP="sleep 2", PREPARE="3", JAX="sleep 2")
    assert status == 0, said


def test_each_file_is_a_process_and_what_fails_or_hangs_takes_no_other_part_along(tmp_path):
    files = "tests/test_fails.py tests/test_passes.py tests/test_hangs.py tests/test_fails.py"
    status, said, out = run(tmp_path, "tests", "suite", TESTS=files, LIMIT="3")
    assert status == 1
    assert "tests-test_fails: FAILED, status 1" in said and "tests-test_passes: passed" in said
    assert "tests-test_hangs: FAILED, not done in time" in said and "tests-test_fails: NOT BEGUN" in said
    assert "suite: passed" in said and "1 tests failed" in said
    assert said.endswith("FAILED: tests-test_fails\nFAILED: tests-test_hangs\nFAILED: tests-test_fails\n")
    assert (out / "failures.txt").read_text() == "FAILED tests/test_fails.py::test_a - off by one\n"
    assert (out / "tests-test_passes.log").read_text() == "2 passed\n"


@pytest.mark.parametrize(("settings", "status"), [({}, 1), ({"ONLY": "fprop"}, 0)])
def test_a_file_without_a_test_is_a_failure_unless_some_are_asked_for(settings, status, tmp_path):
    assert run(tmp_path, "tests", TESTS="tests/test_empty.py", **settings)[0] == status


def test_without_a_failure_the_status_is_zero(tmp_path):
    status, said, _ = run(tmp_path, "tests", TESTS="tests/test_passes.py")
    assert status == 0 and "0 tests failed" in said


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"PIP": "false"}, "FAILED: installing"),
        ({"PIP": "sleep 60", "PREPARE": "1"}, "FAILED: installing"),
        ({"WHEEL": "# of yesterday"}, "the wheel is not of this checkout, make it anew: they differ in jaxext/a.py"),
        ({"KERNELS": "built without"}, "!!! NO CUDA KERNELS: built without"),
        ({"COLLECTED": "2"}, "FAILED: collecting the tests"),
    ],
    ids=["pip fails", "pip hangs", "another checkout's wheel", "no kernels in the wheel", "a file cannot be imported"],
)
def test_what_is_not_ready_ends_it_before_a_gpu_is_asked_for(settings, said, tmp_path):
    status, output, _ = run(tmp_path, "tests", **settings)
    assert status == 1 and said in output and "one GPU" not in output


def test_what_a_launch_needs_and_is_not_there_is_told_at_once_and_fails_the_tests_alone(tmp_path):
    """Without a C compiler every launch of Triton's fails, in the middle of a test."""

    def with_compiler(name, part):
        status, said, _ = run(tmp_path / part / name, part, REAL=sys.executable, CC=name, TESTS="tests/test_passes.py")
        return status, said

    line = "missing: a C compiler (no-such-cc)"
    status, said = with_compiler("no-such-cc", "tests")
    assert status == 1 and said.count(line) == 2 and said.index(line) < said.index("one GPU")
    assert "tests-test_passes: passed" in said and said.endswith("FAILED: tests, for what is missing\n")
    status, said = with_compiler("no-such-cc", "suite")
    assert status == 0 and line in said and "suite: passed" in said
    assert "a C compiler" not in with_compiler("true", "suite")[1]


def test_an_unknown_part_is_named(tmp_path):
    status, said, _ = run(tmp_path, "test")
    assert status == 2 and "no part is called test: tests suite" in said


def test_each_part_may_have_its_seconds_and_all_end_within_those_of_the_whole(tmp_path):
    status, said, _ = run(tmp_path / "a", "tests=2", "suite", TESTS="tests/test_hangs.py")
    assert status == 1 and "tests-test_hangs: FAILED, not done in time (2 s)" in said and "suite: passed" in said
    status, said, _ = run(tmp_path / "b", "tests=2", "suite", TESTS="tests/test_hangs.py", WITHIN="1")
    assert status == 1 and "suite: NOT BEGUN" in said


def test_the_smoke_test_is_of_marked_cases_alone(tmp_path):
    assert "-m gpu and smoke" in run(tmp_path, "smoke")[1]


def script(name):
    return (SCRIPT.parent / name).read_text()


OF_GPUS = sorted(path for path in (SCRIPT.parents[1] / "tests/backends").glob("test_gpu*.py") if "pytest.mark.gpu" in path.read_text())


def test_every_file_of_gpu_tests_is_run():
    names = [path.stem.removeprefix("test_gpu") for path in OF_GPUS if path.stem not in ("test_gpu", "test_gpu_suite")]
    (braces,) = re.findall(r"tests/backends/test_gpu_\{(.*?)\}", script("on_gpu.sh"))
    assert {f"_{name}" for name in braces.split(",")} == {*names} and "tests/backends/test_gpu_suite.py" in script("on_gpu.sh")


@pytest.mark.parametrize("path", OF_GPUS, ids=lambda path: path.stem)
def test_a_file_of_gpu_tests_is_collected_by_itself(path):
    """A GPU runs it in a process of its own, and another file, collected before, may have given it what it imports."""
    command = [sys.executable, "-m", "pytest", "-q", "--collect-only", "-m", "gpu", path]
    done = subprocess.run(command, cwd=SCRIPT.parents[1], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:]


def campaign(tmp_path, call, *measured):
    """Status and output of a call, of a checkout whose on_gpu.sh says with what it was called, and leaves a log and a report; and OUT."""
    benchmarks, out = tmp_path / "benchmarks", tmp_path / "out"
    benchmarks.mkdir()
    shutil.copy(SCRIPT.parent / "campaign.sh", benchmarks)
    rows = ", ".join(f'{{"name": "{name}"}}' for name in (*measured, call))
    (benchmarks / "on_gpu.sh").write_text(
        'echo "parts $*, within $WITHIN, resume ${RESUME:-no}, bench $BENCH"; [ ! -e "$OUT/gpu.json" ] || cat "$OUT/gpu.json"\n'
        f"""echo log >"$OUT/a.log"; echo '{{"rows": [{rows}], "left_out": ["slow"], "begun": []}}' >"$OUT/gpu.json"\n"""
        'printf "=== in all:\\nsmoke: passed\\n"; exit 1\n'
    )
    report = tmp_path / "gpu.json"
    if measured:
        report.write_text("the report before\n")
    environment = {"PATH": os.environ["PATH"], "PYTHON": sys.executable, "OUT": str(out), "REPORT": str(report)}
    command = ["bash", str(benchmarks / "campaign.sh"), call]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=60)
    return done.returncode, done.stdout, out


def test_a_call_of_the_campaign_leaves_an_archive_and_the_report_and_says_what_it_had_no_time_for(tmp_path):
    status, said, out = campaign(tmp_path, "1")
    assert status == 1 and "parts smoke=90 bench, within 540, resume no, bench --brief" in said
    assert said.endswith("=== in all:\nsmoke: passed\nmeasured: 1 cases\nleft out: 1 cases\n  slow\nbegun: 0 cases\n")
    assert sorted(path.name for path in out.iterdir()) == ["campaign-1.tar.gz", "gpu.json"]
    names = subprocess.run(["tar", "--list", "-f", out / "campaign-1.tar.gz"], capture_output=True, text=True).stdout.split()
    assert sorted(names) == ["./", "./a.log", "./output.log", "./status"]


def test_a_later_call_goes_on_with_the_report(tmp_path):
    _, said, _ = campaign(tmp_path, "2", "cube")
    assert "resume 1, bench --brief" in said and "the report before" in said and "measured: 2 cases" in said


def test_an_unknown_call_is_refused(tmp_path):
    status, said, out = campaign(tmp_path, "4")
    assert (status, said) == (2, "which call: 1, 2 or 3\n") and not out.exists()
