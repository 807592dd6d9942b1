"""lax's two products read as forms: `dot_general` in any layout is one bind of MATMUL, a convolution one bind of its form.

`substitute` runs a function with every product of lax in it replaced; the public operations are their namesakes so substituted,
which is why shapes, dtypes, weak types and errors agree with lax by construction.  It must not know the public names.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import ClosedJaxpr, Literal
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxext import _compat
from jaxext._conv import conv_form
from jaxext._form import replacing_lax
from jaxext._matmul import MATMUL
from jaxext._window import Window


class Keywords:
    """Static keyword arguments that can be a key of a cache.

    Equal only if their types are: numpy says that float64's dtype equals None, and jit's cache once took the one for the other.
    """

    def __init__(self, keywords: Mapping[str, Any]):
        self.items = tuple((name, type(value), _frozen(value)) for name, value in keywords.items())

    def __eq__(self, other):
        return isinstance(other, Keywords) and self.items == other.items

    def __hash__(self):
        return hash(self.items)

    def __call__(self) -> dict[str, Any]:
        return {name: value for name, _, value in self.items}


def _frozen(value):
    """Sequences as tuples: a key is hashed."""
    if isinstance(value, np.ndarray):
        value = value.tolist()
    is_sequence = isinstance(value, Sequence) and not isinstance(value, str | P) and not hasattr(value, "_fields")
    return tuple(map(_frozen, value)) if is_sequence else value


def substitute(function: Callable, keywords: Keywords, arrays: Sequence, implementation: str | None) -> jax.Array:
    """`function(*arrays, **keywords())` with our products for lax's.

    It is traced on bare shapes and dtypes: what lax refuses of shapes it refuses here, in its own words; what it refuses of the operands'
    shardings is left to the form, which can do more.
    """
    arrays = tuple(map(jnp.asarray, arrays))
    _compat.refuse_parts(getattr(function, "__name__", "product"), "out_sharding", keywords().get("out_sharding"))
    bare = tuple((x.shape, x.dtype, jax.typeof(x).weak_type) for x in arrays)
    # A function without arrays holds them itself, and symbolic sizes of two scopes cannot be compared: neither may be kept.
    keep = arrays and all(isinstance(n, int) for shape, _, _ in bare for n in shape)
    with replacing_lax(False):
        jaxpr = (_jaxpr if keep else _jaxpr.__wrapped__)(function, keywords, bare, _compat.trace_context())
    return _evaluate(jaxpr, arrays, implementation)


@functools.lru_cache(maxsize=4096)
def _jaxpr(function, keywords, bare, context):
    """The jaxpr of a namesake; `context`, all of jax's configuration that tracing reads, is only there to tell entries apart."""
    del context
    operands = [jax.ShapeDtypeStruct(shape, dtype, weak_type=weak_type) for shape, dtype, weak_type in bare]
    return jax.make_jaxpr(functools.partial(function, **keywords()))(*operands)


def _evaluate(closed: ClosedJaxpr, args, implementation):
    """The value of a jaxpr with one result; only jit's own equations hold jaxprs in what lax and jnp trace for a product."""
    values = dict(zip((*closed.jaxpr.constvars, *closed.jaxpr.invars), (*closed.consts, *args), strict=True))

    def read(atom):
        return atom.val if isinstance(atom, Literal) else values[atom]

    for eqn in closed.jaxpr.eqns:
        operands = [read(atom) for atom in eqn.invars]
        if eqn.primitive is lax.dot_general_p:
            out = _dot_general(*operands, dtype=eqn.outvars[0].aval.dtype, implementation=implementation, **eqn.params)
        elif eqn.primitive is lax.conv_general_dilated_p:
            out = _conv_general_dilated(*operands, dtype=eqn.outvars[0].aval.dtype, implementation=implementation, **eqn.params)
        elif eqn.primitive.name in ("jit", "pjit"):
            out = _evaluate(eqn.params["jaxpr"], operands, implementation)
        else:
            out = eqn.primitive.bind(*operands, **eqn.params)
        values[eqn.outvars[0]] = out
    return read(closed.jaxpr.outvars[0])


def _dot_general(lhs, rhs, *, dimension_numbers, precision, out_sharding, dtype, implementation, preferred_element_type):
    """With K contracted: lhs (B M K) and rhs (B K N) are a and b of the form; (B M K) and (B N K) are its c and b, (B K M) and (B K N)
    its a and c.  Only (B K M) with (B N K), the product of two transposes, moves an operand.
    """
    del preferred_element_type  # it has become dtype
    (lc, rc), (lb, rb) = dimension_numbers
    batch, summed = len(lb), len(lc)
    lhs_free, rhs_free = lhs.ndim - batch - summed, rhs.ndim - batch - summed
    order = sorted(range(summed), key=lambda i: lc[i])  # as lhs holds its contracted axes
    lhs, k_first = _arrange(lhs, lb, [lc[i] for i in order])
    rhs, n_last = _arrange(rhs, rb, [rc[i] for i in order])
    n_last = n_last or rhs_free == 0
    if k_first and not n_last:
        lhs, k_first = _transpose(lhs, [*range(batch), *range(batch + summed, lhs.ndim), *range(batch, batch + summed)]), False
    if k_first:
        open, operands, ranks = "b", {"a": lhs, "c": rhs}, dict(M=summed, K=lhs_free, N=rhs_free)
    elif n_last:
        open, operands, ranks = "c", {"a": lhs, "b": rhs}, dict(M=lhs_free, K=summed, N=rhs_free)
    else:
        open, operands, ranks = "a", {"c": lhs, "b": rhs}, dict(M=lhs_free, N=summed, K=rhs_free)
    return MATMUL.bind(
        open,
        operands,
        ranks=tuple(dict(ranks, B=batch)[label] for label in MATMUL.free),
        window=None,
        dtype=dtype,
        precision=precision,
        implementation=implementation,
        out_sharding=out_sharding,
    )


def _arrange(x, batch, contract):
    """An operand as (batch, contracted, free) if it lies so, else as (batch, free, contracted), and whether the contracted axes lead."""
    free = [axis for axis in range(x.ndim) if axis not in batch and axis not in contract]
    if [*batch, *contract, *free] == list(range(x.ndim)) and free:
        return x, True
    return _transpose(x, [*batch, *free, *contract]), False


def _transpose(x, permutation):
    return x if list(permutation) == list(range(x.ndim)) else lax.transpose(x, permutation)


def _conv_general_dilated(
    lhs,
    rhs,
    *,
    window_strides,
    padding,
    lhs_dilation,
    rhs_dilation,
    dimension_numbers,
    feature_group_count,
    batch_group_count,
    precision,
    out_sharding,
    dtype,
    implementation,
    preferred_element_type,
):
    """Channels to the end, groups to an axis of their own: feature groups are the label G; batch groups, each with its own inputs and
    filters, are the label B.
    """
    del preferred_element_type  # it has become dtype
    rank = lhs.ndim - 2
    for name, value in (("lhs_dilation", lhs_dilation), ("rhs_dilation", rhs_dilation)):
        if len(value) != rank:  # lax leaves it to the compiler to find out
            raise ValueError(f"conv_general_dilated: {name} is {value}, want one entry for each of {rank} spatial axes")
    if any(stride <= 0 for stride in window_strides):  # lax leaves it to the compiler to find out
        raise ValueError(f"conv_general_dilated: window_strides is {window_strides}, want positive numbers")
    x = _transpose(lhs, _channels_last(dimension_numbers.lhs_spec))  # (N, *input, C)
    w = _transpose(rhs, _channels_last(dimension_numbers.rhs_spec))  # (K, *filter, C)
    window = Window(
        input=x.shape[1:-1],
        filter=w.shape[1:-1],
        stride=window_strides,
        padding=padding,
        input_dilation=lhs_dilation,
        filter_dilation=rhs_dilation,
    )
    form = conv_form(window.rank)
    grouped, batched = feature_group_count > 1, batch_group_count > 1
    if grouped:
        x, w = _split(x, -1, feature_group_count), _split(w, 0, feature_group_count)
    if batched:
        x, w = _split(x, 0, batch_group_count), _split(w, 0, batch_group_count)
    ranks = dict(B=int(batched), N=1, G=int(grouped), C=1, K=1)
    to_user = tuple(_inverse(_channels_last(dimension_numbers.out_spec)))
    y = form.bind(
        "y",
        {"x": x, "w": w},
        ranks=tuple(ranks[label] for label in form.free),
        window=window,
        dtype=dtype,
        precision=precision,
        implementation=implementation,
        out_sharding=_channels_last_sharding(out_sharding, dimension_numbers, feature_group_count, batch_group_count),
    )
    if batched:
        y = jnp.moveaxis(y, 0, -2)
    if grouped or batched:
        y = lax.collapse(y, y.ndim - 2)
    y = _transpose(y, to_user)
    return y if out_sharding is None else jax.sharding.reshard(y, out_sharding)


def _channels_last(spec):
    return (spec[0], *spec[2:], spec[1])


def _split(x, axis, groups):
    axis %= x.ndim
    return lax.reshape(x, (*x.shape[:axis], groups, x.shape[axis] // groups, *x.shape[axis + 1 :]))


def _inverse(permutation):
    return sorted(range(len(permutation)), key=permutation.__getitem__)


def _channels_last_sharding(sharding, dimension_numbers, feature_group_count, batch_group_count):
    """The sharding of the form's result for a wanted one of lax's; channels that are split into groups stay whole until the end."""
    if sharding is None:
        return None
    n, c, *spatial = dimension_numbers.out_spec
    spec = (*sharding.spec, *(None,) * (2 + len(spatial) - len(sharding.spec)))
    groups = (None,) if feature_group_count > 1 or batch_group_count > 1 else ()
    channels = (None,) if groups else (spec[c],)
    batch_groups = groups if batch_group_count > 1 else ()
    feature_groups = groups if feature_group_count > 1 else ()
    return NamedSharding(sharding.mesh, P(*batch_groups, spec[n], *(spec[s] for s in spatial), *feature_groups, *channels))
