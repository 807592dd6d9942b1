"""A plugin of pytest for tests on a GPU: an illegal access in one must not take the tests after it along.

After one, every call of CUDA in that process fails, whatever it is.  So a worker of pytest-xdist in which a test failed, and then nothing
else works either, tells why and ends; pytest-xdist says during which test, and goes on with a new worker.
"""

import os

import jax
import numpy as np
import pytest


def works() -> bool:
    """Return whether the device still computes."""
    try:
        return float(jax.device_put(np.float32(1), jax.local_devices()[0]) + np.float32(1)) == 2
    except Exception:  # of whichever kind: the runtime says it in many ways
        return False


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    report = yield
    if report.failed and "PYTEST_XDIST_WORKER" in os.environ and not works():
        with item.config.pluginmanager.getplugin("capturemanager").global_and_fixture_disabled():
            # What is printed here stands in the log; the report itself does not reach it, or the test would count as done.
            os.write(2, f"\n{item.nodeid} left nothing usable:\n{report.longreprtext}\n".encode())
        os._exit(1)
    return report
