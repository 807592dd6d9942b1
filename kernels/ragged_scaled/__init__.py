"""Ragged products of scaled numbers: rows in groups, a matrix for each group, and a scale for each block of either."""

from ..ragged.plan import clocks
from .plan import Config, candidates, grid, launch, refuses
from .problem import Problem
