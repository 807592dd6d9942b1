"""Portable CUDA kernels run on a simulator, whose drivers are built once for all tests and workers."""

import pytest


@pytest.fixture
def simulator(tmp_path_factory, tmp_path):
    from simt import Simulator  # which needs Triton

    here = tmp_path_factory.getbasetemp()  # a folder for each worker of pytest-xdist
    return Simulator(here.parent if here.name.startswith("popen-") else here, tmp_path)
