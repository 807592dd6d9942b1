"""Predictions for layers that people train, on machines with many GPUs: the tables of docs/scaling.md.

    python -m benchmarks.scaling

`jaxext.parallel.cost` counts what each device computes, holds and sends.  Here the counts are divided by the rates of a GPU and of its
links, from the vendor's data sheets.  Nothing was measured.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from jaxext.kernels.machine import machine
from jaxext.parallel.cost_model import Collective, Cost, cost

# NVIDIA's data sheets of the H100 and H200 (SXM) and of ConnectX-7: all of each is assumed, and no latency.
FLOPS = machine(90, "NVIDIA H200").flops  # per second: dense bfloat16 products
HBM = machine(90, "NVIDIA H200").bandwidth  # bytes per second
NODE = 8  # GPUs that NVLink joins
NVLINK = 450e9  # bytes per second that a GPU sends to others of its node: NVLink 4, 900 GB/s in both directions together
NETWORK = 50e9  # bytes per second that a GPU sends to other nodes: one link of InfiniBand NDR, 400 Gb/s, for each GPU
GPUS = (8, 64, 1024)
RINGS = (  # GPUs, what a ring of them has per GPU, and what a halo has: a node, several nodes, one GPU of each of several nodes
    (8, NVLINK, NVLINK),
    (64, NODE * NETWORK, NETWORK),
    (1024, NODE * NETWORK, NETWORK),
    (128, NETWORK, NETWORK),
)
BYTES = 2  # of a bfloat16


@dataclasses.dataclass(frozen=True)
class Plan:
    """A way to split a layer over n GPUs: for each of its products the labels with their parts, and further arguments of `cost`.

    The first label is split within nodes.
    """

    name: str
    split: Callable[[int], tuple[Mapping[str, int], ...]]
    how: tuple[Mapping[str, Any], ...] = ({},)


@dataclasses.dataclass(frozen=True)
class Layer:
    name: str
    form: str
    products: tuple[Mapping[str, int], ...]  # the sizes of each
    plans: tuple[Plan, ...]


def data(label: str, times: int = 1) -> Callable[[int], tuple[Mapping[str, int], ...]]:
    return lambda n: ({label: n},) * times


def in_nodes(label: str, *inner: str) -> Callable[[int], tuple[Mapping[str, int], ...]]:
    """Return a function from the number of GPUs to splits: `label` over the nodes, and each of `inner` over the GPUs of a node."""
    return lambda n: tuple({other: NODE, label: n // NODE} for other in inner)


def experts(n: int) -> tuple[Mapping[str, int], ...]:
    """All 256, and beyond these the columns between both products."""
    return tuple({"B": min(n, 256), inner: n // min(n, 256)} for inner in ("N", "K"))


def slabs(n: int) -> tuple[Mapping[str, int], ...]:
    return ({"D": min(n, 64), "H": n // min(n, 64)},)


def blocks(n: int) -> tuple[Mapping[str, int], ...]:
    return ({8: dict(W=2, H=2, D=2), 64: dict(W=4, H=4, D=4), 1024: dict(W=8, H=8, D=16)}[n],)


SENT = ({"sent": {"a": ("M", "B")}}, {"sent": {"c": ("M", "B")}})  # to the experts of a mixture, and back
LAYERS = (
    Layer(
        "MLP",
        "matmul",
        (dict(M=2**22, K=8192, N=28672), dict(M=2**22, K=28672, N=8192)),
        (
            Plan("data: M", data("M", 2), ({}, {})),
            Plan("data, parameters scattered: M, b along K", data("M", 2), ({"scattered": {"b": "K"}},) * 2),
            Plan("tensor in a node: N, then K; data: M", in_nodes("M", "N", "K"), ({}, {})),
            Plan("the same, a, then c, scattered along M", in_nodes("M", "N", "K"), ({"scattered": {"a": "M"}}, {"scattered": {"c": "M"}})),
        ),
    ),
    Layer(
        "Mixture",
        "matmul",
        (dict(B=256, M=2**17, K=7168, N=2048), dict(B=256, M=2**17, K=2048, N=7168)),
        (
            Plan("experts: B, rows sent", experts, SENT),
            Plan("data: M", data("M", 2), ({}, {})),
        ),
    ),
    Layer(
        "ResNet-50",
        "conv2d",
        (dict(N=8192, H=14, W=14, C=256, K=256, R=3, S=3),),
        (Plan("data: N", data("N")), Plan("output channels in a node: K; data: N", in_nodes("N", "K"))),
    ),
    Layer(
        "U-Net",
        "conv3d",
        (dict(N=1, D=512, H=512, W=512, C=32, K=32, T=3, R=3, S=3),),
        (
            Plan("slabs: D; beyond 64 H too", slabs),
            Plan("blocks: W, H, D", blocks),
            Plan("slabs, gathered by `jit`", slabs, ({"spatial": "gather"},)),
        ),
    ),
    Layer(
        "ConvNeXt",
        "conv2d",
        (dict(N=4096, H=56, W=56, G=128, C=1, K=1, R=7, S=7),),
        (
            Plan("data: N", data("N")),
            Plan("groups in a node: G; data: N", in_nodes("N", "G")),
            Plan("rows in a node: H; data: N", in_nodes("N", "H")),
        ),
    ),
)


SHARDINGS: tuple[tuple[str, str, str, Mapping[str, Any]], ...] = (
    ("matmul", "B", "batch of matrices, experts", {}),
    ("matmul", "B", "`expert_parallel`", {"sent": {"a": ("M", "B"), "c": ("M", "B")}}),
    ("matmul", "M", "rows: data", {}),
    ("matmul", "M", "data, parameters scattered", {"scattered": {"b": "K"}}),
    ("matmul", "N", "columns: tensor", {}),
    ("matmul", "N", "`all_gather_matmul`", {"scattered": {"a": "M"}}),
    ("matmul", "K", "contracted: tensor", {}),
    ("matmul", "K", "`matmul_reduce_scatter`", {"scattered": {"c": "M"}}),
    ("conv2d", "N", "images: data", {}),
    ("conv2d", "N", "data, parameters scattered", {"scattered": {"w": "K"}}),
    ("conv2d", "G", "groups", {}),
    ("conv2d", "K", "output channels: tensor", {}),
    ("conv2d", "C", "input channels: tensor", {}),
    ("conv2d", "H", "rows, halos", {}),
    ("conv2d", "H", "rows, `jit`", {"spatial": "gather"}),
)


def computing(role: Cost) -> float:
    """Seconds for the operations, or for moving operands and result through memory once, whichever is longer."""
    passed = dict(role.held)
    for collective in role.collectives:  # an operand once it is gathered, and a result before it is scattered
        if collective.kind in ("all-gather", "reduce-scatter"):
            passed[collective.slot] = collective.bytes * (collective.devices if collective.kind == "reduce-scatter" else 1)
    return max(role.flops / FLOPS, sum(passed.values()) / HBM)


def communicating(collective: Collective, split: Mapping[str, int]) -> float:
    """Seconds of communication between GPUs of one node or of several.

    m GPUs of each node form m rings over the nodes; each ring leaves a node by the link of another GPU.  A halo goes one way.
    """
    room, together = NODE, 1
    for label, n in split.items():
        here = min(n, room)
        room //= here
        together *= here if label in collective.over else 1
    if together == collective.devices:
        return collective.wire / NVLINK
    return collective.wire / (NETWORK if collective.kind == "collective-permute" else min(NVLINK, together * NETWORK))


def predicted(layer: Layer, plan: Plan, gpus: int) -> tuple[float, float, float]:
    """The bytes that a GPU sends in the three roles of each product, the seconds of sending, and the seconds of computing."""
    sent = sending = computed = 0.0
    for sizes, split, how in zip(layer.products, plan.split(gpus), plan.how, strict=True):
        for role in cost(layer.form, split, sizes=sizes, dtype="bfloat16", **how).values():
            sent += role.wire
            sending += sum(communicating(collective, split) for collective in role.collectives)
            computed += computing(role)
    return sent, sending, computed


def bound_data(n: int, bandwidth: float, scattered: bool = False) -> float:
    """Rows per GPU (tokens, or pixels of the output) below which a step waits for its parameters: (n-1)/n · bytes·F / 3β, or 2β."""
    return (n - 1) / n * BYTES * FLOPS / ((2 if scattered else 3) * bandwidth)


def bound_columns(n: int, bandwidth: float) -> float:
    """Total columns below which a product split by columns waits for the gradient of its input: (n-1) · bytes·F / 3β."""
    return (n - 1) * BYTES * FLOPS / (3 * bandwidth)


def bound_rows(halo: int, pairs: int, bandwidth: float) -> float:
    """Rows per GPU below which a dense convolution waits for its halo: halo · bytes·F / 2·taps·K·β."""
    return halo * BYTES * FLOPS / (2 * pairs * bandwidth)


def bound_rows_in_memory(halo: int, bandwidth: float) -> float:
    """The same for a memory-bound convolution with equal numbers of input and output channels: halo · HBM / 2β."""
    return halo * HBM / (2 * bandwidth)


def shardings() -> Iterator[list[str]]:
    """The collective that each split label of a form needs, in each role."""
    small = {"matmul": dict(B=2, M=4, K=4, N=4), "conv2d": dict(N=4, H=4, W=4, G=4, C=4, K=4, R=3, S=3)}
    for form, label, name, how in SHARDINGS:
        roles = cost(form, {label: 2}, sizes=small[form], **how).values()
        yield [form, label, name, *(", ".join(dict.fromkeys(f"{c.kind} {c.slot}" for c in role.collectives)) or "-" for role in roles)]


def tables() -> dict[str, str]:
    """The tables by name, in Markdown."""
    split = ("form", "split", "which is", "nn / fprop", "nt / dgrad", "tn / wgrad")
    found = {"shardings": _markdown(split, shardings())}
    for layer in LAYERS:
        found[layer.name] = _markdown((layer.name, *(f"{n} GPUs" for n in GPUS)), ([plan.name, *_row(layer, plan)] for plan in layer.plans))
    found["bounds"] = _markdown(("bound by communication below", *(f"n = {n}, β = {rate / 1e9:.0f}" for n, rate, _ in RINGS)), _bounds())
    return found


def _row(layer: Layer, plan: Plan) -> Iterator[str]:
    for n in GPUS:
        sent, sending, computed = predicted(layer, plan, n)
        cell = f"{_three(sent / 1e6)} MB, {_three(1e3 * sending)} : {_three(1e3 * computed)} ms"
        yield f"**{cell}**" if sending > computed else cell


def _bounds() -> Iterator[list[str]]:
    rings, links = [(n, rate) for n, rate, _ in RINGS], [link for _, _, link in RINGS]
    yield ["rows per GPU, data: (n-1)/n · 2F/3β", *(_three(bound_data(*ring)) for ring in rings)]
    yield ["the same, parameters scattered: (n-1)/n · F/β", *(_three(bound_data(*ring, scattered=True)) for ring in rings)]
    yield ["N, tensor: (n-1) · 2F/3β", *(_three(bound_columns(*ring)) for ring in rings)]
    yield ["rows per GPU, 3 x 3 x 3, K = 32: 2 · 2F/(2 · 27 · 32 β)", *(_three(bound_rows(2, 27 * 32, link)) for link in links)]
    yield ["rows per GPU, depthwise 7 x 7: 6 · HBM/2β", *(_three(bound_rows_in_memory(6, link)) for link in links)]


def _three(x: float) -> str:
    """Three significant digits, without an exponent."""
    return f"{x:,.0f}" if x >= 100 else f"{x:.3g}" if x >= 1e-3 or x == 0 else "< 0.001"


def _markdown(head: Sequence[str], rows) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


if __name__ == "__main__":
    for table in tables().values():
        print(f"{table}\n")
