"""A value of a `jax.make_user_context` for a while: for a block (`with`), or for every call of a function (a decorator)."""

from __future__ import annotations

import contextlib
import inspect
import threading
from collections.abc import Callable
from typing import Any, TypeVar

_Fun = TypeVar("_Fun", bound=Callable)

# Calls of these return before the body runs, so the scope would be left too early.
_LATER = {
    inspect.isgeneratorfunction: "a generator function",
    inspect.iscoroutinefunction: "an async function",
    inspect.isasyncgenfunction: "an async generator function",
}


class Scope(contextlib.ContextDecorator, threading.local):
    """A context manager, and a decorator of functions, in which `config` has the value.

    It may be entered while it is entered, and by several threads.  A context of jax's own may not: it keeps the value to go back to in
    itself.  So each entry makes one of those, and a stack of them belongs to each thread: a `threading.local` runs `__init__` in each.

    Args:
      name: the public function that made it, for messages.
      config: what `jax.make_user_context` returned.
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
          TypeError: `fun` is a class, is no function, or its body runs after the call (generators, async functions).
        """
        kind = next((kind for is_such, kind in _LATER.items() if is_such(fun)), None)
        if kind is not None:
            raise TypeError(f"{self._name}: {fun!r} is {kind}, want a function whose body runs when it is called: decorate what it calls")
        if not callable(fun) or isinstance(fun, type):
            raise TypeError(f"{self._name}: a decorator of functions, got {fun!r}")
        return super().__call__(fun)
