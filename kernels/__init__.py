"""Triton kernels, installed as `jaxext.kernels`: imports Triton and the standard library only, relatively; must not know JAX."""
