"""Calls of the CUDA kernels: a case, operands for it, and the check of its results against float64.

Two methods compute the results: the kernels' PTX on a CPU (ptx/cuda_kernels.py), and a GPU (`compute_on_device`).
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import epilogues
import harness
import jax
import jax.numpy as jnp
import numpy as np
import simt_weight_only
import test_causal_kernel
import test_conv
import test_cuda_gram
import test_cuda_ragged_scaled
import test_epilogues
import test_ragged_kernel
import test_ragged_scaled_kernel
import test_scaled_dot
from cases import random
from cuda_cases import LONG, SHAPES, SLOTS, Case, causal, conv, matmul, numbers_of, pieces, ragged, scaled, weight_only

from jaxext.backends.cuda import cuda_binding
from jaxext.backends.fields import DTYPES
from jaxext.kernels.ragged.problem import visits
from jaxext.ops.ragged import cuda as cuda_ragged
from jaxext.ops.ragged.cuda import RaggedConfig
from jaxext.ops.ragged_scaled import cuda as cuda_ragged_scaled
from jaxext.ops.scaled import cuda as cuda_scaled

Arrays = dict[str, np.ndarray]
# A product of factors that lose 13 bits each is so many times as far off as float32's rounding.  The interpreter cuts them off, TMA rounds.
TF32 = 2**12
DEFINITIONS: dict[str, Any] = {"conv": test_conv, "scaled": test_scaled_dot}


@dataclasses.dataclass(frozen=True)
class Call:
    case: Case
    operands: Mapping[str, np.ndarray]
    check: Callable[[Arrays], None]  # of the results by name

    def __post_init__(self):
        assert {name: (of.dtype.name, of.shape) for name, of in self.operands.items()} == self.case.operands


def unwritten_results(case: Case) -> Arrays:
    """Results of which each byte is 0xFF: NaN in each float format."""
    return {name: np.full(case.bytes[name], 0xFF, np.uint8).view(dtype).reshape(of) for name, (dtype, of) in case.results.items()}


def kernel(case: Case) -> Callable[..., list[jax.Array]]:
    """Return a function of the operands that is one call of the case's target."""
    results = [jax.ShapeDtypeStruct(shape, np.dtype(dtype)) for dtype, shape in case.results.values()]
    return lambda *operands: cuda_binding.ffi_call(f"jaxext_{case.target}_v1", results, operands, case.attributes)


def compute_on_device(call: Call) -> Arrays:
    """The results of a call on a GPU, which are written twice, where there was NaN, and have the same bits both times.

    The memory is donated arguments that nothing reads.  They have the results' types and so become the results, and since the program is
    this one call, XLA has no reason to compute elsewhere and copy: both is checked.
    """
    of_case = kernel(call.case)
    program = jax.jit(lambda memory, *operands: of_case(*operands), donate_argnums=0, keep_unused=True)
    operands, nan = jax.device_put([*call.operands.values()]), [*unwritten_results(call.case).values()]
    compiled = program.lower(nan, *operands).compile()
    assert " copy(" not in str(compiled.as_text()), "a result is computed elsewhere, and copied"
    written = []
    for _ in range(2):
        memory = jax.block_until_ready(jax.device_put(nan))
        places = [array.unsafe_buffer_pointer() for array in memory]
        results = compiled(memory, *operands)
        assert [array.unsafe_buffer_pointer() for array in results] == places, "a result is not where the NaN was"
        written.append([np.asarray(array) for array in results])
    for one, other in zip(*written, strict=True):
        assert one.tobytes() == other.tobytes()
    return dict(zip(call.case.results, written[0], strict=True))


def row_of(problem: Any, config: Any) -> dict[str, Any]:
    """The row of a compiled kernel that a config names, without its limits."""
    names = dict(zip(("operands", "second", "result"), (LONG[dtype] for dtype in problem.dtypes), strict=True))
    return dict(role=problem.role, fused=False) | names | dataclasses.asdict(config)


def check_of_sums(
    operands: Mapping[str, np.ndarray], true: Callable[[Arrays], np.ndarray], integers: bool, product_error: float = 1
) -> Callable[[Arrays], None]:
    """Return the check of a result, or of its parts: exact of integers, else up to rounding; products are so many times as far off."""
    exact = {name: values.astype(np.float64) for name, values in operands.items()}
    want, scale = true(exact), None if integers else product_error * true({name: np.abs(values) for name, values in exact.items()})

    def check(results: Arrays) -> None:
        (result,) = results.values()
        parts = result.reshape(-1, *want.shape)
        harness.check(parts[0] if len(parts) == 1 else parts.sum(axis=0), want, scale)

    return check


@functools.lru_cache(2)
def operands_and_check(name: str, problem: Any, integers: bool) -> tuple[Arrays, Callable[[Arrays], None]]:
    """Return those of a module of tests/kernels, once for all configs of a problem."""
    operands = DEFINITIONS[name].some_operands(problem, integers)
    return operands, check_of_sums(operands, functools.partial(DEFINITIONS[name].true, problem), integers)


def matmul_call(row, B, rows, columns, depth, splits=1, integers=True) -> Call:
    """`rows` and `columns`: of the result.  Of a kernel of products in pieces too."""
    names = {"nn": "MNK", "nt": "MKN", "tn": "KNM"}[row["role"]]
    sizes = dict(zip(names, (rows, columns, depth), strict=True)) | {"B": B}
    case = (pieces if "pieces" in row else matmul)(row | ({"result": "float32"} if splits > 1 else {}), **sizes, splits=splits)
    equation = "{},{}->{}".format(*(SHAPES[slot] for slot in SLOTS[row["role"]]))
    operands = {name: random(shape, dtype, seed, integers) for seed, (name, (dtype, shape)) in enumerate(case.operands.items())}
    true = lambda of: np.einsum(equation, *of.values(), optimize=True)
    return Call(case, operands, check_of_sums(operands, true, integers, TF32 if "fused" in row and row["operands"] == "float32" else 1))


def ragged_call(row, sizes, rows, integers=True, offset=0, B=1, P=1, R=1, **columns) -> Call:
    """`sizes`: of groups, `columns`: K and N.  Ranges and operands are those of test_ragged_kernel: rows of no group are NaN."""
    begin, end = test_ragged_kernel.ranges_of(sizes, B, P, offset)
    dtypes = (DTYPES[row["operands"]],) * 3
    problem = test_ragged_kernel.a_problem(row["role"], (begin, end), rows, B, P, R, **columns, dtypes=dtypes)
    operands = test_ragged_kernel.some_operands(problem, begin, end, integers)
    places = np.stack([begin, end], -1) if row["role"] == "tn" else visits(np, begin, end, rows, row["tile_m"])
    check = check_of_sums(operands, lambda of: test_ragged_kernel.true(problem, of, begin, end), integers)
    return Call(ragged(row, **cuda_ragged.fields(problem)), operands | {"places": places}, check)


def ragged_scaled_call(row, sizes, slots="wy", blocks=(1, 1), widths=(384, 256), result="bf16", integers=True, **more) -> Call:
    """`sizes`: of groups; `blocks`, `widths`: of the sum, and of the columns of the result.  Rows of nobody, and their scales, are NaN."""
    dtypes = DTYPES[row["second"]], DTYPES[row["operands"]], result
    drawn = test_ragged_scaled_kernel.a_call("nt", slots, blocks, widths, dtypes, sizes=sizes, **more)
    config = RaggedConfig(**{name: row[name] for name in ("tile_m", "tile_n", "tile_k", "cluster_n")})
    of_triton = dataclasses.replace(drawn, config=config)
    operands, problem = of_triton.operands(integers), test_cuda_ragged_scaled.for_cuda(drawn.problem)
    (want,), scale = of_triton.results(operands), None if integers else of_triton.scales(operands)[0]
    given = {name: jnp.asarray(operands[name]) for name in cuda_ragged_scaled.slots(problem)}
    arrays = {name: np.asarray(x) for name, x in cuda_ragged_scaled.arrays(problem, given, row["tile_m"]).items()}
    case = test_cuda_ragged_scaled.case(row, **cuda_ragged_scaled.fields(problem), result=LONG[result])
    case = case.replacing({name: dict(shape=arrays[name].shape) for name in ("left", "right")})
    return Call(case, arrays, lambda results: harness.check(results["d"].reshape(want.shape), want, scale))


def scaled_call(problem, config, integers=True) -> Call:
    factors, check = operands_and_check("scaled", problem, integers)
    arrays = cuda_scaled.arrays(problem, {slot: jnp.asarray(factors[slot]) for slot in cuda_scaled.slots(problem)})
    operands = {name: np.asarray(array) for name, array in arrays.items()}
    row = row_of(problem, config) | dict(zip(("operands", "second"), (operands["a"].dtype.name, operands["b"].dtype.name), strict=True))
    scales = operands["left"].shape, operands["right"].shape
    sizes = tuple(cuda_scaled.fields(problem)[name] for name in "BMNKIJS")
    return Call(scaled(row, sizes, *scales, row["result"], config.splits), operands, check)


def gram_call(row, B, M, N, result="bfloat16", factors=(1.0, 0.0), splits=1, integers=True) -> Call:
    """The result is symmetric to the last bit."""
    case = test_cuda_gram.case(row, B, M, N, result, factors, splits)
    operands = {name: random(shape, dtype, seed, integers) for seed, (name, (dtype, shape)) in enumerate(case.operands.items())}
    if "addend" in operands:
        operands["addend"] = np.tril(operands["addend"]) + np.tril(operands["addend"], -1).swapaxes(1, 2)

    def true(of):
        scale, of_addend = factors if integers else np.abs(factors)
        return scale * np.einsum("bin,bjn->bij", of["x"], of["x"], optimize=True) + of_addend * of.get("addend", 0)

    check_sums = check_of_sums(operands, true, integers)

    def check(results):
        check_sums(results)
        np.testing.assert_array_equal(results["y"], results["y"].swapaxes(-1, -2))

    return Call(case, operands, check)


def conv_call(problem, config, integers=True) -> Call:
    """Return the call of a dense or depthwise convolution."""
    row = row_of(problem, config) | {"rank": int(problem.name[4])}
    return Call(conv(row, problem, config, result=row["result"]), *operands_and_check("conv", problem, integers))


def fused_call(problem, config, integers) -> Call:
    """Return the call of a matmul or a convolution with an epilogue.  Results of integers are exact where the activation keeps them."""
    row, epilogue = row_of(problem, config), numbers_of(problem.epilogue)
    kernel = "matmul" if hasattr(problem, "M") else "conv" if "tile_m" in row else "depthwise"
    tf32 = kernel == "matmul" and problem.dtypes[0] == "fp32"
    if tf32:
        case = matmul(row | {"fused": True, "role": "nt"}, problem.B, problem.M, problem.K, problem.N, config.splits, epilogue)
    elif kernel == "matmul":
        case = matmul(row | {"fused": True}, problem.B, problem.M, problem.N, problem.K, config.splits, epilogue)
    else:
        case = conv(row | {"rank": int(problem.name[4])}, problem, config, epilogue, row["result"])
    operands = epilogues.some_operands(problem, integers)
    exact = integers and problem.epilogue.activation in (None, "relu", "relu6")
    given = operands | ({"b": operands["b"].swapaxes(1, 2).copy(), "c": operands["a"]} if tf32 else {})
    judge = functools.partial(test_epilogues.check_results, kernel, problem, operands, exact=exact, product_error=TF32 if tf32 else 1)
    return Call(case, {name: given[name] for name in case.operands}, lambda results: judge(got=[*results.values()]))


def causal_call(problem, config, integers=True) -> Call:
    drawn = test_causal_kernel.operands_of(problem, integers)

    def check(results):
        got = test_causal_kernel.in_order(problem, results)
        if not integers:
            return test_causal_kernel.near(problem, got, drawn)
        for one, want in zip(got, test_causal_kernel.true(problem, drawn), strict=True):
            harness.check(one, want)

    case = causal(problem, config)
    return Call(case, {name: drawn[name] for name in case.operands}, check)


def weight_only_call(problem, config, integers=True, picks=False) -> Call:
    """Return the call of a product with a quantised weight.  `picks`: each row of x picks a row of the weight, whose scales are one."""
    operands = simt_weight_only.operands_of(problem, integers)
    if picks:
        x = np.broadcast_to(np.eye(*operands["x"].shape[1:]), operands["x"].shape)
        operands |= {"x": x.astype(operands["x"].dtype), "scale": np.ones_like(operands["scale"])}
    shape = simt_weight_only.shapes(problem)["y"]
    check = lambda results: simt_weight_only.check_parts(problem, results["y"].reshape(-1, *shape), operands, integers)
    return Call(weight_only(problem, config), operands, check)
