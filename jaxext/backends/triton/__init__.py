"""The implementation `triton`: the kernels of `jaxext.kernels`, compiled or interpreted."""
