"""Calls of every target: by the compiled module's handlers, as XLA calls them, and by the host code that is here on a stand-in for CUDA.

What no kernel can do comes back as an error that says what it got and what it wants, never as a crash, and never as a launch.  A right
call is launched; of the handlers it fails only in CUDA's own words, where there is no driver.  Needs g++, nvcc and the module; no GPU.
"""

import ctypes
import dataclasses
import itertools
import re
from typing import Any

import call_frame
import cuda_cases
import cuda_convs
import cuda_launches as host
import jax.numpy as jnp
import numpy as np
import pytest
import test_causal_kernel
import test_scaled_dot
from cuda_cases import CODES, EPILOGUE, INTERNAL, INVALID, OK, Case, role_of
from cuda_cases import change_dtypes as dtypes
from cuda_launches import SCHEMA, ask, handled, handler
from simt_weight_only import a_problem as a_weight_only_problem
from test_cuda_families import OWN
from test_cuda_scaled import CUTS, product

from jaxext import _cuda_module
from jaxext.backends.cuda import cuda_binding
from jaxext.backends.fields import DTYPES
from jaxext.ops.causal.cuda import CausalConfig
from jaxext.ops.conv.cuda_dense import GEOMETRY, ConvConfig
from jaxext.ops.conv.cuda_depthwise import DepthwiseConfig
from jaxext.ops.scaled import cuda as cuda_scaled
from jaxext.ops.scaled.cuda_weight_only import WeightOnlyConfig

pytestmark = pytest.mark.cuda

COMMAND_BUFFER_COMPATIBLE = 1
CONFIG = "tile_m tile_n tile_k cluster cluster_m cluster_n pingpong lanes strip pieces lines splits".split()
SUBSETS = [slots for count in (3, 2, 1, 0) for slots in itertools.combinations(EPILOGUE, count)]


def _convs(row, splits=1):
    """Return a case of a row, dense or depthwise, with its problem and config."""
    rank, depthwise = row["rank"], "tile_m" not in row
    labels = dict(G=64, C=1, K=1) if depthwise else dict(C=16, K=32)
    problem = cuda_convs.problem(row["role"], (8,) * rank, (3,) * rank, N=2, **labels, low=1, high=1)
    config = DepthwiseConfig(lanes=4, strip=4, splits=splits) if depthwise else ConvConfig(tile_m=0, tile_n=0, cluster=0, splits=splits)
    return cuda_cases.conv(row, problem, config), problem, config


def right_cases():
    """The first one of a target has no parts; where there is one in parts, it is the last."""
    for row, splits in itertools.product(host.MATMULS, (1, 2)):
        if splits == 1 or row["result"] == "float32" and not row["fused"]:
            yield cuda_cases.matmul(row, 1, 256, 512, 256, splits)
    for row, splits in itertools.product(host.PIECES, (1, 2)):
        yield cuda_cases.pieces(row, 1, 256, 512, 256, splits)
    for role in ("nn", "nt"):
        fused = next(row for row in host.MATMULS if row["fused"] and row["role"] == role)
        yield from (cuda_cases.matmul(fused, 1, 256, 512, 256, epilogue=epilogue) for epilogue in enumerate(SUBSETS))
    for row in host.RAGGEDS:
        yield cuda_cases.ragged(row, B=3, P=1, R=1, M=300, N=512, K=256, G=6)
    for row in host.SCALEDS:
        for left, right in [((1, 256, 4), (1, 3, 4)), ((1, 256, 4), (1, 4, 384)), ((1, 1, 1), (1, 1, 1)), ((1, 256, 4), (1, 1, 384))]:
            J = 384 if right[2] == 384 else 3
            yield cuda_cases.scaled(row, (1, 256, 384, 512, 256, J, 4), left, right)
        yield cuda_cases.scaled(row, (1, 256, 384, 512, 256, 3, 4), (1, 256, 4), (1, 3, 4), "float32", splits=4)
    for name, family in OWN.items():
        for row in host.ROWS[name]:
            yield from family.right(row)
    for row in host.CONVS + host.DEPTHWISE:
        case, problem, config = _convs(row)
        yield case
        if row["role"] == "fprop":
            yield from (cuda_cases.conv(row, problem, config, epilogue) for epilogue in enumerate(SUBSETS))
        if row["role"] == "wgrad":
            yield _convs(row, splits=2)[0]
    for row, there in itertools.product(host.CAUSALS, itertools.product((True, False), repeat=4)):
        given = dict(zip(("bias", "state", "idx", "idx_of_states"), there, strict=True))
        problem = test_causal_kernel.a_problem(row["role"], 4, dtype=row["operands"], B=3, T=9, C=16, **given)
        for splits in (1, 2) if row["role"] == "backward" else (1,):
            case = cuda_cases.causal(problem, CausalConfig(lanes=2, strip=8, splits=splits))
            yield case.replacing(dict(w=dict(dtype="float32"), bias=dict(dtype="float16")))
    for dtype, bits, result, splits in [("bf16", 4, None, 1), ("fp16", 8, "fp32", 1), ("bf16", 4, "fp32", 2)]:
        problem = a_weight_only_problem(5, 96, 128, 4, bits, dtype, result, B=3)
        yield cuda_cases.weight_only(problem, WeightOnlyConfig(tile_m=8, tile_n=64, splits=splits))
    for row in host.WIDE_WEIGHT_ONLYS:
        problem = a_weight_only_problem(70, 96, 128, 4, row["bits"], DTYPES[row["operands"]], B=3)
        yield cuda_cases.weight_only(problem, WeightOnlyConfig(tile_m=row["tile_m"], tile_n=row["tile_n"]))


def cases_of_targets() -> dict[str, list[Case]]:
    cases: dict[str, list[Case]] = {}
    for case in right_cases():
        cases.setdefault(case.target, []).append(case)
    return cases


RIGHT = cases_of_targets()


def right(target: str, parts=False) -> Case:
    """A right call, of bfloat16 if the target takes it.  `parts`: its result has several."""
    cases = [case for case in RIGHT[target] if (case.attributes.get("splits", 1) > 1) == parts]
    return next((case for case in cases if "bfloat16" in [dtype for dtype, _ in case.operands.values()]), cases[0])


def has_device():
    """Return True if there is a GPU, which would run calls that are right."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return driver.cuInit(0) == 0


# What is right.


def test_targets():
    forms = [f"{family}{rank}d" for family in ("conv", "depthwise") for rank in (1, 2, 3)]
    names = {f"{form}_{role}" for form in forms for role in ("fprop", "dgrad", "wgrad", "bias_act")}
    names |= {f"{form}_{role}" for form in ("matmul", "pieces", "ragged") for role in ("nn", "nt", "tn")}
    names |= {"linear", "linear_nt", "scaled", *OWN, "weight_only", "causal_conv1d", "causal_conv1d_backward"}
    assert set(RIGHT) == names <= set(SCHEMA), "exported programs hold these names"
    assert set(_cuda_module.handlers()) == {f"jaxext_{name}_v1" for name in SCHEMA}


@pytest.mark.parametrize("target", SCHEMA)
def test_metadata(target):
    """XLA asks a handler for its version, and whether its launches can be recorded: that of execute alone."""
    assert list(_cuda_module.handlers()[f"jaxext_{target}_v1"]) == [*call_frame.STAGES]
    major, minor, traits = ctypes.c_int32(), ctypes.c_int32(), ctypes.c_uint32()
    message = ctypes.create_string_buffer(4096)
    pointers = [ctypes.byref(x) for x in (major, minor, traits)]
    code = call_frame.library().AskMetadata(handler(target, "execute"), *pointers, message, ctypes.c_int64(len(message)))
    assert (code, message.value) == (call_frame.OK, b"")
    assert (major.value, minor.value) == _cuda_module.ffi_version()
    assert traits.value == COMMAND_BUFFER_COMPATIBLE


ROLES = {"nn": 0, "nt": 1, "tn": 2, "fprop": 0, "dgrad": 1, "wgrad": 2}  # jaxext::MatmulRole, jaxext::ConvRole


def kernel_of(case: Case) -> str:
    """A pattern of the mangled name of the kernel that a case is to launch."""
    match case.family:
        case "depthwise":
            return "depthwise5Wgrad" if role_of(case.target) == "wgrad" else "depthwise(6|8|10|11)(Mma|Gather)"
        case "causal":
            return "CausalBackward" if "backward" in case.target else "CausalForward"
        case "matmul" | "ragged" | "conv":
            return f"RoleE{ROLES[role_of(case.target)]}E"
        case "ragged_scaled":
            return "ScaledProduct.*Lb1E"
        case other:
            return other.title().replace("_", "")


@pytest.mark.parametrize("target", RIGHT)
def test_right_calls_are_launched(target):
    """The kernel of their role is launched.  The module's handlers get as far as CUDA."""
    for case in RIGHT[target]:
        status, asked = ask(case)
        assert status == OK, f"{case}: {asked}"
        kernels = [entry["kernel"] for entry in asked if "kernel" in entry]
        assert kernels and all(re.search(kernel_of(case), kernel) for kernel in kernels), kernels
        if not has_device():
            status, message = handled(case)
            assert status == INTERNAL and "CUDA" in message, f"{case}: {message}"


@pytest.mark.parametrize("role", test_scaled_dot.ROLES)
@pytest.mark.parametrize("cuts", CUTS.values(), ids=CUTS)
def test_scales_of_every_role_are_taken(role, cuts):
    problem = product(role, cuts=cuts, B=2)
    given = {name: jnp.asarray(x) for name, x in test_scaled_dot.some_operands(problem).items()}
    made = cuda_scaled.arrays(problem, {name: given[name] for name in cuda_scaled.slots(problem)})
    operands = {name: (x.dtype.name, x.shape) for name, x in made.items()}
    config = dataclasses.asdict(cuda_scaled.candidates(problem, cuda_binding.compiled("scaled"))[0])
    results = {"d": ("bfloat16", (2, problem.rows, problem.cols))}
    status, asked = ask(Case("scaled", cuda_scaled.fields(problem) | config, operands, results))
    assert status == OK, asked


EMPTY = {"conv": "B", "depthwise": "B", "causal": "C", "weight_only": "BMN"}


@pytest.mark.parametrize("target", [target for target, (case, *_) in RIGHT.items() if case.family in EMPTY])
def test_nothing_to_do_is_done(target):
    for name in EMPTY[right(target).family]:
        empty = right(target).having(**{name: 0})
        assert (ask(empty), handled(empty)) == ((OK, []), (OK, ""))


# What is wrong.


def refuse(case: Case, pattern: str) -> str:
    """Assert that handlers and host code refuse a call as an invalid argument, with the same message, and return it."""
    status, message = handled(case)
    assert status == INVALID, f"{case} is answered with {status}: {message}"
    assert re.search(pattern, message), f"{message!r} does not match {pattern!r}"
    if {dtype for dtype, _ in case.arrays.values()} <= {*CODES}:
        assert ask(case) == (INVALID, message)
    return message


def refused(case: Case) -> str | None:
    """The module's reason for refusing the problem of a case, whatever its config and its arrays."""
    problem = {name: value for name, value in case.attributes.items() if name.isupper() or name in (*GEOMETRY, "bits")}
    dtypes = {name: DTYPES[dtype] for name, (dtype, _) in case.arrays.items()}
    factors = (*(name for name in case.operands if name != "addend"), "x" if "x" in dtypes else "a")
    first, second, *_ = (dtypes[name] for name in factors)
    further = dtypes.get("addend", dtypes["bias"] if case.family == "causal" else "")
    given = (first, second, dtypes[next(iter(case.results))], further)
    return _cuda_module.refuses(case.target, dtypes=given, arch=90, **problem)


def refuse_problem(case: Case, pattern: str) -> str:
    """Refuse as `refuse` does; if the module refuses the problem already, the message has its reason."""
    message, reason = refuse(case, pattern), refused(case)
    others = ("has the shape", "want 1 or more", "addend is float32")  # which a launch sees first
    assert reason is None or message == f"{case.family}: {reason}" or any(text in message for text in others), (message, reason)
    return message


def name_of(case: Case, name: str) -> str:
    """The name of an array in messages."""
    places = "ranges" if role_of(case.target) == "tn" else "visits"
    if case.family == "causal" and name == "w":
        return "weight"
    return {"q": "w", "places": places, "first": "d_x" if "d_y" in case.operands else "y"}.get(name, name)


def takes_any_float(case: Case, name: str) -> bool:
    """Return True if an array's dtype follows from no other's."""
    if case.family == "causal":
        return name in ("x", "w", "bias")
    return name in (next(iter(case.operands)), next(iter(case.results))) or name == "b" and "scaled" in case.family


KINDS = {int: "an int64", float: "a float64", tuple: "three int64"}


@pytest.mark.parametrize("target", RIGHT)
def test_attributes_that_do_not_fit(target):
    """Each is missing, or has another type.  Of the handlers alone: the host code has them decoded."""
    case = right(target)
    for name, value in case.attributes.items():
        others: tuple[Any, ...] = np.int32(1), np.ones(1, np.int64), 1 if isinstance(value, float) else 1.0
        if isinstance(value, tuple):
            others = 1, np.array(value, np.int32), *((*value, 1)[:length] for length in (0, 2, 4))
        message = f"attribute {name} is missing or of another type, want {KINDS[type(value)]}"
        without = {key: of for key, of in case.attributes.items() if key != name}
        for attributes in (without, without | {name.swapcase(): value}, *(without | {name: other} for other in others)):
            assert handled(dataclasses.replace(case, attributes=attributes)) == (INVALID, message)
    count = len(case.attributes)
    more = dataclasses.replace(case, attributes={**case.attributes, "more": 1})
    assert handled(more) == (INVALID, f"{count + 1} attributes, want {count}")


@pytest.mark.parametrize("target", RIGHT)
def test_arrays_that_do_not_fit(target):
    """Every axis of every array, and their number; dtypes; addresses."""
    case = right(target)
    for name, (dtype, want) in case.arrays.items():
        text = name_of(case, name)
        resized = [(*want[:axis], want[axis] + by, *want[axis + 1 :]) for axis in range(len(want)) for by in (1, -1)]
        turned = () if name in ("left", "right") else want[::-1]  # whose axes may have one element for all
        for got in {*resized, turned, want[1:], (1, *want), ()} - {want}:
            shapes = (f"({', '.join(map(str, shape))})" for shape in (got, want))
            refuse(case.replacing({name: dict(shape=got)}), "^{} has the shape {}, want {}$".format(text, *map(re.escape, shapes)))
        wanted = "float32, bfloat16, float16, float8_e4m3fn or float8_e5m2" if takes_any_float(case, name) else dtype
        for other in {"float64", "int64", "int32", "int8", *(() if takes_any_float(case, name) else ("float16",))} - {dtype}:
            found = other if other in CODES else "of another dtype"
            refuse(case.replacing({name: dict(dtype=other)}), f"^{text} is {found}, want {wanted}$")
        if name not in ("places", "visits", "left"):  # which are read element by element
            bytes = 1 if case.family in ("depthwise", "causal") else 8
            refuse(dataclasses.replace(case, shifts={name: bytes}), "does not (begin|start) at a multiple of (16 bytes|its elements' size)")


@pytest.mark.parametrize("target", RIGHT)
def test_arrays_too_few_or_too_many(target):
    case = right(target)
    count = dict(operands=len(case.operands), results=len(case.results))
    for group, arrays in (("operands", case.operands), ("results", case.results)):
        for n, name in enumerate(arrays):
            if name != "addend":  # which may be absent
                there = count | {group: n}
                message = f"^{name_of(case, name)} is missing: there are {there['operands']} operands and {there['results']} results$"
                refuse(dataclasses.replace(case, **{group: dict(itertools.islice(arrays.items(), n))}), message)
        there, more = count | {group: count[group] + 1}, {**arrays, "more": next(iter(arrays.values()))}
        message = "^{operands} operands and {results} results".format(**there) + ", want {operands} and {results}$".format(**count)
        refuse(dataclasses.replace(case, **{group: more}), message)


def names_at_least(value, message):
    """Assert that a message has -1 itself, or a number at least as large as the value."""
    numbers = [int(number) for number in re.findall(r"-?\d+", message)]
    assert -1 in numbers if value == -1 else any(abs(number) >= min(abs(value), 2**63 - 1) for number in numbers), message


@pytest.mark.parametrize("target", RIGHT)
def test_sizes_beyond_all_bounds(target):
    """Negative ones, those that need more than 32 bits, and the ends of 64; arrays agree with them.  The message has the number, or what
    the number comes to with others."""
    case = right(target)
    for name, now in case.attributes.items():
        if name.isupper() or name in GEOMETRY:
            for value in (2**31, 2**40, 2**63 - 1, -(2**31), -(2**63), *((-1,) if name != "low" else ())):
                for wrong in [value] if isinstance(now, int) else [(*now[:axis], value, *now[axis + 1 :]) for axis in range(3)]:
                    names_at_least(value, refuse_problem(case.having(**{name: wrong}), r"\d"))


@pytest.mark.parametrize("target", RIGHT)
def test_configs_without_a_kernel(target):
    case = right(target)
    for name in {*CONFIG} & {*case.attributes}:
        for value in (-1, 2**40, -(2**63), *((0,) if name not in ("pingpong", "lines") else ())):
            message = f"{name} is {value}(,| with)|splits={value}|no kernel (has|with) |tile_m x tile_n is |partial results are bf"
            refuse(case.having(**{name: value}), message)


def parts(**changes):
    return lambda case: right(case.target, parts=True).having(**changes)


def attributes(**changes):
    """Return a dict whose arrays stay as they are."""
    return lambda case: dataclasses.replace(case, attributes={**case.attributes, **changes})


def factors(dtype: str, result: str | None = None):
    """Both factors have a dtype, and results and what is added to them another one."""

    def change(case):
        first, second, *_ = case.operands
        others = (name for name in case.arrays if name not in (first, second, "bias", "places"))
        return dtypes(**{first: dtype, second: dtype}, **dict.fromkeys(others, result or dtype))(case)

    return change


def last(value, otherwise=1, i=2):
    """A number for each spatial axis."""
    return (*(otherwise,) * i, value, *(otherwise,) * (2 - i))


def beyond_tma(few, B):
    """A matrix product two of whose axes make an array of 2^38 elements or more, with its batch."""
    return dict.fromkeys("MNK", 2**20 if B == 1 else 2**14) | {few: 8, "B": B}


RAGGED = "ragged_(nn|nt|tn)"
# What is wrong with the calls of one family: the targets that begin so, attributes or a change of a right case, and the message.
FAULTS: list[tuple[str, Any, str]] = [
    *(("matmul|pieces|scaled|linear", {name: 0}, f"{name}=0.*want 1 or more") for name in "BMNK"),
    *((RAGGED, {name: 0}, f"{name}=0.*, want 1 or more") for name in "BPRMNKG"),
    ("matmul|linear$", dict(M=132, N=132, K=132), "has 264 bytes, TMA wants a multiple of 16"),
    ("linear_nt", dict(N=130), "^matmul: a row of each operand has 520 bytes, TMA wants a multiple of 16: pad N to 132$"),
    ("linear_nt", dict(K=130), "^matmul: a row of the result has 520 bytes, TMA wants a multiple of 16: pad K to 132$"),
    *(("matmul", {name: 2**31 - 8}, "2147483640") for name in "MN"),  # numbers of tiles are rounded up: in 32 bits that must not overflow
    *(("matmul", beyond_tma(few, B), "has 2.38 elements or more") for few in "NKM" for B in (1, 2**10)),
    ("matmul|pieces", parts(B=2), "splits is 2 and B is 2, want one of them to be 1"),
    ("matmul", dict(splits=2), "partial results are bfloat16, want float32"),
    ("matmul", parts(splits=3), "has (256|512) elements, want a multiple of splits=3"),
    ("matmul", parts(splits=2**40), "has (256|512) elements, want a multiple of splits=1099511627776"),
    ("matmul_nn", parts(K=8), "a part of an operand has 8 bytes, TMA wants a multiple of 16"),
    ("matmul_nt", parts(N=8), "a part of an operand has 8 bytes, TMA wants a multiple of 16"),
    ("matmul", factors("bfloat16", "float16"), "the result is fp16, .* gives bf16"),
    ("matmul", factors("float32", "float16"), "the result is fp16, (nn|nt|tn) of fp32 gives fp32"),
    ("matmul_(nn|tn)", factors("float32"), "no kernel with .* takes float32 operands and gives float32 in this role$"),
    ("matmul_(nn|tn)", factors("float8_e4m3fn", "float16"), "are fp8e4nv, (nn|tn) takes bf16, fp16"),
    ("matmul_nt", factors("float8_e4m3fn", "float16"), "the result is fp16, nt of fp8e4nv gives bf16, fp32"),
    ("linear$", dtypes(residual="float32", c="float32", saved="float32"), "the result is fp32, nn with an epilogue of bf16 gives bf16"),
    ("linear", dict(splits=2), "splits is 2 with an epilogue, want 1"),
    ("conv.d_bias_act", dict(splits=2), "conv: partial results are bfloat16, want float32"),
    ("depthwise.d_bias_act", dict(splits=2), "splits is 2, want 1"),
    *((".*(linear|bias_act|causal)", dict(activation=value), f"^activation is {value}, want 0 to 9$") for value in (-1, 10)),
    *((".*(linear|bias_act)", {name: v}, f"^{name} is {v}, want 0 or 1$") for name in ("bias", "residual", "saves") for v in (-1, 2)),
    ("pieces", parts(M=40, N=40, K=40, splits=3), "^pieces: .*has 40 elements, want a multiple of 4 for each of 3 parts$"),
    ("pieces", parts(splits=64), "^pieces: .*splits is 64, want 1 to 32$"),
    ("pieces", dict(splits=0), "^pieces: .*splits is 0, want 1 to 32$"),
    ("pieces", dict(pieces=4), "^pieces: .*no kernel has tile_m=128 tile_n=128 pieces=4 splits=1$"),
    ("pieces", dict(tile_n=64), "^pieces: .*no kernel has tile_m=128 tile_n=64 pieces=2 splits=1$"),
    ("pieces", factors("bfloat16", "float32"), "^pieces: .*bf16 times bf16 into fp32, want fp32 alone$"),
    ("pieces", dict(N=6), "^pieces: .*has 24 bytes, TMA wants a multiple of 16: pad N to 8$"),
    *((RAGGED, {name: 96}, "no kernel has") for name in ("tile_m", "tile_n", "tile_k", "cluster_n")),
    (RAGGED, dict(tile_m=0), "tile_m is 0, want 1 or more"),
    *(("ragged_(nn|nt)", attributes(tile_m=value), "visits has the shape") for value in (16, 2**62)),
    (RAGGED, factors("bfloat16", "float32"), "bf16 times bf16 into fp32, want one dtype, bf16 or fp16"),
    *(("scaled", {name: 96}, "no kernel has") for name in ("tile_m", "tile_n", "tile_k", "cluster_m")),
    *(("scaled", parts(splits=value), f"splits is {value}, want 1 to 32") for value in (0, -1, 33, 2**40)),
    ("scaled", dtypes(a="bfloat16"), "bf16 times fp8e4nv into bf16, want fp8e4nv times fp8e4nv or fp8e5"),
    ("scaled", dtypes(d="float16"), "into fp16, want"),
    ("scaled", dict(splits=2), "parts are bfloat16, want float32"),
    *((name, *fault) for name, family in OWN.items() for fault in family.faults(parts)),
    ("conv", dict(C=12), "12 channels per group, TMA wants a multiple of 8"),
    ("conv", dict(K=12), "12 channels per group, TMA wants a multiple of 8"),
    ("conv.d_fprop", dict(C=0), "an operand is empty, want none"),
    ("conv.d_dgrad", dict(K=0), "an operand is empty, want none"),
    ("conv.d_wgrad", dict(N=0), "an operand is empty, want none"),
    ("conv", dict(G=65), "65 groups, with those of the batch label, it takes 64 at most"),
    ("conv", dict(B=5, G=13), "65 groups, with those of the batch label"),
    ("conv", dict(input_dilation=last(2)), "an input dilation of 2, TMA's boxes have no holes"),
    ("conv", dict(stride=last(9)), "a stride of 9, a TMA box takes 8 at most"),
    ("conv", lambda case: case.having(low=(*case.attributes["low"][:2], 40000)), "axis W"),
    ("conv", dict(filter_dilation=last(40000)), "axis W"),
    ("conv", dict(N=2**16, input=last(2**15), output=last(2**15)), "2147483648 pixels, it takes fewer than 2.31 - 2.16"),
    ("conv1d", dict(input=(1, 2, 8)), "axis H is in use, want 1 spatial axes"),
    ("conv2d", dict(input=(2, 8, 8)), "axis D is in use, want 2 spatial axes"),
    ("conv[23]d_dgrad", dict(stride=(1, 8, 8), G=9), "64 phases of the strides in each of 9 groups, it takes 512 together"),
    ("conv.d_wgrad", parts(splits=3), "splits is 3, want at most N=2, or a multiple"),
    ("conv.d_wgrad", dict(filter=last(70000)), "70000 blocks side by side, it takes 65535 at most"),
    ("conv.d_wgrad", parts(splits=40, N=40, G=2), "B=1 G=2 splits=40 make too many parts or none, want 1 to 64"),
    ("conv.d_wgrad", dict(splits=2), "partial results are bfloat16, want float32"),
    ("conv.d_(fprop|dgrad)", lambda case: factors("bfloat16", "float32")(case).having(splits=2), "splits is 2, want 1 unless in wgrad"),
    ("conv", factors("float32"), "the operands are fp32 and fp32, it takes two of bf16 or fp16"),
    ("depthwise", dict(C=2), "2 input channels per group, it takes 1"),
    ("depthwise", dict(K=65536), "65536 outputs per group, it takes 1 to 65535"),
    ("depthwise", dict(filter=last(32)), "32 taps along an axis, it takes 31 at most"),
    ("depthwise", dict(lanes=3), "lanes is 3, want a power of two up to 32"),
    ("depthwise", dict(B=65536), "B=65536 and 1 phases, it takes 65535 at most"),
    ("depthwise", dict(N=2**20, input=last(2**12), output=last(2**12)), "positions, it takes fewer than 2147418112"),
    ("depthwise", factors("float8_e4m3fn"), "dtype fp8e4nv, it takes fp32, bf16, fp16"),
    ("depthwise.d_wgrad", dict(pieces=64), "pieces is 64, want a power of two up to 32"),
    ("depthwise.d_wgrad", parts(splits=65536), "splits is 65536, want 1 to 65535"),
    ("depthwise.d_wgrad", dict(splits=2), "a result of bfloat16 in parts, want float32"),
    ("depthwise.d_(fprop|dgrad)", dict(pieces=2), "pieces is 2, want a power of two up to 1"),
    ("depthwise.d_(fprop|dgrad)", dict(splits=2), "splits is 2, want 1 to 1"),
    ("depthwise", dict(lines=33), "lines is 33, want 0 to 32"),
    ("depthwise", lambda case: factors("float32")(case).having(lines=1), "lines is 1, want 0: tensor cores take 16 bits"),
    ("depthwise[23]d_dgrad", dict(input=(1, 300, 300), stride=(1, 300, 300)), "B=1 and 90000 phases, it takes 65535 at most"),
    *(("causal", {name: value}, "a size is -|steps|channels|taps") for name, value in dict(B=-1, T=-(2**62), C=2**62, J=32).items()),
    (
        "causal",
        dtypes(**dict.fromkeys(("x", "initial_states", "d_y", "first", "d_initial_states"), "float8_e4m3fn")),
        "x is fp8e4nv, it takes",
    ),
    *(("causal", {name: v}, f"{name} is {v}, want ") for name, v in dict(lanes=3, strip=2**62, splits=2**62).items()),
    *(("causal", {name: v}, f"^{name} is {v}, want 0 or 1$") for name in ("bias", "seq_idx", "idx_of_states") for v in (-1, 2)),
    ("causal_conv1d$", dict(idx_of_states=0), "^6 operands and 1 results, want 5 and 1$"),
    ("causal_conv1d_backward", dict(idx_of_states=0), "^d_y has the shape"),
    *(
        ("weight_only", {name: value}, "it takes")
        for name, value in (("M", 65), ("M", 2**62), ("N", 2**62), ("K", 2**62), ("S", 3), ("bits", 16))
    ),
    ("weight_only", dtypes(x="float32"), "x is fp32, it takes bf16, fp16"),
    ("weight_only", dtypes(y="float16"), "the result is fp16, it takes bf16, as x, and fp32"),
    ("weight_only", dict(splits=2), "the result is bfloat16, want float32, as partial results are"),
    *(("weight_only", {name: v}, "tile_m x tile_n is ") for name, v in (("tile_m", 9), ("tile_m", -(2**63)), ("tile_n", 2**62))),
    *(("weight_only", dict(splits=value), f"splits is {value}, want 1 to 64") for value in (0, -(2**63))),
]
ROWS = [(target, change, message) for targets, change, message in FAULTS for target in RIGHT if re.match(targets, target)]
assert all(any(re.match(targets, target) for target in RIGHT) for targets, *_ in FAULTS)


@pytest.mark.parametrize(("target", "change", "message"), ROWS, ids=[f"{target}-{message}" for target, _, message in ROWS])
def test_faults(target, change, message):
    case = right(target)
    refuse_problem(case.having(**change) if isinstance(change, dict) else change(case), message)


def test_a_column_of_scales_lies_beside_the_next():
    """Scales of single columns are the last axis."""
    case = right("scaled").having(J=384)
    refuse(case.replacing(dict(right=dict(shape=(1, 384, 4)))), r"want \(1, 4, 384\)")
    refuse(case.replacing(dict(right=dict(shape=(1, 4, 1)))), "want them beside each other")


@pytest.mark.parametrize("target", [target for target, (case, *_) in RIGHT.items() if case.family in ("conv", "depthwise")])
def test_products_that_leave_64_bits(target):
    """Each size is within bounds."""
    case = right(target)
    for many in (2**20, 2**29, 2**30 - 1):
        huge = tuple(1 if size == 1 else many for size in case.attributes["input"])
        for some in ["N", "NG"] if case.family == "depthwise" else ["N", "C", "K", "NC", "NK", "CK", "NCK"]:
            refuse_problem(case.having(input=huge, output=huge, **dict.fromkeys(some, many // 8 * 8)), "^(conv|depthwise)")
