"""Rows times numbers."""

from .plan import Config, Problem, candidates, launch, refuses
