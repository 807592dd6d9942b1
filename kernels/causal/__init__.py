"""Causal depthwise convolutions of sequences."""

from .plan import Config, Problem, candidates, clocks, grid, launch, supports
from .problem import CausalProblem
