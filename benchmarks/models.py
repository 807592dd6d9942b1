"""Training steps of whole networks: lax's beside jaxext's, interleaved: time, time to compile, memory, and errors against float64.

    pip install '.[models]'
    python -m jaxext.benchmarks.models --json models_cpu.json

The networks come from haiku and Keras, or are written in flax, haiku and equinox as their users write them.  jaxext's step is the same
function inside `in_place_of_lax`.  A step gives the loss and the gradients of all parameters, in float32; an optimiser would be the same in
both.  Each network is measured in a process of its own, with empty caches of compiled programs.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import functools
import importlib.metadata
import multiprocessing
import os
import pathlib
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.flatten_util import ravel_pytree

import jaxext
from jaxext.tuning import timing

from .heap import keep_freed_memory
from .private_training import by_vmap, entropy, of_resnet, wide_resnet
from .race import tell

MOST = {"compile": 2.0, "memory": 1.2}  # the goals, for jaxext over lax; and no step is slower
CLASSES = 1000
KEY = jax.random.key(0)

Network = tuple[Callable, Any, tuple]  # the step of (parameters, *batch), parameters, batch


def images(*shape: int) -> tuple[jax.Array, jax.Array]:
    """Random images and labels."""
    return jax.random.normal(KEY, shape), jax.random.randint(KEY, shape[:1], 0, CLASSES).astype(jnp.float32)


def from_flax(network, batch: tuple, loss: Callable = entropy) -> Network:
    variables = dict(jax.jit(network.init)(KEY, batch[0]))
    params = variables.pop("params")

    def of(params, x, *labels):
        return loss(network.apply({"params": params} | variables, x, mutable=[*variables])[0], *labels)

    return jax.value_and_grad(of), params, batch


def from_haiku(forward: Callable, batch: tuple, loss: Callable = entropy) -> Network:
    import haiku as hk

    network = hk.without_apply_rng(hk.transform_with_state(forward))
    params, state = jax.jit(network.init)(KEY, batch[0])
    return jax.value_and_grad(lambda params, x, *labels: loss(network.apply(params, state, x)[0], *labels)), params, batch


def convnext(size: int = 96, depths=(3, 3, 9, 3), width: int = 96) -> Network:
    from flax import linen as nn

    class ConvNeXt(nn.Module):
        @nn.compact
        def __call__(self, x):
            for stage, depth in enumerate(depths):
                channels, by = width << stage, 2 if stage else 4
                x = nn.Conv(channels, (by, by), (by, by))(nn.LayerNorm()(x) if stage else x)
                x = x if stage else nn.LayerNorm()(x)
                for block in range(depth):
                    y = nn.LayerNorm()(nn.Conv(channels, (7, 7), feature_group_count=channels)(x))
                    y = nn.Dense(channels)(nn.gelu(nn.Dense(4 * channels)(y)))
                    x = x + self.param(f"scale {stage} {block}", nn.initializers.constant(0.1), (channels,)) * y
            return nn.Dense(CLASSES)(nn.LayerNorm()(x.mean((1, 2))))

    return from_flax(ConvNeXt(), images(4, size, size, 3))


# of EfficientNet-B0: expansion, channels, blocks, stride, size of the filter
MBCONV = ((1, 16, 1, 1, 3), (6, 24, 2, 2, 3), (6, 40, 2, 2, 5), (6, 80, 3, 2, 3), (6, 112, 3, 1, 5), (6, 192, 4, 2, 5), (6, 320, 1, 1, 3))


def efficientnet(size: int = 96, stages=MBCONV) -> Network:
    from flax import linen as nn

    class EfficientNet(nn.Module):
        @nn.compact
        def __call__(self, x):
            def conv(x, channels, k=1, stride=1, groups=1):
                x = nn.Conv(channels, (k, k), (stride, stride), use_bias=False, feature_group_count=groups)(x)
                return nn.BatchNorm(use_running_average=False)(x)

            x = nn.silu(conv(x, 32, 3, 2))
            for expansion, channels, blocks, stride, k in stages:
                for block in range(blocks):
                    inner = expansion * x.shape[-1]
                    y = nn.silu(conv(x, inner)) if expansion > 1 else x
                    y = nn.silu(conv(y, inner, k, 1 if block else stride, inner))
                    squeezed = nn.silu(nn.Conv(x.shape[-1] // 4, (1, 1))(y.mean((1, 2), keepdims=True)))
                    y = conv(y * nn.sigmoid(nn.Conv(inner, (1, 1))(squeezed)), channels)
                    x = x + y if x.shape == y.shape else y
            return nn.Dense(CLASSES)(nn.silu(conv(x, 1280)).mean((1, 2)))

    return from_flax(EfficientNet(), images(8, size, size, 3))


def mobilenet(size: int = 96) -> Network:
    import haiku as hk

    return from_haiku(lambda x: hk.nets.MobileNetV1(num_classes=CLASSES)(x, is_training=True), images(8, size, size, 3))


def resnet(size: int = 96) -> Network:
    import haiku as hk

    return from_haiku(lambda x: hk.nets.ResNet50(CLASSES)(x, is_training=True), images(4, size, size, 3))


def mobilenet_v3(size: int = 96) -> Network:
    os.environ["KERAS_BACKEND"] = "jax"
    import keras

    network = keras.applications.MobileNetV3Small(
        (size, size, 3), weights=None, classes=CLASSES, include_preprocessing=False, classifier_activation=None, dropout_rate=0
    )
    params, state = ([v.value for v in of] for of in (network.trainable_variables, network.non_trainable_variables))

    def of(params, x, labels):
        return entropy(network.stateless_call(params, state, x, training=True)[0], labels)

    return jax.value_and_grad(of), params, images(16, size, size, 3)


def unet(shape: tuple[int, ...], widths: tuple[int, ...], up: int) -> Network:
    """A U-Net of eqx.nn.Conv and eqx.nn.ConvTranspose, of `up` taps by 2, that restores its input."""
    import equinox as eqx

    axes, keys = len(shape) - 2, iter(jax.random.split(KEY, 64))

    def conv(i, o, k=3, stride=1):
        return eqx.nn.Conv(axes, i, o, k, stride, (k - 1) // 2, key=next(keys))

    def twice(i, o):
        return [conv(i, o), conv(o, o)]

    def run(layers, x):
        for layer in layers:
            x = jax.nn.relu(layer(x))
        return x

    pairs = list(zip(widths, widths[1:], strict=False))
    network = {
        "in": twice(shape[1], widths[0]),
        "down": [[conv(i, o, 2, 2), *twice(o, o)] for i, o in pairs],
        "up": [(eqx.nn.ConvTranspose(axes, o, i, up, 2, padding=(up - 2) // 2, key=next(keys)), twice(2 * i, i)) for i, o in pairs],
        "out": conv(widths[0], shape[1], 1),
    }
    params, static = eqx.partition(network, eqx.is_inexact_array)

    def restored(network, x):
        levels = [run(network["in"], x)]
        for layers in network["down"]:
            levels.append(run(layers, levels[-1]))
        x = levels.pop()
        for widen, layers in reversed(network["up"]):
            x = run(layers, jnp.concatenate([levels.pop(), widen(x)]))
        return network["out"](x)

    def of(params, x):
        return jnp.mean((jax.vmap(functools.partial(restored, eqx.combine(params, static)))(x) - x) ** 2)

    return jax.value_and_grad(of), params, images(*shape)[:1]


def mamba(length: int = 128, width: int = 256, layers: int = 12, state: int = 16) -> Network:
    from flax import linen as nn

    inner = 2 * width

    class Mamba(nn.Module):
        @nn.compact
        def __call__(self, x):
            for layer in range(layers):
                v, gate = jnp.split(nn.Dense(2 * inner, use_bias=False)(nn.RMSNorm()(x)), 2, -1)
                v = nn.silu(nn.Conv(inner, (4,), padding="CAUSAL", feature_group_count=inner)(v))
                delta = nn.softplus(nn.Dense(inner)(nn.Dense(width // 16, use_bias=False)(v)))
                b, c = jnp.split(nn.Dense(2 * state, use_bias=False)(v), 2, -1)
                decay = -jnp.exp(self.param(f"decay {layer}", nn.initializers.normal(), (inner, state)))

                def step(h, now, decay=decay):
                    v, delta, b, c = now
                    h = jnp.exp(delta[..., None] * decay) * h + (delta * v)[..., None] * b[:, None]
                    return h, jnp.einsum("ncs,ns->nc", h, c)

                of_time = [z.swapaxes(0, 1) for z in (v, delta, b, c)]
                _, y = lax.scan(step, jnp.zeros((len(x), inner, state), x.dtype), of_time)
                x = x + nn.Dense(width, use_bias=False)((y.swapaxes(0, 1) + v) * nn.silu(gate))
            return nn.Dense(CLASSES)(nn.RMSNorm()(x).mean(1))

    return from_flax(Mamba(), images(2, length, width))


def wavenet(length: int = 2048, stacks: int = 2, layers: int = 10, width: int = 64) -> Network:
    import haiku as hk

    def forward(x):
        x, skips = hk.Conv1D(width, 1)(x), 0
        for rate in [1 << layer for layer in range(layers)] * stacks:
            filtered, gate = jnp.split(hk.Conv1D(2 * width, 2, rate=rate, padding=hk.pad.causal)(x), 2, -1)
            y = jnp.tanh(filtered) * jax.nn.sigmoid(gate)
            skips, x = skips + hk.Conv1D(4 * width, 1)(y), x + hk.Conv1D(width, 1)(y)
        return hk.Conv1D(CLASSES // 4, 1)(jax.nn.relu(hk.Conv1D(4 * width, 1)(jax.nn.relu(skips)))).mean(1)

    x, labels = images(2, length, 1)
    return from_haiku(forward, (x, labels // 4))


def private_resnet(*sizes: int) -> Network:
    """The sum of clipped gradients; no loss is computed."""
    params, x = of_resnet(*sizes)
    gradients = by_vmap(functools.partial(wide_resnet, lax.conv_general_dilated))
    labels = jax.random.randint(KEY, (len(x),), 0, 10).astype(jnp.float32)
    return lambda params, x, labels: (jnp.zeros(()), gradients(params, x, labels)), params, (x, labels)


# what the table calls it -> the package by which it is written, the function, and its arguments
NETWORKS: dict[str, tuple[str, Callable[..., Network], tuple]] = {
    "ConvNeXt-T": ("flax", convnext, ()),
    "EfficientNet-B0": ("flax", efficientnet, ()),
    "MobileNetV1": ("dm-haiku", mobilenet, ()),
    "ResNet-50": ("dm-haiku", resnet, ()),
    "MobileNetV3Small": ("keras", mobilenet_v3, ()),
    "UNet": ("equinox", unet, ((4, 3, 96, 96), (32, 64, 128, 256), 4)),
    "3-D UNet": ("equinox", unet, ((1, 1, 32, 48, 48), (16, 32, 64, 128), 2)),
    "Mamba, 12 layers": ("flax", mamba, ()),
    "WaveNet": ("dm-haiku", wavenet, ()),
    "DP-SGD, WRN-10-4": ("jax", private_resnet, (16, 32, 4)),
}


def measure(name: str, rounds: int) -> dict:
    """The row of a network.  Nothing but jaxext's first product, which imports modules, is compiled before."""
    jax.config.update("jax_enable_compilation_cache", False)
    package, make, sizes = NETWORKS[name]
    step, params, batch = make(*sizes)
    arguments = (params, *batch)
    timing.compile(jaxext.in_place_of_lax()(lambda x: lax.conv(x, x, (1, 1), "SAME")), [jnp.ones((1, 1, 3, 3))])
    programs = {}
    for library, function in {"lax": step, "jaxext": jaxext.in_place_of_lax()(step)}.items():
        jax.clear_caches()
        programs[library] = timing.compile(function, arguments)
    results = {library: program() for library, program in programs.items()}
    ms = timing.take({library: timing.Wall().sampler(program) for library, program in programs.items()}, rounds, patience_s=25)
    truth = timing.truth(lambda dtype, _: jax.jit(step)(*jax.tree.map(lambda x: x.astype(dtype), arguments)))
    return {
        "network": name,
        "package": f"{package} {importlib.metadata.version(package)}",
        "batch": list(batch[0].shape),
        "parameters": sum(leaf.size for leaf in jax.tree.leaves(params)),
        "ms": {library: timing.quartiles(took)[1] for library, took in ms.items()},
        "lax over jaxext": timing.quartiles([a / b for a, b in zip(ms["lax"], ms["jaxext"], strict=True)]),
        "trace_s": {library: program.trace_ms / 1e3 for library, program in programs.items()},
        "compile_s": {library: program.compile_ms / 1e3 for library, program in programs.items()},
        "MiB": {library: _bytes(program) / 2**20 for library, program in programs.items()},
        "error": {library: _errors(result, truth) for library, result in results.items()},
        "difference": _errors(results["jaxext"], results["lax"]),
    }


def _bytes(program: timing.Program) -> int:
    memory = program.compiled.memory_analysis()
    return memory.argument_size_in_bytes + memory.output_size_in_bytes + memory.temp_size_in_bytes - memory.alias_size_in_bytes


def _errors(result, truth) -> dict[str, float]:
    """Relative, that of all gradients in the norm."""
    pairs = zip(("loss", "gradients"), result, truth, strict=True)
    with jax.enable_x64(True):
        return {what: timing.relative_error(ravel_pytree(a)[0], ravel_pytree(b)[0])[0] for what, a, b in pairs}


def over_lax(row: dict) -> dict[str, float]:
    """Time to trace and compile, and memory, of jaxext over lax's."""
    build = {library: row["trace_s"][library] + row["compile_s"][library] for library in row["MiB"]}
    return {what: of["jaxext"] / of["lax"] for what, of in (("compile", build), ("memory", row["MiB"]))}


def broken(row: dict) -> list[str]:
    """The goals that a row misses; a step is slower if all quartiles of the ratio say so."""
    return [what for what, ratio in over_lax(row).items() if ratio > MOST[what]] + ["time"] * (max(row["lax over jaxext"]) < 1)


def line(row: dict) -> str:
    if "failed" in row:
        return f"{row['network']:17} {row['failed']}"
    least, ratio, most = row["lax over jaxext"]
    errors = "/".join(f"{of['gradients']:.0e}" for of in row["error"].values())
    told = f"{row['ms']['lax']:7.1f}/{row['ms']['jaxext']:7.1f} ms {ratio:5.2f} ({least:.2f} to {most:.2f})"
    told += f", {row['compile_s']['lax']:5.1f} s, {row['MiB']['lax']:5.0f} MiB" + "".join(f" {r:.2f}" for r in over_lax(row).values())
    return ", ".join([f"{row['network']:17} {told}", f"errors {errors}", *(f"misses {goal}" for goal in broken(row))])


def rows(names, rounds: int) -> Iterator[dict]:
    spawn = multiprocessing.get_context("spawn")
    for name in names:
        with concurrent.futures.ProcessPoolExecutor(1, spawn, keep_freed_memory) as process:
            try:
                yield process.submit(measure, name, rounds).result()
            except (ImportError, concurrent.futures.BrokenExecutor) as error:
                yield {"network": name, "failed": f"{type(error).__name__}: {error}"}


def main(arguments=None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=pathlib.Path, help="where the rows go")
    parser.add_argument("--rounds", type=int, default=15, help="of each network (default: 15)")
    parser.add_argument("--only", action="append", choices=NETWORKS, help="a network (default: all)")
    options = parser.parse_args(arguments)
    print(f"{'network':17} lax/jaxext: time of a step, and the ratio with its quartiles; time to compile; memory; error of the gradients")
    tell(rows(options.only or NETWORKS, options.rounds), line, options.json)


if __name__ == "__main__":
    main()
