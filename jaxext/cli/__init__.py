"""The command line, `python -m jaxext`."""
