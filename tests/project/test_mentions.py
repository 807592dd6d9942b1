"""The number of files that name an operation: those that a maintainer finds, and may have to edit, when it changes."""

import pathlib
import subprocess

import pytest

ROOT = pathlib.Path(__file__).parents[2]

# Operation -> the most tracked files, without measurements, that have its name as a word.  Lower it if there are fewer; 25 is the goal.
CEILINGS = {"gram": 51, "causal_conv1d": 60, "ragged_dot": 49}


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="no checkout of git")
@pytest.mark.parametrize("operation", CEILINGS)
def test_few_files_name_an_operation(operation):
    grep = ["git", "grep", "--files-with-matches", "--word-regexp", "--fixed-strings", operation, "--", ".", ":!benchmarks/results"]
    found = subprocess.run(grep, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    assert len(found) <= CEILINGS[operation], "\n".join(found)
