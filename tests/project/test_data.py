"""The data in the repository is small, and says how to repeat it: results have only what a page or a test reads."""

import pathlib
import re
import subprocess

import pytest

ROOT = pathlib.Path(__file__).parents[2]
MOST = 1_000_000  # bytes


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="no checkout of git")
def test_data_is_less_than_a_megabyte():
    listed = ["git", "ls-files", "--", "*.json", "*.jsonl", "*.csv", "*.npz", "benchmarks/results"]
    names = subprocess.run(listed, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    sizes = {name: path.stat().st_size for name in names if (path := ROOT / name).exists()}
    assert len(sizes) > 9 and sum(sizes.values()) <= MOST, sorted(sizes.items(), key=lambda item: -item[1])[:5]


@pytest.mark.parametrize("path", sorted((ROOT / "benchmarks" / "results").glob("*.json")), ids=lambda path: path.stem)
def test_a_recorded_command_has_no_path_of_a_machine(path):
    commands = re.findall(r'"command": "(.*?)"', path.read_text())
    assert commands and not [command for command in commands if re.search(r"(?:^|[\s=])[/~]", command)]


def test_a_path_of_a_machine_is_noticed(tmp_path):
    (tmp_path / "a.json").write_text('{"command": "bench.py --json /scratch/rows.json"}')
    with pytest.raises(AssertionError):
        test_a_recorded_command_has_no_path_of_a_machine(tmp_path / "a.json")
