"""The implementation `cuda`: the kernels of csrc/, which the installation compiled."""
