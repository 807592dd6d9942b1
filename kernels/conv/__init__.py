"""Convolutions as implicit matrix products."""

from .plan import Config, Problem, candidates, clocks, grid, launch, refuses
