"""The data in the repository is small, and says how to repeat it: results have only what a page or a test reads."""

import pathlib
import re

import pytest

ROOT = pathlib.Path(__file__).parents[2]
MOST = 1_000_000  # bytes


def test_data_is_less_than_a_megabyte():
    files = {path for path in (ROOT / "benchmarks" / "results").rglob("*") if path.is_file()}
    for folder in ("benchmarks", "docs", "examples", "jaxext", "kernels", "tests"):
        files |= {path for suffix in ("json", "jsonl", "csv", "npz") for path in (ROOT / folder).rglob(f"*.{suffix}")}
    sizes = {str(path.relative_to(ROOT)): path.stat().st_size for path in files}
    assert len(sizes) > 9 and sum(sizes.values()) <= MOST, sorted(sizes.items(), key=lambda item: -item[1])[:5]


@pytest.mark.parametrize("path", sorted((ROOT / "benchmarks" / "results").glob("*.json")), ids=lambda path: path.stem)
def test_a_recorded_command_has_no_path_of_a_machine(path):
    commands = re.findall(r'"command": "(.*?)"', path.read_text())
    assert commands and not [command for command in commands if re.search(r"(?:^|[\s=])[/~]", command)]


def test_a_path_of_a_machine_is_noticed(tmp_path):
    (tmp_path / "a.json").write_text('{"command": "bench.py --json /scratch/rows.json"}')
    with pytest.raises(AssertionError):
        test_a_recorded_command_has_no_path_of_a_machine(tmp_path / "a.json")
