"""These tests need g++, and a cache for Triton: jax-triton, which tests before may have imported, tells Triton that there is none."""

import shutil

import pytest


@pytest.fixture(scope="session")
def triton_cache(tmp_path_factory):
    return tmp_path_factory.mktemp("triton")


@pytest.fixture(autouse=True)
def with_triton_cache(triton_cache, monkeypatch):
    if shutil.which("g++") is None:
        pytest.skip("g++ is not there, which compiles ptxsim")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(triton_cache))
