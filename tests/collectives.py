"""The collectives of a compiled program, counted by kind."""

import collections
import re

COLLECTIVE = re.compile(r" (all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter)(?:-start)?\(")


def collectives(compiled) -> collections.Counter:
    return collections.Counter(COLLECTIVE.findall(compiled.as_text()))
