"""Triton kernels are compiled anew in tests that ask for it."""

import pytest


@pytest.fixture
def empty_cache(tmp_path, monkeypatch):
    """jax-triton, which tests before may have imported, says that there is no cache."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
