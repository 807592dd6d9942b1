"""Triton kernels, installed as `jaxext.kernels`.  They import only Triton and the standard library, and each other relatively.

A folder is a family: problem.py has facts about a problem, plan.py chooses configs and makes the launch, kernel.py runs on the GPU.  Beside
the folders lies what families share.  Only kernel.py, tile.py and tile_epilogue.py need Triton to be imported.
"""
