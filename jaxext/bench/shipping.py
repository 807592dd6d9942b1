"""A record of verified kernels in the form in which the package ships it: with digests of the code that was right or wrong.

Triton kernels are compiled here for that, CUDA kernels are read in the compiled module.
"""

from __future__ import annotations

import concurrent.futures
import importlib
import multiprocessing
import os
import tempfile
from collections.abc import Iterable
from typing import Any
from unittest import mock

import msgspec

import jaxext
from jaxext._target import use_device
from jaxext.backends.cuda import cuda_binding
from jaxext.bench import code_digest, triton_ptx
from jaxext.ops.matmul.cuda import CudaMatmul
from jaxext.ops.matmul.triton import TritonMatmul
from jaxext.tables import environment
from jaxext.tables.table_format import Context, Entry
from jaxext.verify import cases

Launched = tuple[str, Any, Any]  # the module of a Triton kernel, the problem, the config


def compilers() -> dict[str, str]:
    """Implementation -> the compiler of its kernels here."""
    found = {} if triton_ptx.missing() else {"triton": TritonMatmul().compiler()}
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
    """The digest of a launch's PTX, and of that of the launch after it; None if it does not compile."""
    module, problem, config = job
    try:
        first = importlib.import_module(module).launch(problem, config)
        compiled = [triton_ptx.compile_launch(launch, problem) for launch in (first, first.then) if launch]
    except Exception:  # of the compiler: then there is no such code
        return None
    found = [code_digest.ptx_digest(str(kernel.asm["ptx"])) for kernel in compiled]
    return code_digest.joint_digest(found) if first.then else found[0]


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
    verified = ((kind, of) for kind, of in entry.verified.items() if kind in code)
    recorded = {kind: msgspec.structs.replace(of, code=code[kind], date=entry.measured) for kind, of in verified}
    return Entry.of(Context(entry.device, entry.capability, {}, {}), entry.measured, {}, recorded)
