"""`tune` measures the implementations of a function's operations; `explain` shows which ones are chosen."""
