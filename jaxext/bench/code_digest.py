"""Digests of compiled kernels that are blind to names, comments and line numbers.

Evidence that a kernel was right lasts as long as its code does: a kernel that is moved or renamed keeps its digest, and one that computes
otherwise has another.  Of a Triton kernel the PTX counts, of a CUDA kernel the machine code, which the compiled module holds.
"""

from __future__ import annotations

import functools
import hashlib
import pathlib
import re
import tempfile
from collections.abc import Iterable

from jaxext.backends.fields import DTYPES
from jaxext.bench.cuda_names import CONV_ROLES, MATMUL_ROLES, demangled, describe
from jaxext.bench.machine_code import images, own, tool

_DEBUG_SECTION = re.compile(r"^\s*\.section\b.*", re.MULTILINE | re.DOTALL)  # the first of those at the end of a file
_UNSEEN = re.compile(r"//.*|^\s*\.(?:loc|file)\b.*|^\$L__(?:tmp|func_begin|func_end|info_string)\w*:.*", re.MULTILINE)
_ENTRY = re.compile(r"\.entry\s+(\w+)")
_CALLED = re.compile(r"`\([^)]*\)")  # a name in a disassembly
_INSTRUCTION = re.compile(r"^\s*/\*[0-9a-f]{4,}\*/\s+(.*?;)", re.MULTILINE)
_FUNCTION = re.compile(r"^\s*Function : (\w+)\n", re.MULTILINE)


def ptx_digest(ptx: str) -> str:
    text = _UNSEEN.sub("", _DEBUG_SECTION.sub("", ptx))
    for name in set(_ENTRY.findall(text)):
        text = re.sub(rf"\b{name}(?=\b|_param_)", "kernel", text)
    return _digest([" ".join(line.split()) for line in text.splitlines() if line.strip()])


def machine_code_digest(disassembly: str) -> str:
    """The digest of a function in a disassembly: its instructions."""
    return _digest([" ".join(_CALLED.sub("name", line).split()) for line in _INSTRUCTION.findall(disassembly)])


def joint_digest(digests: Iterable[str]) -> str:
    """The digest of several, in any order."""
    return _digest(sorted(set(digests)))


def cuda_digest(kind: str, arch: int) -> str | None:
    """The digest of the compiled module's kernels of a kind ("family role dtypes") for a GPU; None if it has none.

    Kernels with a role in their name count for that role alone, but matrix products of float32 for all, since other roles are transposed
    before; of the dtypes those of the operands count.
    """
    found = [digest for row, digest in _functions(arch) if _is_of(row, *kind.split(" "))]
    return joint_digest(found) if found else None


@functools.cache
def _functions(arch: int) -> list[tuple[dict, str]]:
    """Each kernel of the compiled module for a GPU, as `describe` gives it, and its digest."""
    module = own()
    assert module is not None
    found = []
    with tempfile.TemporaryDirectory() as folder:
        for image in images(module, pathlib.Path(folder), (arch,)):
            if image.source == "code":
                _, *parts = _FUNCTION.split(tool("cuobjdump", "-sass", image.path))
                found += [
                    (describe(demangled(name)), machine_code_digest(code)) for name, code in zip(parts[::2], parts[1::2], strict=True)
                ]
    return found


def _is_of(row: dict, family: str, role: str, dtypes: str) -> bool:
    if row["kernel"] == "matmul_nt" and row["operands"] == "float32":
        return family == "matmul" and dtypes.startswith("fp32,")
    if _family(row["kernel"]) != family:
        return False
    its, asked = row["kernel"].rpartition("_")[2], "fprop" if "bias_act" in role else role.rpartition("_")[2]
    roles = ("fprop", "dgrad") if its in ("gather", "mma") else (its,)  # of the kernel
    known = {*MATMUL_ROLES, *CONV_ROLES}
    if asked in known and known.issuperset(roles) and asked not in roles:
        return False
    return "operands" not in row or DTYPES[row["operands"]] in re.split("x|->", dtypes.partition(",")[0])


def _family(kernel: str) -> str:
    """The family of a kernel by its name in `describe`."""
    families = ("wide_weight_only", "weight_only", "depthwise_mma", "ragged_scaled")
    return next((family for family in families if kernel.startswith(family)), re.sub(r"\dd$", "", kernel.partition("_")[0]))


def _digest(lines: list[str]) -> str:
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]
