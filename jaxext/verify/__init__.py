"""`python -m jaxext verify`: every kernel once on the GPU of this machine, against float64 on its CPU."""
