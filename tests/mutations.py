"""Planted defects, and whether the tests find them: `make mutations`, or `python tests/mutations.py [--all] [part of a name ...]`.

Each defect of mutations.txt is one small error that somebody could make.  It is planted in a copy of this checkout, where those tests run
that are likely to find it and then, if these pass, the others.  Those that found one are run once more without any, and must pass.  A row
for each defect says which test found it, or why the defect cannot be planted; the status is 1 if one was not found or not planted.  The
compiled CUDA kernels have no defects, so those planted in csrc can only be found by tests that compile its sources.  `--check` runs no
test: it lists the defects that cannot be planted.
"""

import argparse
import ast
import dataclasses
import importlib.util
import itertools
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).parent.parent
TABLE = ROOT / "tests/mutations.txt"
# Tests that fail at any change of a source.
BLIND = ["tests/backends/triton/test_kernels_compiled.py::test_the_tables_are_of_the_kernels_that_are_here"]
DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
TOKENS = re.compile(r"\w+|[^\w\s]")
CPP_TEXT = re.compile(r"""//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\])'""", re.DOTALL)  # comments and literals
FINDERS = re.compile(r"^(?:FAILED|ERROR) (\S+?\.py(?:::.+?)?)(?: - .*)?$", re.MULTILINE)


@dataclasses.dataclass(frozen=True)
class Defect:
    name: str
    file: str
    function: str
    old: str
    new: str
    tests: tuple[str, ...]  # that are likely to find it


def defects() -> list[Defect]:
    """Read the table, in which each has a line "# file: function: name" and lines of the old text, of the new one and of tests."""
    found = []
    for block in TABLE.read_text().split("\n# ")[1:]:
        head, *lines = block.splitlines()
        file, function, name = head.split(": ", 2)
        old, new, tests = ("\n".join(line[1:] for line in lines if line.startswith(sign)) for sign in "-+?")
        found.append(
            Defect(
                name,
                file,
                function,
                old,
                new,
                tuple(test if test.startswith("ptxsim/") else f"tests/{test}" for test in tests.splitlines()),
            )
        )
    return found


def python_spans(text: str, function: str) -> list[tuple[int, int]]:
    """Find the definitions of a function or class, `outer.inner`, with their decorators."""
    begin = [0, *itertools.accumulate(len(line) + 1 for line in text.split("\n"))]
    nodes: list = [ast.parse(text)]
    for name in function.split("."):
        nodes = [x for node in nodes for x in ast.walk(node) if x is not node and isinstance(x, DEFINITIONS) and x.name == name]
    return [(begin[min(part.lineno for part in (node, *node.decorator_list)) - 1], begin[node.end_lineno]) for node in nodes]


def cpp_spans(text: str, name: str) -> list[tuple[int, int]]:
    """Find the definitions of a function, type or constant, each from its line to the brace or semicolon that ends it."""
    code = CPP_TEXT.sub(lambda found: " " * len(found[0]), text)
    spans = []
    for head in re.finditer(rf"^[^=;{{}}\n]*\b{name}\s*([({{\[=]|:(?!:))", code, re.MULTILINE):
        depth = 0
        for end in range(head.start(1), len(code)):
            depth += (code[end] in "({[") - (code[end] in ")}]")
            if depth < 0 or depth == 0 and code[end] in ";}":
                spans += [(head.start(), end + 1)] if depth == 0 and (code[end] == "}" or head[1] == "=") else []
                break
    return spans


def planted(folder: pathlib.Path, defect: Defect) -> tuple[pathlib.Path, str]:
    """Return the file below a folder and its text with the defect; a LookupError or SyntaxError says why that is impossible."""
    path = folder / defect.file
    paths = [path] if path.exists() else [*folder.glob(f"[!.]*/**/{path.name}")]  # its folder may have been renamed
    if len(paths) != 1:
        raise LookupError(f"there is no {defect.file}")
    path = paths[0]
    text, spans_of = path.read_text(), python_spans if path.suffix == ".py" else cpp_spans
    spans = [(0, len(text))] if defect.function == "-" else spans_of(text, defect.function)
    old = r"\s*".join(rf"\b{token}\b" if re.match(r"\w", token) else re.escape(token) for token in TOKENS.findall(defect.old))
    places = {place.span() for span in spans for place in re.compile(old).finditer(text, *span)}
    if len(places) != 1:
        raise LookupError(f"the old text is there {len(places)} times, in {len(spans)} definitions of {defect.function}")
    ((begin, end),) = places
    text = text[:begin] + defect.new + text[end:]
    if path.suffix == ".py":
        compile(text, path, "exec")
    for test in defect.tests:
        file, *names = test.partition("[")[0].split("::")
        source = (ROOT / file).read_text() if (ROOT / file).exists() else ""
        # A class has the rows of a test that it inherits under the test's name.
        if not all(re.search(rf"^((def|class) {name}\(|    {name.removeprefix('test_')} = )", source, re.MULTILINE) for name in names):
            raise LookupError(f"there is no {test}")
    return path, text


def copy(folder: pathlib.Path) -> None:
    """This checkout as it is now, with what was compiled."""
    subprocess.run(["git", "clone", "--quiet", "--shared", ROOT, folder], check=True)
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"], cwd=ROOT, capture_output=True, check=True
    )
    for name in filter(None, listed.stdout.decode().split("\0")):
        (folder / name).unlink(missing_ok=True)
        if (ROOT / name).exists():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)
    for library in ROOT.glob("build/*/libjaxext_kernels.a"):  # to which tests/cuda_launches.py adds the host code of the copy
        (folder / "build" / library.parent.name).mkdir(parents=True)
        (folder / "build" / library.parent.name / library.name).symlink_to(library)
    (folder / "jaxext/kernels").symlink_to("../kernels")  # where an installation has them
    for name in ("_cuda_build", "_cuda_module"):
        if (spec := importlib.util.find_spec(f"jaxext.{name}")) and spec.origin:
            (folder / "jaxext" / pathlib.Path(spec.origin).name).symlink_to(spec.origin)
    # An editable installation would find the modules of this checkout before those of the copy.
    (folder.parent / "site").mkdir()
    (folder.parent / "site/sitecustomize.py").write_text(
        "import sys\nsys.meta_path[:] = [f for f in sys.meta_path if not type(f).__name__.startswith('ScikitBuild')]\n"
    )


def environment(folder: pathlib.Path, **more: str) -> dict[str, str]:
    inherited = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    return inherited | {"PYTHONPATH": os.pathsep.join(map(str, (folder.parent / "site", folder, folder / "ptxsim")))} | more


def run(folder: pathlib.Path, tests: list[str], options: argparse.Namespace) -> str | None:
    """The first test that fails, or None; those of kernels run last, in Triton's interpreter."""
    of_kernels = [test for test in tests if test.startswith("tests/kernels")]
    others = [test for test in tests if test not in of_kernels]
    more = ["tests/kernels"] if "tests" in tests else of_kernels
    for these, variables in ((others, {}), (more, {"TRITON_INTERPRET": "1"})):
        if these and (found := _pytest(folder, these, options, environment(folder, **variables))):
            return found
    return None


def _pytest(folder, tests, options, variables) -> str | None:
    workers = 0 if all("::" in test for test in tests) else options.workers  # few tests are done before workers have begun
    command = [sys.executable, "-m", "pytest", "-x", "-q", "--no-header", "-rfE", "-n", str(workers), "--tb=line"]
    command += [] if options.all else ["-m", "not slow"]
    command += [f"--deselect={test}" for test in BLIND] + tests
    with tempfile.TemporaryFile("w+") as said:
        process = subprocess.Popen(command, cwd=folder, env=variables, stdout=said, stderr=subprocess.STDOUT, start_new_session=True)
        try:
            status = process.wait(options.limit)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            return f"no end after {options.limit} s: {' '.join(tests)}"
        said.seek(0)
        text = said.read()
    if status in (0, 5):  # 5: there are none but slow ones
        return None
    if finders := FINDERS.findall(text):
        return finders[0]
    if status < 0:  # a worker's end is a failure of its test
        return f"the end of pytest by signal {-status}"
    raise SystemExit(f"{' '.join(command)}: status {status}\n{text[-3000:]}")


def main() -> None:
    parser = argparse.ArgumentParser(description="Planted defects, and whether the tests find them.")
    parser.add_argument("names", nargs="*", help="parts of names or files of defects; all, if none is given")
    parser.add_argument("--check", action="store_true", help="run no test, and list the defects that cannot be planted")
    parser.add_argument("--all", action="store_true", help="the whole suite, slow tests included")
    parser.add_argument("--tests", nargs="+", metavar="TEST", help="these tests alone")
    parser.add_argument("--likely", action="store_true", help="the likely tests of each defect alone")
    parser.add_argument("--workers", type=int, default=2, help="of pytest")
    parser.add_argument("--limit", type=int, default=3600, help="seconds of a run of tests")
    options = parser.parse_args()
    wanted = [d for d in defects() if not options.names or any(name in f"{d.file}: {d.name}" for name in options.names)]
    faults = []
    for defect in wanted:
        try:
            planted(ROOT, defect)
        except (LookupError, SyntaxError) as error:
            faults.append(defect)
            print(f"{defect.file}: {defect.name}\n    NOT PLANTED, {error}")
    wanted = [defect for defect in wanted if defect not in faults]
    if options.check:
        sys.exit(f"{len(faults)} cannot be planted" if faults else 0)
    with tempfile.TemporaryDirectory(prefix="jaxext-mutations-") as temporary:
        folder = pathlib.Path(temporary) / "jaxext"
        copy(folder)
        where = [sys.executable, "-c", "import jaxext, ptxsim; print(jaxext.__file__, ptxsim.__file__)"]
        printed = subprocess.run(where, cwd=temporary, env=environment(folder), capture_output=True, text=True, check=True).stdout
        assert printed.split() == [f"{folder}/{name}/__init__.py" for name in ("jaxext", "ptxsim/ptxsim")], printed
        found = {defect: find(folder, defect, options) for defect in wanted}
        finders = sorted({test for test in found.values() if test and "::" in test})
        false = finders and run(folder, finders, options)
    missed = [defect for defect, test in found.items() if test is None]
    print(f"{len(wanted) - len(missed)} of {len(wanted)} found" + (f"; {len(faults)} cannot be planted" if faults else ""))
    if false:
        print(f"without a defect there fails {false}")
    sys.exit(bool(faults or missed or false))


def find(folder: pathlib.Path, defect: Defect, options: argparse.Namespace) -> str | None:
    """The test that finds it, or None."""
    (path, text), begun = planted(folder, defect), time.monotonic()
    before = path.read_text()
    path.write_text(text)
    stages = [options.tests] if options.tests else [list(defect.tests), *([] if options.likely else [["tests"]])]
    try:
        shutil.rmtree(path.parent / "__pycache__", ignore_errors=True)  # a file of the same size may be changed within a second
        found = next(filter(None, (run(folder, tests, options) for tests in stages if tests)), None)
    finally:
        path.write_text(before)
        shutil.rmtree(path.parent / "__pycache__", ignore_errors=True)
    print(f"{defect.file}: {defect.name}\n    {found or 'NOT FOUND'}, {time.monotonic() - begun:.0f} s", flush=True)
    return found


if __name__ == "__main__":
    main()
