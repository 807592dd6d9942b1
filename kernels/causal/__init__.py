"""Causal depthwise convolutions of sequences."""

from .plan import Config, Problem, candidates, clocks, grid, launch, refuses
from .problem import CausalProblem
