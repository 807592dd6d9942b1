"""Random calls of the operations that are no plain bilinear product: for each a draw, and its definition in numpy.

A definition takes float64 (or complex128, int64) arrays and must be analytic in those that are differentiated: `fuzz_functions` has its
derivatives from complex steps, so |x| and max must keep the imaginary part of what they choose.  It must not know jaxext: an operation is
looked up by name in a module that is passed in.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Mapping
from typing import Any

import causal_frames
import fuzz_windows
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import scipy.special
from cases import random
from jax import lax


@dataclasses.dataclass(frozen=True, kw_only=True)
class Operand:
    """An array of a call.  `values(rng)` gives its elements, else they are random numbers; `moves` says whether it is differentiated."""

    shape: tuple[int, ...]
    dtype: str
    values: Callable[[np.random.Generator], Any] | None = None
    moves: bool = True

    def __str__(self):
        return f"{self.dtype}{list(self.shape)}"

    def array(self, seed: int, integers: bool) -> np.ndarray:
        if self.values is None:
            return random(self.shape, self.dtype, seed, integers)
        return np.asarray(self.values(np.random.default_rng(seed))).astype(self.dtype).reshape(self.shape)


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Call:
    """A call of the operation `op` on `operands`, by name.

    `run(module, operands)` and `truth(operands)` give the results, whose dtypes are `results`.  `namesake(operands)` is a function of lax
    that refuses what must be refused.  `smooth` says whether small integers, on which a function may have a kink, are fine, and
    `orders` how often it can be differentiated; `slack` multiplies the roundings that are allowed.
    `rounded` is what happens to the cotangents of one example before anything else.
    """

    op: str
    operands: Mapping[str, Operand]
    results: tuple[str, ...]
    said: Mapping[str, Any]
    run: Callable[[Any, Mapping[str, Any]], tuple]
    truth: Callable[[Mapping[str, np.ndarray]], tuple]
    namesake: Callable[[Mapping[str, Any]], Any] | None = None
    smooth: bool = True
    orders: int = 2
    slack: float = 1
    rounded: Callable[[np.ndarray, Mapping[str, np.ndarray]], np.ndarray] | None = None

    @property
    def dtypes(self) -> tuple[str, ...]:
        return tuple(of.dtype for of in self.operands.values())

    def __str__(self):
        said = [*(f"{name} {of}" for name, of in self.operands.items()), *(f"{name}={value!r}" for name, value in self.said.items())]
        return f"{self.op}({', '.join(said)})"


# --- what draws share

REAL = {"float32": 10, "float64": 3, "bfloat16": 2, "float16": 2}
WITH_COMPLEX = REAL | {"complex64": 1, "complex128": 1}
ALL = WITH_COMPLEX | {"int32": 1, "int8": 1, "uint8": 0.3}
WIDE = {"float32": 3, "float64": 1}


def size(draw) -> int:
    return draw.weighted({0: 2, 1: 12, 2: 25, 3: 15, 4: 20, 5: 5, 6: 4, 8: 10, 9: 2})


def lead(draw) -> tuple[int, ...]:
    return tuple(size(draw) or 1 for _ in range(draw.weighted({0: 4, 1: 4, 2: 2})))


def kind(dtype) -> int:
    return [jnp.issubdtype(dtype, of) for of in (jnp.integer, jnp.floating, jnp.complexfloating)].index(True)


def dtypes(draw, weights) -> tuple[str, str, str]:
    """The dtypes of two operands, and the promoted one."""
    one = draw.weighted(weights)
    other = draw.weighted({name: n for name, n in weights.items() if kind(name) == kind(one)}) if draw.chance(10) else one
    with jax.numpy_dtype_promotion("standard"):
        return one, other, str(jnp.promote_types(one, other))


def optional(draw, **operands: Operand) -> dict[str, Operand]:
    return {name: of for name, of in operands.items() if draw.chance(50)}


ACTIVATIONS: dict[str | None, Callable[[Any], Any]] = {
    None: lambda z: z,
    "relu": lambda z: np.where(z.real > 0, z, 0),
    "relu6": lambda z: np.where((z.real > 0) & (z.real < 6), z, np.clip(z.real, 0, 6)),
    "gelu": lambda z: z * (1 + scipy.special.erf(z / math.sqrt(2))) / 2,
    "gelu_tanh": lambda z: z * (1 + np.tanh(math.sqrt(2 / math.pi) * (z + 0.044715 * z**3))) / 2,
    "silu": lambda z: z / (1 + np.exp(-z)),
    "sigmoid": lambda z: 1 / (1 + np.exp(-z)),
    "tanh": np.tanh,
    "leaky_relu": lambda z: np.where(z.real > 0, z, 0.01 * z),
    "squared_relu": lambda z: np.where(z.real > 0, z * z, 0),
}
FUNCTIONS = {jax.nn.silu: "silu", jnp.tanh: "tanh", jax.nn.gelu: "gelu_tanh"}


def wave(z):
    """A function that has no name."""
    return z * jnp.sin(z)


OWN = {wave: lambda z: z * np.sin(z)}


def activation(draw, dtype) -> tuple[dict[str, Any], Callable, bool]:
    """The keyword, its definition, and whether there is none, so that small integers meet no kink and no saturation."""
    if kind(dtype) != 1 or draw.chance(30):
        return {}, ACTIVATIONS[None], True
    given = draw.choice([*list(ACTIVATIONS)[1:], *FUNCTIONS, *OWN])
    return {"activation": given}, OWN.get(given) or ACTIVATIONS[FUNCTIONS.get(given, given)], False


def preferred(draw, dtype) -> tuple[dict[str, Any], str]:
    """The keyword, and the dtype of the result."""
    wider = {"float16": "float32", "bfloat16": "float32", "float32": "float64", "int8": "int32", "complex64": "complex128"}
    return ({"preferred_element_type": wider[dtype]}, wider[dtype]) if dtype in wider and draw.chance(20) else ({}, dtype)


def keywords(draw) -> dict[str, Any]:
    return {"precision": draw.choice(["highest", "default", lax.Precision.HIGH])} if draw.chance(10) else {}


def by_name(op, said, *, positional=2) -> Callable:
    """Calls the operation: the first operands by position, the others by name."""

    def run(module, operands):
        first = list(operands.items())
        result = getattr(module, op)(*(x for _, x in first[:positional]), **dict(first[positional:]), **said)
        return result if isinstance(result, tuple) else (result,)

    return run


# --- fused


def linear(draw) -> Call:
    """`linear` and `gated_linear_unit`."""
    gated, front, k, n = draw.chance(35), lead(draw), size(draw), size(draw)
    x, w, both = dtypes(draw, ALL)
    act, function, smooth = activation(draw, both)
    wanted, result = preferred(draw, both)
    operands = {"x": Operand(shape=(*front, k), dtype=x)}
    operands["w"] = Operand(shape=(k, 2, n) if gated else (k, n), dtype=w)
    if not gated:
        operands |= optional(draw, bias=Operand(shape=(n,), dtype=w), residual=Operand(shape=(*front, n), dtype=x))

    def truth(of):
        if gated:
            return (function(of["x"] @ of["w"][:, 0]) * (of["x"] @ of["w"][:, 1]),)
        return (function(of["x"] @ of["w"] + of.get("bias", 0)) + of.get("residual", 0),)

    op, said = "gated_linear_unit" if gated else "linear", act | wanted | keywords(draw)
    return Call(op=op, operands=operands, results=(result,), said=said, run=by_name(op, said), truth=truth, smooth=smooth)


def conv_bias_act(draw) -> Call:
    while True:
        form, said = fuzz_windows.convolution(draw)
        if math.prod(form.x) <= 60 and math.prod(form.w) <= 40 and math.prod(form.output) <= 80:
            break
    dtype = draw.weighted(REAL)
    act, function, smooth = activation(draw, dtype)
    channels = form._layout("y")[1]
    operands = {"x": Operand(shape=form.x, dtype=dtype), "w": Operand(shape=form.w, dtype=dtype)}
    operands |= optional(draw, bias=Operand(shape=(form.output[channels],), dtype=dtype), residual=Operand(shape=form.output, dtype=dtype))

    def truth(of):
        bias = of["bias"].reshape([-1 if i == channels else 1 for i in range(len(form.x))]) if "bias" in of else 0
        return (function(form.y(of["x"], of["w"]) + bias) + of.get("residual", 0),)

    def run(module, of):
        return (module.conv_bias_act(of["x"], of["w"], **said, bias=of.get("bias"), residual=of.get("residual"), **act),)

    def namesake(of):
        return lax.conv_general_dilated(of["x"], of["w"], **said)

    made: dict[str, Any] = dict(op="conv_bias_act", operands=operands, results=(dtype,), said=said | act, smooth=smooth)
    return Call(run=run, truth=truth, namesake=namesake, **made)


# --- by FFT


def conv_by_fft(draw) -> Call:
    while True:
        form, said = fuzz_windows.convolution(draw)
        axes = len(form.x) - 2
        if 1 <= axes <= 3 and math.prod(form.x) <= 60 and math.prod(form.w) <= 40 and math.prod(form.output) <= 80:
            break
    dtype = draw.weighted(WITH_COMPLEX)
    operands = {"x": Operand(shape=form.x, dtype=dtype), "w": Operand(shape=form.w, dtype=dtype)}

    def run(module, of):
        return (module.conv_general_dilated(of["x"], of["w"], **said, implementation="fft"),)

    def namesake(of):
        return lax.conv_general_dilated(of["x"], of["w"], **said)

    made: dict[str, Any] = dict(op="conv_by_fft", operands=operands, results=(dtype,), said=said, smooth=False)
    return Call(run=run, truth=lambda of: (form.y(of["x"], of["w"]),), namesake=namesake, **made)


def long_conv(draw) -> Call:
    front, steps, channels, taps = lead(draw), size(draw), size(draw), draw.choice([1, 2, 3, 4, 7, 12])
    outputs = draw.choice([None, 1, 2, 3])
    x, w, _ = dtypes(draw, WITH_COMPLEX)
    of_w = (taps, channels) if outputs is None else (taps, channels, outputs)
    operands = {"x": Operand(shape=(*front, steps, channels), dtype=x), "w": Operand(shape=of_w, dtype=w)}
    if outputs in (None, channels):
        operands |= optional(draw, skip=Operand(shape=(channels,), dtype=w))
    operands |= optional(draw, gate=Operand(shape=(*front, steps, of_w[-1]), dtype=x))
    said = {} if draw.chance(50) else {"causal": draw.chance(30)}
    said |= {"implementation": name} if (name := draw.choice(["fft", "xla", None])) else {}

    def truth(of):
        y, present = np.zeros((*front, steps, of_w[-1]), np.result_type(*of.values())), 0 if said.get("causal", True) else (taps - 1) // 2
        for s in range(taps):
            for t in range(max(0, s - present), min(steps, steps + s - present)):
                read = of["x"][..., t + present - s, :]
                y[..., t, :] += read * of["w"][s] if outputs is None else read @ of["w"][s]
        return ((y + of.get("skip", 0) * (of["x"] if "skip" in of else 0)) * of.get("gate", 1),)

    made: dict[str, Any] = dict(op="long_conv", operands=operands, results=(x,), said=said, smooth=False)
    return Call(run=by_name("long_conv", said), truth=truth, **made)


# --- ragged


def group_sizes(draw, groups: int, rows: int) -> Operand:
    """Sizes that sum to the rows, to less or to more, of which many are zero, or one is negative."""
    how = draw.weighted({"all": 5, "less": 4, "more": 2, "negative": 0.5, "one": 1, "none": 1})
    dtype = "int32" if how == "negative" else draw.weighted({"int32": 8, "int64": 1, "uint8": 1, "int8": 1, "uint32": 1})

    def values(rng):
        total = {"less": rng.integers(rows + 1), "more": rows + rng.integers(5), "none": 0}.get(how, rows)
        weights = rng.random(groups) * (rng.random(groups) < 0.7) + 1e-9
        if how == "one":
            weights = np.eye(groups)[rng.integers(groups)]
        sizes = rng.multinomial(total, weights / weights.sum())
        if how == "negative":
            sizes[rng.integers(groups)] = -2
        return sizes

    return Operand(shape=(groups,), dtype=dtype, values=values if groups else lambda rng: (), moves=False)


def group_of_rows(sizes, rows) -> np.ndarray:
    """The number of each row's group, or that of one that there is not."""
    of_all = np.repeat(np.arange(len(sizes)), np.maximum(sizes.real.astype(np.int64), 0))
    return np.concatenate([of_all, np.full(rows, -(10**6))])[:rows]


def of_groups(x, w, sizes, offset=0):
    """y[m] = x[m] w[group of m]."""
    numbers = group_of_rows(sizes, len(x)) - offset
    y = np.zeros((len(x), *w.shape[2:]), np.result_type(x, w))
    for m, g in enumerate(numbers):
        if 0 <= g < len(w):
            y[m] = np.tensordot(x[m], w[g], 1)
    return y, numbers


def ragged_dot(draw) -> Call:
    groups, rows, k, n = (size(draw) for _ in range(4))
    x, w, _ = dtypes(draw, ALL)
    both = str(jax.eval_shape(lax.dot, *(jax.ShapeDtypeStruct((1,), dtype) for dtype in (x, w))).dtype)  # of float16 and bfloat16 not jnp's
    wanted, result = preferred(draw, both)
    more = draw.randint(0, 3) if draw.chance(30) else None
    operands = {
        "lhs": Operand(shape=(rows, k), dtype=x),
        "rhs": Operand(shape=(groups, k, n), dtype=w),
        "group_sizes": group_sizes(draw, groups + (more or 0), rows),
    }
    if more is not None:
        low = draw.choice([0, 0, -1])
        operands["group_offset"] = Operand(shape=(1,), dtype="int32", values=lambda rng: rng.integers(low, more + 2, 1), moves=False)

    def truth(of):
        return (of_groups(of["lhs"], of["rhs"], of["group_sizes"], int(of.get("group_offset", [0])[0].real))[0],)

    said = wanted | keywords(draw)

    def namesake(of):  # which has no group_offset
        return lax.ragged_dot(of["lhs"], of["rhs"], jnp.zeros(groups, of["group_sizes"].dtype), **said)

    made: dict[str, Any] = dict(op="ragged_dot", operands=operands, results=(result,), said=said)
    return Call(run=by_name("ragged_dot", said, positional=3), truth=truth, namesake=namesake, **made)


def ragged_contraction(draw) -> Call:
    """`ragged_dot_general` whose contracted axis is ragged."""
    groups, rows, m, n = (size(draw) for _ in range(4))
    dtype = draw.weighted(WITH_COMPLEX)
    operands = {
        "lhs": Operand(shape=(rows, m), dtype=dtype),
        "rhs": Operand(shape=(rows, n), dtype=dtype),
        "group_sizes": group_sizes(draw, groups, rows),
    }
    said: dict[str, Any] = {"ragged_dot_dimension_numbers": lax.RaggedDotDimensionNumbers((((0,), (0,)), ((), ())), [0], [])}

    def truth(of):
        member = group_of_rows(of["group_sizes"], rows)[None] == np.arange(groups)[:, None]
        return (np.einsum("gk,km,kn->gmn", member, of["lhs"], of["rhs"]),)

    def namesake(of):
        return lax.ragged_dot_general(of["lhs"], of["rhs"], of["group_sizes"], **said)

    made: dict[str, Any] = dict(op="ragged_dot_general", operands=operands, results=(dtype,), said=said)
    return Call(run=by_name("ragged_dot_general", said, positional=3), truth=truth, namesake=namesake, **made)


def ragged_linear(draw) -> Call:
    """`ragged_linear` and `ragged_gated_linear_unit`."""
    gated, (groups, rows, k, n) = draw.chance(40), (size(draw) for _ in range(4))
    x, w, both = dtypes(draw, REAL)
    act, function, smooth = activation(draw, both)
    wanted, result = preferred(draw, both)
    operands = {"x": Operand(shape=(rows, k), dtype=x)}
    operands["w"] = Operand(shape=(groups, k, 2, n) if gated else (groups, k, n), dtype=w)
    operands["group_sizes"] = group_sizes(draw, groups, rows)
    added = dict(bias=Operand(shape=(groups, n), dtype=w), row_scale=Operand(shape=(rows,), dtype=x))
    operands |= {name: of for name, of in optional(draw, **added).items() if not (gated and name == "bias")}

    def truth(of):
        y, numbers = of_groups(of["x"], of["w"], of["group_sizes"])
        inside = ((numbers >= 0) & (numbers < groups))[:, None]
        if "bias" in of and groups:
            y = y + of["bias"][np.clip(numbers, 0, groups - 1)]
        y = function(y[:, 0]) * y[:, 1] if gated else function(y)
        return (np.where(inside, y * of.get("row_scale", np.ones(rows))[:, None], 0),)

    op, said = "ragged_gated_linear_unit" if gated else "ragged_linear", act | wanted | keywords(draw)
    return Call(op=op, operands=operands, results=(result,), said=said, run=by_name(op, said, positional=3), truth=truth, smooth=smooth)


def moe(draw) -> Call:
    """A layer without a gate, with a separate one, or one beside what it gates.  Some choices are of no expert, or beyond the capacity."""
    front, k, experts = lead(draw), draw.weighted({0: 1, 1: 5, 2: 8, 3: 3}), draw.weighted({1: 3, 2: 5, 3: 4, 4: 1})
    width, hidden, dtype, gate = size(draw), size(draw), draw.weighted(REAL), draw.choice(["none", "separate", "beside"])
    act, function, smooth = activation(draw, dtype)
    said = {"activation": None} | act | keywords(draw) | ({"capacity": draw.choice([0, 1, 2, 4])} if draw.chance(40) else {})
    choices, integers = (*front, k), draw.weighted({"int32": 6, "int64": 1, "int8": 1, "uint8": 1})
    least = 0 if integers == "uint8" else -1
    operands = {"x": Operand(shape=(*front, width), dtype=dtype)}
    operands["indices"] = Operand(shape=choices, dtype=integers, values=lambda rng: rng.integers(least, experts + 1, choices), moves=False)
    operands["weights"] = Operand(shape=choices, dtype=draw.choice([dtype, "float32"]))
    if gate == "separate":
        operands["w_gate"] = Operand(shape=(experts, width, hidden), dtype=dtype)
    operands["w_up"] = Operand(shape=(experts, width, *([2] if gate == "beside" else []), hidden), dtype=dtype)
    operands["w_down"] = Operand(shape=(experts, hidden, width), dtype=dtype)

    def truth(of):
        x, chosen, weights = (of[name].reshape(math.prod(front), of[name].shape[-1]) for name in ("x", "indices", "weights"))
        into, up = (of["w_up"][:, :, 0], of["w_up"][:, :, 1]) if gate == "beside" else (of.get("w_gate", of["w_up"]), of["w_up"])
        y, room = np.zeros(x.shape, np.result_type(*of.values())), [said.get("capacity", math.inf)] * experts
        for (t, j), e in np.ndenumerate(chosen.real.astype(int)):
            if 0 <= e < experts and room[e] > 0:
                room[e] -= 1
                inner = function(x[t] @ into[e]) * (1 if gate == "none" else x[t] @ up[e])
                y[t] += weights[t, j] * (inner @ of["w_down"][e])
        return (y.reshape(*front, width),)

    def run(module, of):
        return (module.moe(of["x"], of["indices"], of["weights"], of.get("w_gate"), of["w_up"], of["w_down"], **said),)

    return Call(op="moe", operands=operands, results=(dtype,), said=said, run=run, truth=truth, smooth=smooth, slack=4)


# --- causal


def causal_conv1d(draw) -> Call:
    front, steps, channels, taps = lead(draw), size(draw), size(draw), draw.choice([1, 2, 3, 4, 4, 6])
    x, w, _ = dtypes(draw, REAL)
    act, function, smooth = activation(draw, x)
    operands = {"x": Operand(shape=(*front, steps, channels), dtype=x), "w": Operand(shape=(taps, channels), dtype=w)}
    operands |= optional(draw, bias=Operand(shape=(channels,), dtype=w))
    said = dict(act)
    if draw.chance(30):
        packed = draw.weighted({"int32": 3, "int64": 1, "uint8": 1})
        shape = (*front, steps)
        operands["seq_idx"] = Operand(shape=shape, dtype=packed, values=lambda rng: np.sort(rng.integers(0, 3, shape), -1), moves=False)
    operands |= optional(draw, initial_states=Operand(shape=(*front, taps - 1, channels), dtype=x))
    said |= {"return_final_states": True} if draw.chance(40) else {}

    def truth(of):
        before = of.get("initial_states", np.zeros((*front, taps - 1, channels)))
        y, last = causal(before, of["x"], of["w"], of.get("bias", 0), function, of.get("seq_idx"))
        return (y, last) if "return_final_states" in said else (y,)

    results = (x, x) if "return_final_states" in said else (x,)
    made: dict[str, Any] = dict(op="causal_conv1d", operands=operands, results=results, said=said, smooth=smooth)
    return Call(run=by_name("causal_conv1d", said), truth=truth, **made)


def causal(before, x, weight, bias, function, seq_idx=None):
    """Results, and the last inputs."""
    read, (taps, _), steps = np.concatenate([before, x], -2), weight.shape, x.shape[-2]
    z, numbers = np.zeros(x.shape) + bias, np.zeros(read.shape[:-1])
    if seq_idx is not None and steps:  # the state is of the first sequence
        numbers = np.concatenate([np.repeat(seq_idx[..., :1], taps - 1, -1), seq_idx], -1)
    for i in range(taps):
        same = numbers[..., i : i + steps] == numbers[..., taps - 1 :]
        z = z + read[..., i : i + steps, :] * same[..., None] * weight[i]
    return function(z), read[..., steps:, :] * (numbers[..., steps:] == numbers[..., -1:])[..., None]


def causal_conv1d_update(draw) -> Call:
    front, steps, channels, taps = lead(draw), draw.choice([None, 1, 2, 5]), size(draw), draw.choice([1, 2, 3, 4])
    indexed, circle = draw.chance(25), draw.chance(40)
    front, length = (size(draw),) if indexed else front, taps - 1 + draw.choice([0, 0, 1, 3])
    if circle:
        length = max(length, 1)
    x, w, _ = dtypes(draw, REAL)
    act, function, smooth = activation(draw, x)
    rows = (front[0] + draw.randint(0, 2),) if indexed else front
    operands = {
        "x": Operand(shape=(*front, *(() if steps is None else (steps,)), channels), dtype=x),
        "conv_state": Operand(shape=(*rows, length, channels), dtype=x),
        "w": Operand(shape=(taps, channels), dtype=w),
    }
    operands |= optional(draw, bias=Operand(shape=(channels,), dtype=w))
    if circle:
        operands["cache_seqlens"] = Operand(shape=front, dtype="int32", values=lambda rng: rng.integers(0, 20, front), moves=False)
    if indexed:

        def places(rng):
            return np.where(rng.random(front) < 0.8, rng.permutation(rows[0])[: front[0]], -1)

        operands["conv_state_indices"] = Operand(shape=front, dtype="int32", values=places, moves=False)

    def truth(of):
        given = of["x"] if steps is not None else of["x"][..., None, :]
        new = of["conv_state"].astype(np.result_type(of["conv_state"], given))
        y = np.zeros(given.shape, np.result_type(*(of[name] for name in operands if name not in ("cache_seqlens", "conv_state_indices"))))
        for at in itertools.product(*map(range, front)):
            row = (int(of["conv_state_indices"][at].real),) if indexed else at
            if row and row[0] < 0:
                continue
            state, count = of["conv_state"][row], int(of["cache_seqlens"][at].real) if circle else length
            order = (np.arange(length) + count) % max(length, 1)  # the oldest first
            y[at], _ = causal(state[order][length - taps + 1 :], given[at], of["w"], of.get("bias", 0), function)
            if not circle:
                new[row] = np.concatenate([state, given[at]])[len(given[at]) :]
            for i, step in enumerate(given[at] if circle else ()):
                new[row][(count + i) % length] = step
        return y if steps is not None else y[..., 0, :], new

    made: dict[str, Any] = dict(op="causal_conv1d_update", operands=operands, results=(x, x), said=act, smooth=smooth)
    return Call(run=by_name("causal_conv1d_update", act, positional=3), truth=truth, **made)


def causal_conv(draw) -> Call:
    axes, transpose = draw.weighted({1: 4, 2: 3, 3: 2}), draw.chance(30)
    strides, dilation, taps = (tuple(draw.weighted({1: 6, 2: 3, 3: 1}) for _ in range(axes)) for _ in range(3))
    groups, channels, filters = (draw.weighted({1: 3, 2: 2, 3: 1}) for _ in range(3))
    steps = size(draw) * (1 if transpose else strides[0])
    x, w, _ = dtypes(draw, REAL)
    shape = (draw.weighted({0: 1, 1: 10, 2: 5}), steps, *(draw.randint(1, 4) for _ in taps[1:]), groups * channels)
    held = causal_frames.held(taps[0], strides, dilation, transpose)
    operands = {"x": Operand(shape=shape, dtype=x), "w": Operand(shape=(*taps, channels, groups * filters), dtype=w)}
    operands |= optional(draw, state=Operand(shape=(shape[0], held, *shape[2:]), dtype=x))
    said: dict[str, Any] = dict(
        strides=strides, dilation=dilation, padding=draw.choice(["SAME", "VALID"]), groups=groups, transpose=transpose
    )
    kept = draw.chance(50)

    def truth(of):
        return causal_frames.causal_frames(**of, **said)[: 1 + kept]

    run = by_name("causal_conv", said | {"return_state": kept})
    return Call(op="causal_conv", operands=operands, results=(x,) * (1 + kept), said=said, run=run, truth=truth)


# --- scaled and quantised


def spread(scale, shape):
    """An element of each block for every element of the array."""
    for axis, (n, whole) in enumerate(zip(scale.shape, shape, strict=True)):
        scale = np.repeat(scale, whole // max(n, 1), axis)
    return scale


def scales(draw, shapes, chance=65) -> dict[str, Operand]:
    """A scale of random blocks for some of the sides."""
    operands = {}
    for side, shape in shapes.items():
        if draw.chance(chance):
            blocks = tuple(draw.choice([d for d in range(1, n + 1) if n % d == 0] or [0]) for n in shape)
            dtype = draw.weighted({"float32": 4, "float8_e8m0fnu": 1, "bfloat16": 1, "float64": 1})
            powers = dtype == "float8_e8m0fnu"
            values = functools.partial(lambda blocks, rng: 2.0 ** rng.integers(-2, 3, blocks), blocks) if powers else None
            operands[f"{side}_scale"] = Operand(shape=blocks, dtype=dtype, values=values, moves=not powers)
    return operands


def scaled_dot(draw) -> Call:
    front, m, k, n = tuple(size(draw) for _ in range(draw.choice([0, 0, 1]))), *(size(draw) for _ in range(3))
    shapes = {"lhs": (*front, m, k), "rhs": (*front, k, n)}
    operands, result = {}, draw.choice(["float32", "bfloat16", "float64", None])
    for side, shape in shapes.items():
        dtype = draw.weighted({"float8_e4m3fn": 3, "int8": 2, "bfloat16": 2, "float32": 3, "float64": 1})
        operands[side] = Operand(shape=shape, dtype=dtype, moves=np.dtype(dtype).itemsize > 1)
    operands |= scales(draw, shapes)
    said = {} if result is None else {"preferred_element_type": result}

    def truth(of):
        factors = [of[side] * spread(of.get(f"{side}_scale", np.ones((1,) * len(shape))), shape) for side, shape in shapes.items()]
        return (factors[0] @ factors[1],)

    made: dict[str, Any] = dict(op="scaled_dot", operands=operands, results=(result or "bfloat16",), said=said)
    return Call(run=by_name("scaled_dot", said), truth=truth, **made)


def ragged_scaled_dot(draw) -> Call:
    groups, rows, k, n = (size(draw) for _ in range(4))
    turned, result = draw.chance(30), draw.choice(["float32", "bfloat16", "float64", None])
    shapes = {"lhs": (rows, k), "rhs": (groups, n, k) if turned else (groups, k, n)}
    operands = {}
    for side, weights in (("lhs", {"float32": 4, "bfloat16": 2, "float16": 1}), ("rhs", {"float32": 1, "int8": 3, "int4": 2})):
        dtype = draw.weighted({"float8_e4m3fn": 2, "int8": 1, "float64": 1} | weights)
        operands[side] = Operand(shape=shapes[side], dtype=dtype, moves=np.dtype(dtype).itemsize > 1)
    operands["group_sizes"] = group_sizes(draw, groups, rows)
    operands |= scales(draw, shapes)
    said = ({"transpose_rhs": True} if turned else {}) | ({} if result is None else {"preferred_element_type": result}) | keywords(draw)

    def truth(of):
        x, w = (of[side] * spread(of.get(f"{side}_scale", np.ones((1,) * len(shape))), shape) for side, shape in shapes.items())
        return (of_groups(x, w.swapaxes(1, 2) if turned else w, of["group_sizes"])[0],)

    lhs = operands["lhs"].dtype
    result = result or (lhs if np.dtype(lhs).itemsize > 1 else "bfloat16")
    made: dict[str, Any] = dict(op="ragged_scaled_dot", operands=operands, results=(result,), said=said)
    return Call(run=by_name("ragged_scaled_dot", said, positional=3), truth=truth, **made)


def in_8_bits(x, dtype):
    """x rounded to the numbers of a dtype, once: ml_dtypes rounds float64 to float32 first, so that 200 + 1e-6 becomes 192, not 208."""
    info = ml_dtypes.finfo(dtype)
    exponent = np.maximum(np.frexp(x)[1] - 1, info.minexp)
    step = np.ldexp(np.ones_like(x), exponent - info.nmant)
    return np.rint(x / step) * step


def fp8_matmul(draw) -> Call:
    front, k, n = lead(draw), size(draw), size(draw)
    x, w, _ = dtypes(draw, REAL)
    operands = {"x": Operand(shape=(*front, k), dtype=x), "w": Operand(shape=(k, n), dtype=w)}
    scale = Operand(shape=(), dtype="float32", values=lambda rng: rng.choice([1 / 64, 0.01, 0.003]), moves=False)
    operands |= {name: scale for name in ("x_scale", "w_scale", "gradient_scale") if draw.chance(30)}

    def rounded(array, dtype, of_array, scale):
        """x rounded to 8 bits; an imaginary part, which stands for a tangent, is not rounded."""
        wide, highest = np.float64 if of_array == "float64" else np.float32, float(ml_dtypes.finfo(dtype).max)
        real = array.real.astype(wide)
        scale = (np.abs(real).max(initial=0) / wide(highest) if scale is None else scale.real).astype(wide)
        scale = scale if scale > 0 else wide(1)
        small = in_8_bits(np.clip(real / scale, -highest, highest), dtype)
        return (small * scale).astype(np.float64) + (1j * array.imag if np.iscomplexobj(array) else 0)

    def truth(of):
        x8, w8 = (rounded(of[name], ml_dtypes.float8_e4m3fn, operands[name].dtype, of.get(f"{name}_scale")) for name in "xw")
        return (x8 @ w8,)

    def cotangent(ct, of):
        return rounded(ct, ml_dtypes.float8_e5m2, x, of.get("gradient_scale"))

    made: dict[str, Any] = dict(op="fp8_matmul", operands=operands, results=(x,), said={}, orders=1)
    return Call(run=by_name("fp8_matmul", {}), truth=truth, rounded=cotangent, **made)


def quantized_matmul(draw) -> Call:
    """The product with what `quantize` makes of a matrix, and that matrix."""
    front, k, n = lead(draw), size(draw), size(draw)
    x, w = draw.weighted(REAL), draw.weighted(WIDE)
    symmetric, axis = draw.chance(60), draw.choice([-2, -2, 0, 1, None])
    of_axis = k if axis in (-2, 0) else n
    group = draw.choice([None, *(d for d in range(1, of_axis + 1) if of_axis % d == 0)]) if axis is not None else None
    kinds = ["int8", "int4", *(["float8_e4m3fn"] if symmetric else ["uint8", "uint4"])]
    said = {"symmetric": symmetric, "axis": axis, "group": group, "dtype": draw.choice(kinds)}
    operands = {"x": Operand(shape=(*front, k), dtype=x), "w": Operand(shape=(k, n), dtype=w)}

    def run(module, of):
        small = module.quantization.quantize(of["w"], **said)
        return module.quantized_matmul(of["x"], small), small.dequantize()

    def truth(of):
        w_small = dequantized(of["w"], w, **said)
        return of["x"] @ w_small, w_small

    made: dict[str, Any] = dict(op="quantized_matmul", operands=operands, results=(x, w), said=said)
    return Call(run=run, truth=truth, smooth=False, orders=1, **made)  # a difference, for the second derivative, meets another rounding


def dequantized(w, wide, *, symmetric, axis, group, dtype):
    """The result of `quantize`, by its definition; the imaginary part is that of the scale."""
    info = ml_dtypes.finfo(dtype) if dtype.startswith("float") else ml_dtypes.iinfo(dtype)
    low, high = float(info.min), float(info.max)
    if axis is None:
        blocks, over = w.reshape(1, w.size), 1
    else:
        along = np.moveaxis(w, axis, 0)
        along = along.reshape(len(along) // (group or max(len(along), 1)), group or len(along), math.prod(along.shape[1:]))
        blocks, over = along.transpose(0, 2, 1), 2

    def extreme(of):
        """The first element where `of` is the largest, and not less than 0."""
        if not blocks.shape[over]:
            return np.zeros((*blocks.shape[:over], 1), w.dtype)
        found = np.take_along_axis(blocks, np.expand_dims(of.argmax(over), over), over)
        return np.where(np.take_along_axis(of, np.expand_dims(of.argmax(over), over), over) > 0, found, 0)

    def numbers(x: Any):
        return x.real.astype(wide)

    if symmetric:
        peak: Any = extreme(np.abs(blocks.real))
        scale, zero = np.where(peak.real < 0, -peak, peak) / high, 0
    else:
        least = extreme(-blocks.real)
        scale = (extreme(blocks.real) - least) / (high - low)
    scale = np.where(scale.real > 0, scale, 1)
    if not symmetric:
        zero = np.clip(np.rint(low - numbers(least) / numbers(scale)), low, high)
    small = np.clip(numbers(blocks) / numbers(scale) + zero, max(low, -high) if symmetric else low, high)
    small = in_8_bits(small, dtype) if dtype.startswith("float") else np.rint(small)
    value = (small - zero) * scale
    if axis is None:
        return value.reshape(w.shape)
    moved = np.moveaxis(w, axis, 0)
    return np.moveaxis(value.transpose(0, 2, 1).reshape(moved.shape), 0, axis)


# --- symmetric


def gram(draw) -> Call:
    dtype = draw.weighted(ALL)
    wanted, result = preferred(draw, dtype)
    operands = {"x": Operand(shape=(*lead(draw), size(draw), size(draw)), dtype=dtype)}
    said = wanted | keywords(draw)
    made: dict[str, Any] = dict(op="gram", operands=operands, results=(result,), said=said, run=by_name("gram", said))
    return Call(truth=lambda of: (of["x"] @ of["x"].swapaxes(-1, -2),), **made)


def newton_schulz(draw) -> Call:
    dtype, steps = draw.weighted(WIDE), draw.randint(0, 3)
    operands = {"x": Operand(shape=(*lead(draw), size(draw), size(draw)), dtype=dtype)}
    triple = (3.4445, -4.7750, 2.0315)
    said: dict[str, Any] = {"steps": steps, "coefficients": triple if draw.chance(50) else (triple,) * steps}

    def truth(of):
        x = of["x"]
        norm = np.sqrt((x * x).sum((-2, -1), keepdims=True))
        x = x / (norm + 1e-8)
        for a, b, c in (triple,) * steps:
            square = x @ x.swapaxes(-1, -2)
            x = a * x + (b * square + c * square @ square) @ x
        return (x,)

    made: dict[str, Any] = dict(op="newton_schulz", operands=operands, results=(dtype,), said=said, slack=8)
    made["smooth"] = False  # it is not at a matrix of zeros
    return Call(run=by_name("newton_schulz", said, positional=1), truth=truth, **made)


# --- of one's own


def channelwise(draw) -> Call:
    """`extend.define`."""
    ranks = {label: draw.weighted({0: 2, 1: 4, 2: 1}) for label in "BNKMC"}
    sizes = {label: tuple(draw.weighted({1: 2, 2: 4, 3: 2, 4: 2}) for _ in range(rank)) for label, rank in ranks.items()}
    dtype = draw.weighted(WITH_COMPLEX)
    shapes = {name: sum((sizes[label] for label in labels), ()) for name, labels in (("x", "BNKC"), ("w", "BKMC"))}
    operands = {name: Operand(shape=shape, dtype=dtype) for name, shape in shapes.items()}
    letters = iter("abcdefghijklmnopq")
    names = {label: "".join(itertools.islice(letters, rank)) for label, rank in ranks.items()}
    subscripts = "{B}{N}{K}{C},{B}{K}{M}{C}->{B}{N}{M}{C}".format(**names)

    def run(module, of):
        return (module.extend.define("fuzz_channelwise", x="B N K C", w="B K M C", y="B N M C")(of["x"], of["w"], **ranks),)

    made: dict[str, Any] = dict(op="extend.define", operands=operands, results=(dtype,), said=ranks, run=run)
    return Call(truth=lambda of: (np.einsum(subscripts, of["x"], of["w"]),), **made)


@functools.cache
def declared(module):
    def reference(x, g, number, *, epsilon=1e-3):
        mean = jnp.mean(x * x, -1)
        chosen = jnp.where(jnp.arange(x.shape[-1])[None] == number[:, None], x, 0).sum(
            -1
        )  # jax cannot transpose a gather on explicit meshes
        return x * lax.rsqrt(mean + epsilon)[:, None] * g[None], mean - chosen

    labels: dict[str, Any] = dict(operands=dict(x="N D", g="D", number="N"), results=dict(y="N D", loss="N"))
    return module.extend.operation("fuzz_norm", reference, **labels, unsharded="D", constant="number")


def norm(draw) -> Call:
    """`extend.operation`: a norm, and a loss by number."""
    front, d, dtype = lead(draw), size(draw) or 1, draw.weighted(REAL)
    said = {"epsilon": 0.5} if draw.chance(50) else {}
    operands = {
        "x": Operand(shape=(*front, d), dtype=dtype),
        "g": Operand(shape=(d,), dtype=dtype),
        "number": Operand(shape=front, dtype="int32", values=lambda rng: rng.integers(0, d, front), moves=False),
    }

    def truth(of):
        mean = (of["x"] ** 2).mean(-1)
        chosen = np.take_along_axis(of["x"], of["number"].real.astype(int)[..., None], -1)[..., 0]
        return of["x"] / np.sqrt(mean + said.get("epsilon", 1e-3))[..., None] * of["g"], mean - chosen

    def run(module, of):
        return declared(module)(*of.values(), ranks={"N": len(front)}, **said)

    return Call(op="extend.operation", operands=operands, results=(dtype, dtype), said=said, run=run, truth=truth)


# --- privacy


def clipped_grad(draw) -> Call:
    """The sum of clipped gradients of a small net, the norms and the losses."""
    examples, k, n, dtype = size(draw), *(size(draw) or 1 for _ in range(2)), draw.weighted(WIDE)
    steps = draw.choice([(), (3,)])
    net = draw.choice(["dense", "shared", "lookup"])
    clip, unit, each = draw.choice([0.0, 0.5, 3.0]), draw.chance(30), draw.chance(50)
    inputs: dict[str, Any] = {"shape": (examples, *steps, k), "dtype": dtype}
    if net == "lookup":
        shape = (examples, *steps)
        inputs = {"shape": shape, "dtype": "int32", "values": lambda rng: rng.integers(0, k, shape)}
    operands = {
        "w": Operand(shape=(k, n), dtype=dtype, moves=False),
        "b": Operand(shape=(n,), dtype=dtype, moves=False),
        "x": Operand(moves=False, **inputs),
        "y": Operand(shape=(examples, *steps, n), dtype=dtype, moves=False),
    }

    def loss(np: Any, w: Any, b: Any, x: Any, y: Any):
        z = np.tanh((w[x] if net == "lookup" else x @ w) + b)
        z = np.tanh(z @ w.T) @ w if net == "shared" else z
        return ((z - y) ** 2).sum()

    def run(module, of):
        options: dict[str, Any] = dict(l2_clip_norm=clip, rescale_to_unit_norm=unit, batch_argnums=(2, 3), keep_batch_dim=each)
        gradient = module.privacy.clipped_grad(functools.partial(loss, jnp), (0, 1), **options, return_values=True, return_grad_norms=True)
        (w, b), aux = gradient(*of.values())
        return w, b, aux.grad_norms, aux.values

    def truth(of):
        total, norms, losses = [np.zeros((k, n)), np.zeros(n)], [], []
        for x, y in zip(of["x"], of["y"], strict=True):
            gradients = [np.zeros((k, n)), np.zeros(n)]
            for which, at in ((i, at) for i in (0, 1) for at in np.ndindex(gradients[i].shape)):
                moved: Any = [of["w"].astype(complex), of["b"].astype(complex)]
                moved[which][at] += 1e-30j
                gradients[which][at] = loss(np, moved[0], moved[1], x, y).imag / 1e-30
            norms.append(math.sqrt(sum((g * g).sum() for g in gradients)))
            losses.append(loss(np, of["w"], of["b"], x, y))
            scale = min(1, clip / norms[-1])
            scale = (scale / clip if clip else 1 / norms[-1]) if unit else scale
            total = [a + scale * g for a, g in zip(total, gradients, strict=True)]
        return *total, np.array(norms), np.array(losses)

    said = {"net": net, "l2_clip_norm": clip, "rescale_to_unit_norm": unit, "keep_batch_dim": each}
    made: dict[str, Any] = dict(op="clipped_grad", operands=operands, results=(dtype,) * 4, said=said)
    return Call(run=run, truth=truth, smooth=False, orders=0, slack=16, **made)


OPERATIONS = {
    gram: 7, newton_schulz: 4, channelwise: 6, norm: 6, clipped_grad: 6, linear: 16, conv_bias_act: 10, conv_by_fft: 8, long_conv: 8,
    ragged_dot: 14, ragged_contraction: 6, ragged_linear: 14, moe: 12, causal_conv1d: 14, causal_conv1d_update: 8, causal_conv: 10,
    scaled_dot: 10, fp8_matmul: 7, quantized_matmul: 8, ragged_scaled_dot: 12,
}  # fmt: skip
