"""The mesh axes that split the operands and the results of a program's products, as XLA says.

The program is lowered, and the propagation of Shardy runs on it, as it does when XLA compiles.  No device is needed.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun
from jax.extend.mlir import ir, passmanager
from jax.extend.mlir.dialects import sdy
from jax.sharding import NamedSharding

from jaxext import _compat
from jaxext.core.form import owner
from jaxext.hazards.origins import rewritten
from jaxext.tuning.walk import walk

Split = tuple[tuple[str, ...], ...]  # of each dimension: the mesh axes that split it

MARK = re.compile(r"jaxext_product_(\d+)_")
ASKED = {"conv_general_dilated": "stablehlo.convolution", "dot_general": "stablehlo.dot_general"}  # about these products
PIPELINE = "builtin.module(sdy-propagation-pipeline)"
# In names of primitives that XLA does not look into, and that other platforms, or meshes without devices, may lack.
OPAQUE = ("pallas_call", "ffi_call", "kernel_call", "debug_", "inspect_sharding")


class Splits(NamedTuple):
    """The way in which XLA splits the products of a program.

    Attributes:
      mesh: the axes of its mesh with their sizes.
      products: the splits of the operands and of the result of each, in the order of a walk; one that nothing uses has none.
        None if XLA cannot be asked: without Shardy, or if the program cannot be lowered for CPUs.
    """

    mesh: dict[str, int]
    products: list[tuple[Sequence[Split | None], Split | None]] | None


def product_splits(program: ClosedJaxpr, shardings: Sequence[Any]) -> Splits:
    """The splits, given the shardings of the program's constants and arguments; those without a mesh are whole.

    Raises:
      ValueError: the shardings have several meshes.
    """
    named = {sharding.mesh.abstract_mesh for sharding in shardings if isinstance(sharding, NamedSharding)}
    if len({(mesh.axis_names, mesh.axis_sizes) for mesh in named}) > 1:
        raise ValueError(f"doctor: the arguments are split over the meshes {[*named]}, want one")
    meshes = [*_meshes(program, shardings)]
    axes = {axis: size for mesh in meshes for axis, size in mesh.shape.items() if size > 1}
    marked, count = _marked(program)
    if not axes or not count:
        return Splits(axes, [])
    if not _compat.config.use_shardy_partitioner.value:
        return Splits(axes, None)
    avals: list[Any] = [*(var.aval for var in program.jaxpr.constvars), *program.in_avals]
    n = len(program.consts)
    on_mesh = [s if isinstance(s, NamedSharding) else NamedSharding(meshes[0], jax.P()) for s in shardings]
    called = jax.jit(lambda *operands: jaxpr_as_fun(marked.replace(consts=operands[:n]))(*operands[n:]))
    try:
        types = [jax.ShapeDtypeStruct(aval.shape, aval.dtype, sharding=s) for aval, s in zip(avals, on_mesh, strict=True)]
        module: Any = called.trace(*types).lower(lowering_platforms=("cpu",)).compiler_ir("stablehlo")
        with module.context:
            passmanager.PassManager.parse(PIPELINE).run(module.operation)
    except Exception:  # of a rule of some primitive
        return Splits(axes, None)
    found: list[tuple[Sequence[Split | None], Split | None]] = [((None, None), None)] * count
    for op in _operations(module.operation):
        if op.name in ASKED.values() and (mark := MARK.search(str(op.location))):
            found[int(mark[1])] = tuple(map(_split, op.operands)), _split(op.results[0])
    return Splits(axes, found)


def _meshes(program: ClosedJaxpr, shardings: Sequence[Any]) -> Iterator[Any]:
    yield from (sharding.mesh for sharding in shardings if isinstance(sharding, NamedSharding))
    for step in walk(program.jaxpr):
        params = step.eqn.params
        jit_shardings = (*params.get("in_shardings", ()), *params.get("out_shardings", ()))
        for sharding in (params.get("sharding"), params.get("dst_sharding"), *jit_shardings):
            if isinstance(sharding, NamedSharding):
                yield sharding.mesh
        if step.eqn.primitive.name == "shard_map":
            yield params["mesh"]


def _marked(program: ClosedJaxpr) -> tuple[ClosedJaxpr, int]:
    """The program with a name around each product, by which to find it again, and the number of them."""
    numbers = itertools.count()

    def marked(eqn: Any) -> list[Any]:
        if eqn.primitive.name in ASKED:
            info = eqn.source_info
            return [eqn.replace(source_info=info.replace(name_stack=info.name_stack.extend(f"jaxext_product_{next(numbers)}_")))]
        if eqn.primitive in owner:
            return [_without_devices(eqn)]
        is_opaque = any(name in eqn.primitive.name for name in OPAQUE) and not eqn.params.get("interpret")
        return [_opaque(eqn) if is_opaque else eqn]

    return rewritten(program, marked), next(numbers)


def _without_devices(eqn: Any) -> Any:
    """A product of jaxext, by any implementation, lowered without the devices of its mesh."""
    params = {**eqn.params, "static": eqn.params["static"].replace(implementation=None)}

    def fun(*operands):
        results = eqn.primitive.bind(*operands, **params)
        return results if eqn.primitive.multiple_results else [results]

    return eqn.replace(primitive=_compat.lowering_p, params=dict(settings=(), fun=fun, avals=tuple(var.aval for var in eqn.outvars)))


def _opaque(eqn: Any) -> Any:
    """A call of a library with the operands and the results of this equation, which nothing runs."""
    given, results = ([jax.ShapeDtypeStruct(atom.aval.shape, atom.aval.dtype) for atom in each] for each in (eqn.invars, eqn.outvars))
    call = jax.make_jaxpr(jax.ffi.ffi_call("jaxext_opaque", results, has_side_effect=True))(*given).jaxpr.eqns[-1]
    return eqn.replace(primitive=call.primitive, params=call.params, effects=call.effects)


def _operations(op: Any) -> Iterator[Any]:
    for region in op.regions:
        for block in region.blocks:
            for inner in block.operations:
                yield inner.operation
                yield from _operations(inner.operation)


def _split(value: Any) -> Split:
    """The mesh axes that split each dimension, without those that are manual where it stands."""
    manual: tuple[str, ...] = ()
    if isinstance(value, ir.BlockArgument):
        op: Any = value.owner.owner
        at = value.arg_number
        if "arg_attrs" in op.attributes:  # of a function
            attribute = _get(op.attributes["arg_attrs"][at], "sdy.sharding")
        else:
            attribute = _get(op.attributes, "in_shardings", "sdy.sharding")  # of a shard_map, or of a loop
            if "manual_axes" in op.attributes:
                axes: Any = sdy.ManualAxesAttr(op.attributes["manual_axes"])
                manual = tuple(axes)
            attribute = attribute and sdy.TensorShardingPerValueAttr(attribute).shardings[at]
    elif attribute := _get(value.owner.attributes, "sdy.sharding", "out_shardings"):
        attribute = sdy.TensorShardingPerValueAttr(attribute).shardings[value.result_number]
    else:
        attribute = _get(value.owner.attributes, "sharding", "out_sharding")  # of a reshard, or a collective
    if attribute is None:
        return ((),) * ir.RankedTensorType(value.type).rank
    dimensions = (sdy.DimensionShardingAttr(each).axes for each in sdy.TensorShardingAttr(attribute).dimension_shardings)
    names = (tuple(_name(sdy.AxisRefAttr(axis)) for axis in axes) for axes in dimensions)
    return tuple(tuple(axis for axis in axes if axis not in manual) for axes in names)


def _get(attributes: Any, *names: str) -> Any:
    return next((attributes[name] for name in names if name in attributes), None)


def _name(axis: Any) -> str:
    """The name of a mesh axis, or of a part of one, such as "data:(1)2"."""
    part = axis.sub_axis_info and sdy.SubAxisInfoAttr(axis.sub_axis_info)
    return f"{axis.name}:({part.pre_size}){part.size}" if part else axis.name
