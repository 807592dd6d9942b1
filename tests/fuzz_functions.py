"""Make a call of `fuzz_operations` and judge it: mapped, differentiated, in contexts, split over simulated devices.

The truth of every derivative comes from the definition in numpy: f(p + i h t).imag / h is the derivative along t to the last bit, since no
difference is taken.  A second derivative is that of a central difference, and complex operands, in which definitions are polynomials, have
the mean over four roots of unity in place of both.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import math
from importlib.metadata import version

import fuzz_operations
import jax
import jax.numpy as jnp
import numpy as np
from cases import random, wide
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

ORDERS = {"value": 15, "first": 55, "jvp of vjp": 10, "vjp of jvp": 10, "vjp of vjp": 10}
MOST_ELEMENTS = 250  # of all operands: the truth moves each by itself
ROUNDINGS = 16  # of the coarsest dtype, that a result may be off


@dataclasses.dataclass(frozen=True, kw_only=True)
class Use:
    """The transformations of a call: `vmap` maps `axes` of the operands to `out`, and `specs` split the operands over a mesh."""

    call: fuzz_operations.Call
    integers: bool
    order: str
    size: int = 1
    axes: tuple[int | None, ...]
    out: tuple[int, ...]
    inside: bool = False
    how: tuple[str, ...] = ()
    mesh: str = ""
    specs: tuple[tuple[str | None, ...], ...] = ()

    op = property(lambda self: self.call.op)
    dtypes = property(lambda self: self.call.dtypes)

    def __str__(self):
        said = [str(self.call), self.order, *self.how]
        if self.mapped:
            said.append(f"vmap of {self.size} over {self.axes} to {self.out}, derivatives {'inside' if self.inside else 'outside'}")
        if self.mesh:
            said.append(f"{self.mesh} mesh {self.specs}")
        return "; ".join([*said, *([] if self.integers else ["normal numbers"])])

    @property
    def mapped(self) -> bool:
        return any(axis is not None for axis in self.axes)

    @property
    def moved(self) -> tuple[int, ...]:
        """The operands that are differentiated."""
        of = self.call.operands.values()
        return tuple(i for i, o in enumerate(of) if o.moves and jnp.issubdtype(o.dtype, jnp.inexact))


def use(draw) -> Use:
    """A call, and all that is drawn about it."""
    mapped = draw.chance(40)
    n = draw.weighted({1: 2, 2: 5, 3: 2, 4: 2})
    while True:
        call = draw.weighted(fuzz_operations.OPERATIONS)(draw)
        operands = list(call.operands.values())
        if sum(math.prod(of.shape) for of in operands) * (n if mapped else 1) <= MOST_ELEMENTS:
            break
    axes = tuple(draw.randint(0, len(of.shape)) if mapped and draw.chance(60) else None for of in operands)
    shapes = [of.shape if axis is None else (*of.shape[:axis], n, *of.shape[axis:]) for of, axis in zip(operands, axes, strict=True)]
    how = ["eager"] if draw.chance(7) else []
    how += ["checkpoint"] if draw.chance(7) else []
    if draw.chance(30):
        narrow = not {"float64", "complex128", "int64"} & {*call.dtypes, *call.results}
        contexts = ["x64", "highest", "tensorfloat32", "use_implementation", "in_place_of_lax", *(["x32"] if narrow else [])]
        how.append(draw.choice(contexts))
    mesh, specs = "", ()
    if draw.chance(30) and not ("x64" in how and version("jax").startswith("0.10.")):  # that loses the context, jaxlib's callbacks do
        mesh = draw.choice(["auto", "explicit"])
        of_mapped = "a" if n % MESH["a"] == 0 and draw.chance(30) else None  # jax wants the same for all
        specs = tuple(spec(draw, shape, axis, of_mapped) for shape, axis in zip(shapes, axes, strict=True))
    exact = call.smooth and draw.chance(30)
    orders = [order for order in ORDERS if order == "value" or call.orders and (order == "first" or call.orders > 1)]
    made = Use(
        call=call,
        integers=exact,
        order=draw.weighted({order: ORDERS[order] for order in orders}),
        size=n,
        axes=axes,
        out=tuple(0 if draw.chance(60) else -1 for _ in call.results),
        inside=draw.chance(30),
        how=tuple(how),
        mesh=mesh,
        specs=specs,
    )
    return made if made.moved else dataclasses.replace(made, order="value")


MESH = {"a": 2, "b": 2}


def spec(draw, shape, mapped, of_mapped) -> tuple[str | None, ...]:
    """Mesh axes, each at most once, for axes that they divide; that of the mapped one is given."""
    free, chosen = [name for name in MESH if name != of_mapped], []
    for axis, n in enumerate(shape):
        name = of_mapped if axis == mapped else draw.choice(free) if free and draw.chance(35) else None
        name = name if name and n and n % MESH[name] == 0 else None
        chosen.append(name)
        free = [other for other in free if other != name]
    return tuple(chosen)


# --- the program


def program(use: Use, module):
    """A function of operands, cotangents and tangents: values, gradients, jvps, and one of the second derivatives."""

    if "in_place_of_lax" in use.how and use.op in ("ragged_dot", "ragged_dot_general") and "group_offset" not in use.call.operands:
        module = lax

    def plain(*operands):
        return use.call.run(module, dict(zip(use.call.operands, operands, strict=True)))

    f = jax.checkpoint(plain) if "checkpoint" in use.how else plain
    if use.mapped and not use.inside:
        f = jax.vmap(f, use.axes, use.out)

    def derivatives(operands, cts, tangents):
        def of_moved(*some):
            moved = dict(zip(use.moved, some, strict=True))
            return f(*(moved.get(i, x) for i, x in enumerate(operands)))

        primals = tuple(operands[i] for i in use.moved)
        if use.order == "value":
            return f(*operands)
        y, back = jax.vjp(of_moved, *primals)
        if use.mesh == "explicit":
            cts = tuple(jax.sharding.reshard(ct, jax.typeof(of).sharding) for ct, of in zip(cts, y, strict=True))
        first = (*y, *back(cts), *jax.jvp(of_moved, primals, tangents)[1])

        def gradient(*some):
            return jax.vjp(of_moved, *some)[1](cts)

        if use.order == "jvp of vjp":
            return *first, *jax.jvp(gradient, primals, tangents)[1]
        if use.order == "vjp of vjp":
            return *first, *jax.vjp(gradient, *primals)[1](tangents)
        if use.order == "vjp of jvp":
            return *first, *jax.vjp(lambda *some: jax.jvp(of_moved, some, tangents)[1], *primals)[1](cts)
        return first

    if not (use.mapped and use.inside):
        return derivatives
    return jax.vmap(derivatives, (use.axes, 0, () if use.order == "value" else tuple(use.axes[i] for i in use.moved)))


def names(use: Use) -> list[str]:
    results = [f"result {i}" for i in range(len(use.call.results))]
    moved = [list(use.call.operands)[i] for i in use.moved]
    if use.order == "value":
        return results
    first = [*results, *(f"gradient of {name}" for name in moved), *(f"jvp of {name}" for name in results)]
    return first if use.order == "first" else [*first, *(f"{use.order} in {name}" for name in moved)]


# --- the truth


def slope(f, holomorphic: bool):
    """The derivatives at 0 of the arrays f(s)."""
    if not holomorphic:
        return [y.imag / 1e-30 for y in f(1e-30j)]
    h, roots = 1 / 16, [1, 1j, -1, -1j]
    several = [f(h * root) for root in roots]
    return [sum(y / root for y, root in zip(ys, roots, strict=True)) / (4 * h) for ys in zip(*several, strict=True)]


def truths(use: Use, operands, cts, tangents) -> list[np.ndarray]:
    """The types of the results of `program`."""
    if not use.mapped:
        return one(use, operands, cts, tangents)
    several = []
    for i in range(use.size):
        of_operands = [x if axis is None else x.take(i, axis) for x, axis in zip(operands, use.axes, strict=True)]
        outs = (0,) * len(use.out) if use.inside else use.out
        of_cts = [ct.take(i, axis) for ct, axis in zip(cts, outs, strict=True)] if cts else []
        of_tangents = [t if use.axes[j] is None else t.take(i, use.axes[j]) for j, t in zip(use.moved, tangents, strict=False)]
        several.append(one(use, of_operands, of_cts, of_tangents))
    stacked = [np.stack(each) for each in zip(*several, strict=True)]
    if use.inside:
        return stacked
    results = iter(stacked)
    out = [np.moveaxis(next(results), 0, axis) for axis in use.out]
    if use.order == "value":
        return out

    def gradients():
        summed = [(next(results), use.axes[j]) for j in use.moved]
        return [x.sum(0) if axis is None else np.moveaxis(x, 0, axis) for x, axis in summed]

    out += gradients()
    out += [np.moveaxis(next(results), 0, axis) for axis in use.out]
    return out + (gradients() if use.order != "first" else [])


def one(use: Use, operands, cts, tangents) -> list[np.ndarray]:
    """The results of one example."""
    call, holomorphic = use.call, any(np.iscomplexobj(x) for x in operands)
    given = dict(zip(call.operands, operands, strict=True))
    moved = {list(call.operands)[i]: t for i, t in zip(use.moved, tangents, strict=False)}
    with np.errstate(all="ignore"):
        value = list(call.truth(given))
        if use.order == "value":
            return value
        if call.rounded:
            cts = [call.rounded(ct, given) for ct in cts]

        def along(s):
            return call.truth(given | {name: given[name] + s * t for name, t in moved.items()})

        def gradients(f):
            """The derivatives of ⟨cts, f(s, name, unit)⟩ by every element of the operands that move."""
            return [np.array([sum((ct * d).sum() for ct, d in zip(cts, f(name, at), strict=True)) for at in np.ndindex(given[name].shape)])
                    .reshape(given[name].shape) for name in moved]  # fmt: skip

        def at_element(name, at, s, r: float = 0):
            """The results where an element is moved by s, and all by r times their tangents."""
            operand = np.array(given[name] + (r * moved[name] if r else 0), complex)  # no scalar, which has no elements to move
            operand[at] += s
            others = {other: given[other] + r * t for other, t in moved.items()} if r else {}
            return call.truth(given | others | {name: operand})

        def first(name, at):
            return slope(lambda s: at_element(name, at, s), holomorphic)

        def second(name, at):
            if holomorphic:
                return slope(lambda r: slope(lambda s: at_element(name, at, s, r), True), True)
            h = 1e-5
            more, less = (slope(lambda s, r=r: at_element(name, at, s, r), False) for r in (h, -h))
            return [(a - b) / (2 * h) for a, b in zip(more, less, strict=True)]

        found = [*value, *gradients(first), *slope(along, holomorphic)]
        return found if use.order == "first" else [*found, *gradients(second)]


# --- the verdict


def judge(use: Use, seed: int, module) -> tuple[str, str | None]:
    """("right" or "refused", None), or ("wrong", what is wrong)."""
    from fuzz_worker import attempt, said

    call = use.call
    structs = {name: jax.ShapeDtypeStruct(of.shape, of.dtype) for name, of in call.operands.items()}
    if call.namesake and (refusal := attempt(jax.eval_shape, call.namesake, structs)[1]):
        error = attempt(jax.eval_shape, lambda of: call.run(module, {name: of[name] for name in call.operands}), structs)[1]
        return ("refused", None) if type(error) is type(refusal) else ("wrong", f"lax: {said(refusal)}; here: {said(error)}")
    arrays = operands(use, seed)
    with contexts(use, module):
        if use.mesh:
            arrays = split(use, arrays)
        run = program(use, module)
        got, error = attempt(run if "eager" in use.how else jax.jit(run), *arrays)
    if error:
        by_types = type(error).__name__ == "ShardingTypeError" or "should be sharded the same" in str(error)
        return ("refused", None) if use.mesh == "explicit" and by_types else ("wrong", said(error))
    arrays = jax.tree.map(np.asarray, arrays)
    # XLA does not split an array without elements, lax's own neither, and jax cannot read it then.
    wrong = compare(use, arrays, [np.asarray(y) if y.size else np.zeros(y.shape, y.dtype) for y in got])
    return ("wrong", wrong) if wrong else ("right", None)


@contextlib.contextmanager
def contexts(use: Use, module):
    """The contexts of a call; of `x64` the process itself has 32 bits."""
    with contextlib.ExitStack() as stack:
        if "x64" in use.how:
            jax.config.update("jax_enable_x64", False)
            stack.callback(jax.config.update, "jax_enable_x64", True)
            stack.enter_context(jax.enable_x64(True))
        for name in use.how:
            if name in ("highest", "tensorfloat32"):
                stack.enter_context(jax.default_matmul_precision(name))
            elif name == "x32":
                stack.enter_context(jax.enable_x64(False))
            elif name == "use_implementation":
                stack.enter_context(module.use_implementation("xla"))
            elif name == "in_place_of_lax":
                stack.enter_context(module.in_place_of_lax())
        if use.mesh == "explicit":
            stack.enter_context(jax.set_mesh(mesh_of(use.mesh)))
        yield


@functools.cache
def mesh_of(kind: str):
    return jax.make_mesh(tuple(MESH.values()), tuple(MESH), axis_types=({"auto": AxisType.Auto, "explicit": AxisType.Explicit}[kind],) * 2)


def operands(use: Use, seed: int) -> tuple[tuple, tuple, tuple]:
    """Operands, cotangents and tangents."""
    numbers = itertools.count(1000 * seed)
    arrays = []
    for of, axis in zip(use.call.operands.values(), use.axes, strict=True):
        some = [of.array(next(numbers), use.integers) for _ in range(1 if axis is None else use.size)]
        arrays.append(some[0] if axis is None else np.stack(some, axis))
    if use.order == "value":
        return tuple(arrays), (), ()
    with np.errstate(all="ignore"):
        shapes = [y.shape for y in truths(dataclasses.replace(use, order="value"), [wide(x) for x in arrays], (), ())]
    cts = [random(shape, dtype, next(numbers), use.integers) for shape, dtype in zip(shapes, use.call.results, strict=True)]
    tangents = [random(arrays[i].shape, arrays[i].dtype, next(numbers), use.integers) for i in use.moved]
    return tuple(arrays), tuple(cts), tuple(tangents)


def split(use: Use, arrays):
    """Operands and tangents by their specs.  A cotangent lies on the whole mesh."""
    given, cts, tangents = arrays

    def placed(x, spec):
        return jax.device_put(x, NamedSharding(mesh_of(use.mesh), P(*spec)))

    specs = [use.specs[i] for i in use.moved] if tangents else []
    split_tangents = tuple(placed(t, spec) for t, spec in zip(tangents, specs, strict=True))
    return tuple(map(placed, given, use.specs)), tuple(placed(ct, ()) for ct in cts), split_tangents


def compare(use: Use, arrays, got) -> str | None:
    """The first result that is wrong."""
    from fuzz_worker import different

    want = truths(use, *([wide(x) for x in some] for some in arrays))
    call, listed = use.call, list(use.call.operands.values())
    moved = [listed[i].dtype for i in use.moved]
    dtypes = [*call.results, *moved, *call.results, *moved]
    floats = [np.dtype(d) for d in (*call.dtypes, *call.results) if jnp.issubdtype(d, jnp.inexact) and np.dtype(d).itemsize > 1]
    eps = max([float(jnp.finfo(d).eps) for d in floats], default=0)
    for name, value, true, dtype in zip(names(use), got, want, dtypes[: len(got)], strict=True):
        if (value.shape, str(value.dtype)) != (true.shape, dtype):
            return f"{name} is {value.dtype}{value.shape}, want {dtype}{true.shape}"
        if not jnp.issubdtype(dtype, jnp.inexact):
            true, allowed = true.astype(dtype), 0
        else:
            size = 1 + float(np.abs(true).max(initial=0))
            allowed = call.slack * ROUNDINGS * math.sqrt(1 + sum(of.shape[-1] for of in listed if of.shape)) * eps * size
            if " in " in name:  # a second derivative, with its finite difference
                allowed = 8 * allowed + 1e-7 * size
        if wrong := different(name, value, true, allowed):
            return wrong
    return None
