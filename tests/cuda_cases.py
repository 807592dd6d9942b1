"""Calls of targets, without the compiled module: attributes, and the dtypes and shapes of arrays.  It must not know who runs them."""

import dataclasses
import importlib
import math
import pathlib
import types
from collections.abc import Mapping, Sequence
from typing import Any

from jaxext.backends.fields import DTYPES
from jaxext.kernels.epilogue import ACTIVATIONS, Epilogue
from jaxext.kernels.ragged.problem import most_visits
from jaxext.ops.causal import cuda as cuda_causal
from jaxext.ops.conv import cuda_dense as cuda_conv
from jaxext.ops.scaled import cuda_weight_only

# In the order of jaxext::Dtype.
BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3fn": 1, "float8_e5m2": 1, "int8": 1, "int32": 4}
CODES = [*BYTES]
OK, INVALID, INTERNAL = range(3)  # jaxext::Status
SHAPES = {"a": "BMK", "b": "BKN", "c": "BMN"}
SLOTS = {"nn": "abc", "nt": "bca", "tn": "acb", "fprop": "xwy", "dgrad": "wyx", "wgrad": "xyw"}  # operands and result
RAGGED_SLOTS = {"nn": "xwy", "nt": "wyx", "tn": "xyw"}
LONG = {short: dtype for dtype, short in DTYPES.items()}
FAMILIES = {path.parent.name for path in pathlib.Path(__file__).parents[1].glob("csrc/*/*.h")} - {"common"}
Arrays = Mapping[str, tuple[str, tuple[int, ...]]]  # name -> dtype and shape


def role_of(target: str) -> str:
    """The role of a target that has one in its name: nn, nt, tn, fprop, dgrad or wgrad."""
    name = target.rpartition("_")[2]
    return {"linear": "nn", "act": "fprop"}.get(name, name)


def shapes_of(target: str, attributes: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """The shapes of all arrays that a target can have, for these attributes."""
    a, role = types.SimpleNamespace(**attributes), role_of(target)
    match Case(target, attributes, {}, {}).family:
        case "matmul" | "pieces":
            shapes, result = dict(a=(a.B, a.M, a.K), b=(a.B, a.K, a.N), c=(a.B, a.M, a.N)), SLOTS[role][2]
            y = shapes[result]
            shapes |= dict(bias=(a.B, y[-1]), residual=y, saved=y)
        case "conv" | "depthwise":
            y, result = (a.B, a.N, *a.output, a.G, a.K), SLOTS[role][2]
            shapes = dict(
                x=(a.B, a.N, *a.input, a.G, a.C), w=(a.B, a.G, a.K, *a.filter, a.C), y=y, bias=(a.B, a.G, a.K), residual=y, saved=y
            )
        case "ragged":
            places = (a.B, a.P, a.G, 2) if role == "tn" else (a.B, a.P, most_visits(a.M, a.G, max(a.tile_m, 1)), 5)
            return dict(x=(a.B, a.P, a.R, a.M, a.K), w=(a.B, a.G, a.K, a.N), y=(a.B, a.P, a.R, a.M, a.N), places=places)
        case "scaled":
            right = (a.B, a.S, a.J) if a.J == a.N else (a.B, a.J, a.S)
            shapes, result = dict(a=(a.B, a.M, a.K), b=(a.B, a.N, a.K), left=(a.B, a.I, a.S), right=right, d=(a.B, a.M, a.N)), "d"
        case "weight_only":
            bytes = a.N // 2 if a.bits == 4 else a.N
            shapes, result = dict(x=(a.B, a.M, a.K), q=(a.B, a.K, bytes), scale=(a.B, a.S, a.N), y=(a.B, a.M, a.N)), "y"
        case "causal":
            x, state, sums = (a.B, a.T, a.C), (a.B, a.J - 1, a.C), (a.splits, a.J + a.bias, a.C)
            operands = dict(x=x, w=(a.J, a.C), bias=(a.C,), initial_states=state, seq_idx=x[:2], idx_of_states=state[:2], d_y=x)
            return operands | dict(first=x, sums=sums, d_initial_states=state)
        case family:
            shapes, result = importlib.import_module(f"test_cuda_{family}").shapes(a)
    return shapes | {result: (a.splits, *shapes[result])} if getattr(a, "splits", 1) > 1 else shapes


@dataclasses.dataclass(frozen=True)
class Case:
    """A call of a target: a name in the module's schema, its attributes, and its arrays."""

    target: str
    attributes: Mapping[str, Any]
    operands: Arrays
    results: Arrays
    shifts: Mapping[str, int] = dataclasses.field(default_factory=dict)  # of addresses, in bytes

    @property
    def family(self) -> str:
        return max((family for family in FAMILIES if self.target.replace("linear", "matmul").startswith(family)), key=len, default="")

    @property
    def arrays(self) -> Arrays:
        return {**self.operands, **self.results}

    @property
    def addresses(self) -> dict[str, int]:
        """Array -> address: far from each other, and aligned to no more than the kernels want."""
        arrays = enumerate(self.arrays.items(), 1)
        return {name: (i << 44) + (4 if dtype == "int32" else 16) + self.shifts.get(name, 0) for i, (name, (dtype, _)) in arrays}

    @property
    def bytes(self) -> dict[str, int]:
        return {name: BYTES[dtype] * math.prod(shape) for name, (dtype, shape) in self.arrays.items()}

    def having(self, **attributes) -> "Case":
        """The case with other attributes; arrays change their shapes with them."""
        attributes = {**self.attributes, **attributes}
        old, new = shapes_of(self.target, self.attributes), shapes_of(self.target, attributes)
        changed = {name: tuple(min(max(size, -(2**63)), 2**63 - 1) for size in new[name]) for name in self.arrays if new[name] != old[name]}
        return dataclasses.replace(self.replacing({name: dict(shape=shape) for name, shape in changed.items()}), attributes=attributes)

    def replacing(self, arrays: Mapping[str, Mapping[str, Any]]) -> "Case":
        """The case in which arrays have another `dtype` or `shape`."""

        def replaced(group: Arrays) -> Arrays:
            changes = {name: arrays.get(name, {}) for name in group}
            return {name: (changes[name].get("dtype", dtype), changes[name].get("shape", shape)) for name, (dtype, shape) in group.items()}

        return dataclasses.replace(self, operands=replaced(self.operands), results=replaced(self.results))


def config_of(row, names, splits=None) -> dict[str, int]:
    return {name: row[name] for name in names.split()} | ({} if splits is None else {"splits": splits})


def make_case(target: str, attributes: Mapping[str, Any], operands: Mapping[str, str], results: Mapping[str, str]) -> Case:
    """The case with arrays of these dtypes."""
    shapes = shapes_of(target, attributes)
    arrays = lambda group: {name: (dtype, shapes[name]) for name, dtype in group.items()}
    return Case(target, attributes, arrays(operands), arrays(results))


def change_dtypes(**changes):
    """A change of a case to these dtypes of arrays."""
    return lambda case: case.replacing({name: dict(dtype=dtype) for name, dtype in changes.items()})


# Cases: a row, and a problem that it takes.  Families whose test file has `shapes` have theirs there.


def matmul(row, B, M, N, K, splits=1, epilogue: tuple[int, Sequence[str]] | None = None):
    """`epilogue`: the activation's number and the slots that exist; all of them if the kernel fuses one."""
    target = {"nn": "linear", "nt": "linear_nt"}[row["role"]] if row["fused"] else f"matmul_{row['role']}"
    config = config_of(row, "tile_m tile_n tile_k cluster_m pingpong", splits)
    case = _product(target, row, dict(B=B, M=M, N=N, K=K) | config, row["result"])
    return add_epilogue(case, *(epilogue or (3, EPILOGUE))) if row["fused"] else case


def _product(target, row, attributes, result):
    first, second, open_ = SLOTS[row["role"]]
    return make_case(target, attributes, {first: row["operands"], second: row["operands"]}, {open_: result})


EPILOGUE = ("bias", "residual", "saved")


def numbers_of(epilogue: Epilogue) -> tuple[int, list[str]]:
    """The number of its activation, and the arrays that exist."""
    activation = 0 if epilogue.activation is None else 1 + ACTIVATIONS.index(epilogue.activation)
    return activation, [name for name in EPILOGUE if getattr(epilogue, {"saved": "saves"}.get(name, name))]


def add_epilogue(case: Case, activation: int, slots: Sequence[str]) -> Case:
    """Add these arrays of an epilogue to a case, and their attributes."""
    flags = dict(activation=activation, bias=int("bias" in slots), residual=int("residual" in slots), saves=int("saved" in slots))
    ((dtype, _),), shapes = case.results.values(), shapes_of(case.target, case.attributes)
    added = {name: ("float32" if name == "bias" else dtype, shapes[name]) for name in EPILOGUE if name in slots}
    saved = {name: added.pop(name) for name in ("saved",) if name in added}
    return Case(case.target, {**case.attributes, **flags}, {**case.operands, **added}, {**case.results, **saved})


def pieces(row, B, M, N, K, splits=1):
    return _product(f"pieces_{row['role']}", row, dict(B=B, M=M, N=N, K=K) | config_of(row, "tile_m tile_n pieces", splits), "float32")


def ragged(row, B, P, R, M, N, K, G):
    first, second, open_ = RAGGED_SLOTS[row["role"]]
    attributes = dict(B=B, P=P, R=R, M=M, N=N, K=K, G=G) | config_of(row, "tile_m tile_n tile_k cluster_n")
    dtypes = {first: row["operands"], second: row["operands"], "places": "int32"}
    return make_case(f"ragged_{row['role']}", attributes, dtypes, {open_: row["operands"]})


def scaled(row, problem, left, right, result="bfloat16", splits=1):
    """`problem`: B, M, N, K, and the blocks I, J and S.  `left`, `right`: the scales' shapes, (B, I, S) and (B, J, S), or (B, S, J) if each
    column has its own; an axis of 1 is for all."""
    attributes = dict(zip("BMNKIJS", problem, strict=True)) | config_of(row, "tile_m tile_n tile_k cluster_m", splits)
    dtypes = dict(a=row["operands"], b=row["second"], left="float32", right="float32")
    return make_case("scaled", attributes, dtypes, {"d": result}).replacing(dict(left=dict(shape=left), right=dict(shape=right)))


def conv(row, p, config, epilogue=None, result=None):
    """Make a case of a dense convolution, or of a depthwise one, whose row has no tile.  `epilogue`: as for `matmul`."""
    fields, family = dataclasses.asdict(config), "conv" if "tile_m" in row else "depthwise"
    attributes = cuda_conv.fields(p) | {name: row.get(name, value) for name, value in fields.items() if name != "splits"}
    target = f"{family}{row['rank']}d_{'bias_act' if epilogue else row['role']}"
    result = "float32" if config.splits > 1 else result or row["operands"]
    case = _product(target, row, attributes | {"splits": config.splits}, result)
    return add_epilogue(case, *epilogue) if epilogue else case


def causal(problem, config):
    x, w, _ = (LONG[dtype] for dtype in problem.dtypes)
    bias, backward = problem.epilogue.bias, problem.role == "backward"
    added = [("bias", bias, LONG.get(bias, "")), ("initial_states", problem.state, x)]
    added += [("seq_idx", problem.idx, "int32"), ("idx_of_states", problem.idx_of_states, "int32")]
    present: dict[str, Any] = {name: dtype for name, there, dtype in added if there}
    sums = {"sums": "float32"} | ({"d_initial_states": x} if problem.state else {})
    attributes = cuda_causal.fields(problem) | dataclasses.asdict(config) | {name: int(name in present) for name, *_ in added}
    attributes["activation"], _ = numbers_of(problem.epilogue)
    operands: dict[str, Any] = {"x": x, "w": w, **present} | ({"d_y": x} if backward else {})
    target = "causal_conv1d_backward" if backward else "causal_conv1d"
    return make_case(target, attributes, operands, {"first": x} | (sums if backward else {}))


def weight_only(problem, config):
    x, _, y = (LONG[dtype] for dtype in problem.dtypes)
    attributes = cuda_weight_only.fields(problem) | dataclasses.asdict(config)
    return make_case("weight_only", attributes, dict(x=x, q="int8", scale="float32"), {"y": "float32" if config.splits > 1 else y})
