"""The operations: a folder for each, with its public functions, its form, and what computes it."""
