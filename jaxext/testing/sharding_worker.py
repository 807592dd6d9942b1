"""A function with its operands split over a mesh: the program as text, and the process that runs it.

The text is what a finding prints and what the worker executes, so that both show the same.  XLA can abort on such a program, or hang: then
another process takes the place of the worker.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import itertools
import math
import multiprocessing
import os
import pathlib
import pickle
import signal
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from multiprocessing.connection import wait
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxext.testing.conformance import Mismatch, compare, is_float
from jaxext.testing.sharded import collectives

AUTOMATIC, EXPLICIT, EXPORTED, MANUAL, HALF = WAYS = (
    "automatic axes",
    "explicit axes",
    "an exported program",
    "shard_map",
    "shard_map over one axis",
)
VALUES, GRADIENTS, SECOND = PARTS = ("values", "gradients", "second derivative")
NAMES = "ab"  # of the mesh axes
TOGETHER = ("values", "values and gradients", "all")  # what one program computes, by the order of the derivatives
UNFIT = "unfit"  # the outcome of arguments that the function does not take


@dataclasses.dataclass(frozen=True)
class Function:
    """A function of arrays, or its source over the names of `HEAD`, and example arrays.

    `order` is that of the highest derivative.  `gathered` are axes of each operand and of the result whose split may need communication.
    """

    name: str
    fn: Callable | str
    args: tuple[np.ndarray, ...]
    reference: Callable | str | None = None
    tolerance: float | None = None
    order: int = 2
    ways: tuple[str, ...] = WAYS
    gathered: tuple[tuple[int, ...], ...] = ()


@dataclasses.dataclass(frozen=True)
class Layout:
    """Mesh axes assigned to array axes: `axes` has, for each mesh axis, the axis that it splits of each operand and of the result.

    Where both split one array axis, the first mesh axis is the major one, or the minor one if `flipped`.  `uneven` if they need not divide
    the sizes.
    """

    way: str
    mesh: tuple[int, ...]
    axes: tuple[tuple[int | None, ...], ...]
    flipped: bool = False
    uneven: bool = False

    def spec(self, k: int, over: str = NAMES) -> tuple:
        """The spec of operand k, or of the result for -1, over some of the mesh axes."""
        split: dict[int, str] = {}
        for name, axes in list(zip(NAMES, self.axes, strict=False))[:: -1 if self.flipped else 1]:
            if name in over and (at := axes[k]) is not None:
                split[at] = split.get(at, "") + name
        entries = [split.get(axis) for axis in range(max(split, default=-1) + 1)]
        return tuple(entry if entry is None or len(entry) == 1 else tuple(entry) for entry in entries)

    def parts(self, k: int, axis: int) -> int:
        return math.prod(n for n, axes in zip(self.mesh, self.axes, strict=True) if axes[k] == axis)

    def even(self, arrays: Sequence) -> bool:
        """Return whether it divides the axes of the operands, or of operands and result."""
        return all(size % self.parts(k, axis) == 0 for k, x in enumerate(arrays) for axis, size in enumerate(x.shape))

    def __str__(self) -> str:
        specs = ", ".join(f"P{_tuple(self.spec(k))}" for k in range(len(self.axes[0]) - 1))
        return f"{self.way}, mesh {self.mesh}: {specs} -> P{_tuple(self.spec(-1))}"


@dataclasses.dataclass(frozen=True)
class Facts:
    """The result of a function on one device, and which axes belong together.

    `cuts[r, n]` are the axes of the operands that can be split into n parts together with axis r of the result, since a part of the result
    depends on these parts alone; `local` are those of which the function of the parts is the part of the result.  `sums` are pairs of axes
    of two operands that are contracted with each other.
    """

    shape: tuple[int, ...]
    is_float: bool
    cuts: Mapping[tuple[int, int], tuple[int | None, ...]]
    local: frozenset[tuple[int, int]]
    sums: tuple[tuple[int | None, ...], ...]

    def agree(self, layout: Layout, among: Iterable | None = None) -> bool:
        """Return whether every mesh axis splits nothing, or everything that a cut of the function has."""
        if layout.way == HALF and layout.flipped:  # the axis of the shard_map is the major one inside of it
            return False
        for axes in layout.axes:
            if any(at is not None for at in axes):
                cut = (axes[-1], layout.parts(-1, axes[-1])) if axes[-1] is not None else None
                if cut is None or self.cuts.get(cut) != axes[:-1] or among is not None and cut not in among:
                    return False
        return True


def drawn(shape: tuple[int, ...], seed: int) -> np.ndarray:
    """Small integers, whose sums are exact."""
    return np.random.default_rng(seed).integers(-3, 4, shape)


# The text.

HEAD = """\
import os
os.environ.update(JAX_PLATFORMS="cpu", XLA_FLAGS="--xla_force_host_platform_device_count={devices}")
import jax, jaxext, numpy as np
from functools import partial
from jax import export, lax, numpy as jnp
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
"""


def _tuple(entries: Iterable) -> str:
    """Arguments in parentheses, without the comma of a single one."""
    return f"({', '.join(map(repr, entries))})"


def _array(x: np.ndarray, seed: int) -> str:
    if np.array_equal(x, drawn(x.shape, seed).astype(x.dtype)):
        return f"np.random.default_rng({seed}).integers(-3, 4, {x.shape}).astype({_dtype(x)})"
    return f"np.array({np.asarray(x, object).tolist()}, {_dtype(x)})"


def _dtype(x) -> str:
    return f'"{x.dtype}"' if x.dtype.kind in "biufc" else f"jnp.{x.dtype}"


def _source(fn: Callable | str) -> str:
    if isinstance(fn, str):
        return fn
    return f"...  # {getattr(fn, '__module__', '')}.{getattr(fn, '__qualname__', fn)}"


def operands_of(part: str) -> tuple[str, ...]:
    """The names of the operands of `program`."""
    return ("args", "ct", "tangents")[: 1 if part == VALUES else 2 if part in (GRADIENTS, TOGETHER[1]) else 3]


def setting(function: Function, result: np.ndarray, part: str) -> list[str]:
    """Lines that define the function, its operands, and `program`, which computes one of PARTS or of TOGETHER."""
    n = len(function.args)
    floats = [k for k, x in enumerate(function.args) if is_float(x)]
    names, xs = (", ".join(of % k for k in floats) for of in ("x%d", "args[%d]"))
    given = ", ".join(f"x{k}" if k in floats else f"args[{k}]" for k in range(n))
    f = "f" if len(floats) == n else f"lambda {names}: f({given})"
    arrays = (
        [*map(_array, function.args, range(n))],
        _array(drawn(result.shape, n).astype(result.dtype), n),
        [_array(drawn(function.args[k].shape, n + 1 + k).astype(function.args[k].dtype), n + 1 + k) for k in floats],
    )
    lines = [f"{name} = {_nested(text)}" for name, text in zip(operands_of(part), arrays, strict=False)]
    both = "(lambda y, back: (y, back(ct)))(*jax.vjp({}, {}))".format
    program = {
        VALUES: "f(*args)",
        GRADIENTS: f"jax.vjp({f}, {xs})[1](ct)",
        SECOND: f"jax.jvp(lambda {names}: jax.vjp({f}, {names})[1](ct), ({xs},), tangents)[1]",
        TOGETHER[1]: both(f, xs),
        TOGETHER[2]: f"(lambda y, t: (*y, t[1]))(*jax.jvp(lambda {names}: {both(f, names)}, ({xs},), tangents))",
    }[part]
    return [*lines, f"program = lambda f, {', '.join(operands_of(part))}: {program}"]


def _nested(text: str | Sequence[str]) -> str:
    return text if isinstance(text, str) else f"({', '.join(text)},)"


def splitting(function: Function, result: np.ndarray, part: str, layout: Layout, takes_out_sharding: bool) -> list[str]:
    """Lines that split the operands, and compile and call the program."""
    kind = "Explicit" if layout.way == EXPLICIT else "Auto"
    n, names = len(function.args), tuple(NAMES[: len(layout.mesh)])
    types = f"axis_types=(AxisType.{kind},) * {len(names)}, devices=jax.devices()[:{math.prod(layout.mesh)}]"
    lines = [f"mesh = jax.make_mesh({layout.mesh}, {names}, {types})", "s = lambda *spec: NamedSharding(mesh, P(*spec))"]
    uneven = [k for k, x in enumerate((*function.args, result)) if any(size % layout.parts(k, axis) for axis, size in enumerate(x.shape))]
    spec = [f"s{_tuple(layout.spec(k))}" for k in (*range(n), -1)]
    put = [s if k not in uneven else "s()" for k, s in enumerate(spec)]
    if layout.way in (MANUAL, HALF):
        over = NAMES if layout.way == MANUAL else NAMES[manual_axis(layout)]
        inside = [f"P{_tuple(layout.spec(k, over))}" for k in (*range(n), -1)]
        some = f", axis_names={{{over!r}}}" if layout.way == HALF else ""
        lines += [f"f = jax.shard_map(fn, mesh=mesh, in_specs={_nested(inside[:-1])}, out_specs={inside[-1]}{some})"]
    else:
        given = [f"lax.with_sharding_constraint(x{k}, {spec[k]})" if k in uneven else f"x{k}" for k in range(n)]
        call = plain = f"fn({', '.join(given)})"
        if layout.way == EXPLICIT and takes_out_sharding:
            call = f"{plain[:-1]}, out_sharding={spec[-1]})"
        elif layout.way == EXPLICIT:
            call = f"jax.sharding.reshard({plain}, {spec[-1]})"
        elif layout.spec(-1):
            call = f"lax.with_sharding_constraint({plain}, {spec[-1]})"
        lines += [f"f = lambda {', '.join(f'x{k}' for k in range(n))}: {call}" if call != plain or uneven else "f = fn"]
    where = put[:-1], put[-1], [put[k] for k, x in enumerate(function.args) if is_float(x)]
    operands = [f"jax.device_put({name}, {_nested(of)})" for name, of in zip(operands_of(part), where, strict=False)]
    compiled = "jax.jit(partial(program, f))"
    if layout.way == EXPORTED:
        compiled = f"jax.jit(export.export({compiled})(*operands).call)"
    then = [f"compiled = {compiled}.lower(*operands).compile()", "got = compiled(*operands)"]
    if layout.way == EXPLICIT:
        then = ["with jax.set_mesh(mesh):", *(f"    {line}" for line in then)]
    return [*lines, f"operands = {_nested(operands)}", *then]


def manual_axis(layout: Layout) -> int:
    """The mesh axis of a shard_map over one axis: the first that splits the result, as shard_map leaves no other to XLA before it."""
    return next((i for i, axes in enumerate(layout.axes) if axes[-1] is not None), 0)


def script(known: Known, part: str, layout: Layout, kind: str) -> str:
    """A program that shows a finding by itself."""
    function = known.function
    lines = [f"fn = {_source(function.fn)}", *setting(function, known.result, part), *known.splitting(part, layout)]
    if kind == "communication":
        sent = "all-(?:gather|to-all)|collective-(?:permute|broadcast)|reduce-scatter"
        lines += ["import re", f'assert not re.findall(r"{sent}", compiled.as_text()), "communication"']
    elif kind in PARTS:
        reference = "fn" if function.reference is None else "reference"
        lines[1:1] = [] if function.reference is None else [f"reference = {_source(function.reference)}"]
        lines += [
            f"for g, w in zip(jax.tree.leaves(got), jax.tree.leaves(program({reference}, {', '.join(operands_of(part))})), strict=True):",
            "    np.testing.assert_allclose(np.asarray(g), w, rtol=1e-3, atol=1e-3)",
        ]
    return HEAD.format(devices=max(2, math.prod(layout.mesh))) + "\n".join(lines)


# The worker.


def _wide(x):
    return jnp.asarray(x, jnp.float64) if is_float(x) else jnp.asarray(x)


class Known:
    """A function in a worker, with its truth and its facts."""

    def __init__(self, function: Function):
        self.function, self.names = function, dict[str, Any]()
        exec(HEAD.partition("\n")[2].partition("\n")[2], self.names)  # without the lines for a process of its own
        of: Any = function.fn if function.reference is None else function.reference
        self.fn: Any = eval(function.fn, self.names) if isinstance(function.fn, str) else function.fn
        self.reference: Any = eval(of, self.names) if isinstance(of, str) else of
        result = jax.eval_shape(self.reference, *function.args)
        if not isinstance(result, jax.ShapeDtypeStruct):
            raise TypeError(f"check_shardings: fn returns {type(result).__name__}, want an array: choose one by a lambda")
        self.result = np.zeros(result.shape, result.dtype)
        takes_out_sharding = "out_sharding" in inspect.signature(self.fn).parameters
        self.splitting = lambda part, layout: splitting(function, self.result, part, layout, takes_out_sharding)
        self._run = jax.jit(self.reference)
        self._parts: dict[str, tuple] = {}

    def truth(self, part: str) -> tuple:
        """The results in float64 on one device, and their shapes and dtypes."""
        if part not in self._parts:
            names = dict(self.names)
            exec("\n".join(setting(self.function, self.result, part)), names)
            operands = [names[name] for name in operands_of(part)]
            structs = jax.eval_shape(lambda *operands: names["program"](self.reference, *operands), *operands)
            with jax.enable_x64(True):
                want = jax.jit(functools.partial(names["program"], self.reference))(*jax.tree.map(_wide, operands))
                self._parts[part] = jax.tree.map(np.asarray, want), structs
        return self._parts[part]

    def __call__(self, *args) -> np.ndarray:
        with jax.enable_x64(True):
            return np.asarray(self._run(*map(_wide, args)))

    @functools.cached_property
    def facts(self) -> Facts:
        args = [np.asarray(x, np.float64) if is_float(x) else x for x in self.function.args]
        floats = [k for k, x in enumerate(args) if is_float(x)]
        y = self(*args)
        found: dict[tuple[int, int], list[int | None]] = {}
        for n, k in itertools.product((2, 4, 8), floats):
            noise = np.random.default_rng(k).uniform(5, 10, args[k].shape)
            for axis in (axis for axis, size in enumerate(args[k].shape) if size % n == 0 and size):
                belongs = {r for r, size in enumerate(y.shape) if size % n == 0 and size}
                for block in range(n):
                    inside = _blocks(args[k].shape[axis], n) == block
                    changed = self(*args[:k], args[k] + noise * _along(inside, axis, args[k].ndim), *args[k + 1 :]) != y
                    belongs = {r for r in belongs if not np.any(changed & ~_along(_blocks(y.shape[r], n) == block, r, y.ndim))}
                for r in belongs:
                    positions = found.setdefault((r, n), [None] * len(args))
                    positions[k] = axis if positions[k] is None else positions[k]
        cuts = {cut: tuple(axes) for cut, axes in found.items()}
        finest = {r: n for r, n in sorted(cuts)}
        unsummed = {r for r, n in finest.items() if self._is_local(args, y, r, n, cuts[r, n])}
        local = frozenset((r, n) for r, n in cuts if r in unsummed and cuts[r, n] == cuts[r, finest[r]])
        return Facts(y.shape, is_float(self.result), cuts, local, tuple(self._sums(args, floats)))

    def _is_local(self, args, y, r, n, axes) -> bool:
        for block in (0, n - 1):
            try:
                part = self(*(x if axis is None else np.split(x, n, axis)[block] for x, axis in zip(args, axes, strict=True)))
            except Exception:
                return False
            want = np.split(y, n, r)[block]
            if part.shape != want.shape or not np.allclose(part, want):
                return False
        return True

    def _sums(self, args, floats) -> Iterator[tuple[int | None, ...]]:
        for k, other in itertools.combinations(floats, 2):
            zero = self(*(x * (i != k) for i, x in enumerate(args)))
            for p, q in itertools.product(range(args[k].ndim), range(args[other].ndim)):
                size = args[k].shape[p]
                if size == args[other].shape[q] and size % 2 == 0 and size:
                    first = _blocks(size, 2) == 0
                    masked = {k: args[k] * _along(first, p, args[k].ndim), other: args[other] * _along(~first, q, args[other].ndim)}
                    if np.allclose(self(*(masked.get(i, x) for i, x in enumerate(args))), zero):
                        yield tuple({k: p, other: q}.get(i) for i in range(len(args)))


def _blocks(size: int, n: int) -> np.ndarray:
    return np.arange(size) * n // size


def _along(mask: np.ndarray, axis: int, ndim: int) -> np.ndarray:
    return mask.reshape([-1 if i == axis else 1 for i in range(ndim)])


def judge(known: Known, layout: Layout, part: str) -> tuple[str, str]:
    """("right", "") or the kind of a finding with its detail, or "refused" and why."""
    function, names = known.function, known.names
    if not (layout.uneven or layout.even([*function.args, known.result])):
        return UNFIT, "the mesh does not divide the sizes"
    names |= {"fn": known.fn, "compiled": None}
    try:
        want, structs = known.truth(part)
        exec("\n".join(setting(function, known.result, part)), names)
    except Exception as error:
        return UNFIT, _format_error(error)
    try:
        exec("\n".join(known.splitting(part, layout)), names)
    except Exception as error:
        # Types may be ambiguous, which jax tells while it traces.
        return "refused" if layout.way == EXPLICIT and type(error).__name__ == "ShardingTypeError" else "error", _format_error(error)
    several = part not in PARTS
    results = [x if several else [x] for x in (names["got"], want, structs)]
    for kind, g, w, struct in zip(PARTS if several else (part,), *results, strict=False):
        try:
            compare(g, w, struct, function.tolerance)
        except Mismatch as mismatch:
            return kind, str(mismatch)
    found = collectives(names["compiled"])
    expected = function.gathered and {axes[-1] for axes in layout.axes} & {*function.gathered[-1]}
    if {*found} - {"all-reduce"} and not expected and known.facts.agree(layout):
        return "communication", ", ".join(f"{n} {name}" for name, n in sorted(found.items()))
    return "right", ""


def _format_error(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"


def serve(connection: Any, output: str) -> None:
    """Answer requests until the connection ends.  `output` is the file for what XLA prints."""
    file = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(file, 1)
    os.dup2(file, 2)
    known = functools.lru_cache(64)(lambda pickled: Known(pickle.loads(pickled)))
    while True:
        try:
            pickled, layout, part = connection.recv()
        except EOFError:
            return
        try:
            function = known(pickled)
        except Exception as error:
            connection.send((UNFIT, _format_error(error)))
            continue
        connection.send(function.facts if layout is None else ("script", script(function, part[0], layout, part[1]))
            if isinstance(part, tuple) else judge(function, layout, part))  # fmt: skip


FLAGS = "--xla_force_host_platform_device_count={} --xla_backend_optimization_level=0" + (
    " --xla_cpu_use_fusion_emitters=false" if jax.__version__.startswith("0.10.") else ""  # halves the time
)
Job = tuple[bytes, Layout | None, Any]  # a pickled function, and None for its facts


class Workers:
    """Processes with simulated devices.  One that dies or hangs is replaced, and its job gets the outcome "abort" or "hang"."""

    def __init__(self, number: int, devices: int, limit: float):
        self._number, self._devices, self._limit = number, devices, limit
        self._folder = tempfile.TemporaryDirectory(prefix="shardings-")
        self._idle: list[tuple] = []
        self._count = 0

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, *_) -> None:
        for worker in self._idle:
            self._end(worker)
        self._idle = []
        self._folder.cleanup()

    def run(self, jobs: Iterable[Job]) -> Iterator[tuple[Job, Any]]:
        """Each job with its outcome, in the order in which they end."""
        jobs = iter(jobs)
        busy: dict[Any, tuple] = {}
        try:
            while True:
                while len(busy) < self._number and (job := next(jobs, None)) is not None:
                    worker = self._idle.pop() if self._idle else self._start()
                    try:
                        worker[0].send(job)
                    except OSError:  # it ended while it was idle
                        self._end(worker)
                        worker = self._start()
                        worker[0].send(job)
                    busy[worker[0]] = worker, job, time.monotonic() + self._limit
                if not busy:
                    return
                ready: list[Any] = wait(list(busy), max(0.0, min(deadline for *_, deadline in busy.values()) - time.monotonic()))
                for connection in ready or [c for c, (*_, deadline) in busy.items() if deadline <= time.monotonic()]:
                    worker, job, _ = busy.pop(connection)
                    if ready:
                        try:
                            outcome = connection.recv()
                            self._idle.append(worker)
                        except (EOFError, ConnectionError):
                            outcome = "abort", self._end(worker)
                    else:
                        self._end(worker)
                        outcome = "hang", f"no end after {self._limit:g} s"
                    yield job, outcome
        finally:
            for worker, *_ in busy.values():
                self._end(worker)

    def one(self, job: Job) -> Any:
        return next(self.run([job]))[1]

    def _start(self) -> tuple:
        context = multiprocessing.get_context("spawn")
        ours, theirs = multiprocessing.Pipe()
        self._count += 1
        output = os.path.join(self._folder.name, str(self._count))
        process = context.Process(target=serve, args=(theirs, output), daemon=True)
        variables = {"XLA_FLAGS": FLAGS.format(self._devices), "JAX_PLATFORMS": "cpu", "JAX_ENABLE_X64": "0", "TF_CPP_MIN_LOG_LEVEL": "2"}
        before = {name: os.environ.get(name) for name in variables}
        os.environ.update(variables)
        try:
            process.start()
        finally:
            for name, value in before.items():
                os.environ.pop(name) if value is None else os.environ.update({name: value})
        theirs.close()
        return ours, process, output

    def _end(self, worker: tuple) -> str:
        """End a worker; return its exit status, and the line that says why."""
        connection, process, output = worker
        process.join(0.5)
        process.kill()
        process.join()
        connection.close()
        code = process.exitcode or 0
        lines = pathlib.Path(output).read_text(errors="replace").splitlines() if os.path.exists(output) else []
        why = next((line for line in lines if "Check failed" in line or "free()" in line or "F1" in line[:2]), lines[-1] if lines else "")
        return f"{signal.Signals(-code).name if code < 0 else f'status {code}'}: {why[:300]}"
