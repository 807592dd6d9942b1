"""Our CUDA kernels' PTX, launched on the interpreter by our own host code, with the parameters and tensor maps that it makes."""

import ctypes
import dataclasses
import functools
import importlib.util
import os
import pathlib
import subprocess
import tempfile
from collections.abc import Callable, Mapping
from typing import Any

import cuda_convs
import epilogues
import interpreter
import ml_dtypes
import numpy as np
import pytest
import simt_causal
import simt_weight_only
import test_causal_kernel
import test_depthwise
import test_epilogues
import test_ragged_kernel
import triton
from cuda_launches import (
    ELEMENTS,
    LIBRARY,
    NVCC,
    OK,
    SHAPES,
    SLOTS,
    TESTS,
    Case,
    ask,
    causal,
    conv,
    gram,
    matmul,
    pieces,
    ragged,
    runtime,
    scaled,
    weight_only,
)
from harness import check
from interpreter import EARLY, LATE, Input, Module, Output, TensorMap
from opcodes import untested

from jaxext.backends import problems
from jaxext.backends.cuda import cuda_ragged
from jaxext.kernels.ragged.problem import visits

DTYPES = {
    "float32": np.float32,
    "bfloat16": ml_dtypes.bfloat16,
    "float16": np.float16,
    "float8_e4m3fn": ml_dtypes.float8_e4m3fn,
    "float8_e5m2": ml_dtypes.float8_e5m2,
}
SWIZZLES = (0, 32, 64, 128)  # CUtensorMapSwizzle -> bytes of a row


@functools.cache
def modules(arch: str = "sm_90") -> dict[str, Module]:
    """The module of each kernel of our library, by the kernel's name."""
    found = modules_of(LIBRARY, arch)
    if not found:
        assert os.environ.get("JAXEXT_PTX") != "ON", f"{LIBRARY} has no PTX for {arch}, and was to have it"
        pytest.skip(f"{LIBRARY} has no PTX for {arch}: build with JAXEXT_PTX=ON in the environment, as `make build` does")
    tell_parameters(runtime(), found)
    return found


def modules_of(binary, arch: str) -> dict[str, Module]:
    cuobjdump = pathlib.Path(triton.__path__[0]) / "backends/nvidia/bin/cuobjdump"
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run([cuobjdump, "-xptx", "all", binary], cwd=folder, check=True, capture_output=True)
        for path in sorted(pathlib.Path(folder).glob("*.ptx")):
            text = path.read_text()
            if f".target {arch}" in text:
                assert "brkpt" not in text, "an assertion in CUTLASS's pipelines: compiled without NDEBUG"
                module = Module(text)
                assert not (without_test := untested(module)), without_test
                found |= dict.fromkeys(module.kernels, module)
    return found


def compiled(source: str, *flags: str) -> tuple[ctypes.CDLL, dict[str, Module]]:
    """The runtime with what a file of tests/ptx/cuda launches, and its modules."""
    package = importlib.util.find_spec("cutlass_library")
    if package is None:
        pytest.skip("no headers of CUTLASS: nvidia-cutlass is not installed")
    cutlass = pathlib.Path(next(iter(package.submodule_search_locations or ()))) / "source"
    include = [f"-I{folder}" for folder in (cutlass / "include", cutlass / "tools/util/include", TESTS.parent / "csrc")]
    options = ["-std=c++17", "-O1", "-DNDEBUG", "--expt-relaxed-constexpr", "-Xcompiler=-fPIC", *flags]
    with tempfile.TemporaryDirectory() as folder:
        made = f"{folder}/{source}.o"
        command = [str(NVCC), "-gencode=arch=compute_90a,code=compute_90a", *options, *include, "-c", TESTS / "ptx/cuda" / source]
        subprocess.run([*command, "-o", made], check=True)
        library, found = runtime(made), modules_of(made, "sm_90")
    tell_parameters(library, found)
    return library, found


def tell_parameters(runtime: ctypes.CDLL, modules: dict[str, Module]) -> None:
    """From now on the runtime writes down the parameters of these kernels' launches too."""
    for name, module in modules.items():
        sizes = [size for _, size in module.kernels[name].parameters]
        runtime.TellParameters(name.encode(), len(sizes), (ctypes.c_int64 * len(sizes))(*sizes))


def execute(case: Case, operands: Mapping[str, np.ndarray], late, device=0, arch="sm_90", instead=None) -> dict[str, np.ndarray]:
    """The results of a case by name, from the library's modules or others.  Each element is written once, the operands never."""
    kernels = instead or modules(arch)  # first: it makes the runtime tell parameters
    status, asked = ask(case, device)
    assert status == OK, asked
    inputs = [Input(operands[name], case.addresses[name]) for name in case.operands]
    outputs = {}
    for name, (dtype, shape) in case.results.items():
        outputs[name] = Output(np.full(case.bytes[name], 0xFF, np.uint8).view(DTYPES[dtype]).reshape(shape), case.addresses[name])
    assert {name: values.nbytes for name, values in operands.items()} == {name: case.bytes[name] for name in case.operands}
    before = [array.values.tobytes() for array in inputs]
    launch(asked, kernels, [*inputs, *outputs.values()], late)
    for output in outputs.values():
        assert (output.written == 1).all(), f"each element is written once: {np.bincount(output.written.ravel())}"
    assert [array.values.tobytes() for array in inputs] == before
    return {name: output.values for name, output in outputs.items()}


def late_and_early(call, **where) -> Any:
    """The results of a call, which are the same bits whether asynchronous work is late or early."""
    late, early = (call.execute(when, **where) for when in (LATE, EARLY))
    for one, other in zip(late, early, strict=True):
        np.testing.assert_array_equal(one.view(np.uint8), other.view(np.uint8))
    return late


@dataclasses.dataclass(frozen=True)
class Call:
    case: Case
    operands: Mapping[str, np.ndarray]
    shape: tuple[int, ...]  # of the result
    truth: Callable[[Mapping[str, np.ndarray]], np.ndarray]
    integers: bool
    places: np.ndarray | None = None  # of a ragged product

    def check(self, **where) -> None:
        """The result is right, up to rounding if operands are no integers."""
        self.check_result(late_and_early(self, **where))

    def check_result(self, parts: np.ndarray) -> None:
        got = parts[0] if len(parts) == 1 else parts.sum(axis=0)
        exact = {slot: values.astype(np.float64) for slot, values in self.operands.items()}
        check(got, self.truth(exact), None if self.integers else self.truth({slot: np.abs(values) for slot, values in exact.items()}))

    def execute(self, late, **where) -> np.ndarray:
        """The result's partial sums."""
        places = {} if self.places is None else {"places": self.places}
        (result,) = execute(self.case, {**self.operands, **places}, late, **where).values()
        return result.reshape(-1, *self.shape)


@dataclasses.dataclass(frozen=True)
class FusedCall:
    """Of a kernel of matrix products or convolutions, and of a problem with an epilogue."""

    case: Case
    kernel: str
    problem: Any

    def check(self, **where) -> None:
        """As a plain call; small integers exactly where the activation keeps them."""
        activation = self.problem.epilogue.activation
        for integers in (True, False):
            operands = epilogues.some_operands(self.problem, integers)
            late, early = (list(execute(self.case, operands, when, **where).values()) for when in (LATE, EARLY))
            for one, other in zip(late, early, strict=True):
                np.testing.assert_array_equal(one.view(np.uint8), other.view(np.uint8))
            exact = integers and activation in (None, "relu", "relu6")
            test_epilogues.check_results(self.kernel, self.problem, operands, late, exact)


@dataclasses.dataclass(frozen=True)
class CausalCall:
    """Of a causal convolution's problem."""

    problem: Any
    config: Any
    integers: bool = True

    @property
    def case(self):
        return causal(self.problem, self.config)

    def check(self, **where) -> None:
        self.check_result(late_and_early(self, **where))

    def operands(self):
        drawn = test_causal_kernel.operands_of(self.problem, self.integers)
        return {name: drawn[name] for name in simt_causal.operand_shapes(self.problem)}

    def check_result(self, results) -> None:
        names = simt_causal.result_shapes(self.problem, self.config.splits)
        got = simt_causal.in_order(self.problem, dict(zip(names, results, strict=True)))
        operands = test_causal_kernel.operands_of(self.problem, self.integers)
        if not self.integers:
            return test_causal_kernel.near(self.problem, got, operands)
        for one, want in zip(got, test_causal_kernel.true(self.problem, operands), strict=True):
            check(one, want)

    def execute(self, late, **where) -> list[np.ndarray]:
        return list(execute(self.case, self.operands(), late, **where).values())


@dataclasses.dataclass(frozen=True)
class WeightOnlyCall:
    """Of a product with a quantised weight."""

    problem: Any
    config: Any
    integers: bool = True
    picks: bool = False  # each row of x picks a row of the weight, whose scales are one

    @property
    def case(self):
        return weight_only(self.problem, self.config)

    def check(self, **where) -> None:
        self.check_result(late_and_early(self, **where))

    @functools.cached_property
    def operands(self) -> dict[str, np.ndarray]:
        drawn = simt_weight_only.operands_of(self.problem, self.integers)
        if not self.picks:
            return drawn
        x = np.broadcast_to(np.eye(*drawn["x"].shape[1:]), drawn["x"].shape)
        return drawn | {"x": x.astype(drawn["x"].dtype), "scale": np.ones_like(drawn["scale"])}

    def check_result(self, parts) -> None:
        simt_weight_only.check_parts(self.problem, parts, self.operands, self.integers)

    def execute(self, late, **where) -> np.ndarray:
        """The result's parts."""
        return execute(self.case, self.operands, late, **where)["y"].reshape(-1, *simt_weight_only.shapes(self.problem)["y"][1:])


@dataclasses.dataclass(frozen=True)
class GramCall:
    """Of a product with an own transpose."""

    row: Mapping[str, Any]
    B: int
    M: int
    N: int
    result: str = "bfloat16"
    factors: tuple[float, float] = (1.0, 0.0)
    splits: int = 1
    integers: bool = True

    @property
    def case(self):
        return gram(self.row, self.B, self.M, self.N, self.result, self.factors, self.splits)

    @functools.cached_property
    def arrays(self) -> dict[str, np.ndarray]:
        rng = np.random.default_rng(0)
        draw = lambda *shape: rng.integers(-3, 4, shape) if self.integers else rng.standard_normal(shape)
        x, half = draw(self.B, self.M, self.N).astype(DTYPES[self.row["operands"]]), np.tril(draw(self.B, self.M, self.M))
        symmetric = half + np.tril(half, -1).swapaxes(1, 2)
        return {"x": x} | ({"addend": symmetric.astype(DTYPES[self.result])} if self.factors[1] else {})

    def truth(self, absolute=False) -> np.ndarray:
        found = {name: values.astype(np.float64) for name, values in self.arrays.items()}
        scale, of_addend = self.factors
        if absolute:
            found, scale, of_addend = {name: np.abs(values) for name, values in found.items()}, abs(scale), abs(of_addend)
        return scale * np.einsum("bin,bjn->bij", found["x"], found["x"]) + of_addend * found.get("addend", 0)

    def check(self, **where) -> None:
        """As a plain call, and the result is symmetric to the last bit."""
        self.check_result(late_and_early(self, **where))

    def check_result(self, parts) -> None:
        got = parts[0] if len(parts) == 1 else parts.sum(axis=0)
        check(got, self.truth(), None if self.integers else self.truth(absolute=True))
        np.testing.assert_array_equal(parts, parts.swapaxes(-1, -2))

    def execute(self, late, **where) -> np.ndarray:
        """The partial results."""
        return execute(self.case, self.arrays, late, **where)["y"].reshape(-1, self.B, self.M, self.M)


@dataclasses.dataclass(frozen=True)
class ScaledCall:
    """Of a scaled product: problem and scales as in cuda_launches."""

    row: Mapping[str, Any]
    problem: tuple[int, ...]
    left: tuple[int, ...] = (1, 1, 1)
    right: tuple[int, ...] = (1, 1, 1)
    result: str = "bfloat16"
    splits: int = 1
    integers: bool = True

    @property
    def case(self):
        return scaled(self.row, self.problem, self.left, self.right, self.result, self.splits)

    @functools.cached_property
    def arrays(self) -> dict[str, np.ndarray]:
        B, M, N, K, *_ = self.problem
        rng = np.random.default_rng(0)
        draw = lambda shape: rng.integers(-3, 4, shape) if self.integers else rng.standard_normal(shape)
        powers = lambda shape: np.exp2(rng.integers(-2, 3, shape)) if self.integers else rng.uniform(0.1, 2, shape)
        factors = {"a": ((B, M, K), self.row["operands"]), "b": ((B, N, K), self.row["second"])}
        found = {name: draw(shape).astype(DTYPES[dtype]) for name, (shape, dtype) in factors.items()}
        return found | {"left": powers(self.left).astype(np.float32), "right": powers(self.right).astype(np.float32)}

    def truth(self, absolute=False) -> np.ndarray:
        B, M, N, K, *_, J, _ = self.problem
        a, b, left, right = (self.arrays[name].astype(np.float64) for name in ("a", "b", "left", "right"))
        right = right.swapaxes(1, 2) if J == N else right
        a, b = (x * spread(scale, x.shape) for x, scale in ((a, left), (b, right)))
        return np.einsum("bmk,bnk->bmn", *(np.abs(x) if absolute else x for x in (a, b)))

    def check(self, **where) -> None:
        self.check_result(late_and_early(self, **where))

    def check_result(self, parts) -> None:
        got = parts[0] if len(parts) == 1 else parts.sum(axis=0)
        check(got, self.truth(), None if self.integers else self.truth(absolute=True))

    def execute(self, late, **where) -> np.ndarray:
        """The partial results."""
        return execute(self.case, self.arrays, late, **where)["d"].reshape(-1, *(self.problem[i] for i in (0, 1, 2)))


def spread(scale: np.ndarray, shape) -> np.ndarray:
    """An element for each of an array of this shape."""
    for axis, size in enumerate(shape):
        scale = np.repeat(scale, size // scale.shape[axis], axis)
    return scale


def _operands(row, shapes, integers):
    rng = np.random.default_rng(0)
    draw = lambda shape: rng.integers(-3, 4, shape) if integers else rng.standard_normal(shape)
    return {slot: draw(shapes[slot]).astype(DTYPES[row["operands"]]) for slot in SLOTS[row["role"]][:2]}


def matmul_call(row, B, rows, columns, depth, splits=1, integers=True) -> Call:
    """`rows` and `columns`: of the result.  Of a kernel of products in pieces too."""
    names = {"nn": "MNK", "nt": "MKN", "tn": "KNM"}[row["role"]]
    sizes = dict(zip(names, (rows, columns, depth), strict=True)) | {"B": B}
    shapes = {slot: tuple(sizes[label] for label in labels) for slot, labels in SHAPES.items()}
    of = pieces if "pieces" in row else matmul
    case = of(row | ({"result": "float32"} if splits > 1 else {}), **sizes, splits=splits)
    open_slot = SLOTS[row["role"]][2]

    def product(operands):
        return np.einsum(f"{','.join(SHAPES[slot] for slot in operands)}->{SHAPES[open_slot]}", *operands.values())

    return Call(case, _operands(row, shapes, integers), shapes[open_slot], product, integers)


def ragged_call(row, sizes, rows, integers=True, offset=0, B=1, P=1, R=1, **columns) -> Call:
    """`sizes`: of groups, `columns`: K and N.  Ranges and operands are those of test_ragged_kernel: rows of no group are NaN."""
    begin, end = test_ragged_kernel.ranges_of(sizes, B, P, offset)
    dtypes = (problems.DTYPES[row["operands"]],) * 3
    problem = test_ragged_kernel.a_problem(row["role"], (begin, end), rows, B, P, R, **columns, dtypes=dtypes)
    return Call(
        ragged(row, **cuda_ragged.fields(problem)),
        test_ragged_kernel.some_operands(problem, begin, end, integers),
        problem.shapes[test_ragged_kernel.ROLES[row["role"]]],
        lambda operands: test_ragged_kernel.true(problem, operands, begin, end),
        integers,
        np.stack([begin, end], -1) if row["role"] == "tn" else visits(np, begin, end, rows, row["tile_m"]),
    )


def conv_call(row, problem, config, integers=True) -> Call:
    """Of a dense convolution, or a depthwise one."""
    of = cuda_convs if "tile_m" in row else test_depthwise
    shapes = {slot: of.shape_of(problem, slot) for slot in "xwy"}
    operands = _operands(row, shapes, integers)
    return Call(conv(row, problem, config), operands, shapes[SLOTS[row["role"]][2]], functools.partial(of.truth, problem), integers)


def launch(asked, modules: dict[str, Module], arrays, late) -> None:
    """Runs the kernels that a runtime was asked to launch, with the tensor maps that it was asked to encode."""
    maps = [_tensor_map(entry) for entry in asked if "descriptor" in entry]
    for entry in asked:
        if "kernel" in entry:
            where = {name: entry[name] for name in ("grid", "block", "cluster", "shared")}
            arguments = [bytes.fromhex(digits) for digits in entry["parameters"].split()]
            modules[entry["kernel"]].run(entry["kernel"], arguments=arguments, arrays=arrays, maps=maps, late=late, **where)


def _tensor_map(entry) -> TensorMap:
    return interpreter.tensor_map(
        entry["address"],
        entry["strides"],
        entry["sizes"],
        entry["box"],
        ELEMENTS[entry["type"]],
        SWIZZLES[entry["swizzle"]],
        entry["steps"],
        (entry["lower"], entry["upper"]) if "lower" in entry else None,
    )
