"""The package's record of verified kernels, kept true: adds what `python -m jaxext verify --share` wrote, and drops what has changed.

    make record                                     # drops the entries whose code has changed since, and says which
    make record SHARED=verified.json                # adds first what a machine with a GPU found: a shared record, or its user's own
    python -m jaxext.benchmarks.record --check      # changes nothing; exit status 1 if there is such an entry

An entry is compared where its compiler is: Triton kernels are compiled here, CUDA kernels are read in the compiled module.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import datetime
import importlib
import multiprocessing
import os
import pathlib
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any
from unittest import mock

import msgspec

import jaxext
from jaxext._target import use_device
from jaxext.backends.cuda import cuda_binding
from jaxext.ops.matmul.cuda import CudaMatmul
from jaxext.ops.matmul.triton import TritonMatmul
from jaxext.tables import environment, record, table_file
from jaxext.tables.table_format import Context, Entry, Verified
from jaxext.verify import cases

from . import code_digest, compiled

Launched = tuple[str, Any, Any]  # the module of a Triton kernel, the problem, the config


def compilers() -> dict[str, str]:
    """Implementation -> the compiler of its kernels here."""
    found = {} if compiled.missing() else {"triton": TritonMatmul().compiler()}
    return found if cuda_binding.missing() else found | {"cuda": CudaMatmul().compiler()}


def digests(kinds: Iterable[str], arch: int, device: str) -> dict[str, str]:
    """Kind ("implementation family role dtypes") -> the digest of its code for a GPU of this name.  A kind that has no code is left out."""
    asked = set(kinds)
    launched: dict[str, list[Launched]] = {kind: [] for kind in asked if kind.startswith("triton ")}
    with jaxext.use_target(f"sm_{arch}"), use_device(device):
        listed, _ = cases.listed(cases.contacts(), "cuda", ["triton"] if launched else [])
    for case in listed:
        plan: Any = case.plan
        if case.key in launched:
            launched[case.key].append((plan.implementation.kernels(plan.problem).__name__, plan.problem, case.config))
    jobs = dict.fromkeys(job for of in launched.values() for job in of)
    # Triton's own cache does not see when a method of a problem changes.
    with tempfile.TemporaryDirectory() as cache, mock.patch.dict(os.environ, TRITON_CACHE_DIR=cache):
        with concurrent.futures.ProcessPoolExecutor(mp_context=multiprocessing.get_context("spawn")) as pool:
            compiled_to = {job: digest for job, digest in zip(jobs, pool.map(_digest, jobs), strict=True) if digest}
    whole = {kind: of for kind, of in launched.items() if of and compiled_to.keys() >= {*of}}
    made = {kind: code_digest.joint_digest(compiled_to[job] for job in of) for kind, of in whole.items()}
    cuda = {kind: code_digest.cuda_digest(kind.removeprefix("cuda "), arch) for kind in asked if kind.startswith("cuda ")}
    return made | {kind: digest for kind, digest in cuda.items() if digest}


def _digest(job: Launched) -> str | None:
    """The digest of a launch's PTX; None if it does not compile."""
    module, problem, config = job
    try:
        return code_digest.ptx_digest(
            str(compiled.compile_launch(importlib.import_module(module).launch(problem, config), problem).asm["ptx"])
        )
    except Exception:  # of the compiler: then there is no such code
        return None


def stale(entries: Sequence[Entry], here: Mapping[str, str]) -> Iterator[tuple[Entry, str, str]]:
    """Each entry and kind whose code is another than the record says, with the reason; of the compilers that are `here`."""
    for entry in entries:
        asked = {kind: of for kind, of in entry.verified.items() if here.get(kind.partition(" ")[0]) == of.compiler}
        found = digests(asked, entry.capability or 0, entry.device) if asked else {}
        for kind, verified in asked.items():
            if kind not in found:
                yield entry, kind, "there are no such kernels any more"
            elif found[kind] != verified.code:
                yield entry, kind, f"the code has changed: {found[kind]}, recorded {verified.code}"


def without(entries: Sequence[Entry], dropped: Iterable[tuple[Entry, str, str]]) -> list[Entry]:
    """The entries without these kinds."""
    gone = {(entry.place, kind) for entry, kind, _ in dropped}
    kept = ({kind: of for kind, of in entry.verified.items() if (entry.place, kind) not in gone} for entry in entries)
    return [msgspec.structs.replace(entry, verified=verified) for entry, verified in zip(entries, kept, strict=True) if verified]


def shipped(entry: Entry) -> Entry:
    """A user's entry in the form in which the package ships it: with the digests of the code that was right or wrong.

    Raises:
      ValueError: it was made with other sources than these, so that the code that ran is not known.
    """
    here, sources = compilers(), environment.codes("cuda")
    for name in sorted({kind.partition(" ")[0] for kind in entry.verified}):
        if entry.sources.get(name) != sources.get(name) or name not in here:
            raise ValueError(f"{entry.device}: its {name} kernels are of another build than those here, want the same commit and compiler")
    code = digests(entry.verified, entry.capability or 0, entry.device)
    recorded = {kind: _with_code(of, code[kind], entry.measured) for kind, of in entry.verified.items() if kind in code}
    return Entry.of(Context(entry.device, entry.capability, {}, {}), entry.measured, {}, recorded)


def compared(entry: Entry) -> Entry:
    """A shared entry without the kinds whose code is another here; a user's own record as `shipped` makes it."""
    if not all(of.code for of in entry.verified.values()):
        return shipped(entry)
    dropped = list(stale([entry], compilers()))
    _tell(dropped)
    return next(iter(without([entry], dropped)), msgspec.structs.replace(entry, verified={}))


def _with_code(verified: Verified, code: str, date: datetime.date) -> Verified:
    return msgspec.structs.replace(verified, code=code, date=date)


def _tell(dropped: Iterable[tuple[Entry, str, str]]) -> None:
    for entry, kind, reason in dropped:
        print(f"{entry.device}, {kind}: {reason}")


def main(argv: Sequence[str] | None = None, path: pathlib.Path = record.SHIPPED) -> int:
    """Run the command; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m jaxext.benchmarks.record", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--add", metavar="FILE", help="what `python -m jaxext verify --share FILE` wrote")
    parser.add_argument("--check", action="store_true", help="change nothing")
    options = parser.parse_args(argv)
    entries = table_file.load(path)
    dropped = list(stale(entries, compilers()))
    _tell(dropped)
    if options.check:
        here = compilers()
        recorded = [(kind, of) for entry in entries for kind, of in entry.verified.items()]
        others = sum(here.get(kind.partition(" ")[0]) != of.compiler for kind, of in recorded)
        print(f"{len(recorded)} kinds are recorded, {len(dropped)} of them are stale, {others} are of compilers that are not here")
        return 1 if dropped else 0
    kept = without(entries, dropped)
    added = [compared(entry) for entry in table_file.load(options.add)] if options.add else []
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        table_file.merge(new := pathlib.Path(folder, path.name), [*kept, *added])
        new.replace(path)
    print(f"{path.name}: {len(dropped)} kinds dropped, {sum(len(entry.verified) for entry in added)} added")
    return 0


if __name__ == "__main__":
    sys.exit(main())
