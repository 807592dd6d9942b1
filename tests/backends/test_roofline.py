"""The rates of GPUs are those of data sheets, and the six models of clocks have no others: where they mean the same product, they agree."""

import dataclasses

import pytest

pytest.importorskip("triton")

from jaxext.kernels.conv import plan as conv
from jaxext.kernels.depthwise import plan as depthwise
from jaxext.kernels.geometry import ConvProblem
from jaxext.kernels.launch import SHARED_MEMORY
from jaxext.kernels.machine import LAUNCH, machine
from jaxext.kernels.matmul import plan as matmul
from jaxext.ops.conv import cuda_dense as cuda_conv
from jaxext.ops.conv import cuda_depthwise
from jaxext.ops.matmul import cuda as cuda_matmul

BF16 = dict(dtypes=("bf16",) * 3, precision="tf32", arch=90)
IMAGE = dict(B=1, N=64, input=(1, 64, 64), filter=(1, 1, 1), output=(1, 64, 64), **BF16)


def product(size, depth):
    return matmul.Problem(name="matmul_nn", role="nn", B=1, M=size, N=size, K=depth, **BF16)


def convolution(role, channels, **sizes):
    return ConvProblem(name=f"conv2d_{role}", role=role, G=1, C=channels, K=channels, **IMAGE | sizes)


def channelwise(role):
    return ConvProblem(name=f"conv2d_{role}", role=role, G=4096, C=1, K=1, **IMAGE | dict(filter=(1, 3, 3), low=(0, 1, 1)))


LARGE = dict(tile_m=128, tile_n=128, tile_k=64)
CUDA = dict(tile_m=128, tile_n=128)
# A large product, and one whose partial results take the longest.
LONG = {
    "triton matmul": (matmul, product(4096, 4096), matmul.Config(**LARGE)),
    "triton conv": (conv, convolution("fprop", 4096), conv.Config(**LARGE)),
    "triton depthwise": (depthwise, channelwise("fprop"), depthwise.candidates(channelwise("fprop"))[0]),
    "cuda matmul": (cuda_matmul, product(4096, 4096), cuda_matmul.MatmulConfig(**CUDA, cluster_m=2, tile_k=64, pingpong=0)),
    "cuda conv": (cuda_conv, convolution("fprop", 4096), cuda_conv.ConvConfig(**CUDA, cluster=2)),
    "cuda depthwise": (cuda_depthwise, channelwise("fprop"), cuda_depthwise.pick(channelwise("fprop"))),
}
SPLIT = {
    "triton matmul": (matmul, product(8192, 1024), matmul.Config(**LARGE, splits=8)),
    "triton conv": (conv, convolution("wgrad", 4096), conv.Config(**LARGE, splits=264)),
    "cuda matmul": (cuda_matmul, product(8192, 1024), cuda_matmul.MatmulConfig(**CUDA, cluster_m=2, tile_k=64, pingpong=0, splits=8)),
    "cuda conv": (cuda_conv, convolution("wgrad", 4096, N=4), cuda_conv.ConvConfig(**CUDA, cluster=2, splits=30)),
}
CASES = {f"{kind} {name}": case for kind, cases in (("long", LONG), ("split", SPLIT)) for name, case in cases.items()}


DATA_SHEETS = [
    *((80, 1.41, 16, "tf32", 312), (80, 1.41, 8, "tf32", 624), (80, 1.41, 32, "tf32", 156), (80, 1.41, 32, "ieee", 19.5)),
    *((90, 1.83, 16, "tf32", 989), (90, 1.83, 8, "tf32", 1979), (90, 1.83, 32, "tf32", 495), (90, 1.98, 32, "ieee", 67)),
    *((90, 1.83, 32, "tf32x3", 165), (90, 1.83, 32, "bf16x3", 330), (90, 1.83, 32, "bf16x6", 165), (90, 1.83, 16, "bf16x6", 989)),
    *((100, 1.85, 16, "tf32", 2250), (100, 1.85, 8, "tf32", 4500), (103, 1.85, 16, "tf32", 2250)),
]
MEASURED = [(80, "", 1.41, 5.4, 1.73), (90, "", 1.98, 9.8, 3.2), (90, "NVIDIA H200", 1.98, 9.8, 4.1), (89, "", 2.49, 5.2, 0.8)]


@pytest.mark.parametrize(("arch", "ghz", "bits", "precision", "teraflops"), DATA_SHEETS)
def test_products_are_those_of_data_sheets(arch, ghz, bits, precision, teraflops):
    gpu = machine(arch)
    assert 2 * gpu.rate(bits, precision) * gpu.multiprocessors * ghz / 1000 == pytest.approx(teraflops, rel=0.02)


@pytest.mark.parametrize(("arch", "device", "ghz", "l2", "memory"), MEASURED)
def test_bytes_are_no_more_than_was_measured(arch, device, ghz, l2, memory):
    """The unit is 10^12 bytes per second; an L40 has 142 multiprocessors."""
    gpu = machine(arch, device)
    gpu = dataclasses.replace(gpu, multiprocessors=142) if arch == 89 else gpu
    assert 0.8 * l2 < gpu.l2 * gpu.multiprocessors * ghz / 1000 < l2
    assert gpu.memory * gpu.multiprocessors * ghz / 1000 == pytest.approx(memory, rel=0.15)


def test_an_h100_and_an_h200_have_their_own_memory():
    """A copy was measured at 3.0 and 4.1 TB/s; all else is the same."""
    h100, h200 = machine(90, "NVIDIA H100 80GB HBM3"), machine(90, "NVIDIA H200")
    assert [gpu.memory * gpu.multiprocessors * gpu.hertz / 1e12 for gpu in (h100, h200)] == pytest.approx([3.0, 4.1], rel=0.02)
    assert dataclasses.replace(h200, name="H100", memory=13, bandwidth=3.35e12) == h100
    assert machine(90) == machine(90, "NVIDIA GH200 480GB") == h100  # whose memory is an H100's
    assert machine(80, "NVIDIA H200").name == "A100"


def test_the_name_of_the_device_reaches_the_model():
    """Two GPUs of one capability: the one with less bandwidth splits less."""
    h100, h200 = (dataclasses.replace(SPLIT["triton matmul"][1], device=f"NVIDIA {name}") for name in ("H100", "H200"))
    config = SPLIT["triton matmul"][2]
    assert matmul.clocks(h100, config) > matmul.clocks(h200, config)
    assert repr(h100) == repr(h200) and h100 != h200  # a kernel's name does not depend on it


def test_partial_results_are_written_and_read_again():
    gpu = machine(90)
    assert gpu.moving(1e6 * gpu.memory * gpu.multiprocessors) == 1e6
    assert gpu.adding(1e6 * gpu.memory * gpu.multiprocessors) == 2e6 + LAUNCH
    assert all(machine(arch).memory < machine(arch).l2 < 64 for arch in (*SHARED_MEMORY, 0)), "memory is slower than its cache"


@pytest.mark.parametrize("name", CASES)
def test_no_model_has_a_rate_of_its_own(name, monkeypatch):
    """A machine with infinite rates has only starts, stores and launches left; a slower one is slower, by at most its rates."""
    model, problem, config = CASES[name]

    def clocks(**rates):
        monkeypatch.setattr(model, "machine", lambda arch, device: dataclasses.replace(machine(arch), **rates))
        return model.clocks(problem, config)

    before = model.clocks(problem, config)
    assert clocks(**{of.name: 1e12 for of in dataclasses.fields(machine(90)) if of.name != "multiprocessors"}) < 0.3 * before
    halved = {of: clocks(**{of: getattr(machine(90), of) // 2}) for of in ("products", "l2", "memory", "multiprocessors")}
    assert before <= min(halved.values()) and max(halved.values()) <= 2.01 * before
    assert halved.pop("multiprocessors") > 1.6 * before
    assert max(halved.values()) > 1.3 * before


def test_models_agree_on_what_is_one_product():
    """A convolution with a filter of one pixel is a product of matrices."""
    pixels = convolution("fprop", 4096, N=1)  # 64² pixels, of 4096 channels
    triton = conv.clocks(pixels, conv.Config(**LARGE)) / matmul.clocks(*LONG["triton matmul"][1:])
    cuda = (cuda_conv.clocks(pixels, cuda_conv.ConvConfig(**CUDA, cluster=2)) - LAUNCH) / cuda_matmul.clocks(*LONG["cuda matmul"][1:])
    assert 1 < triton < 1.1 and 0.95 < cuda < 1.05
