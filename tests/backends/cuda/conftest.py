"""Portable CUDA kernels run on a simulator, whose drivers are built once for all tests and workers."""

import pytest
from simt import Simulator


@pytest.fixture
def simulator(tmp_path_factory, tmp_path):
    here = tmp_path_factory.getbasetemp()
    return Simulator(
        here.parent if here.name.startswith("popen-") else here, tmp_path
    )  # pytest-xdist gives each worker a folder of its own
