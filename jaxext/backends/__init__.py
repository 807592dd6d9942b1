"""The implementations: `xla`, and two made of kernels, `triton` and `cuda`."""
