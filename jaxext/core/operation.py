"""An operation on labelled operands that is not bilinear, such as a product with bias and activation, and all rules that JAX needs.

Its meaning is its *composition*: forms and jnp.  An implementation may fuse it into one kernel.  Its labels are of three kinds.  It works
on each element of an *independent* label by itself, so vmap and shardings may use it.  A *summed* label is missing in a result; if devices
split it, parts of that result are added over them.  If that has to happen before the epilogue, the operation falls apart into the
composition there.  A label in `unsharded` is neither mapped nor split.  The companions of the product inside are the operation's, too.

The derivative is a composition, too.  What it needs of the operation's inside, such as the input of an activation, is a further result of
the same primitive.  Dead-code elimination drops it where no derivative is taken.
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
from jax.interpreters import ad

from jaxext import _compat
from jaxext.core import partition, primitive
from jaxext.core.call import Call
from jaxext.core.choose import replacing_lax
from jaxext.core.composition import composed
from jaxext.core.family import Family
from jaxext.core.form import Form
from jaxext.core.labelled import Labelled
from jaxext.core.static import Static


@dataclasses.dataclass(frozen=True, eq=False)
class Operation(Labelled):
    """An operation.  Its first result is what it is called for; further ones are saved for its derivative.

    Attributes:
      inputs, results: name -> labels.
      composition: `composition(operation, product, operands, static, narrow=False)` gives all results in a dict.  It computes the product
        of a form by `product(form, open, operands, static)`, which is `Form.bind` or has the same parameters.  If `narrow`, sums of 16-bit
        results need not be kept in float32.
      tangents: `tangents(operation, operands, results, dots, static)` gives the tangents of all results in a dict, linear in `dots`, the
        tangents of operands by name.
      saved: `saved(options)` names the further results that `tangents` reads.
      product: the form and the open slot of the product inside, whose factors are the first operands; None if there is none.
      unfuse: `unfuse(options, split)` gives the options of the unfused composition if devices split these labels, and None if the
        operation stays fused.  By default it is unfused if that makes its product a sum over devices.
      examples: as of a form: operands with which a call can be measured, where random numbers would have no meaning.
      unmeasured: the reason why a call cannot be measured with random operands, or "".
    """

    name: str
    inputs: Mapping[str, tuple[str, ...]]
    results: Mapping[str, tuple[str, ...]]
    composition: Callable[..., Mapping[str, jax.Array]]
    tangents: Callable[..., Mapping[str, jax.Array]]
    family: Family
    saved: Callable[[Any], Sequence[str]] = lambda options: ()
    window: tuple[str, ...] = ()
    unsharded: tuple[str, ...] = ()
    product: tuple | None = None
    unfuse: Callable[[Any, set[str]], Any] | None = None
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
        """The form of the product inside."""
        return self.product[0] if self.product else None

    @property
    def unmapped(self) -> tuple[str, ...]:
        return *self.unsharded, *super().unmapped

    def unsplit_axes(self, ranks: Sequence[int]) -> tuple[str, ...]:
        rank = self.unpack(ranks)
        return (*super().unsplit_axes(ranks), *(f"{label}{i}" for label in self.unsharded for i in range(rank[label])))

    def unfused(self, options: Any, split: set[str], summed: Callable | None) -> Any:
        if self.unfuse is not None:
            return self.unfuse(options, {label for label in self.free if any(axis.rstrip("0123456789") == label for axis in split)})
        return options if self.product and summed is not None else None

    def lower_unfused(self, call: Call, operands: Mapping[str, jax.Array], summed: Callable | None) -> tuple[jax.Array, ...]:
        """The results by the composition, whose partial products `summed` adds up over devices."""
        with replacing_lax(False):
            results = composed(call, operands, call.parameters.implementation, summed)
        return results if call.further else (results,)

    @functools.cached_property
    def primitive(self):
        made = primitive.make(self, self.open, _batch_rule, multiple_results=True)
        ad.primitive_jvps[made] = functools.partial(_jvp_rule, self)
        _compat.register_remat(made, functools.partial(_remat_rule, self))
        return made

    @property
    def primitives(self):
        return {self.open: self.primitive}

    def bind(self, operands: Mapping[str, jax.Array], static: Static, *, wanted: Sequence[str]) -> dict[str, jax.Array]:
        """The wanted results, by name."""
        args = primitive.prepare(self, *partition.place_on_one_mesh([operands[name] for name in self.inputs]))
        return dict(zip(wanted, self.primitive.bind(*args, wanted=tuple(wanted), static=static), strict=True))

    def call(self, open, avals, *, static, wanted=(), **device) -> Call:
        call = super().call(open, avals, static=static, **device)
        names = (*self.inputs, *(wanted or (open,)))
        dtypes = dict(zip(self.results, static.dtypes, strict=True))
        return dataclasses.replace(
            call,
            labels={name: call.labels[name] for name in names},
            axes={name: call.axes[name] for name in names},
            further={name: dtypes[name] for name in wanted if name != open},
            operation=self,
            static=static.options,
        )


def _jvp_rule(operation, primals, tangents, *, static: Static, wanted, kept: Mapping[str, jax.Array] = types.MappingProxyType({})):
    """`kept`: results that need not be computed."""
    operands = dict(zip(operation.inputs, primals, strict=True))
    dots = {name: dot for name, dot in zip(operation.inputs, tangents, strict=True) if type(dot) is not ad.Zero}
    needed = {*wanted, *operation.saved(static.options)}
    if missing := [name for name in operation.results if name in needed - {*kept}]:
        missing = [name for name in operation.results if name in missing or name == operation.open]
        kept = {**operation.bind(operands, static, wanted=missing), **kept}
    results = {name: kept[name] for name in operation.results if name in needed}
    results = {name: y if name == operation.open else checkpoint_name(y, name) for name, y in results.items()}
    moved = operation.tangents(operation, operands, results, dots, static)
    out = [results[name] for name in wanted]
    typed = {name: sharded_as(dot, jax.typeof(results[name])) for name, dot in moved.items() if name in results}
    return out, [typed.get(name, ad.Zero(jax.typeof(y).to_tangent_aval())) for name, y in zip(wanted, out, strict=True)]


def _remat_rule(operation, policy, *args, static: Static, wanted):
    """`jax_remat3` asks a policy before it takes derivatives, which need further results: these are saved with the result, or by name."""
    needed = tuple(name for name in operation.results if name in {*wanted, *operation.saved(static.options)})
    results = operation.bind(dict(zip(operation.inputs, args, strict=True)), static, wanted=needed)
    of_all = _compat.storage(policy, operation.primitive, list(map(jax.typeof, args)), dict(static=static, wanted=needed))

    def storage_of(name):
        named = name != operation.open and not of_all
        return _compat.storage(policy, _compat.name_p, [jax.typeof(results[name])], dict(name=name)) if named else of_all

    stored = {name: how for name in needed if (how := storage_of(name)) is not None}
    saved = {name: store(results[name]) for name, (store, _) in stored.items()}

    def again(saved, *args):
        if not saved:
            return operation.primitive.bind(*args, static=static, wanted=wanted)
        kept = {name: load(saved[name]) for name, (_, load) in stored.items()}
        return _resumed(operation, kept, args, static=static, wanted=wanted)

    return [results[name] for name in wanted], saved, again


def _resumed(operation, kept, args, **params):
    """The wanted results, which with their derivatives are computed from those that are kept."""

    @jax.custom_jvp
    def results(kept, *args):
        wanted = params["wanted"]
        missing = () if {*wanted} <= {*kept} else operation.primitive.bind(*args, **params)
        return [kept[name] if name in kept else y for name, y in zip(wanted, missing or wanted, strict=True)]

    def tangent(primals, tangents):
        (kept, *args), (_, *dots) = primals, tangents
        dots = [ad.Zero(dot.aval) if isinstance(dot, SymbolicZero) else dot for dot in dots]
        out, moved = _jvp_rule(operation, args, dots, kept=kept, **params)
        return out, list(map(ad.instantiate_zeros, moved))

    results.defjvp(tangent, symbolic_zeros=True)
    return results(kept, *args)


def sharded_as(dot, aval):
    """A tangent or cotangent with the sharding in the type of its value: other operands may be sharded more, or less."""
    sharding = partition.explicit(aval)
    return dot if sharding is None or jax.typeof(dot).sharding == sharding else jax.sharding.reshard(dot, sharding)


def _batch_rule(operation, open, args, dims, *, static: Static, wanted):
    """The mapped axis becomes the first axis of an independent label that all mapped operands have.

    It is the label for which the fewest unmapped operands are broadcast.  If a large one would be, the composition is mapped instead.
    """
    operands = dict(zip(operation.inputs, args, strict=True))
    mapped = {name: d for name, d in zip(operation.inputs, dims, strict=True) if d is not None}
    label = _label_to_map(operation, mapped)
    if label is None:

        def composition(*args):
            results = operation.composition(operation, Form.bind, dict(zip(operation.inputs, args, strict=True)), static)
            return [results[name] for name in wanted]

        return jax.vmap(composition, in_axes=dims)(*args), [0] * len(wanted)
    joined, changed = operation.joined(label, open, operands, mapped, static)
    results = operation.bind(joined, changed, wanted=wanted)
    return list(results.values()), [operation.position(name, label, static.ranks) for name in wanted]


def _label_to_map(operation, mapped):
    def repeated(label):
        return [name for name, labels in operation.inputs.items() if label in labels and name not in mapped]

    everywhere = [*operation.results.values(), *(operation.inputs[name] for name in mapped)]
    independent = [label for label in operation.free if label not in operation.unmapped and all(label in labels for labels in everywhere)]
    cheap = [label for label in independent if not {*repeated(label)} & {*operation.factors(operation.open)}]
    return min(cheap, key=lambda label: len(repeated(label)), default=None)
