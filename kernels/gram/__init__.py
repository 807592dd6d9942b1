"""The product of a matrix with its own transpose."""

from .plan import RATIOS, Config, candidates, clocks, grid, launch, refuses, share, tiles
from .problem import Problem
