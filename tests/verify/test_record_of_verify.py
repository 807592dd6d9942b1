"""Records of `python -m jaxext verify`, with workers that run no kernel: each case ends as its test says."""

import contextlib
import functools
import json
import sys

import jax
import pytest

import jaxext
from jaxext.bench import shipping
from jaxext.cli import command, verify
from jaxext.cli.terminal import Failure
from jaxext.core.contact import TILES, Contact, arrays, step
from jaxext.tables import active, environment, table_file
from jaxext.tables.table_format import Context
from jaxext.verify import cases, results
from jaxext.verify.events import read

WORKER = """
import json, sys

print(json.dumps({"event": "ready"}), flush=True)
for line in sys.stdin:
    case = json.loads(line)["case"]
    if any(word in case for word in sys.argv[1:]):
        told = {"event": "wrong", "check": "bits", "reason": "first at (0,)", "errors": {"norm": "nan", "worst": "nan"}}
    else:
        told = {"event": "right", "errors": {"norm": 0.25, "worst": 0.5}, "graph": "held 1"}
    print(json.dumps(told), flush=True)
"""
FOUR_AXES = arrays((2, 4, 6, 6, 6, 6), (4, 4, 3, 3, 3, 3))
ROLES = ("nn", "nt", "tn")
HERE = Context("NVIDIA H100", 90, {"jax": "1"}, {"triton": environment.codes("cuda")["triton"]})


def four_axes(x, w):
    return jaxext.conv_general_dilated(x, w, 4 * (1,), "VALID")


def some_contacts():
    yield from (step(f"product {dtype}", jaxext.matmul, *arrays(*TILES, dtype=dtype)) for dtype in ("bfloat16", "float16"))
    yield Contact("product into float32", functools.partial(jaxext.matmul, preferred_element_type="float32"), arrays(*TILES))


@pytest.fixture
def run(monkeypatch, tmp_path, capsys):
    """Runs the command as on an H100: cases that have one of these words in their names are wrong."""
    monkeypatch.setattr(table_file, "default_path", lambda: tmp_path / "cache/jaxext/tables.json")
    monkeypatch.setattr(verify, "_no_gpu", lambda: None)
    monkeypatch.setattr(active, "context", lambda platform: HERE)
    monkeypatch.setattr(cases, "contacts", lambda: [*some_contacts()])

    def ran(*arguments, wrong=()):
        monkeypatch.setattr(verify, "command", lambda module: [sys.executable, "-c", WORKER, *wrong])
        with jaxext.use_target("sm_90a"), jax.enable_x64(False), jax.numpy_dtype_promotion("standard"):
            status = command.main(["verify", "--implementation", "triton", "--workers", "2", *map(str, arguments)])
        return status, capsys.readouterr().out

    return ran


def stored():
    """The kinds in the user's own record -> whether they are right, and their errors."""
    found = {}
    for entry in table_file.load(table_file.record_path()):
        assert entry.context == HERE and not entry.rows
        found |= {kind: (of.right, of.error) for kind, of in entry.verified.items()}
    return found


def test_what_was_right_and_wrong_is_stored(run, tmp_path, monkeypatch):
    monkeypatch.setattr(shipping, "digests", lambda kinds, arch, device: dict.fromkeys(kinds, f"code for {arch}, {device}"))
    status, out = run("--share", tmp_path / "shared.json", wrong=["product float16"])
    assert status == 1 and "wrong: triton" in out and "bits: first at (0,)" in out
    assert stored() == {
        **{f"triton matmul matmul_{role} bf16": (True, 0.25) for role in ROLES},
        **{f"triton matmul matmul_{role} fp16": (False, None) for role in ROLES},
        "triton matmul matmul_nn bf16->fp32": (True, 0.25),
    }
    (shared,) = table_file.load(tmp_path / "shared.json")  # as the package ships it, with the code that ran
    assert shared.place == HERE.place and not shared.sources
    assert {kind: (of.right, of.code) for kind, of in shared.verified.items()} == {
        kind: (right, "code for 90, NVIDIA H100") for kind, (right, _) in stored().items()
    }


def test_events_are_in_the_cache_unless_a_file_is_named(run):
    path = table_file.record_path().with_name("verify.jsonl")
    assert run(wrong=["product float16"])[0] == 1
    first = read(path)
    assert run("--again", path)[0] == 0
    assert {name for name, of in first.verdicts.items() if of.outcome == "wrong"} < {*read(path).verdicts}
    assert run()[0] == 0 and path.read_text().count('"environment"') == 1  # made afresh


def test_what_an_implementation_refuses_is_in_the_events(run, tmp_path, monkeypatch):
    path = tmp_path / "events.jsonl"
    monkeypatch.setattr(cases, "contacts", lambda: [Contact("four axes", four_axes, FOUR_AXES), *some_contacts()])
    assert run("--json", path)[0] == 0
    refused = [event for event in map(json.loads, path.read_text().splitlines()) if event["event"] == "refused"]
    assert [(event["implementation"], event["op"], event["reason"]) for event in refused if event["implementation"] == "triton"] == [
        ("triton", "conv4d_fprop", "4 spatial axes, want 3 at most")
    ]


def test_a_kind_whose_first_case_did_not_run_is_not_stored(run):
    status, out = run("--only", "another tile")
    assert status == 0 and stored() == {} and "Nothing was stored" in out


def test_again_runs_what_was_not_right(run, tmp_path):
    path = tmp_path / "events.jsonl"
    assert run("--json", path, wrong=["float16"])[0] == 1
    assert stored()["triton matmul matmul_nn fp16"][0] is False
    before = path.read_text().count('"begun"')
    status, out = run("--json", path, "--again", path)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    begun = [line["case"] for line in lines if line["event"] == "begun"][before:]
    assert status == 0 and begun and all("float16" in case for case in begun)
    assert stored()["triton matmul matmul_nn fp16"] == stored()["triton matmul matmul_nn bf16"] == (True, 0.25)


def test_earlier_events_of_other_code_are_no_evidence(run, tmp_path, monkeypatch):
    path = tmp_path / "events.jsonl"
    run("--json", path, "--only", "picked")
    table_file.record_path().unlink()
    monkeypatch.setattr(environment, "codes", lambda platform: {"triton": "changed"})
    run("--again", path)
    kinds = (*(f"{role} bf16" for role in ROLES), "nn bf16->fp32", "tn fp16")  # of which not all cases ran: these run whole
    assert stored() == {f"triton matmul matmul_{kind}": (True, 0.25) for kind in kinds}


def test_cases_are_listed(run):
    status, out = run("--list", "--family", "matmul")
    assert status == 0 and "triton matmul_nn: product bfloat16, picked" in out and cases.ANOTHER in out
    assert "matmul_nn" not in run("--list", "--family", "conv")[1]
    assert stored() == {}


def test_ctrl_c_ends_with_what_is_known(run, monkeypatch, tmp_path):
    def interrupt(controller):
        if len(controller.log.verdicts) >= 2:
            raise KeyboardInterrupt

    monkeypatch.setattr(verify, "_progress", lambda total: contextlib.nullcontext(interrupt))
    status, out = run("--json", tmp_path / "events.jsonl", wrong=["float16"])
    assert status == 130 and results.LEGEND in out and "not run" in out
    assert len(read(tmp_path / "events.jsonl").verdicts) >= 2


def test_an_unwritable_record_is_an_error_before_anything_runs(run):
    folder = table_file.record_path().parent
    folder.mkdir(parents=True)
    folder.chmod(0o775)  # as by Ubuntu's umask
    assert run()[0] == 1 and not [*folder.iterdir()]
    with pytest.raises(Failure, match="the record cannot be written: .*chmod go-w"):
        verify._check_writable()
