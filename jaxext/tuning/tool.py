"""Tools as transformations of a function: `explain(fun)(*args)`, `tune(fun)(*args)` and `doctor(fun)(*args)`."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Generic, TypeVar

import jax

from jaxext._messages import format_value

Result = TypeVar("Result")


class Tool(Generic[Result]):
    """A function of the arguments of `fun`.  `read(bound, args, kwargs)` gives its result, from the arguments that hold an array.

    All leaves that are no arrays are static, such as strides or a module's activation: `bound` has them already.
    """

    def __init__(self, name: str, fun: Callable, read: Callable[..., Result]):
        if not callable(fun):
            raise TypeError(f"{name}: fun is {format_value(fun)}, want the function itself: {name}(fun)(*args)")
        functools.update_wrapper(self, fun)
        self._name, self._fun, self._read = name, fun, read

    def __call__(self, *args: Any, **kwargs: Any) -> Result:
        def bound(*own: Any, **named: Any) -> Any:
            rest = iter(own)
            whole = [_whole(x, next(rest)) if holds_array(x) else x for x in args]
            return self._fun(*whole, **{name: _whole(x, named[name]) if name in named else x for name, x in kwargs.items()})

        named = {name: _arrays(x) for name, x in kwargs.items() if holds_array(x)}
        return self._read(bound, tuple(map(_arrays, filter(holds_array, args))), named)

    def __repr__(self) -> str:
        return f"{self._name}({self._fun!r}), to be called with the arguments of that function"


def holds_array(x: Any) -> bool:
    """Return whether a pytree has a leaf with a shape and a dtype: an array, or a `jax.ShapeDtypeStruct`."""
    return any(map(_is_array, jax.tree.leaves(x)))


def _is_array(leaf: Any) -> bool:
    return hasattr(leaf, "shape") and hasattr(leaf, "dtype")


def _arrays(x: Any) -> Any:
    """Return a pytree with None in place of the leaves that are no arrays."""
    return x if all(map(_is_array, jax.tree.leaves(x))) else jax.tree.map(lambda leaf: leaf if _is_array(leaf) else None, x)


def _whole(x: Any, arrays: Any) -> Any:
    """Return the pytree x with other arrays: the leaves of `arrays`."""
    found = iter(jax.tree.leaves(arrays))
    return jax.tree.map(lambda leaf: next(found) if _is_array(leaf) else leaf, x)
