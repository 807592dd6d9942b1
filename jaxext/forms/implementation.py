"""What an implementation is: asked once for each product, it gives a `Plan` or the reason why it refuses.

A plan holds all that is known of the call by then, so that nothing is built twice: its configurations, those expected to be fastest first,
whether the implementation is expected to be faster than those after it, words for `explain`, and how to run.  Nothing is timed here.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import inspect
import pathlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax

from jaxext._compat import Splitter
from jaxext.forms.call import EXPORTED, Call


@dataclasses.dataclass(frozen=True)
class Algorithm:
    """The config of an implementation that has nothing else to choose."""

    algorithm: str


class Implementation:
    """What computes a form's products: derive from it, say what it `supports`, `run` it, and `register` an instance.

    It is asked when a program is lowered, for one device's part of the product, and must answer by the `Call` and by what is installed,
    which must be alike in every process.  A call has one slot open (`call.open`), which is to be computed from the other two: the operation
    itself is asked for as y, its gradients as x and as w.  Where an implementation refuses, the next one is asked; if it was named,
    NotImplementedError is raised with its reason.

    `plan` asks `supports`, and makes a `Plan` of the other methods.  Where these would share work, override `plan` itself.

    An FFI target (`jax.ffi.register_ffi_target`) is registered with the implementation, not in `supports`: a program that JAX has stored is
    loaded without asking.

    Attributes:
      name: by which `implementation=` and `jaxext.use_implementation` know it: an identifier, but none of jaxext's own.
      version: of its code, in a word: what `jaxext.tune` measured with another version, and programs that JAX has stored with it, do not
        hold.  None stands for a hash of the file that its class is written in; where a kernel lies in another file, say it yourself.
      custom_calls: the targets of its custom calls, which `jaxext.export_disabled_checks` then lists.

    Examples:
      >>> class Einsum(Implementation):
      ...     name, version = "einsum", "1"
      ...     def supports(self, call):
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

    def supports(self, call: Call) -> str | None:
        """None, or the reason for refusing the call; `no_kernel` says when any kernel must."""
        raise NotImplementedError

    def gains(self, call: Call) -> str | None:
        """None, or the reason why a call that it supports is left to others if nobody named it: of itself, that it is exported.

        jax stores a program with your FFI target only if `jax.export.DisabledSafetyCheck.custom_call` of its name is among the
        `disabled_checks`; `jaxext.export_disabled_checks()` are those of all `custom_calls`.
        """
        return EXPORTED if call.splitter is Splitter.LATER else None

    def candidates(self, call: Call) -> Sequence[Any]:
        """The configs with which it can compute a call that it supports, those expected to be fastest first: one or more frozen
        dataclasses of whole numbers, words and truth values, among which `jaxext.tune` chooses."""
        return (Algorithm(self.name),)

    def describe(self, call: Call, config: Any) -> str:
        """How the call is computed, in a word or two, for `jaxext.explain`."""
        return " ".join(str(value) for value in dataclasses.asdict(config).values())

    def run(self, call: Call, config: Any, operands: Mapping[str, jax.Array]) -> jax.Array:
        """The result, of `call.shape` and `call.dtype`, by anything that JAX can trace: `jax.ffi.ffi_call`, a Triton kernel, `jax.numpy`.

        The operands, by slot, have the axes `call.axes`; `call.flatten(operands)` has exactly one axis per label, of `call.sizes`.  A size
        may be 0.  A jaxext operation that is called here must name its implementation, such as "xla", or this one may be asked again.
        """
        raise NotImplementedError

    def plan(self, call: Call) -> Plan | str:
        """How the call would be computed, or the reason for refusing it."""
        return self._answer(call, "supports") or Plan(self, call)

    def code(self, platform: str) -> str:
        """A word that tells its code for the platform from any other.

        Raises:
          ValueError: `version` is no word, or is None and the class lies in no file.
        """
        if self.version is not None:
            if not isinstance(self.version, str) or not self.version.isprintable() or not 0 < len(self.version) <= 100:
                raise ValueError(f"register: {self.name} has the version {self.version!r}, want a word")
            return self.version
        try:
            return hash_of([file_of(type(self))])
        except (OSError, TypeError) as error:
            raise ValueError(f"register: {self.name} lies in no file, so it must have a `version` ({error})") from None

    def _answer(self, call: Call, question: str) -> str | None:
        """What `supports` or `gains` says."""
        reason = getattr(self, question)(call)
        if reason is not None and not isinstance(reason, str):
            raise TypeError(f"{call.op}: `{question}` of implementation {self.name!r} gave {reason!r}, want None or a reason")
        return reason


class Plan:
    """How an implementation would compute a call.

    Attributes:
      only_if_named: why it is neither taken nor timed unless it is named, if so.
    """

    only_if_named: str | None = None

    def __init__(self, implementation: Implementation, call: Call):
        self.implementation, self.call = implementation, call

    @functools.cached_property
    def configs(self) -> Sequence[Any]:
        """One or more, those expected to be fastest first, each of which a table could hold."""
        found = self.implementation.candidates(self.call)
        if not isinstance(found, Sequence) or not found or not all(map(_is_config, found)):
            wanted = "one or more frozen dataclasses of whole numbers, words and truth values"
            raise TypeError(f"{self.call.op}: `candidates` of implementation {self.implementation.name!r} gave {found!r}, want {wanted}")
        return found

    def gains(self) -> str | None:
        """None, or the reason why the implementations after it are taken if nobody named one."""
        return self.implementation._answer(self.call, "gains")

    def describe(self, config: Any) -> str:
        """How the call would be computed, in a word or two, for `explain`."""
        return self.implementation.describe(self.call, config)

    def run(self, config: Any, operands: Mapping[str, jax.Array]) -> jax.Array:
        """The result, in `call.shape` and `call.dtype`, of operands whose axes are `call.axes`."""
        return self.implementation.run(self.call, config, operands)


def _is_config(config: Any) -> bool:
    if not dataclasses.is_dataclass(config) or isinstance(config, type):
        return False
    return all(type(value) in (int, str, bool) for value in dataclasses.asdict(config).values())


def hash_of(files: Iterable[pathlib.Path], *more: bytes) -> str:
    """A word for the contents of files.

    Raises:
      OSError: one cannot be read.
    """
    parts = [hashlib.sha256(file.read_bytes()).digest() for file in files]
    return hashlib.sha256(b"".join([*parts, *more])).hexdigest()[:16]


def file_of(cls: type) -> pathlib.Path:
    """The file in which a class is written."""
    return pathlib.Path(inspect.getfile(cls))


def folder_of(cls: type) -> list[pathlib.Path]:
    """The Python files in the folder of that in which a class is written."""
    return sorted(file_of(cls).parent.glob("*.py"))
