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

    The others are static, such as strides or the name of an activation: `bound` has them already.
    """

    def __init__(self, name: str, fun: Callable, read: Callable[..., Result]):
        if not callable(fun):
            raise TypeError(f"{name}: fun is {format_value(fun)}, want the function itself: {name}(fun)(*args)")
        functools.update_wrapper(self, fun)
        self._name, self._fun, self._read = name, fun, read

    def __call__(self, *args: Any, **kwargs: Any) -> Result:
        def bound(*own: Any, **named: Any) -> Any:
            rest = iter(own)
            return self._fun(*(next(rest) if holds_array(x) else x for x in args), **{**kwargs, **named})

        named = {name: x for name, x in kwargs.items() if holds_array(x)}
        return self._read(bound, tuple(filter(holds_array, args)), named)

    def __repr__(self) -> str:
        return f"{self._name}({self._fun!r}), to be called with the arguments of that function"


def holds_array(x: Any) -> bool:
    """Return whether a pytree has a leaf with a shape and a dtype: an array, or a `jax.ShapeDtypeStruct`."""
    return any(hasattr(leaf, "shape") and hasattr(leaf, "dtype") for leaf in jax.tree.leaves(x))
