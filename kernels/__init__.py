"""Triton kernels, installed as `jaxext.kernels`.  They import only Triton and the standard library, and each other relatively."""
