"""Finds the products of which XLA's CPU compiler makes one kernel with the reduction behind them, and gets it wrong.

XLA grows such a kernel from a reduction, as far as it computes nothing twice: upwards by what only the kernel uses, downwards by the one
user of its result.  Elementwise operations of 4,096 elements or more, broadcasts and the product alone are taken in.  The last axis of the
product's left factor is contracted.  To XLA a product is the same as that of the exchanged factors, transposed.

jaxext's products are written as the equations that XLA gets of them, where `xla` computes them: XLA's compiler treats them as lax's.
"""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal

from jaxext.core.choose import Choice
from jaxext.core.form import owner, rows_columns_depth
from jaxext.core.invariant import Invariant
from jaxext.hazards.lax_products import Equation
from jaxext.hazards.origins import CALLS, ELEMENTWISE, Origins, rewritten
from jaxext.tuning.explain import chosen
from jaxext.tuning.truth import alone
from jaxext.tuning.walk import Step, jaxprs_in, walk

REDUCTIONS = {f"reduce{window}_{of}" for of in ("sum", "max", "min") for window in ("", "_window")}
TAKEN_IN = {*ELEMENTWISE, *REDUCTIONS, "broadcast_in_dim", "stop_gradient", "ceil", "floor", "expm1"}
DTYPES = (jnp.bfloat16, jnp.float32, jnp.float64)
LEAST_ELEMENTS = 4096  # smaller operations are in no kernel of this kind
LEAST_CHANNELS = 17  # of a convolution's input or output


@dataclasses.dataclass(frozen=True, eq=False)
class _Node:
    """An equation that is no call.  Its arrays are pairs: the calls and loops around the equation that makes it, and its variable."""

    eqn: Any
    operands: Sequence[Any]  # None for a literal
    results: Sequence[Any]

    @property
    def name(self) -> str:
        return self.eqn.primitive.name


class FusedReductions:
    def __init__(self, program: ClosedJaxpr, origins: Origins):
        self._origins = origins
        self._nodes: dict[tuple, _Node] = {}  # by the equations around it, and its own
        self._users: dict[Any, list[_Node | None]] = collections.defaultdict(list)  # of each array; None is what returns it
        for array in self._add(program.jaxpr, (), {}):
            self._users[array].append(None)
        for node in reversed(self._nodes.values()):  # XLA removes what nobody uses, such as the value of a loss in its gradient
            if node.eqn.effects or any(self._users[array] for array in node.results):
                for array in {*node.operands} - {None}:
                    self._users[array].append(node)
        self._maker = {array: node for node in self._nodes.values() for array in node.results}

    def _add(self, jaxpr: Jaxpr, around: tuple, arrays: dict[Any, Any]) -> list[Any]:
        """Add the equations, of variables that are these arrays, or new ones.  Returns the results."""

        def array(var):
            return arrays.setdefault(var, (around, var))

        for eqn in jaxpr.eqns:
            operands = [None if isinstance(atom, Literal) else array(atom) for atom in eqn.invars]
            inside, here = jaxprs_in(eqn), (*around, id(eqn))
            if eqn.primitive.name in CALLS and len(inside) == 1 and len(inside[0].invars) == len(operands):
                given = {var: value for var, value in zip(inside[0].invars, operands, strict=True) if value is not None}
                arrays.update(zip(eqn.outvars, self._add(inside[0], here, given), strict=True))
                continue
            for inner in inside:
                for result in self._add(inner, here, {}):
                    self._users[result].append(None)
            self._nodes[here] = _Node(eqn, operands, [*map(array, eqn.outvars)])
        return [(around, id(var)) if isinstance(var, Literal) else array(var) for var in jaxpr.outvars]

    def has_one_number(self, step: Step) -> bool:
        """Return whether this equation is such a product, whose right factor is one number."""
        node = self._product(step)
        if node is None or node.eqn.outvars[0].aval.size < LEAST_ELEMENTS:
            return False
        left, right = (self._origins.of(atom) for atom in node.eqn.invars[:2])
        if node.name == "conv_general_dilated":
            return right.one_number and left.argument and not left.one_number and _is_plain(node.eqn) and self._is_reduced(node)
        if _is_vector(node.eqn) or left.one_number == right.one_number:
            return False
        if left.one_number:  # as the right factor of the transposed product
            return right.argument and self._contracts_last(node, 1) and self._is_reduced(self._transposed(node))
        return left.argument and self._contracts_last(node, 0) and self._is_reduced(node)

    def is_narrow(self, step: Step) -> bool:
        """Return whether it is a product of a few columns by many rows, whose kernel is wrong beyond the first 128 KiB."""
        node = self._product(step)
        if node is None or node.name != "dot_general" or jnp.bfloat16 == node.eqn.outvars[0].aval.dtype:
            return False
        (lhs, rhs), result = (atom.aval for atom in node.eqn.invars), node.eqn.outvars[0].aval
        dims = node.eqn.params["dimension_numbers"]
        rows, columns, depth = rows_columns_depth(lhs.shape, rhs.shape, dims)
        most = 2**17  # bytes of a row, and elements of both
        if columns < 2 or len(dims[0][0]) > 1 or depth & (depth - 1) == 0:
            return False
        if not most // result.dtype.itemsize < rows <= most // (-(-columns // depth) * depth):
            return False
        left_size = math.prod(lhs.shape[i] for i in range(lhs.ndim) if i not in (*dims[0][0], *dims[1][0]))
        first = node if left_size == columns else self._transposed(node)
        return rows in (*lhs.shape, *rhs.shape) and all(self._contracts_last(node, i) for i in (0, 1)) and self._is_reduced(first)

    def _product(self, step: Step) -> _Node | None:
        """The equation, if it is a product of arrays that XLA has such kernels for."""
        eqn: Any = step.eqn
        if eqn.primitive.name not in ("dot_general", "ragged_dot_general", "conv_general_dilated"):
            return None
        avals = [atom.aval for atom in (*eqn.invars[:2], eqn.outvars[0])]
        if any(aval.dtype not in DTYPES or not all(isinstance(n, int) for n in aval.shape) for aval in avals):
            return None
        in_branch = any(around.primitive.name == "cond" for around in step.within)
        return None if in_branch else self._nodes.get((*map(id, step.within), id(eqn)))

    def _transposed(self, node: _Node) -> _Node | None:
        users = self._users[node.results[0]]
        return users[0] if len(users) == 1 and users[0] is not None and users[0].name == "transpose" else None

    def _contracts_last(self, node: _Node, i: int) -> bool:
        """Return whether the last axes of this factor are contracted.  XLA makes the transpose of matrices a part of the product."""
        axes, ndim = _dimension_numbers(node.eqn)[0][i], node.eqn.invars[i].aval.ndim
        maker = self._maker.get(node.operands[i])
        matrices = ndim - len(_dimension_numbers(node.eqn)[1][i]) == 2
        while matrices and maker is not None and maker.name == "transpose":
            axes = [maker.eqn.params["permutation"][axis] for axis in axes]
            maker = self._maker.get(maker.operands[0])
        return sorted(axes) == [*range(ndim - len(axes), ndim)] and not (matrices and self._is_of_transposed(maker))

    def _is_of_transposed(self, maker: _Node | None) -> bool:
        """Return whether elementwise operations of a transposed array make it."""
        if maker is None or maker.name not in ELEMENTWISE:
            return False
        shape = maker.results[0][1].aval.shape
        makers = [self._maker.get(array) for array in maker.operands if array is not None and array[1].aval.shape == shape]
        return any(each is not None and (each.name == "transpose" or self._is_of_transposed(each)) for each in makers)

    def _is_reduced(self, product: _Node | None) -> bool:
        """Return whether a kernel that grows from a reduction takes in the product."""
        if product is None:
            return False
        matrices = product.name == "transpose" or product.name == "dot_general" and _multiplies_matrices(product.eqn)
        reached, reductions = [product], {}
        for node in reached:
            for user in (user for array in node.results for user in self._users[array] if user is not None):
                if user.name in REDUCTIONS:
                    reductions[user] = None
                elif user not in reached and _is_taken_in(user, matrices):
                    reached.append(user)
        return any(self._is_taken_in_by(reduction, product, matrices) for reduction in reductions)

    def _is_taken_in_by(self, reduction: _Node, product: Any, matrices: bool) -> bool:
        kernel, grows = [reduction], True
        while grows:
            above = [self._maker.get(array) for node in kernel for array in node.operands]
            used_here = [node for node in above if node and all(user in kernel for array in node.results for user in self._users[array])]
            below = [self._users[array] for node in kernel for array in node.results]
            candidates = (*used_here, *(users[0] for users in below if len(users) == 1))
            new = {n: None for n in candidates if n is not None and n not in kernel and (n is product or _is_taken_in(n, matrices))}
            kernel, grows = [*kernel, *new], bool(new)
        clamps = {"min", "max"} <= {node.name for node in kernel}  # which XLA leaves out of such kernels
        return product in kernel and not clamps


def _is_taken_in(node: _Node, matrices: bool) -> bool:
    """Return whether kernels take this equation in, behind a product of matrices or another."""
    if node.name == "transpose":
        return not matrices  # XLA makes it a part of their product
    result, operands = node.eqn.outvars[0].aval, [atom.aval for atom in node.eqn.invars]
    if result.dtype not in DTYPES or node.name not in TAKEN_IN:
        return False
    nothing = node.name == "max" and any(isinstance(atom, Literal) and atom.val == -math.inf for atom in node.eqn.invars)
    return nothing or node.name in ("broadcast_in_dim", "reshape") or max(each.size for each in (result, *operands)) >= LEAST_ELEMENTS


def _multiplies_matrices(eqn: Any) -> bool:
    return eqn.outvars[0].aval.ndim - len(_dimension_numbers(eqn)[1][0]) == 2


def _is_plain(eqn: Any) -> bool:
    """Return whether it is a convolution of the only kind that is in such kernels."""
    (x, w), y, params, numbers = (atom.aval for atom in eqn.invars), eqn.outvars[0].aval, eqn.params, eqn.params["dimension_numbers"]
    input, filter, output = ([aval.shape[i] for i in spec] for aval, spec in zip((x, w, y), numbers, strict=True))
    groups = {params["feature_group_count"], params["batch_group_count"], *params["lhs_dilation"]}
    smaller = all(max(o, r) <= i for i, r, o in zip(input[2:], filter[2:], output[2:], strict=True))
    return x.ndim == 4 and groups == {1} and smaller and max(input[1], output[1]) >= LEAST_CHANNELS and y.dtype != jnp.bfloat16


def _dimension_numbers(eqn: Any) -> Any:
    params = eqn.params
    return params["ragged_dot_dimension_numbers"].dot_dimension_numbers if "ragged" in eqn.primitive.name else params["dimension_numbers"]


def _is_vector(eqn: Any) -> bool:
    """Return whether a factor has no axis of its own, or nothing is summed: XLA makes a matrix product of none of these."""
    lhs, rhs = (atom.aval.shape for atom in eqn.invars[:2])
    return 1 in rows_columns_depth(lhs, rhs, _dimension_numbers(eqn))[1:]


def fused_in_own(program: ClosedJaxpr, platform: str) -> Iterator[tuple[Equation, Step]]:
    """Products of jaxext that XLA's CPU compiler fuses with their reduction, as it does lax's."""
    if platform != "cpu":
        return
    written, own = _written(program, platform)
    fused = FusedReductions(written, origins := Origins(written))
    for step in walk(written.jaxpr):
        around = (*step.within, step.eqn)
        depth = next((i for i, eqn in enumerate(around) if id(eqn) in own), None)
        if depth is not None and not step.inside and fused.has_one_number(step):
            eqn = own[id(around[depth])]
            product = Step(eqn, step.jaxpr, step.times, step.within[:depth], ())
            yield Equation(eqn, [None] * len(eqn.invars), {}, platform, one_number_reduced=True), product
        origins.follow(step)


def _written(program: ClosedJaxpr, platform: str) -> tuple[ClosedJaxpr, dict[int, Any]]:
    """The program in which products of jaxext with one number everywhere are written in equations of lax, as `xla` computes them.

    Also returns the product that each such equation is a part of, by the equation's id.
    """
    wanted, own, origins = set(), {}, Origins(program)
    for step in walk(program.jaxpr):
        if step.eqn.primitive in owner and any(origins.of(atom).one_number for atom in step.eqn.invars):
            wanted.add(id(step.eqn))
        origins.follow(step)

    def rewrite(eqn: Any) -> list[Any]:
        eqns = _equations_of_xla(eqn, platform) if id(eqn) in wanted else None
        own.update((id(each), eqn) for each in eqns or ())
        return eqns or [eqn]

    return rewritten(program, rewrite), own


def _equations_of_xla(eqn: Any, platform: str) -> list[Any] | None:
    """The equations of `xla`, of the variables around the product; None if another implementation computes it, or xla by parts."""
    if isinstance(eqn.params["static"].implementation, Invariant):
        return None
    choice: Choice = chosen(eqn, platform)[-1]
    if choice.plan is None or choice.implementation != "xla":
        return None
    closed = jax.make_jaxpr(alone(choice.plan, choice.config))(*(atom.aval for atom in eqn.invars))
    inner = closed.jaxpr
    of: dict[Any, Any] = dict(zip(inner.outvars, eqn.outvars, strict=True))
    if closed.consts or len(of) < len(inner.outvars) or not {*inner.invars}.isdisjoint(of) or any(isinstance(v, Literal) for v in of):
        return None
    of.update(zip(inner.invars, eqn.invars, strict=True))

    def outer(atom) -> Any:
        return atom if isinstance(atom, Literal) else of.get(atom, atom)

    return [each.replace(invars=[*map(outer, each.invars)], outvars=[*map(outer, each.outvars)]) for each in inner.eqns]
