"""`tune` measures the implementations of a function's products; `explain` shows which ones are chosen."""
