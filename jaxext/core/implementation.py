"""The interface of implementations: for each product, an implementation returns a `Plan` or the reason why it refuses.

A plan holds everything derived from the call, so that nothing is computed twice: its configs (those expected to be fastest first), whether
it is expected to be faster than the implementations after it, a description for `explain`, and how to run.  Nothing is timed here.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import inspect
import itertools
import pathlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax

from jaxext._compat import Partitioner
from jaxext._messages import format_value
from jaxext.core.call import EXPORTED, Call
from jaxext.core.precisions import xla_bits


@dataclasses.dataclass(frozen=True)
class Algorithm:
    """The config of an implementation that has nothing else to choose."""

    algorithm: str


class Implementation:
    """Base class of implementations.  Derive from it, define `refuses` and `run`, and `register` an instance.

    jaxext queries it at lowering, for one device's part of the operation.  The answer may depend only on the `Call` and on installed
    software, which must be the same in every process.  A call has one open slot (`call.open`), computed from the other two: y for the
    operation itself, x and w for its gradients.  If this implementation refuses, the next one is tried; if it was named,
    NotImplementedError is raised with its reason.

    `plan` calls `refuses`, and builds a `Plan` from the other methods.  If these would repeat work, override `plan` itself.

    Register an FFI target (`jax.ffi.register_ffi_target`) together with the implementation, not in `refuses`: JAX loads cached programs
    without calling `refuses`.

    Attributes:
      name: its name for `implementation=` and `jaxext.use_implementation`: an identifier that jaxext does not use.
      version: a str that identifies its code.  A new version invalidates measurements of `jaxext.tune` and programs in JAX's cache.  None
        means a hash of the file of its class; if a kernel is in another file, set it yourself.
      custom_calls: the targets of its custom calls, for `jaxext.export.disabled_checks`.
      coded_as: the name under which tables and stored programs know its code.  None means `name`.
      rows_by_config: whether the bits of a row of the result depend on its config but not on the other rows (`jaxext.use_invariant`).

    Examples:
      >>> class Einsum(Implementation):
      ...     name, version = "einsum", "1"
      ...     def refuses(self, call):
      ...         return None if call.dtype == np.float32 else f"the result is {call.dtype}, want float32"
      ...     def run(self, call, config, operands):
      ...         letters = {slot: "".join(labels) for slot, labels in call.labels.items()}  # one letter each
      ...         equation = f"{','.join(letters[slot] for slot in operands)}->{letters[call.open]}"
      ...         return jnp.einsum(equation, *call.flatten(operands).values()).reshape(call.shape)
      >>> register("matmul", Einsum())
      >>> jax.grad(lambda a, b: jaxext.matmul(a, b, implementation="einsum").sum())(jnp.ones((2, 3)), jnp.ones((3, 4))).shape
      (2, 3)
    """

    name: str
    version: str | None = None
    custom_calls: Sequence[str] = ()
    coded_as: str | None = None
    rows_by_config: bool = False

    def refuses(self, call: Call) -> str | None:
        """Return the reason why it does not support the call, or None.  `no_kernel` gives the reasons that hold for any kernel."""
        raise NotImplementedError

    def not_preferred(self, call: Call) -> str | None:
        """Return the reason why other implementations are preferred unless this one is named, or None.  By default only exported programs
        have one.

        jax exports a program with your FFI target only if `jax.export.DisabledSafetyCheck.custom_call` of its name is among the
        `disabled_checks`; `jaxext.export.disabled_checks()` returns those of all `custom_calls`.
        """
        return EXPORTED if call.partitioner is Partitioner.LATER else None

    def candidates(self, call: Call) -> Sequence[Any]:
        """Return one or more configs for a supported call, fastest expected first: frozen dataclasses of int, str and bool."""
        return (Algorithm(self.name),)

    def describe(self, call: Call, config: Any) -> str:
        """Return a word or two on how the call is computed, for `jaxext.explain`."""
        return " ".join(str(value) for value in dataclasses.asdict(config).values())

    def expected(self, call: Call) -> Sequence[str]:
        """Return the expected cost of each config in a few words, in the order of `candidates`, for `jaxext.explain`; empty if unknown."""
        return ()

    def multiplies(self, call: Call) -> str:
        """Return the precision of the multiplications if it is below that of the factors, such as "TF32: 11 bits", for `jaxext.explain`."""
        return ""

    def run(self, call: Call, config: Any, operands: Mapping[str, jax.Array]) -> jax.Array:
        """Compute the result, of `call.shape` and `call.dtype`, in code that JAX can trace, such as `jax.ffi.ffi_call` or `jax.numpy`.

        `operands` maps slots to arrays with the axes `call.axes`; `call.flatten(operands)` has exactly one axis per label, of
        `call.sizes`.  A size may be 0.  For an operation with several results, return a tuple in the order of `call.results`, which lacks
        unused ones.  If you call a jaxext operation here, name its implementation, such as "xla", or this one may be tried again.  jax's
        settings and jaxext's contexts are those of the caller; a `jax.make_user_context` of yours is not if XLA splits the program over
        devices.
        """
        raise NotImplementedError

    def plan(self, call: Call) -> Plan | str:
        """Return a `Plan` for the call, or the reason why it is not supported."""
        return self._reason("refuses", call) or Plan(self, call)

    def code(self, platform: str) -> str:
        """Return a str that identifies its code for the platform.

        Raises:
          ValueError: `version` is not a printable str of 1 to 100 characters, or it is None and the class has no file.
        """
        if self.version is not None:
            if not isinstance(self.version, str) or not self.version.isprintable() or not 0 < len(self.version) <= 100:
                raise ValueError(
                    f"register: version of {self.name} is {format_value(self.version)}, want a printable str of 1 to 100 characters"
                )
            return self.version
        try:
            return hash_of([file_of(type(self))])
        except (OSError, TypeError) as error:
            raise ValueError(f"register: the class of {self.name} is in no file, want a `version` ({error})") from None

    def _reason(self, method: str, call: Call) -> str | None:
        """The answer of `refuses` or `not_preferred`, with its type checked."""
        reason = getattr(self, method)(call)
        if reason is not None and not (isinstance(reason, str) and reason):
            raise TypeError(
                f"{call.op}: `{method}` of implementation {self.name!r} returned {format_value(reason)}, want a reason as a str, or None"
            )
        return reason

    def planned(self, call: Call) -> Plan | str:
        """Return the answer of `plan`, with its type checked."""
        plan = self.plan(call)
        if not isinstance(plan, Plan) and not (isinstance(plan, str) and plan):
            raise TypeError(
                f"{call.op}: `plan` of implementation {self.name!r} returned {format_value(plan)}, want a Plan, or a reason as a str"
            )
        return plan


class Definition(Implementation):
    """An implementation that defines the result: it supports every call, and is taken if all before it refuse or are not preferred."""

    def refuses(self, call: Call) -> str | None:
        return None

    def not_preferred(self, call: Call) -> str | None:
        return None

    def multiplies(self, call: Call) -> str:
        return xla_bits(call)


class Plan:
    """The way in which an implementation would compute a call.

    Attributes:
      only_if_named: the reason why it is used and timed only if named, or None.
      in_the_norm: whether its errors are proportional to the norms of the operands, so that `tune` may time it under a stated tolerance.
    """

    only_if_named: str | None = None
    in_the_norm: bool = False

    def __init__(self, implementation: Implementation, call: Call):
        self.implementation, self.call = implementation, call

    @functools.cached_property
    def configs(self) -> Sequence[Any]:
        """One or more configs, fastest expected first, each of which a table can hold."""
        found = self.implementation.candidates(self.call)
        if not isinstance(found, Sequence) or not found or not all(map(_is_config, found)):
            wanted = "one or more frozen dataclasses of int, str and bool"
            raise TypeError(
                f"{self.call.op}: `candidates` of implementation {self.implementation.name!r} returned {format_value(found)}, want {wanted}"
            )
        return found

    def not_preferred(self) -> str | None:
        """Return the reason why the implementations after it are preferred unless this one is named, or None."""
        return self.implementation._reason("not_preferred", self.call)

    def yields(self) -> bool:
        """Return whether an implementation after it is expected to be faster, so that it is used only if none of them is preferred."""
        return False

    def fails(self, config: Any) -> str | None:
        """Return the reason why this machine cannot compile it, or None.  It is called at lowering, unless the implementation was named."""
        return None

    def describe(self, config: Any) -> str:
        """Return a word or two on how the call would be computed, for `explain`."""
        return self.implementation.describe(self.call, config)

    def multiplies(self) -> str:
        """Return the precision of the multiplications if it is below that of the factors."""
        return self.implementation.multiplies(self.call)

    @property
    def run(self) -> Callable[[Any, Mapping[str, jax.Array]], Any]:
        """A function `run(config, operands)` that computes the result, of `call.shape` and `call.dtype`, from operands with the axes
        `call.axes`.
        """
        return functools.partial(self.implementation.run, self.call)


def _is_config(config: Any) -> bool:
    if not dataclasses.is_dataclass(config) or isinstance(config, type):
        return False
    return all(type(value) in (int, str, bool) for value in dataclasses.asdict(config).values())


def hash_of(files: Iterable[pathlib.Path], *more: bytes) -> str:
    """A short hash of the contents of files.

    Raises:
      OSError: a file cannot be read.
    """
    parts = [hashlib.sha256(file.read_bytes()).digest() for file in files]
    return hashlib.sha256(b"".join([*parts, *more])).hexdigest()[:16]


def file_of(cls: type) -> pathlib.Path:
    """The file that defines a class."""
    return pathlib.Path(inspect.getfile(cls))


def files_of(implementation: Implementation, *beside: str) -> list[pathlib.Path]:
    """Return the files of one of jaxext's implementations: those of its class and of its bases, and beside each those whose names begin
    with the implementation's name, or are in `beside`."""
    classes = itertools.takewhile(lambda cls: cls is not Implementation, type(implementation).__mro__)
    files = {file_of(cls) for cls in classes}
    patterns = (f"{implementation.name}*.*", *beside)
    return sorted(files | {found for file in files for pattern in patterns for found in file.parent.glob(pattern)})
