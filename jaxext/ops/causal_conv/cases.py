"""The named calls of causal convolutions (`core/contact.py`): none, since no kernel computes them."""

from collections.abc import Iterator

from jaxext.core.contact import Contact


def contacts() -> Iterator[Contact]:
    return iter(())


PAGES: dict[str, list[Contact]] = {}
