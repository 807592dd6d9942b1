"""Creates a `jax.make_user_context`, and sets it for a block (`with`), or for every call of a function (as a decorator)."""

from __future__ import annotations

import contextlib
import functools
import inspect
import threading
from collections.abc import Callable
from typing import Any, TypeVar

import jax

from jaxext._messages import format_value

_Fun = TypeVar("_Fun", bound=Callable)

contexts: dict[str, Any] = {}  # every context of jaxext, for `_compat.settings`


def user_context(name: str, default: Any) -> Any:
    """A `jax.make_user_context`, which is part of jit's cache key.  The `repr` of its values has to be the same in every process."""
    return contexts.setdefault(name, jax.make_user_context(default))


# Calls of these return before the body runs, so the scope would end too early.
_LATER = {
    inspect.isgeneratorfunction: "a generator function",
    inspect.iscoroutinefunction: "an async function",
    inspect.isasyncgenfunction: "an async generator function",
}


class Scope(contextlib.ContextDecorator, threading.local):
    """A context manager and function decorator in which `config` has the value.

    It is reentrant and thread-safe.  A context of jax is neither, because it stores the previous value in itself.  Each entry therefore
    creates a new one, on a stack per thread: a `threading.local` runs `__init__` in each thread.

    Args:
      name: the public function that returns it, for messages.
      config: a `user_context`.
      value: hashable.
    """

    def __init__(self, name: str, config: Callable[[Any], contextlib.AbstractContextManager], value: Any):
        self._name, self._config, self._value = name, config, value
        self._entered: list[contextlib.AbstractContextManager] = []

    def __enter__(self) -> None:
        context = self._config(self._value)
        context.__enter__()
        self._entered.append(context)

    def __exit__(self, *exception) -> None:
        self._entered.pop().__exit__(*exception)

    def __call__(self, fun: _Fun) -> _Fun:
        """`fun`, called inside the scope, with its name, documentation and signature.

        Raises:
          TypeError: `fun` is a class, is not callable, or its body runs after the call (generators, async functions).
        """
        kind = next((kind for is_such, kind in _LATER.items() if is_such(fun)), None)
        if kind is not None:
            raise TypeError(
                f"{self._name}: {format_value(fun)} is {kind}, want a function whose body runs when it is called: decorate what it calls"
            )
        if not callable(fun) or isinstance(fun, type):
            raise TypeError(f"{self._name}: got {format_value(fun)}, want a function to decorate")
        return super().__call__(fun)


def in_parentheses(example: str) -> Callable[[_Fun], _Fun]:
    """Makes a function that returns a `Scope` refuse to be a decorator itself: `@use_target`, in place of `@use_target("sm_90a")`.

    Args:
      example: a call, for the message.
    """

    def decorate(make: _Fun) -> _Fun:
        @functools.wraps(make)
        def scope(*args, **kwargs):
            if len(args) == 1 and not kwargs and callable(args[0]):
                name = make.__name__
                raise TypeError(f"{name}: got {format_value(args[0])}, want parentheses: write @{example}")
            return make(*args, **kwargs)

        return scope  # type: ignore[return-value]

    return decorate
