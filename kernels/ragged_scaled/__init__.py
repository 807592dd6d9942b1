"""Ragged products of scaled numbers: rows in groups, a matrix for each group, and a scale for each block of either."""

from .plan import Config, candidates, clocks, grid, launch, refuses
from .problem import Problem
