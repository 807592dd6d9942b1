"""`python -m jaxext verify`: checks each kind of kernel on the GPU of this machine against float64 on its CPU."""
