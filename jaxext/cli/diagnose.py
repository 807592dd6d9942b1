"""The command `doctor`: issues of lax's operations in a function."""

from __future__ import annotations

import argparse
import dataclasses
import re
from typing import Any

import jax
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxext
from jaxext._compat import PLATFORMS
from jaxext.cli.arguments import arch, function, shape, takes_function
from jaxext.cli.terminal import UsageError, says_json, tell

SPLIT = re.compile(r"(?<=\d)@(\w+(?:\+\w+)*)")


def add_arguments(command: argparse.ArgumentParser) -> None:
    takes_function(command, split_shape)
    command.add_argument(
        "--mesh", type=mesh, metavar="SIZES", help="sizes of the mesh: 4,2 (axes data and model) or data=4,model=2; no devices are needed"
    )
    command.add_argument("--platform", choices=PLATFORMS, help="default: that of --arch, or of this machine")
    command.add_argument("--arch", type=arch, help="read the program for this GPU, such as sm_90a; no GPU is needed")
    command.add_argument(
        "--backward",
        action=argparse.BooleanOptionalAction,
        help="read the gradient in all floating-point arguments too (default: if the function returns one real number)",
    )
    command.add_argument("--measure", action="store_true", help="time lax's operation and jaxext's where lax's is slow")
    says_json(command)


def doctor(options) -> int:
    """List issues of lax's own operations in a function: where they are wrong, crash or are slow, and the fix.  It is traced, not run.

    The exit status is 1 if something is wrong or crashes, and 0 if operations are at most slow.  A SHAPE such as f32[64@data,32,32,3] is
    split over an axis of --mesh.

    examples:
      python -m jaxext doctor mynet:loss f32[1000] f32[64,32,32,3]
      python -m jaxext doctor mynet:loss f32[1000] f32[64@data,32,32,3] --mesh 4,2
      python -m jaxext doctor mynet:loss f32[1000] f32[64,32,32,3] --arch sm_90a --json
      python -m jaxext doctor mynet:loss f32[1000] f32[64,32,32,3] --in-place-of-lax
    """
    fun = function(options.function, options.shapes)
    if options.in_place_of_lax:
        fun = jaxext.in_place_of_lax()(fun)
    arguments = split_over(options.mesh, options.shapes)
    platform = options.platform or ("cuda" if options.arch else None)
    if options.backward and not jax.tree.leaves(options.shapes):
        raise UsageError("--backward: there is no argument to differentiate by, give a SHAPE for each")
    if options.measure and platform not in (None, jax.default_backend().replace("gpu", "cuda")):
        raise UsageError(f"--measure runs on this machine, whose platform is not {platform}")
    with jaxext.use_target(options.arch):
        report = jaxext.doctor(fun, platform=platform, gradients=options.backward, measure=options.measure)(*arguments)
    tell(options, dataclasses.asdict(report) | {"ok": report.ok}, str(report))
    return 0 if report.ok else 1


def split_shape(text: str) -> jax.ShapeDtypeStruct:
    """Parse a shape whose axes may be split, such as f32[64@data,32,32,3].  Its mesh, which is not known yet, has sizes of 1."""
    text = re.sub(r"\s", "", text)
    unsplit = shape(SPLIT.sub("", text))
    axes = [match and tuple(match[1].split("+")) for match in map(SPLIT.search, text.partition("[")[2].split(","))]
    names = [name for each in axes for name in each or ()]
    if not names:
        return unsplit
    if len({*names}) < len(names):
        raise argparse.ArgumentTypeError(f"{text!r} names an axis of the mesh twice")
    return jax.ShapeDtypeStruct(unsplit.shape, unsplit.dtype, sharding=NamedSharding(_mesh(dict.fromkeys(names, 1)), P(*axes)))


def mesh(text: str) -> AbstractMesh:
    """Parse a mesh: "data=4,model=2", or "4,2" with these names."""
    parts = [each.rpartition("=") for each in re.sub(r"\s", "", text).split(",")]
    names = [name for name, _, _ in parts] if "=" in text else ["data", "model"][: len(parts)]
    if not all(size.isdecimal() and int(size) for *_, size in parts) or not all(map(str.isidentifier, names)) or len({*names}) < len(parts):
        raise argparse.ArgumentTypeError(f"{text!r} is not a mesh, want one such as 4,2 or data=4,model=2")
    return _mesh({name: int(size) for name, (*_, size) in zip(names, parts, strict=True)})


def _mesh(sizes: dict[str, int]) -> AbstractMesh:
    return AbstractMesh(tuple(sizes.values()), tuple(sizes), axis_types=(AxisType.Auto,) * len(sizes))


def split_over(mesh: AbstractMesh | None, arguments: Any) -> Any:
    def split(leaf):
        if leaf.sharding is None:
            return leaf
        names = leaf.sharding.mesh.axis_names
        if mesh is None or not {*names} <= {*mesh.axis_names}:
            raise UsageError(
                f"a SHAPE is split by {', '.join(names)}, want --mesh with it{'' if mesh is None else f', not of {mesh.axis_names}'}"
            )
        sharding = NamedSharding(mesh, leaf.sharding.spec)
        try:
            sharding.shard_shape(leaf.shape)
        except ValueError as error:
            raise UsageError(f"--mesh does not fit a SHAPE: {error}") from None
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

    if mesh is not None and all(leaf.sharding is None for leaf in jax.tree.leaves(arguments)):
        raise UsageError(f"--mesh: no SHAPE is split, want one such as f32[64@{mesh.axis_names[0]},32,32,3]")
    return jax.tree.map(split, arguments)
