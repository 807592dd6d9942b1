"""Whole networks by lax and by jaxext: forward pass and training step, their time, memory, time to build, and errors.

Each script beside this module has networks that it compares if it is run.  `--size small` checks values and gradients, in seconds.

jaxext's program is the same function inside `jaxext.in_place_of_lax()`; the network's code is not changed.  A step gives the loss and the
gradients of all parameters; an optimiser would be the same in both.  The programs run in turn.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.metadata
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import jaxext
from jaxext.bench.heap import keep_freed_memory
from jaxext.tuning import timing

CLASSES = 1000
ROUNDING = {"float32": 1e-2, "float64": 1e-7}  # the largest difference from lax, in the norm: batch norms enlarge rounding
PATIENCE_S = {"forward": 8, "step": 16}  # after which no more rounds are begun
PARTS = "forward", "step"


class Model(NamedTuple):
    """Functions `forward` and `step` of (parameters, x, wanted), and such arguments.

    `injected` has the same functions made of jaxext's operations, if jaxext is not put in the place of lax.
    """

    functions: dict[str, Callable]
    arguments: tuple
    injected: dict[str, Callable] | None = None


@dataclasses.dataclass(frozen=True)
class Network:
    """A network.

    Attributes:
      package: what `pip install` calls the library that has the network, or its layers.
      make: the function of a size that makes the model.
      small, cpu, gpu: sizes for a test, for a CPU and for a GPU.
      rewritten: whether jaxext computes some operations otherwise than lax on a CPU.
      float64: whether the network computes in float64 if its arguments are float64.
    """

    name: str
    package: str
    make: Callable[..., Model]
    small: tuple
    cpu: tuple
    gpu: tuple
    _: dataclasses.KW_ONLY
    rewritten: bool = True
    float64: bool = True

    @property
    def missing(self) -> str | None:
        """The command that installs what the network needs, or None if it is installed."""
        try:
            importlib.metadata.version(self.package)
        except importlib.metadata.PackageNotFoundError:
            return f"pip install {self.package}"
        return None


# --- models


def key() -> jax.Array:
    return jax.random.key(0, impl="unsafe_rbg")  # its draws compile in a quarter of the time


def images(*shape: int, classes: int = CLASSES) -> tuple[jax.Array, jax.Array]:
    """Random images and labels."""
    return jax.random.normal(key(), shape), jax.random.randint(key(), shape[:1], 0, classes)


def text(count: int, length: int, vocabulary: int) -> tuple[jax.Array, jax.Array]:
    """Random tokens, and the token after each."""
    tokens = jax.random.randint(key(), (count, length + 1), 0, vocabulary)
    return tokens[:, :-1], tokens[:, 1:]


def entropy(logits, labels):
    return -jnp.take_along_axis(jax.nn.log_softmax(logits), labels[..., None], -1).mean()


def squares(y, wanted):
    return jnp.mean((y - wanted) ** 2)


def model(apply: Callable, params: Any, batch: tuple, loss: Callable = entropy) -> Model:
    """Return the model of `apply(params, x, training)`."""

    def step(params, x, wanted):
        return jax.value_and_grad(lambda params: loss(apply(params, x, True), wanted))(params)

    return Model({"forward": lambda params, x, wanted: apply(params, x, False), "step": step}, (params, *batch))


def of_linen(network: Any, batch: tuple, call: Callable = lambda training: {}, loss: Callable = entropy) -> Model:
    """Return the model of a module of flax.linen, whose keywords are `call(training)`."""
    variables = dict(jax.jit(lambda x: network.init(key(), x, **call(False)))(batch[0]))
    params = variables.pop("params")

    def apply(params, x, training):
        return network.apply({"params": params, **variables}, x, **call(training), mutable=[*variables])[0]

    return model(apply, params, batch, loss)


def of_equinox(network: Any, batch: tuple, call: Callable, loss: Callable = entropy) -> Model:
    """Return the model of a module of equinox; `call(network, x, training)` is the result of one example."""
    import equinox as eqx

    params, static = eqx.partition(network, eqx.is_inexact_array)

    def apply(params, x, training):
        return jax.vmap(lambda x: call(eqx.combine(params, static), x, training), axis_name="batch")(x)

    return model(apply, params, batch, loss)


def of_haiku(forward: Callable, batch: tuple) -> Model:
    """Return the model of `forward(x, training)`, which applies modules of haiku."""
    import haiku as hk

    network = hk.without_apply_rng(hk.transform_with_state(forward))
    params, state = jax.jit(lambda x: network.init(key(), x, True))(batch[0])
    return model(lambda params, x, training: network.apply(params, state, x, training)[0], params, batch)


# --- what is compared


def cast(tree: Any, dtype: Any) -> Any:
    return jax.tree.map(lambda x: x.astype(dtype) if jnp.issubdtype(x.dtype, jnp.floating) else x, tree)


def pairs(made: Model, dtype: str) -> dict[str, dict[str, Callable]]:
    """Return lax's function and jaxext's, of each part."""

    def typed(function):
        return lambda params, x, wanted: function(*cast((params, x), dtype), wanted)

    ours = made.injected or {part: jaxext.in_place_of_lax()(made.functions[part]) for part in PARTS}
    return {part: {"lax": typed(made.functions[part]), "jaxext": typed(ours[part])} for part in PARTS}


def difference(result: Any, truth: Any) -> float:
    """Return the larger relative error, in the norm, of the loss and of all gradients together, or that of the output."""
    of = zip(*(tree if isinstance(tree, tuple) else (tree,) for tree in (result, truth)), strict=True)
    flat = ([np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(tree)]) for tree in pair] for pair in of)
    return float(np.max([timing.relative_error(*pair)[0] for pair in flat]))  # NaN stays NaN


def rewritten(function: Callable, arguments: tuple) -> list[int]:
    """Return how many operations jaxext computes otherwise than lax, and how many there are."""
    rows = jaxext.explain(function)(*arguments).rows
    return [sum(row.times for row in rows if not row.as_lax), sum(row.times for row in rows)]


def check(network: Network) -> str:
    """Compare values and gradients at the small size, in float64 if the network computes in it.

    Raises:
      AssertionError: jaxext differs from lax, or a claim about what is rewritten does not hold.
    """
    dtype = "float64" if network.float64 else "float32"
    with jax.enable_x64(network.float64):
        made = network.make(*network.small)
        arguments, functions = cast(made.arguments, dtype), pairs(made, dtype)
        results = []
        for library in ("lax", "jaxext"):
            forward, step = (functions[part][library] for part in PARTS)
            results.append(jax.jit(lambda *arguments, f=forward, g=step: (f(*arguments), *g(*arguments)))(*arguments))
        apart, (count, of) = difference(*results[::-1]), rewritten(functions["step"]["jaxext"], arguments)
    assert apart < ROUNDING[dtype], f"{network.name}: jaxext differs from lax by {apart:.0e}"
    assert (count > 0) == network.rewritten, f"{network.name}: {count} of {of} operations of a step are rewritten"
    return f"{network.name}: jaxext differs from lax by {apart:.0e} in {dtype}; {count} of {of} operations of a step are rewritten"


def build(network: Network, dtype: str) -> tuple[dict[str, dict[str, timing.Program]], Callable | None]:
    """Compile the programs of lax and jaxext, and return them with a function that computes a step more exactly."""
    gpu = jax.default_backend() == "gpu"
    with jax.default_device(jax.local_devices(backend="cpu")[0]):
        made = network.make(*(network.gpu if gpu else network.cpu))
    arguments, step = jax.device_put(made.arguments, jax.devices()[0]), made.functions["step"]
    timing.compile(jaxext.in_place_of_lax()(lambda x: lax.conv(x, x, (1, 1), "SAME")), [jnp.ones((1, 1, 3, 3))])  # imports modules
    programs: dict[str, dict[str, timing.Program]] = {}
    for part, functions in pairs(made, dtype).items():
        for library, function in functions.items():
            jax.clear_caches()
            programs.setdefault(part, {})[library] = timing.compile(function, arguments, graphs=True)

    def in_float64(*arguments):
        return timing.truth(lambda dtype, _: jax.jit(step)(*cast(jax.tree.map(np.asarray, arguments), dtype)))

    if gpu:
        with jax.default_matmul_precision("highest"):
            return programs, jax.jit(step).lower(*arguments).compile({"xla_gpu_autotune_level": 0})
    return programs, in_float64 if network.float64 else None


def costs(programs: dict[str, timing.Program], rounds: int, patience_s: float) -> dict:
    """Return quartiles of milliseconds, bytes of arguments, results and temporaries, and milliseconds to trace, lower and compile."""
    ms = timing.take({library: timing.Wall().sampler(program) for library, program in programs.items()}, rounds, patience_s)
    found: dict[str, Any] = {}
    for library, program in programs.items():
        of = program.compiled.memory_analysis()
        used = of.argument_size_in_bytes + of.output_size_in_bytes + of.temp_size_in_bytes - of.alias_size_in_bytes
        found[library] = {"ms": timing.quartiles(ms[library]), "bytes": used, "build_ms": program.trace_ms + program.compile_ms}
    return found | {"lax over jaxext": timing.quartiles([lax / ours for lax, ours in zip(ms["lax"], ms["jaxext"], strict=True)])}


def measure(network: Network, dtype: str, built: tuple, rounds: int) -> dict:
    """Return the row of a network that was built."""
    programs, exact = built
    step = programs["step"]
    results = {part: {library: program() for library, program in of.items()} for part, of in programs.items()}
    row = {part: costs(of, rounds, PATIENCE_S[part]) for part, of in programs.items()}
    truth = exact and exact(*step["lax"].arguments)
    return row | {
        "network": network.name,
        "package": f"{network.package} {importlib.metadata.version(network.package)}",
        "shape": step["lax"].arguments[1].shape,
        "dtype": dtype if network.float64 else "float32",
        "parameters": sum(leaf.size for leaf in jax.tree.leaves(step["lax"].arguments[0])),
        "rewritten": rewritten(step["jaxext"].function, step["jaxext"].arguments),
        "error": {library: difference(result, truth) for library, result in results["step"].items() if exact},
        "difference": {part: difference(of["jaxext"], of["lax"]) for part, of in results.items()},
    }


def lines(row: dict) -> str:
    """Return a line for each part: lax's costs, and jaxext's relative to them."""
    errors = "".join(f", error by {library} {error:.0e}" for library, error in row["error"].items())
    text = "{} ({}): {} of {} operations of a step rewritten".format(row["network"], row["package"], *row["rewritten"]) + errors
    for part in PARTS:
        lax, ours, (least, ratio, most) = (row[part][of] for of in ("lax", "jaxext", "lax over jaxext"))
        text += f"\n  {part:7} lax {lax['ms'][1]:5.0f} ms, over jaxext {ratio:5.2f} ({least:.2f} to {most:.2f})"
        text += f"; {lax['bytes'] / 2**20:5.0f} MiB, times {ours['bytes'] / lax['bytes']:.2f}"
        text += f"; built in {lax['build_ms'] / 1e3:4.1f} s, times {ours['build_ms'] / lax['build_ms']:.2f}"
    return text


def main(networks: Sequence[Network], arguments=None) -> int:
    """Compare the networks of a script."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", choices=[network.name for network in networks], help="(default: all of the script)")
    parser.add_argument("--size", choices=("small", "full"), default="full", help="small: check values and gradients")
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args(arguments)
    keep_freed_memory()
    wanted = [network for network in networks if options.only in (None, network.name)]
    for network in wanted:
        if network.missing:
            print(f"{network.name} is skipped: {network.missing}")
        elif options.size == "small":
            print(check(network))
        else:
            jax.config.update("jax_enable_compilation_cache", False)
            print(lines(measure(network, "float32", build(network, "float32"), options.rounds)))
    return int(all(network.missing for network in wanted))
