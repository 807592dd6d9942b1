"""lax's two products read as forms: `dot_general` in any layout is one bind of MATMUL, a convolution one bind of its form.

`substitute` runs a function with every product of lax in it replaced; the public operations are their namesakes so substituted,
which is why shapes, dtypes, weak types and errors agree with lax by construction.  It must not know the public names.
"""

from __future__ import annotations

import enum
import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import Tracer
from jax.extend.core import ClosedJaxpr, Literal
from jax.sharding import NamedSharding, Sharding
from jax.sharding import PartitionSpec as P

from jaxext import _compat
from jaxext.families.conv import conv_form
from jaxext.families.matmul import MATMUL
from jaxext.forms.form import replacing_lax
from jaxext.forms.window import Window, dilate


class Keywords(tuple):
    """Static keyword arguments as a key of caches, which compares and hashes as fast as a tuple; `given` holds them as they were given.

    Keys are equal only if all types in them are.  lax tells 1 from 1.0, and numpy says that float64's dtype equals None.
    """

    given: Mapping[str, Any]

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> Keywords | None:
        """None if a value is no plain one: it can change, be used up or be traced."""
        try:
            self = cls([None if value is None else _frozen(value) for value in given.values()])
        except TypeError:
            return None
        self.given = given
        return self

    def copy(self) -> dict[str, Any]:
        """What was given, for those who keep it: a list or an array can change after."""
        return {name: _copied(value) for name, value in self.given.items()}


# Of these types equal values are the same to lax.
_PLAIN = (str, bool, int, float, complex, np.generic, np.dtype, type, enum.Enum, P, Sharding, type(None))


def _frozen(value):
    """A hashable that equals another only if lax cannot tell the values apart.

    Raises:
      TypeError: there is none.
    """
    kind = type(value)
    if kind in (tuple, list) or hasattr(value, "_make"):
        return (kind, *map(_frozen, value))
    if isinstance(value, np.ndarray) and value.dtype != object:
        return kind, value.dtype, value.shape, value.tobytes()
    if isinstance(value, _PLAIN):
        hash(value)
        return kind, value
    raise TypeError


def _copied(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return value.copy()
    if isinstance(value, tuple | list):  # or a named tuple
        parts = map(_copied, value)
        return getattr(value, "_make", type(value))(parts)
    return value


def substitute(function: functools.partial, arrays: Sequence, implementation: str | None) -> jax.Array:
    """`function(*arrays)` with our products for lax's.

    It is traced on bare shapes and dtypes: what lax refuses of shapes it refuses here, in its own words; what it refuses of the operands'
    shardings is left to the form, which can do more.
    """
    _compat.refuse_parts(getattr(function.func, "__name__", "product"), "out_sharding", function.keywords.get("out_sharding"))
    arrays = tuple(x if isinstance(x, Tracer) else jnp.asarray(x) for x in arrays)
    bare = [jax.ShapeDtypeStruct(x.shape, x.dtype, weak_type=jax.typeof(x).weak_type) for x in arrays]
    with replacing_lax(False):
        jaxpr = jax.make_jaxpr(function)(*bare)
    return _evaluate(jaxpr, arrays, implementation)


def _evaluate(closed: ClosedJaxpr, args, implementation):
    """The value of a jaxpr with one result; only jit's own equations hold jaxprs in what lax and jnp trace for a product."""
    values = dict(zip((*closed.jaxpr.constvars, *closed.jaxpr.invars), (*closed.consts, *args), strict=True))

    def read(atom):
        return _constant(atom) if isinstance(atom, Literal) else values[atom]

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


def _constant(literal: Any) -> jax.Array:
    """A Python scalar that was an operand has a weak type, which an array of its dtype has not."""
    aval: Any = literal.aval
    weak = jnp.asarray(np.asarray(literal.val).item())
    same = (weak.dtype, weak.weak_type) == (aval.dtype, aval.weak_type)
    return weak if same else jnp.asarray(literal.val, aval.dtype)


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
    lhs_dilation, rhs_dilation = lhs_dilation or (1,) * rank, rhs_dilation or (1,) * rank  # lax takes () for ones
    feature_group_count, batch_group_count = int(feature_group_count), int(batch_group_count)  # from 2.0, too
    _refuse_numbers(rank, window_strides, lhs_dilation, rhs_dilation, dimension_numbers)
    dimension_numbers = lax.ConvDimensionNumbers(*(tuple(map(int, spec)) for spec in dimension_numbers))
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
    _refuse_sizes(window, lhs.shape[dimension_numbers.lhs_spec[0]], rhs.shape[dimension_numbers.rhs_spec[0]])
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


def _refuse_numbers(rank, window_strides, lhs_dilation, rhs_dilation, dimension_numbers):
    """Raise while tracing what lax leaves to the compiler to find out."""
    for name, value in (("lhs_dilation", lhs_dilation), ("rhs_dilation", rhs_dilation)):
        if len(value) != rank:
            raise ValueError(f"conv_general_dilated: {name} is {value}, want one entry for each of {rank} spatial axes")
    if any(stride <= 0 for stride in window_strides):
        raise ValueError(f"conv_general_dilated: window_strides is {window_strides}, want positive numbers")
    for name, spec in zip(dimension_numbers._fields, dimension_numbers, strict=True):
        if not isinstance(spec, Sequence) or sorted(spec) != list(range(rank + 2)):
            error = ValueError if isinstance(spec, Sequence) else TypeError
            raise error(f"conv_general_dilated: {name} of dimension_numbers is {spec}, want each of {rank + 2} axes once")


def _refuse_sizes(window, *others):
    """Raise where 64 bits overflow: lax's shapes wrap around, and XLA ends the process."""
    inputs = [low + dilate(n, d) + high for n, d, (low, high) in zip(window.input, window.input_dilation, window.padding, strict=True)]
    filters = list(map(dilate, window.filter, window.filter_dilation))
    result = [n for n in (*others, *window.output) if isinstance(n, int)]
    if any(isinstance(n, int) and n >= 2**63 for n in (*inputs, *filters, math.prod(result))):
        raise ValueError(
            f"conv_general_dilated: padded and dilated, lhs and rhs have spatial shapes {inputs} and {filters}, and the result has"
            f" {window.output}: want what 64 bits can count"
        )


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
