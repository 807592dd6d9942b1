"""What computes a product: `xla`, and the implementations made of kernels, `triton` and `cuda`."""
