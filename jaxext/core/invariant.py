"""Products whose rows have the same bits in every batch: `use_invariant`.

The order in which the sum of a row is rounded depends on the sizes of the whole product, from which an implementation chooses its tiles.
Here it depends on those of a *part* alone: a fixed number of rows, and no batch.  A kernel, whose tiles do not know of each other, takes
the config for a part and computes all rows by it.  Others, such as XLA's products, compute part after part in a loop.

Rows are the free axes of the first factor: rows of matrices, images, axes of vmap.  The batch are axes that all slots have.  The gradient
of the weights is a sum over rows, so it depends on the batch in any case, and is computed as ever.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxext import _compat
from jaxext.core.call import Call, symbolic_size

# How many rows a part has: of matrices, and of images.  XLA's CPU backend is fast for few.
_ROWS = {"cpu": (32, 1)}
_ROWS_ELSEWHERE = (128, 8)


@dataclasses.dataclass(frozen=True)
class Invariant:
    """A stand-in for the name of an implementation, which may be None: the bits of a row do not depend on the others."""

    name: str | None


def part_of(call: Call, name: str | None) -> Call | None:
    """The call of a part, by the implementation of this name.  None if the result has no rows, as the gradient of weights.

    Raises:
      NotImplementedError: a size is symbolic.
    """
    if call.rows is None or call.empty:
        return None
    if reason := symbolic_size(call):
        raise NotImplementedError(f"{call.op}: inside use_invariant, {reason}")
    batch, row = call.rows
    size = _ROWS.get(call.platform, _ROWS_ELSEWHERE)[call.window is not None]
    sizes, of_window = {**call.sizes, batch: 1, row: size}, {} if call.window is None else call.window.sizes
    named = {label: label if label in of_window else f"{label}0" for label in sizes if label != batch}
    parameters = call.parameters
    if call.operation is not None:  # its composition reads them
        parameters = parameters.replace(ranks=tuple(int(label != batch) for label in call.operation.free), implementation=name)
    return dataclasses.replace(
        call,
        axes={slot: tuple(named[label] for label in labels if label != batch) for slot, labels in call.labels.items()},
        extents={axis: sizes[label] for label, axis in named.items()},
        sizes=sizes,
        parameters=parameters,
        rows=None,
        in_loop=True,
    )


def run_parts(call: Call, part: Call, operands: Mapping[str, jax.Array], compute: Callable[[Mapping[str, jax.Array]], Any]) -> Any:
    """The result of a call, or a tuple if it has several, part after part.

    The compiler does not know the number of parts, so it makes the same code for all numbers.
    """
    assert call.rows is not None
    batch, row = call.rows
    batches, rows, size = call.sizes[batch], call.sizes[row], part.sizes[row]
    total = max(rows, size + 1)  # the compiler would take a slice of all rows out of the loop, and compute it by other code
    parts = -(-max(rows, size) // size)
    number, of_batch = lax.optimization_barrier((jnp.int32(batches * parts), jnp.int32(parts)))
    with_rows = {slot for slot, labels in call.labels.items() if row in labels}

    def whole(slot: str) -> tuple[int, ...]:
        """The shape of a slot, with an axis for each label, and with at least as many rows as a part."""
        return batches, *(total if label == row else call.sizes[label] for label in call.labels[slot][1:])

    def padded(slot: str, x: jax.Array) -> jax.Array:
        return jnp.pad(x, [(0, n - of_x) for of_x, n in zip(x.shape, whole(slot), strict=True)])

    def of_part(index, results):
        b, i = lax.div(index, of_batch), lax.rem(index, of_batch)
        start = i * np.int32(size)  # dynamic slices begin earlier if they would end too late: the last part among rows that are done
        own = {slot: lax.dynamic_index_in_dim(x, b, keepdims=False) for slot, x in arrays.items()}
        done = compute({slot: lax.dynamic_slice_in_dim(x, start, size) if slot in with_rows else x for slot, x in own.items()})
        done = done if call.further else (done,)
        return [lax.dynamic_update_slice(y, x[None], [b, start, *[np.int32(0)] * (y.ndim - 2)]) for y, x in zip(results, done, strict=True)]

    arrays = {slot: padded(slot, x) for slot, x in call.flatten(operands).items()}
    empty = [jnp.zeros(whole(slot), dtype) for slot, dtype in call.results.items()]
    results = _compat.align_varying(*arrays.values(), *empty)[len(arrays) :]
    results = lax.fori_loop(np.int32(0), number, of_part, list(results))
    results = tuple(y[:, :rows].reshape(call.shape_of(slot)) for slot, y in zip(call.results, results, strict=True))
    return results if call.further else results[0]
