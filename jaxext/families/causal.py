"""Causal depthwise convolutions along time: of a whole sequence, of a piece of one, of several behind each other, and step by step.

    z[t, c] = Σ_i w[i, c] x[t - (k - 1) + i, c] + bias[c]        y = activation(z)

The k - 1 inputs before the first are the *state*.  Where sequences lie behind each other, each tap reads what belongs to the same sequence
as its result.  The operation is declared by a reference (`forms.by_reference`), and it and its backward have kernels.

The reference composes it.  Without a state it is a convolution with an epilogue (`fuse`).  A state changes the first k - 1 results alone,
which are such a convolution of the state and the first inputs.  Of packed sequences it is a sum of masked products, which XLA computes in
one pass.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxext.backends.cuda.cuda_convolutions import CudaCausal
from jaxext.backends.triton.triton_binding import TritonCausal
from jaxext.families import activation as _activation
from jaxext.families import fuse
from jaxext.families.dispatch import compiled
from jaxext.families.epilogues import accumulated
from jaxext.forms import partition
from jaxext.forms.by_reference import Declaration, Keywords, Reference
from jaxext.forms.call import Call
from jaxext.forms.family import Family, declare

LAYOUT = ("NWC", "WIO", "NWC")

# Of the operands, in their order.  B: the sequences, J: the taps, S: the steps of a state.
LABELS = {
    "x": ("B", "T", "C"),
    "weight": ("J", "C"),
    "bias": ("C",),
    "initial_states": ("B", "S", "C"),
    "seq_idx": ("B", "T"),
    "idx_of_states": ("B", "S"),
}
NUMBERS = ("seq_idx", "idx_of_states")
FACTORS = ("weight", "bias", "initial_states")  # beside x, whose dtype the result has


def convolution(name: str, arrays: Mapping[str, Any], activation, *, return_final_states: bool, implementation: str | None):
    """`arrays`: x and weight, and bias, seq_idx and initial_states if they are given; `idx_of_states`, their numbers, lets both be."""
    fuse.refuse(name, arrays)
    arrays = {argument: jnp.asarray(x) for argument, x in arrays.items()}
    x, weight = arrays["x"], arrays["weight"]
    _refuse_shapes(name, arrays, x.ndim >= 2, "(..., T, C)")
    if "seq_idx" in arrays:
        fuse.refuse_shape(name, "seq_idx", arrays["seq_idx"], x.shape[:-1], "the number of each step's sequence")
        if not jnp.issubdtype(arrays["seq_idx"].dtype, jnp.integer):
            raise TypeError(f"{name}: seq_idx is {arrays['seq_idx'].dtype}, want integers")
        state = "initial_states" in arrays and "idx_of_states" not in arrays
        for argument, given in (("initial_states", state), ("return_final_states", return_final_states)):
            if given:
                raise ValueError(f"{name}: {argument} is given beside seq_idx, want one of them: a state is of a single sequence")
    if "initial_states" in arrays:
        state = (*x.shape[:-2], weight.shape[0] - 1, x.shape[-1])
        fuse.refuse_shape(name, "initial_states", arrays["initial_states"], state, "the inputs before the first step")
    activation = _activation.named(name, activation)
    key = (tuple(arrays), activation, return_final_states)
    return compiled(_convolution, key, FAMILY, implementation, tuple(arrays.values()), {}, name=name)


def _refuse_shapes(name: str, arrays: Mapping[str, jax.Array], fits: bool, wanted: str) -> None:
    x, weight = arrays["x"], arrays["weight"]
    if not fits:
        raise TypeError(f"{name}: x has the shape {x.shape}, want {wanted}")
    if weight.ndim != 2 or weight.shape[0] < 1 or weight.shape[1] != x.shape[-1]:
        raise TypeError(f"{name}: weight has the shape {weight.shape}, want (k, {x.shape[-1]}) with at least one tap")
    for argument in ("x", "weight"):
        if not jnp.issubdtype(arrays[argument].dtype, jnp.inexact):
            raise TypeError(f"{name}: {argument} is {arrays[argument].dtype}, want floating-point numbers")
    fuse.refuse_kinds(name, {argument: arrays[argument] for argument in FACTORS if argument in arrays}, x.dtype)
    if "bias" in arrays:
        fuse.refuse_shape(name, "bias", arrays["bias"], x.shape[-1:], "an element for each channel")


def _convolution(names, activation, return_final_states, *arrays, implementation):
    given = dict(zip(names, arrays, strict=True))
    x, taps = given["x"], given["weight"].shape[0]
    fuse.promoted(given, ("x", "weight"))  # raises where the user wants no promotion
    empty = () if taps > 1 else ("initial_states", "idx_of_states")  # XLA 0.11.2 crashes where devices add up cotangents without elements
    for argument, dtype in (("bias", accumulated(x.dtype)), ("initial_states", x.dtype)):
        if argument in given and not jnp.issubdtype(given[argument].dtype, jnp.inexact):
            given[argument] = given[argument].astype(dtype)  # integers have no derivative
    operands = {name: given[name] for name in LABELS if name in given and name not in empty}
    operation = _declaration(tuple(operands)).operation
    rank = {"B": x.ndim - 2}
    # The implementation is also the keyword of the reference, which forward mode takes.
    (y,) = operation.bind(
        operands,
        wanted=(operation.open,),
        ranks=tuple(rank.get(label, 1) for label in operation.free),
        window=None,
        dtypes=(x.dtype,),
        precision=None,
        static=Keywords((("activation", activation), *([("implementation", implementation)] if implementation else []))),
        implementation=implementation,
        out_sharding=None,
    ).values()
    return (y, _last(given.get("initial_states"), x, taps - 1)) if return_final_states else y


@functools.cache
def _declaration(names: tuple[str, ...]) -> Declaration:
    """Of the operation with these operands."""
    inputs = {name: LABELS[name] for name in names}
    declared = Declaration(
        name=FAMILY.name,
        reference=functools.partial(_composed, names),
        inputs=inputs,
        results={"y": LABELS["x"]},
        whole=("J", "T", "S") if any("S" in of for of in inputs.values()) else ("J", "T"),
        constant=tuple(name for name in NUMBERS if name in names),
        dropped=("y",),
        examples=_examples,
    )
    _ = declared.backward  # for which there are kernels
    return declared


def _examples(call: Call) -> dict[str, jax.Array]:
    """Numbers of four sequences of one length behind each other."""
    numbers = jnp.arange(call.sizes["T"]) * 4 // call.sizes["T"]
    return {name: jnp.broadcast_to(numbers.astype(of), call.shape_of(name)) for name, of in call.dtypes.items() if name == "seq_idx"}


def _composed(names, *arrays, activation, implementation=None) -> tuple[jax.Array]:
    """The definition: by convolutions with an epilogue, and by jnp where sequences are packed."""
    given = dict(zip(names, arrays, strict=True))
    with jax.numpy_dtype_promotion("standard"):  # whether they may be promoted was asked by the call
        x, weight = fuse.promoted(given, ("x", "weight")).values()
    bias, state, dtype = given.get("bias"), given.get("initial_states"), given["x"].dtype
    if "seq_idx" in given:
        return (_packed(x, weight, bias, given["seq_idx"], given.get("idx_of_states"), state, activation).astype(dtype),)
    taps, steps = weight.shape[0], x.shape[-2]

    def convolved(x, low):
        return _convolved(x, weight, bias, activation, low, implementation)

    y = convolved(x, taps - 1)
    if state is not None and steps:
        head = convolved(jnp.concatenate([state.astype(x.dtype), x[..., : taps - 1, :]], -2), 0)
        y = lax.dynamic_update_slice(y, head, (0,) * y.ndim)
    return (y.astype(dtype),)


FAMILY, _ = (
    declare(Family(name, twin=None, names=name), CudaCausal(), TritonCausal(), Reference())
    for name in ("causal_conv1d", "causal_conv1d_backward")
)


def _convolved(x, weight, bias, activation, low, implementation):
    """The results that a state has not changed: as many as there are inputs, or k - 1 fewer without a `low` padding."""
    arrays = {"lhs": x, "rhs": weight[:, None][:, : x.shape[-1]]} | ({} if bias is None else {"bias": bias})  # without channels, of none
    return fuse.conv_bias_act(
        arrays,
        activation,
        implementation=implementation,
        window_strides=(1,),
        padding=((low, 0),),
        lhs_dilation=None,
        rhs_dilation=None,
        dimension_numbers=LAYOUT,
        feature_group_count=max(1, x.shape[-1]),
        batch_group_count=1,
        precision=None,
        preferred_element_type=None,
        out_sharding=None,
    )


def _packed(x, weight, bias, seq_idx, idx_of_states, state, activation) -> jax.Array:
    """Of sequences behind each other: a tap reads zero where the number of the sequence is another one."""
    if idx_of_states is not None:
        x, seq_idx = jnp.concatenate([state.astype(x.dtype), x], -2), jnp.concatenate([idx_of_states, seq_idx], -1)
        return _packed(x, weight, bias, seq_idx, None, None, activation)[..., idx_of_states.shape[-1] :, :]
    wide, taps, axis = accumulated(x.dtype), weight.shape[0], x.ndim - 2

    def term(i):
        back = taps - 1 - i
        read = jnp.where(_same(seq_idx, back)[..., None], _delayed(x, back, axis), jnp.zeros((), x.dtype))
        return read.astype(wide) * _along(weight[i].astype(wide), x)

    z = functools.reduce(jnp.add, map(term, range(taps)))
    z = z if bias is None else z + _along(bias.astype(wide), x)
    return _activation.apply(activation, z).astype(x.dtype)


def _along(of_channels: jax.Array, x: jax.Array) -> jax.Array:
    return lax.expand_dims(of_channels, range(x.ndim - 1))


def _same(seq_idx: jax.Array, back: int) -> jax.Array:
    """Whether a step and the one so far before it are there, and of one sequence."""
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


def _last(state: jax.Array | None, x: jax.Array, steps: int) -> jax.Array:
    """The last inputs, with those of the state, or zeros, before them."""
    missing = max(0, steps - x.shape[-2])
    if missing == 0:
        return x[..., x.shape[-2] - steps :, :]
    before = (
        jnp.zeros((*x.shape[:-2], missing, x.shape[-1]), x.dtype) if state is None else state[..., steps - missing :, :].astype(x.dtype)
    )
    return jnp.concatenate([before, x], -2)


def update(name: str, arrays: Mapping[str, Any], activation) -> Any:
    """`arrays`: x, conv_state and weight, and bias, cache_seqlens and conv_state_indices if they are given."""
    fuse.refuse(name, arrays)
    arrays = {argument: jnp.asarray(x) for argument, x in arrays.items()}
    x, state, weight = arrays["x"], arrays["conv_state"], arrays["weight"]
    if x.ndim == 0 or state.ndim < 2 or state.shape[-1] != x.shape[-1]:
        raise TypeError(f"{name}: conv_state has the shape {state.shape}, want (..., steps, C), since x has the shape {x.shape}")
    _refuse_shapes(name, arrays, x.ndim in (state.ndim - 1, state.ndim), "(..., C) or (..., T, C), beside conv_state (..., steps, C)")
    lead = x.shape[: state.ndim - 2]
    if state.shape[-2] < weight.shape[0] - 1:
        raise ValueError(
            f"{name}: conv_state has {state.shape[-2]} steps, want {weight.shape[0] - 1} at least, one less than weight has taps"
        )
    indices = "conv_state_indices" in arrays
    if indices and state.ndim != 3 or not indices and state.shape[:-2] != lead:
        raise TypeError(f"{name}: conv_state has the shape {state.shape}, want {(*lead, state.shape[-2], x.shape[-1])}")
    kind, wanted = (jnp.floating, "floating-point") if jnp.issubdtype(x.dtype, jnp.floating) else (jnp.complexfloating, "complex")
    if not jnp.issubdtype(state.dtype, kind):
        raise TypeError(f"{name}: conv_state is {state.dtype}, want {wanted} numbers, since x is {x.dtype}")
    for argument in ("cache_seqlens", "conv_state_indices"):
        if argument in arrays:
            fuse.refuse_shape(name, argument, arrays[argument], lead, "an element for each sequence")
            if not jnp.issubdtype(arrays[argument].dtype, jnp.integer):
                raise TypeError(f"{name}: {argument} is {arrays[argument].dtype}, want integers")
    key = (tuple(arrays), _activation.named(name, activation))
    return compiled(_update, key, FAMILY, None, tuple(arrays.values()), {}, name=name)


def _update(names, activation, *arrays, implementation):
    del implementation
    given = dict(zip(names, partition.on_one_mesh(arrays), strict=True))
    x, buffer, weight, bias = given["x"], given["conv_state"], given["weight"], given.get("bias")
    single = x.ndim < buffer.ndim
    x = x[..., None, :] if single else x
    indices, lengths = given.get("conv_state_indices"), given.get("cache_seqlens")
    indices = None if indices is None else indices.astype(jnp.int32)  # the rows may be more than fewer bits count
    own = partition.explicit(jax.typeof(buffer))
    of_rows = None if own is None else NamedSharding(own.mesh, P(jax.typeof(x).sharding.spec[0], *own.spec[1:]))
    state = buffer if indices is None else buffer.at[jnp.clip(indices, 0, buffer.shape[0] - 1)].get(out_sharding=of_rows)
    for axis in (*range(x.ndim - 2), x.ndim - 1):  # sequences and channels
        of_lengths = axis if lengths is not None and axis < lengths.ndim else None
        x, state, lengths = partition.alike((x, state, lengths), (axis, axis, of_lengths))
    taps, size, steps = weight.shape[0], state.shape[-2], x.shape[-2]
    if lengths is None:
        before = state[..., size - (taps - 1) :, :]
        new = jnp.concatenate([state, x.astype(state.dtype)], -2)[..., steps:, :]
    else:
        before, new = _in_circle(state, x, lengths, taps)
    wide = accumulated(jnp.promote_types(x.dtype, weight.dtype))
    read = jnp.concatenate([before.astype(wide), x.astype(wide)], -2)
    z = functools.reduce(jnp.add, [read[..., i : i + steps, :] * _along(weight[i].astype(wide), x) for i in range(taps)])
    z = z if bias is None else z + _along(bias.astype(wide), x)
    y = _activation.apply(activation, z).astype(given["x"].dtype)
    if indices is not None:  # a negative index has no state
        y = jnp.where((indices >= 0)[..., None, None], y, jnp.zeros((), y.dtype))
        at = jnp.where(indices >= 0, indices, buffer.shape[0])
        new = buffer.at[at].set(new, mode="drop", out_sharding=own)
    return (y[..., 0, :] if single else y), new


def _in_circle(state, x, lengths, taps):
    """The inputs before these, and the state with these; step t of a sequence lies at t modulo the size."""
    size, steps = state.shape[-2], x.shape[-2]
    kept = min(steps, size)  # the others would be overwritten
    lengths = (lengths % max(size, 1) if size <= jnp.iinfo(lengths.dtype).max else lengths).astype(jnp.int32)  # offsets may be negative

    def place(first, last):
        offsets = lax.broadcasted_iota(lengths.dtype, (*lengths.shape, last - first), lengths.ndim) + first
        return (lengths[..., None] + offsets) % size

    own = partition.explicit(jax.typeof(state))  # said where jax cannot tell it: a caller's vmap may map the places, and not the state
    of_all, of_some = (own and NamedSharding(own.mesh, P(at, own.spec[-1])) for at in (own and own.spec[-2], None))

    def read(state, at):
        return state.at[at].get(out_sharding=of_some)

    def put(state, at, x):
        return state.at[at].set(x, unique_indices=True, out_sharding=of_all)

    for _ in lengths.shape:
        read, put = jax.vmap(read), jax.vmap(put)
    before = read(state, place(1 - taps, 0))
    return before, put(state, place(steps - kept, steps), x[..., steps - kept :, :].astype(state.dtype))
