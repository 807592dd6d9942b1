"""The backends are tested as where all of their kernels were verified."""

import pytest


@pytest.fixture(autouse=True)
def kernels_are_verified(verified):
    pass
