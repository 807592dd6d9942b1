"""The calls for a machine that is lent for minutes, with stand-ins for what runs there: what they leave and print, and when they end."""

import re
import signal
import subprocess
import time

import pytest
from gpu_machine import Machine

LONG = "yes 'a line that says nothing' | head -c 40000"
COMMANDS = f"""
*"-m jaxext verify"*)
    echo "$*" >>"$OUT/asked"
    all="$*" file=${{all#*--json }} file=${{file%% *}}
    echo '{{"event": "begun"}}' >>"$file"
    {LONG}
    ${{VERIFY:-true}} || exit 1
    echo '{{"event": "right"}}' >>"$file"
    [ -z "$RECORDS" ] || {{ mkdir -p "$XDG_CACHE_HOME/jaxext" && echo "$RECORDS" >"$XDG_CACHE_HOME/jaxext/verified.json"; }}
    echo "the table of contact" ;;
*"benchmarks.headline --read"*) {LONG}; echo "the table of rows: $(cat "$OUT/gpu.json")" ;;
*benchmarks.headline*)
    echo "$*" >>"$OUT/asked"
    [[ "$*" == *--resume* ]] || echo '{{"rows": []}}' >"$OUT/gpu.json"
    ${{BENCH:-true}} ;;
*"-m jaxext tune"*) echo "$*" >>"$OUT/asked"; echo '{{}}' >"$OUT/tuned.json"; : >"$OUT/tuned.json.lock"; ${{TUNE:-true}} ;;
*benchmarks.gaps*--most*) printf '1. cuda takes 2 ms for a\\n2. triton takes 1 ms for b\\n' ;;
*benchmarks.gaps*--run*) echo "$*" >>"$OUT/asked"; all="$*"; echo "profiled ${{all##* }}" ;;
"""


def start(machine, call, seconds, **settings):
    command = machine.command("campaign.sh", call, str(seconds))
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    env = machine.environment(**{"BEFORE": str(machine.out.parent / "before")} | settings)
    return subprocess.Popen(command, env=env, start_new_session=True, **pipes)


def run(machine, call, seconds=60, **settings):
    """Status, what is printed, the seconds that it took, and what was asked of the commands."""
    begun = time.monotonic()
    process = start(machine, call, seconds, **settings)
    said, _ = process.communicate(timeout=60)
    asked = machine.out / "asked"
    return process.returncode, said, time.monotonic() - begun, asked.read_text().splitlines() if asked.exists() else []


def names(machine):
    return sorted(path.name for path in machine.out.iterdir() if path.name != "asked")


def test_contact(tmp_path):
    machine = Machine(tmp_path, COMMANDS)
    status, said, _, (asked,) = run(machine, "A")
    assert status == 0 and names(machine) == ["contact.jsonl", "log.txt", "smi.csv"]
    (minutes,) = re.findall(rf"-P -m jaxext verify --minutes (\S+) --json {machine.out}/contact.jsonl$", asked)
    assert 40 < 60 * float(minutes) < 56
    assert len(said) < 12_000 and said.endswith("a line that says nothing\nthe table of contact\n")
    assert re.match(r"installed after \d+ s\ncontact: status 0 after \d+ s\na line", said)
    log = (machine.out / "log.txt").read_text()
    assert len(log) > 40_000 and "one GPU" in log and "commit abc" in log and "jaxext/__init__.py" in log
    assert "1980, 650" in (machine.out / "smi.csv").read_text()


def test_rows(tmp_path):
    machine = Machine(tmp_path, COMMANDS)
    status, said, _, (asked,) = run(machine, "B")
    assert status == 0 and names(machine) == ["gpu.json", "log.txt", "smi.csv"]
    assert re.search(r"benchmarks.headline --json \S+/gpu.json --minutes \S+$", asked)
    assert len(said) <= 11_000 and said.endswith('a line that says nothing\nthe table of rows: {"rows": []}\n')


def test_the_rest(tmp_path):
    """It goes on with what the calls before left."""
    machine, before = Machine(tmp_path, COMMANDS), tmp_path / "before"
    before.mkdir()
    (before / "gpu.json").write_text('{"rows": ["before"]}\n')
    (before / "contact.jsonl").write_text('{"event": "wrong"}\n')
    status, said, _, asked = run(machine, "C", RECORDS="of C")
    verify, rows, tune, *profiled = asked
    assert status == 0 and names(machine) == ["contact.jsonl", "gpu.json", "log.txt", "ncu.txt", "smi.csv", "tuned.json", "verified.json"]
    assert verify.endswith(f"--json {machine.out}/contact.jsonl --again {before}/contact.jsonl")
    assert re.search(r"gpu.json --resume --minutes", rows)
    only = re.findall(r"--only (.*?)(?= --only|$)", tune)
    assert "--candidates 4 --dtype bfloat16" in tune and len(only) == 8 and only[0] == "4096 cubed, 4096x4096x4096 nn"
    assert [line[-7:] for line in profiled] == ["--run 1", "--run 2"]
    ncu = (machine.out / "ncu.txt").read_text()
    assert ncu.count("ncu --section SpeedOfLight --section WarpStateStats") == 2 and "profiled 1" in ncu and "profiled 2" in ncu
    assert len(said) <= 11_000 and said.endswith('the table of rows: {"rows": ["before"]}\n')
    assert "the table of contact\n" in said and "1. cuda takes 2 ms for a\n2. triton takes" in said


def test_where_all_was_right_nothing_is_wrong_with_the_rest(tmp_path):
    machine = Machine(tmp_path, COMMANDS)
    machine.out.mkdir()
    (machine.out / "contact.jsonl").write_text('{"event": "right"}\n')
    left = tmp_path / "left"
    left.write_text("#!/bin/bash\necho 'error: no case is left: see --list'; exit 2\n")
    left.chmod(0o755)
    assert run(machine, "C", BEFORE=str(machine.out), VERIFY=str(left))[0] == 0
    left.write_text("#!/bin/bash\necho 'wrong: numbers'; exit 1\n")
    assert run(machine, "C", BEFORE=str(machine.out), VERIFY=str(left))[0] == 1


def test_both_contacts_leave_their_record(tmp_path):
    for call in "AC":
        machine = Machine(tmp_path / call, COMMANDS)
        (machine.out.parent / "before").mkdir(parents=True)
        (machine.out.parent / "before/contact.jsonl").touch()
        assert run(machine, call, RECORDS=f"of {call}")[0] == 0
        assert (machine.out / "verified.json").read_text() == f"of {call}\n"


def test_the_rest_within_one_folder(tmp_path):
    machine = Machine(tmp_path, COMMANDS)
    machine.out.mkdir()
    (machine.out / "contact.jsonl").write_text('{"event": "wrong"}\n')
    status, _, _, asked = run(machine, "C", BEFORE=str(machine.out))
    assert status == 0 and asked[0].endswith("--again build/contact_before.jsonl")
    (before,) = tmp_path.rglob("contact_before.jsonl")
    assert machine.out not in before.parents and before.read_text() == '{"event": "wrong"}\n'


def test_a_call_ends_in_time_whatever_hangs_in_it(tmp_path):
    machine = Machine(tmp_path, COMMANDS)
    status, said, took, _ = run(machine, "A", 15, VERIFY="sleep 100")
    assert status == 1 and took <= 15 and "contact: status 124 after" in said
    assert (machine.out / "contact.jsonl").read_text() == '{"event": "begun"}\n'


@pytest.mark.parametrize(
    ("call", "hanging", "left"), [("A", "VERIFY", "contact.jsonl"), ("B", "BENCH", "gpu.json"), ("C", "TUNE", "tuned.json")]
)
def test_a_call_that_is_killed_leaves_its_files(call, hanging, left, tmp_path):
    machine = Machine(tmp_path, COMMANDS)
    process = start(machine, call, 200, **{hanging: "sleep 100"})
    deadline = time.monotonic() + 50
    while not ((machine.out / left).exists() and (machine.out / left).stat().st_size) and time.monotonic() < deadline:
        time.sleep(0.05)
    subprocess.run(["pkill", "-KILL", "--session", str(process.pid)], check=True)
    process.communicate()
    assert process.returncode == -signal.SIGKILL and (machine.out / left).read_text().startswith("{")
    assert (machine.out / "log.txt").stat().st_size


@pytest.mark.parametrize(
    ("settings", "status", "said"),
    [
        ({"gpu": False}, 3, "NO GPU: nvidia-smi finds none"),
        ({"tag": "cp27"}, 1, "no jaxext for cp"),
    ],
    ids=["no GPU", "no wheel"],
)
def test_what_is_missing_is_said_at_once(settings, status, said, tmp_path):
    machine = Machine(tmp_path, COMMANDS, **settings)
    got, text, *_, asked = run(machine, "A")
    assert got == status and said in text and not asked


def test_a_wheel_of_another_checkout_is_refused(tmp_path):
    machine = Machine(tmp_path, COMMANDS)
    (machine.checkout / "kernels/a.py").write_text("# mended\n")
    status, said, *_ = run(machine, "A")
    assert status == 1 and "make it anew: they differ in kernels/a.py\nFAILED: installing\n" in said


@pytest.mark.parametrize("arguments", [("D", "60"), ("A",), ("A", "soon")])
def test_a_call_that_there_is_not(arguments, tmp_path):
    machine = Machine(tmp_path, COMMANDS)
    done = subprocess.run(machine.command("campaign.sh", *arguments), env=machine.environment(), capture_output=True, text=True)
    assert done.returncode == 2 and done.stderr == "want A, B or C, and the seconds that it may take\n" and not machine.out.exists()


def test_a_trial_asks_for_no_gpu(tmp_path):
    machine = Machine(tmp_path, COMMANDS, gpu=False)
    assert run(machine, "A", TRIAL="1")[3][0].endswith(" --trial")
    _, rows, tune, *_ = run(machine, "C", TRIAL="1")[3]
    assert rows.endswith(" --quick") and "--quick --roles nn fprop --only 4096 cubed, 4096x4096x4096 as" in tune
