"""The command line: what it says, in tables and in JSON, and with which status it ends.  `test_command_tune` is of those that measure."""

import dataclasses
import json
import os
import pathlib
import re
import shlex
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest

import jaxext
from jaxext import __main__
from jaxext.cli import arguments, command, terminal
from jaxext.tables import active, table_file
from jaxext.tables.table_format import Measurement

ROOT = pathlib.Path(jaxext.__file__).parent.parent
NO_GPU = pytest.mark.skipif(jax.default_backend() != "cpu", reason="it says what is where there is no GPU")
MATMUL = ["explain", "jaxext:matmul", "f32[8,4]", "f32[4,2]"]
PLATFORM = {"gpu": "cuda"}.get(jax.default_backend(), jax.default_backend())

MODULE = """
import jax, jax.numpy as jnp, jaxext

SIZE = 3

class Net:
    @staticmethod
    def apply(x):
        return jaxext.matmul(x, x)

def makes_its_own():
    return jaxext.matmul(jax.random.normal(jax.random.key(0), (4, 5), "float32"), jnp.ones((5, 6), "float32"))

def raises(x):
    raise ZeroDivisionError("mine")
"""


@pytest.fixture
def module(tmp_path, monkeypatch):
    """A module of the user's in the current directory, which is not on the path."""
    (tmp_path / "users_module.py").write_text(MODULE)
    (tmp_path / "users_broken.py").write_text("import nonsense_that_is_missing")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path not in ("", str(tmp_path))])
    yield tmp_path
    for name in ("users_module", "users_broken"):
        sys.modules.pop(name, None)


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """Another user's own table."""
    path = tmp_path / "cache/jaxext/tables.json"
    monkeypatch.setattr(table_file, "default_path", lambda: path)
    return path


def said(capsys, *arguments, status=0):
    """Return what a command writes to stdout."""
    assert command.main([*map(str, arguments)]) == status
    return capsys.readouterr().out


def refused(capsys, *arguments):
    """The sentence of a command that was asked for what there is not."""
    with pytest.raises(SystemExit) as end:
        command.main([*map(str, arguments)])
    assert end.value.code == 2
    out, error = capsys.readouterr()
    assert out == "" and "Traceback" not in error
    return error.strip().splitlines()[-1].partition("error: ")[2]


# The command line itself.


@pytest.mark.parametrize("name", command.COMMANDS)
def test_examples_of_help_are_taken(name, capsys):
    with pytest.raises(SystemExit) as end:
        command.main([name, "--help"])
    assert end.value.code == 0
    examples = re.findall(r"^  python -m jaxext (.*)$", capsys.readouterr().out, re.MULTILINE)
    assert len(examples) >= 2
    for example in examples:
        options = command.parser().parse_args(shlex.split(example))
        assert options.run is command.COMMANDS[name][0]


def test_without_a_command_it_helps(capsys):
    assert all(name in said(capsys) for name in command.COMMANDS)


@pytest.mark.parametrize(
    ("arguments", "of", "sentence"),
    [
        (["nonsense"], "", "argument COMMAND: invalid choice: 'nonsense' (choose from "),
        (["--nonsense"], "", "unrecognized arguments: --nonsense"),
        (["info", "more", "--nonsense"], " info", "unrecognized arguments: more --nonsense"),
        (["explain"], " explain", "the following arguments are required: module:function\n"),
        (["doctor"], " doctor", "the following arguments are required: module:function\n"),
    ],
)
def test_usage(arguments, of, sentence, capsys):
    """The command's own, and what it wants: not a SHAPE, without which a function is called without arguments."""
    with pytest.raises(SystemExit) as end:
        command.main(arguments)
    out, error = capsys.readouterr()
    assert (end.value.code, out) == (2, "") and error.startswith(f"usage: python -m jaxext{of} ")
    assert f"python -m jaxext{of}: error: {sentence}" in error


def test_as_a_program():
    """The version, by the module; and a pipe that nobody reads any more is no traceback."""
    done = subprocess.run([sys.executable, "-m", "jaxext", "--version"], capture_output=True, text=True, cwd=ROOT.parent)
    assert (done.returncode, done.stdout, done.stderr) == (0, f"jaxext {jaxext.__version__}\n", "")


def test_interrupted(monkeypatch, capsys):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(jaxext, "explain", interrupted)
    assert said(capsys, *MATMUL, status=130) == ""


def test_an_interrupted_process_ends_at_once(monkeypatch):
    """XLA's threads, still at what was interrupted, crashed some while the interpreter was taken down."""
    ended = []
    monkeypatch.setattr(__main__.os, "_exit", ended.append)
    for status in (0, 1, 130):
        monkeypatch.setattr(__main__, "main", lambda status=status: status)
        with pytest.raises(SystemExit) as end:
            __main__.run()
        assert end.value.code == status
    assert ended == [130]


@pytest.mark.parametrize("arguments", [MATMUL, ["tune", "jax.numpy:sin", "f32[8]"], ["bench", "--list"]], ids=lambda a: a[0])
def test_where_json_cannot_go(arguments, capsys, monkeypatch):
    """The error comes before any work."""
    monkeypatch.setattr(jaxext, "explain", None)
    monkeypatch.setattr(jaxext, "tune", None)
    assert "--json: " in refused(capsys, *arguments, "--json", "/dev/null/it.json")


@pytest.mark.parametrize("json", [[], ["--json"]], ids=["table", "json"])
def test_a_pipe_that_nobody_reads(json, monkeypatch):
    read, write = os.pipe()
    os.close(read)
    with os.fdopen(write, "w") as pipe:
        monkeypatch.setattr(sys, "stdout", pipe)
        assert command.main([*MATMUL, *json]) == 1


def test_json_goes_where_it_is_told(tmp_path, capsys):
    tables = said(capsys, *MATMUL)
    document = json.loads(said(capsys, *MATMUL, "--json"))
    assert document == json.loads(said(capsys, *MATMUL, "--json", "-"))
    assert said(capsys, *MATMUL, "--json", tmp_path / "made/it.json") == tables
    assert json.loads((tmp_path / "made/it.json").read_text()) == document
    assert "not a path that ends in .json" in refused(capsys, "explain", "--json", "jaxext:matmul", "f32[8,4]", "f32[4,2]")


def test_json_has_no_numbers_that_json_has_not():
    assert terminal.plain({"error": float("nan"), "ms": (1.0, float("inf")), "path": pathlib.Path("a")}) == {
        "error": "nan",
        "ms": [1.0, "inf"],
        "path": "a",
    }


def test_no_cell_is_lost(capsys, monkeypatch):
    """No cell is taken for markup.  A terminal folds cells, elsewhere a row is a line."""
    cells = ("[red]x[/red]", ":warning:", "word " * 100)
    terminal.show(terminal.Grid("[title]", ("a", "b", "c"), [cells]))
    title, head, row = capsys.readouterr().out.splitlines()
    assert title == "[title]" and head.split() == ["a", "b", "c"] and row.split() == " ".join(cells).split()
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "40")
    terminal.show(terminal.Grid("[title]", ("a", "b", "c"), [cells]))
    assert capsys.readouterr().out.count("word") == 100


@pytest.mark.parametrize(("terminal_here", "environment", "coloured"), [
    (True, {}, True),
    (True, {"NO_COLOR": "1"}, False),
    (True, {"TERM": "dumb"}, False),
    (False, {}, False),
])  # fmt: skip
def test_words_have_colours_on_a_terminal(terminal_here, environment, coloured, capsys, monkeypatch):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: terminal_here)
    for name in ("NO_COLOR", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)
    for name, value in ({"TERM": "xterm", "COLUMNS": "80"} | environment).items():
        monkeypatch.setenv(name, value)
    terminal.show("WRONG: an issue\nwhy it is wrong", terminal.Grid("title", ("state",), [("preferred",)]))
    out = capsys.readouterr().out
    assert ("\x1b[1;31mWRONG\x1b[0m: an issue\nwhy it is wrong\n" in out) == ("\x1b[32mpreferred\x1b[0m" in out) == coloured
    assert ("\x1b[3" in out) == coloured


# info


@NO_GPU
def test_info(capsys, cache, monkeypatch):
    monkeypatch.setattr(active, "_tables", {})
    document = json.loads(said(capsys, "info", "--json"))
    assert document["environment"]["versions"]["jax"] == jax.__version__
    assert document["devices"] == [{"platform": "cpu", "kind": "cpu", "count": jax.device_count()}]
    state = {(row["platform"], row["call"], row["implementation"]): row["is"] for row in document["implementations"]}
    assert state["cpu", "matmul", "xla"] == "preferred"
    assert state["cpu", "convolution", "triton"] == "not available: platform is 'cpu', want 'cuda' (or TRITON_INTERPRET=1)"
    assert state["cpu", "depthwise convolution", "cuda"] == "not available: platform is 'cpu', want 'cuda'"
    assert {platform for platform, *_ in state} == {"cpu", "cuda sm_90a"} and len(state) == 22  # fft: of convolutions alone
    assert document["table"]["file"] == str(cache)


@NO_GPU
def test_info_says_why_not(capsys, monkeypatch, cache):
    """Each implementation of each kind says its own reason, whole, and a table has them as JSON has."""
    monkeypatch.setattr("jaxext.backends.cuda.cuda_binding.missing", lambda: "built without CUDA (no nvcc)")
    monkeypatch.setattr("jaxext.tables.environment.commit", lambda: None)
    monkeypatch.setattr(active, "_tables", {})
    tables = said(capsys, "info", "--arch", "sm_75")
    assert not re.search(r"^\S.* None$", tables, re.MULTILINE)  # neither "commit  None" nor "ignored  None"
    lines = [line for line in tables.splitlines() if "cuda sm_75  " in line and " fft " not in line]
    said_of_all = "matmul, convolution, depthwise convolution  "
    assert len(lines) == 3 and all(said_of_all in line for line in lines)
    assert sum("not available: built without CUDA (no nvcc)" in line for line in lines) == 1
    assert sum("not available: compute capability is 7.5, want one of" in line for line in lines) == 1
    assert sum(line.endswith("preferred") for line in lines) == 1
    assert re.search(
        r"state +built without CUDA \(no nvcc\)\ninstall +JAXEXT_CUDA=ON pip install .*\ndocumentation +https://.*/gpus\.md", tables
    )


def test_info_tells_the_table(capsys, cache, monkeypatch):
    monkeypatch.setattr(active, "_tables", {})  # a process reads its table once
    row = (Measurement("xla", {"algorithm": "lax"}, (1.0, 1.0, 2.0), 0.0),)
    table_file.write(cache, active.context(PLATFORM), {"matmul_nn B=1": row})
    table = json.loads(said(capsys, "info", "--json"))["table"]
    assert table["valid rows"] == 1 and table["ignored"] is None
    cache.write_text("{")
    monkeypatch.setattr(active, "_tables", {})
    table = json.loads(said(capsys, "info", "--json"))["table"]
    assert table["valid rows"] == 0 and "not a table" in table["ignored"]


# explain


def test_explain_says_what_explain_says(capsys):
    x, w = jax.ShapeDtypeStruct((8, 4), jnp.float32), jax.ShapeDtypeStruct((4, 2), jnp.float32)
    want = jaxext.explain(jaxext.matmul)(x, w)
    assert json.loads(said(capsys, *MATMUL, "--json")) == json.loads(json.dumps(dataclasses.asdict(want)))
    assert said(capsys, *MATMUL) == f"{want}\n"


def test_explain_backward_for_a_gpu(capsys):
    rows = json.loads(said(capsys, "explain", "jaxext:matmul", "bf16[8,4]", "bf16[4,2]", "--backward", "--arch", "sm_90a", "--json"))
    assert rows["platform"] == "cuda" and [row["op"] for row in rows["rows"]].count("matmul_nn") == 1
    assert {row["op"] for row in rows["rows"]} == {"matmul_nn", "matmul_nt", "matmul_tn"}
    assert not any("the target GPU is unknown" in str(row["refused"]) for row in rows["rows"])


def test_explain_what_the_user_wrote(capsys, module):
    rows = json.loads(said(capsys, "explain", "users_module:makes_its_own", "--json"))["rows"]
    assert [row["operands"] for row in rows] == [["a:f32[4,5]", "b:f32[5,6]"]]
    assert "a:bf16[7,7]" in said(capsys, "explain", "users_module:Net.apply", "bf16[7,7]")
    with pytest.raises(ZeroDivisionError, match="mine"):
        command.main(["explain", "users_module:raises", "f32[]"])
    with pytest.raises(ModuleNotFoundError, match="nonsense_that_is_missing"):
        command.main(["explain", "users_broken:loss"])


def test_explain_nothing(capsys):
    assert re.fullmatch("no operation of jaxext .*\n", said(capsys, "explain", "jax.numpy:sin", "f32[2]"))


def test_explain_by_a_table(capsys, tmp_path, monkeypatch):
    """The active table, another, or none."""
    path = tmp_path / "tables.json"
    (config,) = [row["how"] for row in json.loads(said(capsys, *MATMUL, "--json"))["rows"]]
    (call,) = _calls()
    row = (Measurement("xla", {"algorithm": config}, (1.0, 1.25, 2.0), 0.0),)
    table_file.write(path, active.context(PLATFORM), {call.problem: row})
    rows = [json.loads(said(capsys, *MATMUL, "--json", "-", "--table", table))["rows"][0] for table in (path, "none")]
    assert [(row["why"], row["table"]) for row in rows] == [("measured at 1.25 ms", str(path)), ("preferred", None)]
    assert "; measured at 1.25 ms, not cuda[1] triton[2]\n\n[1] cuda: " in (text := said(capsys, *MATMUL, "--table", path))
    assert text.endswith(f"\nmeasured: {path}\n")


def _calls():
    with active.collecting() as calls:
        jax.jit(lambda x, w: jaxext.matmul(x, w)).lower(jnp.ones((8, 4), jnp.float32), jnp.ones((4, 2), jnp.float32))
    return calls


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["nonsense.deep:f"], "no module 'nonsense', neither installed nor in "),
        (["users_module.deep:f"], "no module 'users_module.deep', neither installed nor in "),
        (["users_module:nonsense"], "users_module has no 'nonsense'"),
        (["users_module:Net.nonsense"], "users_module has no 'Net.nonsense'"),
        (["users_module:raise"], "users_module has no 'raise', did you mean 'raises'?"),
        (["users_module:Net.aply"], "users_module has no 'Net.aply', did you mean 'apply'?"),
        (["users_module:SIZE"], "users_module:SIZE is of type int, want a function"),
        (["users_module"], "'users_module' is not a module:function"),
        (["./users_module.py:raises"], "'./users_module.py:raises' is not a module:function, want one such as users_module:raises"),
        (["nets/users_module.py:raises"], "is not a module:function, want one such as nets.users_module:raises"),
        (["/users_module.py:raises"], "is not a module:function, want one such as jaxext:matmul"),
        (["users_module.py:raises"], "; want a module, not its file: write users_module:raises"),
        (["users_module:raises"], "users_module:raises: missing a required argument: 'x'; give a SHAPE for each argument"),
        (["users_module:raises", "f32[]", "f32[]"], "users_module:raises: too many positional arguments"),
        (["users_module:raises", "f32[3"], "argument SHAPE: 'f32[3' is not a shape, want one such as f32[8,32,32,3]"),
        (["users_module:raises", "f33[3]"], "argument SHAPE: 'f33[3]': unknown dtype 'f33', want one of bool, i8, "),
        (["users_module:raises", "f32[3,,4]"], "argument SHAPE: 'f32[3,,4]' is not a shape"),
        (["users_module:raises", "f32[2]", "--arch", "90"], "argument --arch: arch is '90', want \"sm_90a\" (H100, H200)"),
        (["users_module:raises", "f32[2]", "--arch", "h100"], "arch is 'h100', want \"sm_90a\" (H100, H200)"),
        (["users_module:raises", "f32[2]", "--arch", "h100x"], 'arch is \'h100x\', want one of "sm_90a" (H100, H200), "sm_80" (A100), '),
        (["users_module:raises", "f32[2]", "--platform", "gpu"], "argument --platform: invalid choice: 'gpu'"),
        (["users_module:makes_its_own", "--backward"], "--backward: there is no argument to differentiate by"),
        (["users_module:raises", "f32[2]", "--table", "gone.json"], "--table: "),
    ],
)
def test_explain_refuses(arguments, sentence, capsys, module):
    assert sentence in refused(capsys, "explain", *arguments)


def test_shapes():
    assert arguments.shape("bf16[128]") == jax.ShapeDtypeStruct((128,), jnp.bfloat16)
    assert arguments.shape("u8[1,2,3]") == jax.ShapeDtypeStruct((1, 2, 3), jnp.uint8)


def test_dtypes_go_by_jaxs_own_short_names():
    for name in arguments.DTYPES:
        short = jax.make_jaxpr(lambda x: x)(jax.ShapeDtypeStruct((), name)).in_avals[0].str_short(short_dtypes=True).partition("[")[0]
        assert arguments.shape(f"{short}[]").dtype == jnp.dtype(name)


def test_wide_dtypes_where_jax_has_none():
    with jax.enable_x64(False), pytest.raises(Exception, match="float64 needs JAX_ENABLE_X64=1"):
        arguments.shape("f64[2]")


def test_without_triton():
    """A plain install has none; a module of benchmarks imported kernels at once."""
    code = "import sys; sys.modules['triton'] = None; from jaxext.cli import command; sys.exit(command.main(['info']))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
