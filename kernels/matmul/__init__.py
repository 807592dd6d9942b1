"""Matrix multiplication for the three roles of  c[b,m,n] = Σ_k a[b,m,k] b[b,k,n]."""

from .plan import Config, candidates, clocks, grid, launch, refuses, tiles
from .problem import SLOTS, MatmulProblem, Problem
