"""Convolutions of more parts than one launch takes: the library's kernels, and the same with parameters of 4 KB (conv_sm90.cuh), where
no TMA descriptor lies further behind."""

import cuda_convs
import cuda_launches
import numpy as np
import pytest
from cuda_calls import conv_call
from cuda_cases import OK
from cuda_kernels import compiled, execute, modules
from cuda_launches import CONVS, ask
from ptxsim import LATE

from jaxext.ops.conv import cuda_dense as cuda_conv

pytestmark = pytest.mark.cuda

PROBLEMS = {  # with the number of parts
    "wgrad": (cuda_convs.problem("wgrad", (5, 6), (3, 3), N=31, G=1, C=16, K=24, low=1, high=1), 31),
    "dgrad": (cuda_convs.problem("dgrad", (11, 10), (3, 4), N=2, G=1, C=16, K=24, low=1, high=1, stride=3), 9),
}


def results(call, kernels):
    """The partial results; of each launch the number of parts, and the bytes of its parameters."""
    parts = execute(call, LATE, instead=kernels)
    status, asked = ask(call.case)
    assert status == OK
    launches = [entry for entry in asked if "kernel" in entry]
    return parts, [(entry["grid"][2], kernels[entry["kernel"]].kernels[entry["kernel"]].parameters[0][1]) for entry in launches]


@pytest.mark.slow
def test_few_parts_of_a_launch_give_the_same_bits(monkeypatch):
    """One test, because what it runs takes most of a minute to compile."""
    library, few = compiled("few_parts.cu", "-DJAXEXT_PARAMETER_BYTES=4096")
    for role, (problem, parts) in PROBLEMS.items():
        row = next(row for row in CONVS if (row["role"], row["rank"], row["operands"], row["tile_n"]) == (role, 2, "bfloat16", 64))
        config = cuda_conv.ConvConfig(tile_m=128, tile_n=64, cluster=2, splits=parts if role == "wgrad" else 1)
        call = conv_call(problem, config)
        want, launches = results(call, modules())
        most = row["parts"]
        assert [count for count, _ in launches] == [min(most, parts - begin) for begin in range(0, parts, most)]
        assert launches[0][1] > 4096
        call.check(want)
        with monkeypatch.context() as patch:
            patch.setattr(cuda_launches, "runtime", lambda: library)
            got, launches = results(call, few)
        assert [count for count, _ in launches] == [min(4, parts - begin) for begin in range(0, parts, 4)]
        assert all(size <= 4096 for _, size in launches)
        for name, parts in got.items():
            np.testing.assert_array_equal(parts.view(np.uint8), want[name].view(np.uint8))
