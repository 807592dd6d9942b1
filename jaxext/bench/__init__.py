"""The benchmark's suite of problems, how a row is measured, and its report."""
