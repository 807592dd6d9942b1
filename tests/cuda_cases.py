"""Calls of targets, without arrays: those of the portable kernels, and what the builders of all share.  It must not know who runs them."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import simt_weight_only
from simt_causal import operand_shapes, result_shapes

from jaxext.backends.cuda import cuda_causal, cuda_conv, cuda_weight_only
from jaxext.backends.problems import DTYPES
from jaxext.kernels.epilogue import ACTIVATIONS, Epilogue

BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3fn": 1, "float8_e5m2": 1, "int8": 1, "int32": 4}
SLOTS = {"nn": "abc", "nt": "bca", "tn": "acb", "fprop": "xwy", "dgrad": "wyx", "wgrad": "xyw"}  # operands and result
LONG = {short: dtype for dtype, short in DTYPES.items()}
FAMILIES = ("matmul", "pieces", "ragged", "scaled", "gram", "conv", "depthwise", "causal", "weight_only")
Arrays = Mapping[str, tuple[str, tuple[int, ...]]]  # name -> dtype and shape


@dataclasses.dataclass(frozen=True)
class Case:
    """A call of a target: a name in the module's schema, its attributes, and its arrays."""

    target: str
    attributes: Mapping[str, Any]
    operands: Arrays
    results: Arrays

    @property
    def family(self) -> str:
        return next((family for family in FAMILIES if self.target.replace("linear", "matmul").startswith(family)), "")

    @property
    def addresses(self) -> dict[str, int]:
        """Array -> address: far apart, and aligned to no more than the kernels want."""
        arrays = {**self.operands, **self.results}
        return {name: (i << 44) + (4 if dtype == "int32" else 16) for i, (name, (dtype, _)) in enumerate(arrays.items(), 1)}

    @property
    def bytes(self) -> dict[str, int]:
        return {name: BYTES[dtype] * math.prod(shape) for name, (dtype, shape) in {**self.operands, **self.results}.items()}


def in_parts(shape, splits):
    return (splits, *shape) if splits > 1 else shape


EPILOGUE = ("bias", "residual", "saved")


def numbers_of(epilogue: Epilogue) -> tuple[int, list[str]]:
    """The number of its activation, and the arrays that exist."""
    activation = 0 if epilogue.activation is None else 1 + ACTIVATIONS.index(epilogue.activation)
    return activation, [name for name in EPILOGUE if getattr(epilogue, {"saved": "saves"}.get(name, name))]


def add_epilogue(case: Case, bias: tuple[int, ...], activation: int, slots: Sequence[str]) -> Case:
    """Add these arrays of an epilogue to a case, and their attributes."""
    (result,) = case.results.values()
    operands = {name: array for name, array in (("bias", ("float32", bias)), ("residual", result)) if name in slots}
    results = {"saved": result} if "saved" in slots else {}
    flags = dict(activation=activation, bias=int("bias" in slots), residual=int("residual" in slots), saves=int("saved" in slots))
    return Case(case.target, {**case.attributes, **flags}, {**case.operands, **operands}, {**case.results, **results})


def conv(row, p, config, epilogue=None, result=None):
    """Make a case of a dense convolution, or of a depthwise one, whose row has no tile.  `epilogue`: as for `matmul`."""
    names = SLOTS[row["role"]]
    shapes = {"x": (p.B, p.N, *p.input, p.G, p.C), "w": (p.B, p.G, p.K, *p.filter, p.C), "y": (p.B, p.N, *p.output, p.G, p.K)}
    operands = {name: (row["operands"], shapes[name]) for name in names[:2]}
    result = "float32" if config.splits > 1 else result or row["operands"]
    fields = dataclasses.asdict(config)
    family = "conv" if "tile_m" in row else "depthwise"
    attributes = cuda_conv.fields(p) | {name: row.get(name, value) for name, value in fields.items() if name != "splits"}
    case = Case(
        f"{family}{row['rank']}d_{row['role']}",
        attributes | {"splits": config.splits},
        operands,
        {names[2]: (result, in_parts(shapes[names[2]], config.splits))},
    )
    if epilogue is None:
        return case
    return add_epilogue(dataclasses.replace(case, target=f"{family}{row['rank']}d_bias_act"), (p.B, p.G, p.K), *epilogue)


def causal(problem, config):
    backward, epilogue, added = problem.role == "backward", problem.epilogue, ("bias", "initial_states", "seq_idx", "idx_of_states")
    x, weight, _ = (LONG[dtype] for dtype in problem.dtypes)
    dtypes = {"weight": weight, "bias": LONG.get(epilogue.bias), "seq_idx": "int32", "idx_of_states": "int32", "sums": "float32"}
    operands = {name: (dtypes.get(name, x), shape) for name, shape in operand_shapes(problem).items()}
    results = {name: (dtypes.get(name, x), shape) for name, shape in result_shapes(problem, config.splits).items()}
    attributes = cuda_causal.fields(problem) | dataclasses.asdict(config) | {name: int(name in operands) for name in added}
    attributes["activation"], _ = numbers_of(epilogue)
    return Case("causal_conv1d_backward" if backward else "causal_conv1d", attributes, operands, results)


def weight_only(problem, config):
    shapes, dtypes = simt_weight_only.shapes(problem), simt_weight_only.dtypes(problem, config.splits)
    arrays = {name: (dtypes[name].name, shape) for name, shape in shapes.items()}
    dtype, (_, *shape) = arrays.pop("y")
    attributes = cuda_weight_only.fields(problem) | dataclasses.asdict(config)
    return Case("weight_only", attributes, arrays, {"y": (dtype, in_parts(tuple(shape), config.splits))})
