"""Finds the layout (order of axes) of a product's arrays in a program, for `explain`.

A form has a fixed order of axes.  The call adds transposes around it, and reshapes that split channels into groups.  They are followed
backwards from the operands and forwards from the result.  Axes get the letters of `lax`'s dimension numbers, such as NHWC and HWIO.  An
axis added by `vmap` repeats the letter of its label.
"""

from __future__ import annotations

from collections.abc import Sequence

from jax.extend.core import Jaxpr, JaxprEqn, Literal

from jaxext.forms.form import Form


class Around:
    """The producer and the consumers of each variable of a jaxpr."""

    def __init__(self, jaxpr: Jaxpr):
        self._maker, self._takers = {}, {}
        for eqn in jaxpr.eqns:
            for var in eqn.outvars:
                self._maker[var] = eqn
            for atom in eqn.invars:
                if not isinstance(atom, Literal):
                    self._takers.setdefault(atom, []).append(eqn)

    def layouts(self, eqn: JaxprEqn, form: Form, open: str) -> list[str]:
        """The layouts of the operands and, last, of the result."""
        ranks = eqn.params["ranks"]
        axes = [form.axes(slot, ranks) for slot in (*form.operands(open), open)]
        lie = [self._of_operand(atom, of, form.family.groups) for atom, of in zip(eqn.invars, axes, strict=False)]
        lie.append(self._of_result(eqn.outvars[0], axes[-1], form.family.groups))
        return [_letters(form, slot, of) for slot, of in zip((*form.operands(open), open), lie, strict=True)]

    def _of_operand(self, atom, axes: tuple[str, ...], groups: str) -> tuple[str, ...]:
        while not isinstance(atom, Literal) and (eqn := self._maker.get(atom)) is not None:
            before = eqn.invars[0]
            if eqn.primitive.name == "transpose":
                axes = tuple(axes[i] for i in _inverse(eqn.params["permutation"]))
            elif eqn.primitive.name == "reshape" and (merged := _merged(groups, axes, atom.aval.shape, before.aval.shape)):
                axes = merged
            else:
                break
            atom = before
        return axes

    def _of_result(self, var, axes: tuple[str, ...], groups: str) -> tuple[str, ...]:
        while len(takers := self._takers.get(var, ())) == 1:
            (eqn,) = takers
            after = eqn.outvars[0]
            if eqn.primitive.name == "transpose":
                axes = tuple(axes[i] for i in eqn.params["permutation"])
            elif eqn.primitive.name == "reshape" and (merged := _merged(groups, axes, var.aval.shape, after.aval.shape)):
                axes = merged
            else:
                break
            var = after
        return axes


def _inverse(permutation: Sequence[int]) -> list[int]:
    return sorted(range(len(permutation)), key=permutation.__getitem__)


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
