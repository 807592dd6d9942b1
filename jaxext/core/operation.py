"""An operation on labelled operands that is not bilinear, such as a product with bias and activation, and all rules that JAX needs.

Its meaning is its *composition*: forms and jnp.  An implementation may fuse it into one kernel.  Its labels are of three kinds.  It works
on each element of an *independent* label by itself, so vmap and shardings may use it.  A *summed* label is missing in a result; if devices
split it, parts of that result are added over them.  If that has to happen before the epilogue, the operation falls apart into the
composition there.  A label in `whole` is neither mapped nor split.  The companions of the product inside are the operation's, too: a label
that they tie is split, but not mapped.

The derivative is a composition, too.  What it needs of the operation's inside, such as the input of an activation, is a further result of
the same primitive.  Dead-code elimination drops it where no derivative is taken.

The parameters of the primitive are static and hashable.  No rule changes any but `ranks`, `out_sharding` and `wanted`:

    ranks, window, precision, implementation, out_sharding   as of a form
    dtypes          of all results
    static          what else determines the operation, such as the activation
    wanted          the names of the results that are computed
"""

from __future__ import annotations

import dataclasses
import functools
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from jax.ad_checkpoint import checkpoint_name
from jax.custom_derivatives import SymbolicZero
from jax.interpreters import ad, batching

from jaxext import _compat
from jaxext.core import flops, partition
from jaxext.core.call import Call
from jaxext.core.choose import replacing_lax, run
from jaxext.core.composition import composed
from jaxext.core.family import Family, in_use
from jaxext.core.form import Form, cut, known, owner
from jaxext.core.labelled import Labelled


@dataclasses.dataclass(frozen=True, eq=False)
class Operation(Labelled):
    """An operation.  Its first result is what it is called for; further ones are saved for its derivative.

    Attributes:
      inputs, results: name -> labels.
      composition: `composition(operation, product, operands, **params)` gives all results in a dict.  It computes the product of a form by
        `product(form, open, operands, **params)`, which is `Form.bind` or has the same parameters.  If `narrow`, sums of 16-bit results
        need not be kept in float32.
      tangents: `tangents(operation, operands, results, dots, **params)` gives the tangents of all results in a dict, linear in `dots`, the
        tangents of operands by name.
      saved: `saved(static)` names the further results that `tangents` reads.
      product: the form and the open slot of the product inside, whose factors are the first operands; None if there is none.
      apart: `apart(static, split)` gives `static` for the composition into which the operation falls apart where devices split these
        labels, and None where it does not.  By default it does if that makes its product a sum over devices.
      examples: as of a form: operands with which a call can be measured, where random numbers would have no meaning.
      unmeasured: the reason why a call cannot be measured with random operands, or "".
    """

    name: str
    inputs: Mapping[str, tuple[str, ...]]
    results: Mapping[str, tuple[str, ...]]
    composition: Callable[..., Mapping[str, jax.Array]]
    tangents: Callable[..., Mapping[str, jax.Array]]
    family: Family
    saved: Callable[[Any], Sequence[str]] = lambda static: ()
    window: tuple[str, ...] = ()
    whole: tuple[str, ...] = ()
    product: tuple | None = None
    apart: Callable[[Any, set[str]], Any] | None = None
    examples: Callable[[Call], dict[str, jax.Array]] | None = None
    unmeasured: str = ""

    @functools.cached_property
    def labels(self) -> dict[str, tuple[str, ...]]:
        return {**self.inputs, **self.results}

    @property
    def open(self) -> str:
        """The first result."""
        return next(iter(self.results))

    def op(self, open: str) -> str:
        return self.name

    def operands(self, open: str) -> tuple[str, ...]:
        return tuple(self.inputs)

    def factors(self, open: str) -> tuple[str, ...]:
        return tuple(self.inputs)[:2] if self.product else ()

    @property
    def form(self) -> Form | None:
        """Of the product inside."""
        return self.product[0] if self.product else None

    @functools.cached_property
    def chosen(self) -> tuple[str, ...]:
        return self.form.chosen if self.form else ()

    @functools.cached_property
    def primitive(self):
        """The primitive, with all rules."""
        primitive = _compat.operation_primitive(
            self.name,
            functools.partial(_shape_rule, self),
            functools.partial(_dtype_rule, self),
            functools.partial(_sharding_rule, self),
        )
        ad.primitive_jvps[primitive] = functools.partial(_jvp_rule, self)
        batching.primitive_batchers[primitive] = functools.partial(_batch_rule, self)
        _compat.register_remat(primitive, functools.partial(_remat_rule, self))
        _compat.register_lowering(primitive, functools.partial(_lower, self), multiple_results=True)
        owner[primitive] = self, self.open
        return primitive

    def bind(self, operands: Mapping[str, jax.Array], *, wanted: Sequence[str], **params) -> dict[str, jax.Array]:
        """The wanted results, by name."""
        primitive = self.primitive
        flops.tell(owner)
        in_use.add(self.family)
        args = _compat.align_varying(*partition.on_one_mesh([operands[name] for name in self.inputs]))
        return dict(zip(wanted, primitive.bind(*args, wanted=tuple(wanted), **params), strict=True))

    def split_whole(self, ranks: Sequence[int]) -> tuple[str, ...]:
        """The axes that must not be split."""
        rank = dict(zip(self.free, ranks, strict=True))
        return (*self.window, *(f"{label}{i}" for label in self.whole for i in range(rank[label])))

    def call(self, open, avals, *, platform, arch, splitter, wanted, out_sharding=None, **params) -> Call:
        ranks, window = params["ranks"], params["window"]
        extents = self.sizes(open, [aval.shape for aval in avals], ranks, window)
        of_results = dict(zip(self.results, params["dtypes"], strict=True))
        names = (*self.inputs, *wanted)
        return Call(
            op=self.name,
            open=self.open,
            labels={name: self.labels[name] for name in names},
            axes={name: self.axes(name, ranks) for name in names},
            sizes=self.totals(extents, ranks) if window is None else self.totals(extents, ranks) | window.sizes,
            extents=extents,
            dtypes={name: aval.dtype for name, aval in zip(self.inputs, avals, strict=True)},
            dtype=of_results[self.open],
            further={name: of_results[name] for name in wanted if name != self.open},
            window=window,
            precision=params["precision"],
            platform=platform,
            arch=arch,
            device=_compat.device_kind(platform),
            splitter=splitter,
            operation=self,
            static=params["static"],
            params=params,
            rows=self.rows(open),
        )


def _shape_rule(operation, *avals, result, ranks, window, **_):
    sizes = operation.sizes(operation.open, [aval.shape for aval in avals], ranks, window)
    return tuple(sizes[axis] for axis in operation.axes(result, ranks))


def _dtype_rule(operation, *_, result, dtypes, **__):
    return dict(zip(operation.results, dtypes, strict=True))[result]


def _sharding_rule(operation, *avals, result, ranks, out_sharding, **_):
    """Called only on explicit meshes.  `out_sharding` is that of the first result; an axis of another result is sharded likewise."""
    if out_sharding is not None:
        return partition.renamed(out_sharding, operation.axes(operation.open, ranks), operation.axes(result, ranks))
    gathered = operation.form.gathered if operation.form else ()
    return operation.sharding(result, avals, ranks, None, operation.split_whole(ranks), gathered)


def _jvp_rule(operation, primals, tangents, *, wanted, kept: Mapping[str, jax.Array] = types.MappingProxyType({}), **params):
    """`kept`: results that need not be computed."""
    operands = dict(zip(operation.inputs, primals, strict=True))
    dots = {name: dot for name, dot in zip(operation.inputs, tangents, strict=True) if type(dot) is not ad.Zero}
    needed = {*wanted, *operation.saved(params["static"])}
    if missing := [name for name in operation.results if name in needed - {*kept}]:
        missing = [name for name in operation.results if name in missing or name == operation.open]
        kept = {**operation.bind(operands, wanted=missing, **params), **kept}
    results = {name: kept[name] for name in operation.results if name in needed}
    results = {name: y if name == operation.open else checkpoint_name(y, name) for name, y in results.items()}
    moved = operation.tangents(operation, operands, results, dots, **params)
    out = [results[name] for name in wanted]
    typed = {name: sharded_as(dot, jax.typeof(results[name])) for name, dot in moved.items() if name in results}
    return out, [typed.get(name, ad.Zero(jax.typeof(y).to_tangent_aval())) for name, y in zip(wanted, out, strict=True)]


def _remat_rule(operation, policy, *args, wanted, **params):
    """`jax_remat3` asks a policy before it takes derivatives, which need further results: these are saved with the result, or by name."""
    needed = tuple(name for name in operation.results if name in {*wanted, *operation.saved(params["static"])})
    results = operation.bind(dict(zip(operation.inputs, args, strict=True)), wanted=needed, **params)
    of_all = _compat.storage(policy, operation.primitive, list(map(jax.typeof, args)), dict(params, wanted=needed))

    def storage_of(name):
        named = name != operation.open and not of_all
        return _compat.storage(policy, _compat.name_p, [jax.typeof(results[name])], dict(name=name)) if named else of_all

    stored = {name: how for name in needed if (how := storage_of(name)) is not None}
    saved = {name: store(results[name]) for name, (store, _) in stored.items()}

    def again(saved, *args):
        if not saved:
            return operation.primitive.bind(*args, wanted=wanted, **params)
        kept = {name: load(saved[name]) for name, (_, load) in stored.items()}
        return _resumed(operation, kept, args, wanted=wanted, **params)

    return [results[name] for name in wanted], saved, again


def _resumed(operation, kept, args, *, wanted, **params):
    """The wanted results, which with their derivatives are computed from those that are kept."""

    @jax.custom_jvp
    def results(kept, *args):
        missing = () if {*wanted} <= {*kept} else operation.primitive.bind(*args, wanted=wanted, **params)
        return [kept[name] if name in kept else y for name, y in zip(wanted, missing or wanted, strict=True)]

    def tangent(primals, tangents):
        (kept, *args), (_, *dots) = primals, tangents
        dots = [ad.Zero(dot.aval) if isinstance(dot, SymbolicZero) else dot for dot in dots]
        out, moved = _jvp_rule(operation, args, dots, wanted=wanted, kept=kept, **params)
        return out, list(map(ad.instantiate_zeros, moved))

    results.defjvp(tangent, symbolic_zeros=True)
    return results(kept, *args)


def sharded_as(dot, aval):
    """A tangent or cotangent with the sharding in the type of its value: other operands may be sharded more, or less."""
    sharding = partition.explicit(aval)
    return dot if sharding is None or jax.typeof(dot).sharding == sharding else jax.sharding.reshard(dot, sharding)


def _batch_rule(operation, args, dims, *, wanted, **params):
    """The mapped axis becomes the first axis of an independent label that all mapped operands have.

    It is the label for which the fewest unmapped operands are broadcast.  If a large one would be, the composition is mapped instead.
    """
    operands = dict(zip(operation.inputs, args, strict=True))
    mapped = {name: d for name, d in zip(operation.inputs, dims, strict=True) if d is not None}
    label = _label_to_map(operation, mapped)
    if label is None:

        def composition(*args):
            results = operation.composition(operation, Form.bind, dict(zip(operation.inputs, args, strict=True)), **params)
            return [results[name] for name in wanted]

        return jax.vmap(composition, in_axes=dims)(*args), [0] * len(wanted)
    joined, changed = operation.joined(label, operation.open, operands, mapped, params)
    results = operation.bind(joined, wanted=wanted, **changed)
    return list(results.values()), [operation.position(name, label, params["ranks"]) for name in wanted]


def _label_to_map(operation, mapped):
    def repeated(label):
        return [name for name, labels in operation.inputs.items() if label in labels and name not in mapped]

    everywhere = [*operation.results.values(), *(operation.inputs[name] for name in mapped)]
    unmapped = (*operation.whole, *(operation.form.tied if operation.form else ()))
    independent = [label for label in operation.free if label not in unmapped and all(label in labels for labels in everywhere)]
    cheap = [label for label in independent if not {*repeated(label)} & {*operation.factors(operation.open)}]
    return min(cheap, key=lambda label: len(repeated(label)), default=None)


def _lower(operation, platform, arch, splitter, *args, implementation, out_sharding, **params):
    """Lower to the chosen implementation on one device's part of the operands, inside a program that splits them over devices."""
    wanted, ranks, form = params["wanted"], params["ranks"], operation.form
    sizes = operation.sizes(operation.open, [x.shape for x in args], ranks, params["window"])

    def local(splitter, summed, part, *args):
        if form is not None:
            args = cut(form, tuple(operation.inputs), args, part, sizes)
        static = _static_of_parts(operation, params["static"], {axis for axis in sizes if part(axis, sizes[axis]) is not None}, summed)
        if static is None or not operation.product:  # else the sum varies over fewer axes than its factors, as what is added to it may
            args = _compat.align_varying(*args)
        operands = dict(zip(operation.inputs, args, strict=True))
        device = dict(platform=platform, arch=arch, splitter=splitter)
        of_parts = params if static is None else dict(params, static=static)
        call = operation.call(operation.open, args, implementation=implementation, **device, **of_parts)
        if static is None:
            results = run(call, operation.family.implementations, implementation, operands)
        else:
            with replacing_lax(False):
                results = composed(call, operands, implementation, summed)
        results = results if call.further else (results,)
        if summed is None or static is not None:
            return results
        return tuple(summed(y, operation.axes(name, ranks)) for name, y in zip(wanted, results, strict=True))

    everything = dict(params, implementation=implementation, out_sharding=out_sharding)
    operands = {name: operation.axes(name, ranks) for name in operation.inputs}
    names = partition.Names(
        operands=tuple(axes if form is None else form.axes_to_split(name, axes) for name, axes in operands.items()),
        results=tuple(operation.axes(name, ranks) for name in wanted),
        whole=(*operation.split_whole(ranks), *(form.uncut.values() if form else ())),
    )
    known_as = known(splitter, platform, operation.primitive, dict(zip(operation.inputs, args, strict=True)), everything, operation.family)
    return partition.lower(
        lambda *args: tuple(operation.primitive.bind(*args, **everything)), known_as, local, names, splitter, platform, out_sharding, *args
    )


def _static_of_parts(operation: Operation, static, axes: set[str], summed: Callable | None) -> Any:
    """`static` of the composition into which the operation falls apart where devices split these axes; None if it does not."""
    if operation.apart is not None:
        return operation.apart(static, {label for label in operation.free if any(axis.rstrip("0123456789") == label for axis in axes)})
    return static if operation.product and summed is not None else None
