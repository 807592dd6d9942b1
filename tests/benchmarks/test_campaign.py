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
    ${{HANGS_A:-true}} || exit 1
    mkdir -p "$XDG_CACHE_HOME/jaxext" && echo records >"$XDG_CACHE_HOME/jaxext/verified.json"
    echo "the table of contact" ;;
*"benchmarks.headline --read"*) {LONG}; echo "the table of rows: $(cat "$OUT/gpu.json")" ;;
*benchmarks.headline*)
    echo "$*" >>"$OUT/asked"
    [[ "$*" == *--resume* ]] || echo '{{"rows": []}}' >"$OUT/gpu.json"
    ${{HANGS_B:-true}} ;;
*"-m jaxext tune"*) echo "$*" >>"$OUT/asked"; echo '{{}}' >"$OUT/tuned.json"; : >"$OUT/tuned.json.lock"; ${{HANGS_C:-true}} ;;
*benchmarks.gaps*--most*) printf '1. cuda takes 2 ms for a\\n2. triton takes 1 ms for b\\n' ;;
*benchmarks.gaps*--run*) echo "$*" >>"$OUT/asked"; all="$*"; echo "profiled ${{all##* }}" ;;
"""
# Call -> the files that it leaves beside log.txt and smi.csv, the commands that it runs, and the last line that it prints.
VERIFY, ROWS = (
    r"-P -m jaxext verify --minutes \S+ --json \S+/out/contact.jsonl",
    r"-P -m benchmarks.headline .*gpu.json --resume --minutes \S+",
)
TUNE = r".*--candidates 4 --dtype bfloat16 --only 4096 cubed, 4096x4096x4096 nn( --only [^-]*){7}"
CALLS = {
    "A": ({"contact.jsonl", "verified.json"}, [VERIFY], "the table of contact"),
    "B": ({"gpu.json"}, [ROWS], 'the table of rows: {"rows": ["before"]}'),
    "C": (
        {"contact.jsonl", "gpu.json", "ncu.txt", "tuned.json", "verified.json"},
        [rf"{VERIFY} --again \S+/before/contact.jsonl", ROWS, TUNE, ".*--run 1", ".*--run 2"],
        'the table of rows: {"rows": ["before"]}',
    ),
}


@pytest.mark.parametrize("call", CALLS)
def test_a_call_goes_on_with_files_of_before_and_leaves_its_own(call, tmp_path):
    """All is in the log; what is printed is short."""
    machine, (left, commands, last) = Machine(tmp_path, COMMANDS), CALLS[call]
    machine.before.mkdir()
    (machine.before / "gpu.json").write_text('{"rows": ["before"]}\n')
    (machine.before / "contact.jsonl").write_text('{"event": "wrong"}\n')
    status, output = machine.run("campaign.sh", call, "60")
    assert status == 0 and {path.name for path in machine.out.iterdir()} == left | {"asked", "log.txt", "smi.csv"}
    asked = (machine.out / "asked").read_text().splitlines()
    assert [bool(re.fullmatch(*pair)) for pair in zip(commands, asked, strict=True)] == [True] * len(commands), asked
    assert re.match(r"installed after \d+ s\n", output) and len(output) < 12_000 and output.endswith(f"\n{last}\n")
    log = (machine.out / "log.txt").read_text()
    assert len(log) > len(output) and "one GPU" in log and "commit abc" in log and "1980, 650" in (machine.out / "smi.csv").read_text()
    if call == "C":
        assert "the table of contact\n" in output and "1. cuda takes 2 ms for a\n2. triton takes" in output
        assert re.search("ncu --section SpeedOfLight .*profiled 1.*profiled 2", (machine.out / "ncu.txt").read_text(), re.DOTALL)


@pytest.mark.parametrize(("call", "left"), [("A", "contact.jsonl"), ("B", "gpu.json"), ("C", "tuned.json")])
def test_a_call_that_is_killed_leaves_its_files(call, left, tmp_path):
    machine = Machine(tmp_path, COMMANDS)
    process = machine.start("campaign.sh", call, "200", **{f"HANGS_{call}": "sleep 100"})
    deadline = time.monotonic() + 50
    while not ((machine.out / left).exists() and (machine.out / left).stat().st_size) and time.monotonic() < deadline:
        time.sleep(0.05)
    subprocess.run(["pkill", "-KILL", "--session", str(process.pid)], check=True)
    process.communicate()
    assert process.returncode == -signal.SIGKILL and (machine.out / left).read_text().startswith("{")
    assert (machine.out / "log.txt").stat().st_size
