"""Training steps of whole networks: lax's and jaxext's interleaved: time, time to compile, memory, and errors against float64.

    pip install '.[models]'
    python -m benchmarks.models --json models_cpu.json
    python -m benchmarks.models --json models_gpu.json --dtype bfloat16 --jobs 5       # on a GPU

Two networks are haiku's, one is Keras's, and the others are written in flax, haiku and equinox as users write them.  jaxext's step is the
same function inside `in_place_of_lax`.  A step gives the loss and the gradients of all parameters; an optimiser would be the same in both.
Each network is measured in a process of its own, and nothing that it compiles is in a cache.  On a GPU batches are larger, errors are
relative to float32 at the highest precision, and the longest kernels are reported.  Networks that are built at once disturb each other:
their times to build say nothing, and XLA chooses among a GPU's kernels by times that it takes beside other work.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import contextlib
import dataclasses
import functools
import importlib.metadata
import multiprocessing
import os
import pathlib
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import jaxext
from jaxext.bench.heap import keep_freed_memory
from jaxext.cli.terminal import count
from jaxext.tuning import timing

from .algorithms import side
from .private_training import by_vmap, entropy, of_resnet, wide_resnet
from .race import write_rows

MOST = {"build": 2.0, "memory": 1.2}  # the goals, for jaxext over lax; a step is slower if all quartiles of its ratio say so
KERNELS = 20
CLASSES = 1000

Network = tuple[Callable, Any, tuple]  # the step of (parameters, *batch), parameters, batch


def key() -> jax.Array:
    return jax.random.key(0, impl="unsafe_rbg")  # its draws compile in a quarter of the time


def images(*shape: int, classes: int = CLASSES) -> tuple[jax.Array, jax.Array]:
    """Random images and labels."""
    return jax.random.normal(key(), shape), jax.random.randint(key(), shape[:1], 0, classes).astype(jnp.float32)


def flax_network(network, *shape: int) -> Network:
    batch = images(*shape)
    variables = dict(jax.jit(network.init)(key(), batch[0]))
    params = variables.pop("params")
    apply = functools.partial(network.apply, mutable=[*variables])
    return jax.value_and_grad(lambda params, x, labels: entropy(apply({"params": params, **variables}, x)[0], labels)), params, batch


def haiku_network(of: str | Callable, *shape: int) -> Network:
    """A function that applies haiku's modules, or the name of one of its networks."""
    import haiku as hk

    forward = of if callable(of) else lambda x: getattr(hk.nets, of)(num_classes=CLASSES)(x, is_training=True)
    batch, network = images(*shape), hk.without_apply_rng(hk.transform_with_state(forward))
    params, state = jax.jit(network.init)(key(), batch[0])
    return jax.value_and_grad(lambda params, x, labels: entropy(network.apply(params, state, x)[0], labels)), params, batch


def convnext(*batch: int) -> Network:
    from flax import linen as nn

    class ConvNeXt(nn.Module):
        @nn.compact
        def __call__(self, x):
            x = nn.LayerNorm()(nn.Conv(96, (4, 4), (4, 4))(x))
            for depth, channels in ((3, 96), (3, 192), (9, 384), (3, 768)):
                if channels > 96:
                    x = nn.Conv(channels, (2, 2), (2, 2))(nn.LayerNorm()(x))
                for block in range(depth):
                    y = nn.LayerNorm()(nn.Conv(channels, (7, 7), feature_group_count=channels)(x))
                    y = nn.Dense(channels)(nn.gelu(nn.Dense(4 * channels)(y)))
                    x = x + self.param(f"scale {channels} {block}", nn.initializers.constant(0.1), (channels,)) * y
            return nn.Dense(CLASSES)(nn.LayerNorm()(x.mean((1, 2))))

    return flax_network(ConvNeXt(), *batch, 3)


# expansion, channels, blocks, stride, size of the filter
MBCONV = ((1, 16, 1, 1, 3), (6, 24, 2, 2, 3), (6, 40, 2, 2, 5), (6, 80, 3, 2, 3), (6, 112, 3, 1, 5), (6, 192, 4, 2, 5), (6, 320, 1, 1, 3))


def efficientnet(*batch: int) -> Network:
    from flax import linen as nn

    class EfficientNet(nn.Module):
        @nn.compact
        def __call__(self, x):
            def conv(x, channels, k=1, stride=1, groups=1):
                x = nn.Conv(channels, (k, k), (stride, stride), use_bias=False, feature_group_count=groups)(x)
                return nn.BatchNorm(use_running_average=False)(x)

            x = nn.silu(conv(x, 32, 3, 2))
            for expansion, channels, blocks, stride, k in MBCONV:
                for block in range(blocks):
                    inner = expansion * x.shape[-1]
                    y = nn.silu(conv(x, inner)) if expansion > 1 else x
                    y = nn.silu(conv(y, inner, k, 1 if block else stride, inner))
                    squeezed = nn.silu(nn.Conv(x.shape[-1] // 4, (1, 1))(y.mean((1, 2), keepdims=True)))
                    y = conv(y * nn.sigmoid(nn.Conv(inner, (1, 1))(squeezed)), channels)
                    x = x + y if x.shape == y.shape else y
            return nn.Dense(CLASSES)(nn.silu(conv(x, 1280)).mean((1, 2)))

    return flax_network(EfficientNet(), *batch, 3)


def mobilenet_v3(*batch: int) -> Network:
    os.environ["KERAS_BACKEND"] = "jax"
    import keras

    static: Any = dict(weights=None, classes=CLASSES, include_preprocessing=False, classifier_activation=None, dropout_rate=0)
    network = keras.applications.MobileNetV3Small((*batch[1:], 3), **static)
    params, state = ([v.value for v in of] for of in (network.trainable_variables, network.non_trainable_variables))
    step = jax.value_and_grad(lambda params, x, labels: entropy(network.stateless_call(params, state, x, training=True)[0], labels))
    return step, params, images(*batch, 3)


def unet(shape: tuple[int, ...], widths: tuple[int, ...], up: int) -> Network:
    """A U-Net that restores its input, with transposed layers of `up` taps by 2."""
    import equinox as eqx

    axes, keys = len(shape) - 2, iter(jax.random.split(key(), 64))

    def conv(i, o, k=3, stride=1):
        return eqx.nn.Conv(axes, i, o, k, stride, (k - 1) // 2, key=next(keys))

    def run(layers, x):
        return functools.reduce(lambda x, layer: jax.nn.relu(layer(x)), layers, x)

    pairs = list(zip(widths, widths[1:], strict=False))
    network = {
        "down": [[conv(shape[1], widths[0]), conv(widths[0], widths[0])], *([conv(i, o, 2, 2), conv(o, o), conv(o, o)] for i, o in pairs)],
        "widen": [eqx.nn.ConvTranspose(axes, o, i, up, 2, padding=(up - 2) // 2, key=next(keys)) for i, o in pairs],
        "up": [[conv(2 * i, i), conv(i, i)] for i, _ in pairs],
        "out": conv(widths[0], shape[1], 1),
    }
    params, static = eqx.partition(network, eqx.is_inexact_array)

    def restored(network, x):
        levels = []
        for layers in network["down"]:
            levels.append(x := run(layers, x))
        for level, widen, layers in reversed(list(zip(levels[:-1], network["widen"], network["up"], strict=True))):
            x = run(layers, jnp.concatenate([level, widen(x)]))
        return network["out"](x)

    step = jax.value_and_grad(lambda params, x: jnp.mean((jax.vmap(lambda x: restored(eqx.combine(params, static), x))(x) - x) ** 2))
    return step, params, images(*shape)[:1]


def mamba(layers: int, width: int, inner: int, state: int, *batch: int) -> Network:
    from flax import linen as nn

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

                _, y = lax.scan(step, jnp.zeros((len(x), inner, state), x.dtype), [z.swapaxes(0, 1) for z in (v, delta, b, c)])
                x = x + nn.Dense(width, use_bias=False)((y.swapaxes(0, 1) + v) * nn.silu(gate))
            return nn.Dense(CLASSES)(nn.RMSNorm()(x).mean(1))

    return flax_network(Mamba(), *batch, width)


def wavenet(width: int, *batch: int) -> Network:
    import haiku as hk

    def network(x):
        x, skips = hk.Conv1D(width, 1)(x), 0
        for rate in [1 << layer for layer in range(10)] * 2:
            filtered, gate = jnp.split(hk.Conv1D(2 * width, 2, rate=rate, padding=hk.pad.causal)(x), 2, -1)
            y = jnp.tanh(filtered) * jax.nn.sigmoid(gate)
            skips, x = skips + hk.Conv1D(4 * width, 1)(y), x + hk.Conv1D(width, 1)(y)
        return hk.Conv1D(CLASSES, 1)(jax.nn.relu(hk.Conv1D(4 * width, 1)(jax.nn.relu(skips)))).mean(1)

    return haiku_network(network, *batch, 1)


def private_resnet(*sizes: int) -> Network:
    """The sum of clipped gradients; no loss is computed."""
    params, x = of_resnet(*sizes)
    gradients = by_vmap(functools.partial(wide_resnet, lax.conv_general_dilated))
    return lambda *arguments: (jnp.zeros(()), gradients(*arguments)), params, (x, images(len(x), classes=10)[1])


@dataclasses.dataclass(frozen=True)
class NetworkSpec:
    """A network: the package by which it is written, the function that makes it, and its arguments on a CPU and on a GPU."""

    package: str
    make: Callable[..., Network]
    cpu_arguments: tuple
    gpu_arguments: tuple


NETWORKS: dict[str, NetworkSpec] = {
    "ConvNeXt-T": NetworkSpec("flax", convnext, (4, 96, 96), (64, 224, 224)),
    "EfficientNet-B0": NetworkSpec("flax", efficientnet, (8, 96, 96), (64, 224, 224)),
    "MobileNetV1": NetworkSpec("dm-haiku", haiku_network, ("MobileNetV1", 8, 96, 96, 3), ("MobileNetV1", 64, 224, 224, 3)),
    "ResNet-50": NetworkSpec("dm-haiku", haiku_network, ("ResNet50", 4, 96, 96, 3), ("ResNet50", 64, 224, 224, 3)),
    "MobileNetV3Small": NetworkSpec("keras", mobilenet_v3, (16, 96, 96), (128, 224, 224)),
    "UNet": NetworkSpec("equinox", unet, ((4, 3, 96, 96), (32, 64, 128, 256), 4), ((16, 3, 256, 256), (64, 128, 256, 512), 4)),
    "3-D UNet": NetworkSpec("equinox", unet, ((1, 1, 16, 48, 48), (16, 32, 64, 128), 2), ((2, 1, 64, 128, 128), (32, 64, 128, 256), 2)),
    "Mamba, 12 layers": NetworkSpec("flax", mamba, (12, 256, 512, 16, 2, 128), (12, 1024, 2048, 16, 8, 512)),
    "WaveNet": NetworkSpec("dm-haiku", wavenet, (64, 2, 2048), (128, 8, 8192)),
    "DP-SGD, WRN-10-4": NetworkSpec("jax", private_resnet, (16, 32, 4), (256, 32, 4)),
}

_built: list[tuple] = []  # the one network of this process


def build(name: str, network: NetworkSpec, dtype: str) -> None:
    """Compile the steps of a network.  jaxext's first product, which imports modules, is compiled before."""
    jax.config.update("jax_enable_compilation_cache", False)
    gpu = jax.default_backend() == "gpu"
    with jax.default_device(jax.local_devices(backend="cpu")[0]):
        step, params, batch = network.make(*(network.gpu_arguments if gpu else network.cpu_arguments))
    arguments = jax.device_put((params, *batch), jax.devices()[0])

    def typed(params, x, *labels):
        return step(*jax.tree.map(lambda array: array.astype(dtype), (params, x)), *labels)

    timing.compile(jaxext.in_place_of_lax()(lambda x: lax.conv(x, x, (1, 1), "SAME")), [jnp.ones((1, 1, 3, 3))])
    programs: dict[str, timing.Program] = {}
    for library, function in {"lax": typed, "jaxext": jaxext.in_place_of_lax()(typed)}.items():
        jax.clear_caches()
        programs[library] = timing.compile(function, arguments, graphs=True)
    exact = None
    if gpu:
        with jax.default_matmul_precision("highest"):
            exact = jax.jit(step).lower(*arguments).compile({"xla_gpu_autotune_level": 0})
    elif network.package != "keras":  # whose layers compute in float32 whatever their arguments are
        exact = functools.partial(_in_float64, step)
    _built.append((name, network.package, "float32" if network.package == "keras" else dtype, programs, exact))


def _in_float64(step: Callable, *arguments):
    return timing.truth(lambda dtype, _: jax.jit(step)(*jax.tree.map(lambda x: np.asarray(x, dtype), arguments)))


def measure(rounds: int) -> dict:
    """The row of the network that was built."""
    ((name, package, dtype, programs, exact),) = _built
    arguments = programs["lax"].arguments
    results = {library: program() for library, program in programs.items()}
    ms = timing.take({library: timing.Wall().sampler(program) for library, program in programs.items()}, rounds, patience_s=25)
    truth = exact and exact(*arguments)
    sides = {library: side(program, ms[library]) for library, program in programs.items()}
    over = {"build": sides["jaxext"].build_ms / sides["lax"].build_ms, "memory": sides["jaxext"].bytes / sides["lax"].bytes}
    ratio = timing.quartiles([lax / ours for lax, ours in zip(ms["lax"], ms["jaxext"], strict=True)])
    return {
        "network": name,
        "package": f"{package} {importlib.metadata.version(package)}",
        "shape": arguments[1].shape,
        "dtype": dtype,
        "parameters": sum(leaf.size for leaf in jax.tree.leaves(arguments[0])),
        **{library: dataclasses.asdict(of) for library, of in sides.items()},
        "lax over jaxext": ratio,
        "jaxext over lax": over,
        "error": {library: _errors(result, truth) for library, result in results.items() if exact},
        "difference": _errors(results["jaxext"], results["lax"]),
        "missed": [what for what, limit in MOST.items() if over[what] > limit] + ["time"] * (max(ratio) < 1),
        "kernels": _kernels(programs),
    }


def _kernels(programs: Mapping[str, timing.Program]) -> dict[str, dict[str, float]] | str:
    """Milliseconds of all kernels of a GPU together and of the longest, by library, or why they are not known."""
    clock, why_not = timing.timer()
    if not isinstance(clock, timing.Cupti):
        return why_not or ""
    try:
        all_of = {library: clock.kernels_ms(program, cold=False) for library, program in programs.items()}
    except RuntimeError as error:  # a driver may not report each kernel of a CUDA graph
        return str(error)
    longest = {library: sorted(ms, key=lambda name: -ms[name])[:KERNELS] for library, ms in all_of.items()}
    return {library: {"all": sum(ms.values()), **{name: ms[name] for name in longest[library]}} for library, ms in all_of.items()}


def _errors(result, truth) -> list[float]:
    """Relative errors of the loss, and of all gradients together, in the norm."""
    flat = ([np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(part)]) for part in of] for of in (result, truth))
    return [timing.relative_error(*pair)[0] for pair in zip(*flat, strict=True)]


def line(row: dict) -> str:
    least, ratio, most = row["lax over jaxext"]
    lax, over, errors = row["lax"], row["jaxext over lax"], [of[1] for of in (*row["error"].values(), row["difference"])]
    text = f"{row['network']:17} {lax['ms'][1]:7.0f} ms {ratio:5.2f} ({least:.2f} to {most:.2f})"
    text += f"{lax['lower_ms'] / 1e3 + lax['compile_ms'] / 1e3:7.1f} s {over['build']:5.2f}"
    text += f"{lax['bytes'] / 2**20:7.0f} MiB {over['memory']:5.2f}  errors"
    return " ".join([text, *(f"{error:.0e}" for error in errors), *(f" misses {goal}" for goal in row["missed"])])


def rows(names: list[str], rounds: int, dtype: str, jobs: int, failed: list[str]) -> Iterator[dict]:
    """Build `jobs` networks at once, then measure them one after the other.  What failed is printed, and named in `failed`."""
    for some in (names[at : at + jobs] for at in range(0, len(names), jobs)):
        with contextlib.ExitStack() as stack:
            spawn = multiprocessing.get_context("spawn")
            processes = [stack.enter_context(concurrent.futures.ProcessPoolExecutor(1, spawn, keep_freed_memory)) for _ in some]
            building = [process.submit(build, name, NETWORKS[name], dtype) for process, name in zip(processes, some, strict=True)]
            concurrent.futures.wait(building)
            for name, process, built in zip(some, processes, building, strict=True):
                try:
                    built.result()
                    yield process.submit(measure, rounds).result()
                except Exception as error:  # or a process that died: the other networks are measured nevertheless
                    failed.append(name)
                    traceback.print_exception(error)
                    print(f"{name}: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
                process.shutdown()


def main(arguments=None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=pathlib.Path, help="where the rows go")
    parser.add_argument("--rounds", type=count, default=15, help="of each network, three at least (default: 15)")
    parser.add_argument("--only", action="append", choices=NETWORKS, help="a network (default: all)")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16", "float16"), help="of parameters and images in a step")
    parser.add_argument("--jobs", type=count, default=1, help="networks that are built at once (default: 1)")
    options = parser.parse_args(arguments)
    if options.json and not options.json.resolve().parent.is_dir():
        parser.error(f"--json: there is no folder {options.json.resolve().parent}")
    print("lax's step, and its time over jaxext's; lax's time to build, its memory, and jaxext's over them; errors, and the difference")
    os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"  # the processes share a GPU
    failed: list[str] = []
    made = rows(options.only or [*NETWORKS], options.rounds, options.dtype, options.jobs, failed)
    write_rows(made, line, options.json, timing.Wall())
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
