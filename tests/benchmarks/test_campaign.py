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
