"""Measurements and the record of verified kernels: the format, the files, and what of them holds for this device."""
