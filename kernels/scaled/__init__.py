"""Products of scaled numbers: a scale for each block of rows, of columns and of the depth."""

from .plan import Config, candidates, clocks, grid, launch, refuses, tiles
from .problem import LEAST_STEP, Problem
