"""Ragged products: rows in groups, and a matrix for each group."""

from .plan import Config, candidates, clocks, grid, launch, refuses
from .problem import Problem, RaggedProblem, visits
