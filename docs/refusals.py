"""The answers of the GPU implementations, in their own words, to calls of each operation: docs/operations/refusals.json.

    python docs/refusals.py     # where the CUDA kernels are compiled

Each call is explained for an H100: with each implementation named, and without a name where all kernels are verified, as they are there by
the compilers of the package's record.  `docs/tables.py` makes tables of it, and `tests/project/test_docs_pages.py` asks again.
"""

import json
import pathlib
from unittest import mock

import jax

import jaxext
from jaxext.tables import record
from jaxext.verify import contact_list

PATH = pathlib.Path(__file__).parent / "operations" / "refusals.json"

# page -> the calls of its table: PAGES of each operation's cases.py
CALLS = {page: calls for operation in contact_list.OPERATIONS for page, calls in contact_list.cases(operation).PAGES.items()}


def words(call, named):
    """Return, for each product, the chosen implementation or why the named one refuses it; nothing if no implementation has the name."""
    with jaxext.use_target("sm_90a"), jaxext.use_implementation(named):
        try:
            rows = jaxext.explain(call.function, platform="cuda")(*call.operands).rows
        except ValueError as error:
            assert "want one of" in str(error), error
            return {}
    return {row.op: row.chosen or row.refused[named] for row in rows}


def asked(names=("triton", "cuda")):
    """page -> rows: what is called, the product, what each implementation says, and which one runs unnamed."""
    all_verified = mock.patch.object(record, "unverified", lambda *_: None)
    pages = {page: [] for page in CALLS}
    for page, calls in CALLS.items():
        for call in calls:
            said = {name: words(call, name) for name in names}
            with all_verified:
                unnamed = words(call, None)
            for op, taken in unnamed.items():
                row = {name: "yes" if said[name].get(op) == name else said[name].get(op, "no such kernel") for name in names}
                pages[page].append({"call": call.name, "product": op, **row, "unnamed": taken})
    return pages


if __name__ == "__main__":
    with jax.enable_x64(True):  # for the row of float64
        PATH.write_text(json.dumps(asked(), indent=1) + "\n")
