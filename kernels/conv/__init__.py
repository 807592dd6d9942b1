"""Transitional: the names of kernel.py."""

import importlib


def __getattr__(name):
    return getattr(importlib.import_module(f"{__name__}.kernel"), name)
