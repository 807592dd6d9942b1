"""Depthwise convolutions: one input channel per group."""

from ..epilogue import FLOATS
from .plan import Config, Problem, candidates, clocks, filter_pieces, grid, launch, refuses, strips
