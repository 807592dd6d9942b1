"""The benchmark of whole networks: inside `in_place_of_lax` each has jaxext's products alone."""

import importlib.util

import jax
import pytest

import jaxext
from benchmarks import models
from jaxext.tuning.walk import walk

MODULES = {"dm-haiku": "haiku"}  # if it is not the package's name


@pytest.mark.sampled(3)
@pytest.mark.filterwarnings("ignore")  # of others' packages
@pytest.mark.parametrize("name", models.NETWORKS)
def test_a_step_has_no_product_of_lax(name):
    network = models.NETWORKS[name]
    if importlib.util.find_spec(MODULES.get(network.package) or network.package) is None:
        pytest.skip(f"needs {network.package}")
    jaxprs = []

    def trace():
        step, params, batch = network.make(*network.cpu_arguments)
        jaxprs.append(jax.make_jaxpr(jaxext.in_place_of_lax()(step))(params, *batch).jaxpr)

    with jax.enable_x64(False), jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        jax.eval_shape(trace)  # no parameter is computed
    found = {step.eqn.primitive.name for step in walk(*jaxprs)}
    assert not found & {"conv_general_dilated", "dot_general"}
    assert {name.rpartition("_")[2] for name in found} >= {"fprop", "dgrad", "wgrad"}
