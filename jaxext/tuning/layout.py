"""Finds a product's arrays as a program stores them, and their layout (order of axes), for `explain`.

A form has a fixed order of axes.  The call adds transposes around it, and reshapes that split channels into groups.  They are followed
backwards from the operands and forwards from the result.  Axes get the letters of `lax`'s dimension numbers, such as NHWC and HWIO.  An
axis added by `vmap` repeats the letter of its label.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from jax.extend.core import Jaxpr, JaxprEqn, Literal

from jaxext.core.form import Form


class Around:
    """The producer and the consumers of each variable of a jaxpr."""

    def __init__(self, jaxpr: Jaxpr):
        self._makers, self._takers = {}, {}
        for eqn in jaxpr.eqns:
            for var in eqn.outvars:
                self._makers[var] = [eqn]
            for atom in eqn.invars:
                if not isinstance(atom, Literal):
                    self._takers.setdefault(atom, []).append(eqn)

    def stored(self, eqn: JaxprEqn, form: Form, open: str) -> dict[str, tuple[str, Any]]:
        """The layout and the type, by slot: of the operands and, last, of the result."""
        arrays = dict(zip(form.operands(open), eqn.invars, strict=False)) | {open: eqn.outvars[0]}
        found = {}
        for slot, x in arrays.items():
            axes, aval = self._stored(x, form.axes(slot, eqn.params["static"].ranks), form.family.groups, slot == open)
            found[slot] = _letters(form, slot, axes), aval
        return found

    def _stored(self, x, axes: Sequence[str], groups: str, forwards: bool) -> tuple[Sequence[str], Any]:
        """The axes and the type of an array beyond the transposes and the reshapes around the product."""
        while not isinstance(x, Literal) and len(eqns := (self._takers if forwards else self._makers).get(x, ())) == 1:
            (eqn,) = eqns
            beyond = eqn.outvars[0] if forwards else eqn.invars[0]
            if eqn.primitive.name == "transpose":
                order = eqn.params["permutation"]
                axes = [axes[int(i)] for i in (order if forwards else np.argsort(order))]
            elif eqn.primitive.name == "reshape" and (merged := _merged(groups, axes, x.aval.shape, beyond.aval.shape)):
                axes = merged
            else:
                break
            x = beyond
        return axes, x.aval


def _merged(groups: str, axes: Sequence[str], split: Sequence[int], whole: Sequence[int]) -> tuple[str, ...] | None:
    """The axes with a group axis merged into its neighbour, or None if the shapes do not match that."""
    for i, axis in enumerate(axes[:-1]):
        if axis[0] in groups and tuple(whole) == (*split[:i], split[i] * split[i + 1], *split[i + 2 :]):
            return *axes[:i], *axes[i + 1 :]
    return None


def _letters(form: Form, slot: str, axes: Sequence[str]) -> str:
    """The axes as letters, without numbers.  Window axes use the input's letters, and channels the family's."""
    rank = len(form.window) // 3
    spatial = {label: form.window[i % rank] for i, label in enumerate(form.window)}
    channels = form.family.axis_names.get(slot, {})
    letters = [spatial.get(axis, axis).rstrip("0123456789") for axis in axes]
    return "".join(channels.get(letter, letter) for letter in letters)
