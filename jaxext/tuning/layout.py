"""Finds the layout (order of axes) of a product's arrays in a program, for `explain`.

A form has a fixed order of axes.  The call adds transposes around it, and reshapes that split channels into groups.  They are followed
backwards from the operands and forwards from the result.  Axes get the letters of `lax`'s dimension numbers, such as NHWC and HWIO.  An
axis added by `vmap` repeats the letter of its label.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from jax.extend.core import Jaxpr, JaxprEqn, Literal

from jaxext.forms.form import Form


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

    def layouts(self, eqn: JaxprEqn, form: Form, open: str) -> list[str]:
        """The layouts of the operands and, last, of the result."""
        arrays = dict(zip(form.operands(open), eqn.invars, strict=False)) | {open: eqn.outvars[0]}
        axes = {slot: form.axes(slot, eqn.params["ranks"]) for slot in arrays}
        return [_letters(form, slot, self._stored(x, axes[slot], form.family.groups, slot == open)) for slot, x in arrays.items()]

    def _stored(self, x, axes: Sequence[str], groups: str, forwards: bool) -> Sequence[str]:
        """The axes of an array beyond the transposes and the reshapes around the product."""
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
        return axes


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
    channels = form.family.letters.get(slot, {})
    letters = [spatial.get(axis, axis).rstrip("0123456789") for axis in axes]
    return "".join(channels.get(letter, letter) for letter in letters)
