"""The README, the list of changes and docs/cuda.md give the numbers that were found last, and each result says how to repeat it."""

import json
import pathlib
import re

import pytest

ROOT = pathlib.Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"
README, CHANGES = ((ROOT / name).read_text() for name in ("README.md", "CHANGELOG.md"))
FACTOR = re.compile(r"[\d.]+ to [\d.]+ (?:times as long|times as fast|of the memory)|\d[\d.]* (?:times|%|×)")


def result(name):
    return json.loads((RESULTS / f"{name}.json").read_text())


def ratios(name, other, row=None):
    """Time of another program over time of jaxext, in all rows or in those of one kind."""
    return [each["ms"][other] / each["ms"]["jaxext"] for each in result(name)["rows"] if row in (None, each["row"])]


def spread(found):
    """The least and the largest, in two digits."""
    return f"{min(found):.2g} to {max(found):.2g}"


def of_memory():
    """Return the range of a training step's memory in the performance log's table, which `benchmarks/training_memory.py` prints."""
    section = (ROOT / "docs" / "performance-log.md").read_text().partition("## Fused epilogues: what a training step keeps\n")[2]
    rows = [line.split("|") for line in section.partition("\n## ")[0].splitlines() if re.match(r"\|.*\| b?float", line)]
    found = [float(cells[i]) for cells in rows for i in (5, 9)]
    assert len(found) == 12 and all(float(c[i]) == round(float(c[i - 1]) / float(c[i - 2]), 2) for c in rows for i in (5, 9))
    return f"{min(found):.1f} to {max(found):.1f}"


def of_loops():
    return spread(ratios("loops_cpu", "lax", "gradients"))


# What is claimed -> the text, and the words that it must have
CLAIMS = {
    "loops": (README, lambda: f"lax's gradients take [{of_loops()} times as long]"),
    "quantised weights": (README, lambda: f"`quantized_matmul` is [{spread(ratios('quantized_cpu', 'dequantized'))} times as fast]"),
    "memory": (README, lambda: f"a training step keeps [{of_memory()} of the memory]"),
    "loops, in the list of changes": (CHANGES, lambda: f"lax's gradients take {of_loops()} times as long there"),
}


def test_kernels_are_as_many_as_the_page_says():
    """Families for Hopper alone are counted, of which each row of the table says `all N kernels`."""
    page = (ROOT / "docs" / "cuda.md").read_text()
    said = {name: int(number) for name, number in re.findall(r"^\| `(\w+)` \|.*right: all (\d+) kernels", page, re.MULTILINE)}
    rows = [row["kernel"] for row in result("kernels_cuda_13.0")["cuda"]["rows"] if row["arch"] == "90a"]
    assert said == {name: sum(re.match(rf"{name}(\d?d?_|$)", row) is not None for row in rows) for name in said}
    assert {"matmul", "pieces", "conv"} < said.keys()


@pytest.mark.parametrize("text, claim", CLAIMS.values(), ids=CLAIMS)
def test_numbers_are_those_that_were_measured(text, claim):
    assert claim() in text


@pytest.mark.parametrize("text", [README, CHANGES], ids=["README", "changes"])
def test_no_other_number_is_claimed(text):
    """One that is new belongs into CLAIMS, so that it is compared."""
    claimed = {number for of, claim in CLAIMS.values() if of is text for number in FACTOR.findall(claim())}
    assert claimed and {*FACTOR.findall(text)} == claimed


def test_the_picture_is_of_the_commit_that_is_named():
    assert f"The picture shows commit {result('cpu')['environment']['commit'][:7]}." in README


@pytest.mark.parametrize("path", sorted(RESULTS.glob("*.json")), ids=lambda path: path.stem)
def test_a_recorded_command_has_no_path_of_a_machine(path):
    commands = re.findall(r'"command": "(.*?)"', path.read_text())
    assert commands and not [command for command in commands if re.search(r"(?:^|[\s=])[/~]", command)]


def test_a_path_of_a_machine_is_noticed(tmp_path):
    (tmp_path / "a.json").write_text(json.dumps({"command": "bench.py --json /scratch/rows.json"}, indent=1))
    with pytest.raises(AssertionError):
        test_a_recorded_command_has_no_path_of_a_machine(tmp_path / "a.json")
