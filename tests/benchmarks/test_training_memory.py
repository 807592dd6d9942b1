"""Blocks of fused operations save less for the backward pass than those of plain jnp, and compute the same."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import random

from benchmarks.training_memory import BLOCKS, temporaries


@pytest.mark.parametrize("block", BLOCKS)
def test_a_step_keeps_a_quarter_less(block):
    plain, ours = (temporaries(block, fused, layers=4, dtype=jnp.float32) for fused in (False, True))
    assert 0 < ours < 0.75 * plain


@pytest.mark.parametrize("block", BLOCKS)
def test_both_are_the_same_block(block):
    function, x, weights = BLOCKS[block]
    weights = [random(shape, np.float32, seed) / 16 for seed, shape in enumerate(weights)]
    x = random(x, np.float32, 9)
    ours, plain = (jax.jit(lambda x, w, fused=fused: function(fused, x, w))(x, weights) for fused in (True, False))
    np.testing.assert_allclose(ours, plain, rtol=1e-4, atol=1e-4)
