"""The world that every test runs in: 8 simulated devices, strict promotion of dtypes and ranks, no silent conversion."""

import os

os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
os.environ.setdefault("JAX_PLATFORMS", "cpu")

# ruff: noqa: E402
import jax
import pytest

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_enable_x64", True)


def pytest_collection_modifyitems(items):
    if not any(d.platform == "gpu" for d in jax.devices()):
        for item in items:
            if "gpu" in item.keywords:
                item.add_marker(pytest.mark.skip(reason="no GPU here"))
