"""Causal depthwise convolutions along time: of a whole sequence, of a piece of one, and of several behind each other.

    z[t, c] = Σ_i w[i, c] x[t - (k - 1) + i, c] + bias[c]        y = activation(z)

The k - 1 inputs before the first are the *state*.  Where sequences lie behind each other, each tap reads what belongs to the same sequence
as its result.  The operation is declared by a reference (`core.reference`), and it and its backward have kernels.

The reference composes it.  Without a state it is a convolution with an epilogue (`conv_bias_act`).  A state changes the first k - 1
results alone, which are such a convolution of the state and the first inputs.  Of packed sequences it is a sum of masked products, which
XLA computes in one pass.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxext._messages import format_value
from jaxext.core import activation as _activation
from jaxext.core import partition
from jaxext.core.call import Call
from jaxext.core.checks import checked, promoted, refuse_kinds, refuse_shape
from jaxext.core.epilogue import accumulated, applied
from jaxext.core.family import Family, declare
from jaxext.core.reference import Declaration, Keywords, Reference
from jaxext.core.static import Static
from jaxext.lax.dispatch import compiled, conv_precision
from jaxext.ops.causal.cuda import CudaCausal
from jaxext.ops.causal.triton import TritonCausal
from jaxext.ops.fused import conv_bias_act

LAYOUT = ("NWC", "WIO", "NWC")

# Of the operands, in their order.  B: the sequences, J: the taps, S: the steps of a state.
LABELS = {
    "x": ("B", "T", "C"),
    "w": ("J", "C"),
    "bias": ("C",),
    "initial_states": ("B", "S", "C"),
    "seq_idx": ("B", "T"),
    "idx_of_states": ("B", "S"),
}
NUMBERS = ("seq_idx", "idx_of_states")
FACTORS = ("w", "bias", "initial_states")  # beside x, whose dtype the result has


def convolution(
    name: str, arrays: Mapping[str, Any], activation, *, return_final_states: bool, implementation: str | None, precision=None
) -> Any:
    """`arrays`: x and w, and bias, seq_idx, initial_states and their numbers, `idx_of_states`, if they are given."""
    arrays = checked(name, arrays)
    if not isinstance(return_final_states, bool | np.bool_):
        raise TypeError(f"{name}: return_final_states is {format_value(return_final_states)}, want a bool")
    x, w = arrays["x"], arrays["w"]
    refuse_shapes(name, arrays, x.ndim >= 2, "(..., T, C)")
    if "seq_idx" in arrays:
        refuse_shape(name, "seq_idx", arrays["seq_idx"], x.shape[:-1], "the number of each step's sequence")
        if not jnp.issubdtype(arrays["seq_idx"].dtype, jnp.integer):
            raise TypeError(f"{name}: seq_idx is {arrays['seq_idx'].dtype}, want integers")
    if "initial_states" in arrays:
        state = (*x.shape[:-2], w.shape[0] - 1, x.shape[-1])
        refuse_shape(name, "initial_states", arrays["initial_states"], state, "the inputs before the first step")
    activation, function = _activation.named(name, activation)
    key = (tuple(arrays), activation, bool(return_final_states))
    z, *state = compiled(_convolution, key, FAMILY, implementation, tuple(arrays.values()), {"precision": precision}, name=name)
    y = applied(name, function, z, {})
    return (y, *state) if return_final_states else y


def refuse_shapes(name: str, arrays: Mapping[str, jax.Array], fits: bool, wanted: str) -> None:
    """Raise if x, whose shape `fits` or is not as `wanted`, w and bias do not go together."""
    x, w = arrays["x"], arrays["w"]
    if not fits:
        raise TypeError(f"{name}: x has the shape {x.shape}, want {wanted}")
    if w.ndim != 2 or w.shape[0] < 1 or w.shape[1] != x.shape[-1]:
        wanted = f"(k, {x.shape[-1]}) with at least one tap, since x has the shape {x.shape}, channels last"
        raise TypeError(f"{name}: w has the shape {w.shape}, want {wanted}")
    for argument in ("x", "w"):
        if not jnp.issubdtype(arrays[argument].dtype, jnp.inexact):
            raise TypeError(f"{name}: {argument} is {arrays[argument].dtype}, want floating-point numbers")
    refuse_kinds(name, {argument: arrays[argument] for argument in FACTORS if argument in arrays}, x.dtype)
    if "bias" in arrays:
        refuse_shape(name, "bias", arrays["bias"], x.shape[-1:], "an element for each channel")


def _convolution(names, activation, return_final_states, *arrays, precision, implementation):
    given = dict(zip(names, arrays, strict=True))
    if precision is not None:
        precision = conv_precision(precision)
    x, taps = given["x"], given["w"].shape[0]
    promoted(given, ("x", "w"))  # raises where the user wants no promotion
    empty = () if taps > 1 else ("initial_states", "idx_of_states")  # XLA 0.11.2 crashes where devices add up cotangents without elements
    for argument, dtype in (("bias", accumulated(x.dtype)), ("initial_states", x.dtype)):
        if argument in given and not jnp.issubdtype(given[argument].dtype, jnp.inexact):
            given[argument] = given[argument].astype(dtype)  # integers have no derivative
    if "seq_idx" in given and "initial_states" in given and "idx_of_states" not in given:  # of the first sequence, if there are steps
        numbers = given["seq_idx"]
        place = lax.broadcasted_iota(jnp.int32, numbers.shape, numbers.ndim - 1, out_sharding=partition.explicit(jax.typeof(numbers)))
        first = jnp.where(place == 0, numbers, 0).sum(-1, keepdims=True, dtype=numbers.dtype)
        given["idx_of_states"] = jnp.broadcast_to(first, (*x.shape[:-2], taps - 1))
    operands = {name: given[name] for name in LABELS if name in given and name not in empty}
    operation = _declaration(tuple(operands)).operation
    # Also the keywords of the reference, which forward mode takes.
    keywords = {"activation": activation} | {name: of for name, of in (("implementation", implementation), ("precision", precision)) if of}
    static = Static(
        ranks=operation.pack({"B": x.ndim - 2}),
        dtypes=(x.dtype,),
        precision=precision,
        implementation=implementation,
        options=Keywords(tuple(keywords.items())),
    )
    y = operation.bind(operands, static, wanted=(operation.open,))[operation.open]
    return (y, _final(given, taps - 1)) if return_final_states else (y,)


@functools.cache
def _declaration(names: tuple[str, ...]) -> Declaration:
    inputs = {name: LABELS[name] for name in names}
    declared = Declaration(
        name=FAMILY.name,
        reference=functools.partial(_composed, names),
        inputs=inputs,
        results={"y": LABELS["x"]},
        unsharded=("J", "T", "S") if any("S" in of for of in inputs.values()) else ("J", "T"),
        constant=tuple(name for name in NUMBERS if name in names),
        dropped=("y",),
        examples=_examples,
    )
    _ = declared.backward  # for which there are kernels
    return declared


def _examples(call: Call) -> dict[str, jax.Array]:
    """Numbers of four sequences of one length behind each other, the first of which has the state."""
    numbers = {"seq_idx": jnp.arange(call.sizes["T"]) * 4 // call.sizes["T"], "idx_of_states": 0}
    return {name: jnp.broadcast_to(numbers[name], call.shape_of(name)).astype(of) for name, of in call.dtypes.items() if name in NUMBERS}


def _composed(names, *arrays, activation, implementation=None, precision=None) -> tuple[jax.Array]:
    """The definition: by convolutions with an epilogue, and by jnp where sequences are packed."""
    given = dict(zip(names, arrays, strict=True))
    with jax.numpy_dtype_promotion("standard"):  # whether they may be promoted was asked by the call
        x, w = promoted(given, ("x", "w")).values()
    bias, state, dtype = given.get("bias"), given.get("initial_states"), given["x"].dtype
    if "seq_idx" in given:
        return (_packed(x, w, bias, given["seq_idx"], given.get("idx_of_states"), state, activation).astype(dtype),)
    taps, steps = w.shape[0], x.shape[-2]

    def convolved(x, low):
        """The results that a state has not changed: as many as there are inputs, or k - 1 fewer without a `low` padding."""
        return conv_bias_act(
            x,
            w[:, None][:, : x.shape[-1]],  # without channels, of none
            (1,),
            ((low, 0),),
            dimension_numbers=LAYOUT,
            feature_group_count=max(1, x.shape[-1]),
            precision=precision,
            bias=bias,
            activation=activation,
            implementation=implementation,
        )

    y = convolved(x, taps - 1)
    if state is not None and steps:
        head = convolved(jnp.concatenate([state.astype(x.dtype), x[..., : taps - 1, :]], -2), 0)
        y = lax.dynamic_update_slice(y, head, (0,) * y.ndim)
    return (y.astype(dtype),)


FAMILY, _ = (
    declare(Family(name, lax_primitive=None, names=name), CudaCausal(), TritonCausal(), Reference())
    for name in ("causal_conv1d", "causal_conv1d_backward")
)


def _packed(x, w, bias, seq_idx, idx_of_states, state, activation) -> jax.Array:
    """Return the result of sequences behind each other: a tap reads zero where the number of the sequence is another one."""
    if idx_of_states is not None:
        x, seq_idx = jnp.concatenate([state.astype(x.dtype), x], -2), jnp.concatenate([idx_of_states, seq_idx], -1)
        return _packed(x, w, bias, seq_idx, None, None, activation)[..., idx_of_states.shape[-1] :, :]
    wide, taps, axis = accumulated(x.dtype), w.shape[0], x.ndim - 2

    def term(i):
        back = taps - 1 - i
        read = jnp.where(_same(seq_idx, back)[..., None], _delayed(x, back, axis), jnp.zeros((), x.dtype))
        return read.astype(wide) * along(w[i].astype(wide), x)

    z = functools.reduce(jnp.add, map(term, range(taps)))
    z = z if bias is None else z + along(bias.astype(wide), x)
    return _activation.apply(activation, z).astype(x.dtype)


def along(of_channels: jax.Array, x: jax.Array) -> jax.Array:
    """A number for each channel, with as many axes as x."""
    return lax.expand_dims(of_channels, range(x.ndim - 1))


def _same(seq_idx: jax.Array, back: int) -> jax.Array:
    """Return whether a step and the one so far before it are there, and of one sequence."""
    axis = seq_idx.ndim - 1
    back = min(back, seq_idx.shape[axis])
    later, earlier = (lax.slice_in_dim(seq_idx, begin, begin + seq_idx.shape[axis] - back, axis=axis) for begin in (back, 0))
    return lax.pad(later == earlier, False, [(back if i == axis else 0, 0, 0) for i in range(seq_idx.ndim)])


def _delayed(x: jax.Array, steps: int, axis: int) -> jax.Array:
    """x with zeros in front, and as many steps less at the end."""
    if steps == 0:
        return x
    steps = min(steps, x.shape[axis])
    return lax.pad(x, jnp.zeros((), x.dtype), [(steps, -steps, 0) if i == axis else (0, 0, 0) for i in range(x.ndim)])


def _final(given: Mapping[str, jax.Array], steps: int) -> jax.Array:
    """The last inputs, zeros in the place of those of other sequences than the last."""
    last = _last(given.get("initial_states"), given["x"], steps)
    if "seq_idx" not in given:
        return last
    before = given["idx_of_states"][..., None] if "idx_of_states" in given else None
    numbers = _last(before, given["seq_idx"][..., None], steps)
    return jnp.where(numbers == numbers[..., -1:, :], last, jnp.zeros((), last.dtype))


def _last(state: jax.Array | None, x: jax.Array, steps: int) -> jax.Array:
    """The last inputs, with those of the state, or zeros, before them."""
    missing = max(0, steps - x.shape[-2])
    if missing == 0:
        return x[..., x.shape[-2] - steps :, :]
    before = (
        jnp.zeros((*x.shape[:-2], missing, x.shape[-1]), x.dtype) if state is None else state[..., steps - missing :, :].astype(x.dtype)
    )
    return jnp.concatenate([before, x], -2)
