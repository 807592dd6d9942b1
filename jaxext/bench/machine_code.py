"""Reads machine code by NVIDIA's tools, without a GPU: the code in the compiled module, and the instructions in a disassembly.

The tools are those in Triton's wheel, or else those of a CUDA toolkit on the PATH.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import pathlib
import re
import shutil
import subprocess
from collections.abc import Collection, Iterator
from typing import NamedTuple

from jaxext.backends import native

NEWER = (100, 120)  # the architectures for which PTX is assembled: that for 9.0, and none that tests keep for others
_INSTRUCTION = re.compile(r"^\s*/\*([0-9a-f]{4,})\*/\s+(@!?U?P\w+\s+)?(\w[\w.]*)(.*);", re.MULTILINE)
_FUNCTION = re.compile(r"Function : (\w+)\n")


class Instruction(NamedTuple):
    place: int  # its address
    name: str
    modifiers: list[str]
    operands: str
    predicate: str = ""  # such as "@!P0"

    def __str__(self):
        return f"{'.'.join([self.name, *self.modifiers])} {self.operands.strip()}"


def tool(name: str, *arguments, cwd=None) -> str:
    """The output of one of the CUDA tools."""
    done = subprocess.run([find(name), *arguments], cwd=cwd, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode:
        raise RuntimeError(f"{name}: {done.stdout}")
    return done.stdout


def find(name: str) -> str:
    """The path of a tool.  Triton has two assemblers; the newer one, which knows all architectures, is a toolkit's only one."""
    triton = importlib.util.find_spec("triton")
    in_wheel = pathlib.Path(triton.origin).parent / "backends/nvidia/bin" / name if triton and triton.origin else None
    found = str(in_wheel) if in_wheel and in_wheel.exists() else shutil.which(name.removesuffix("-blackwell"))
    if not found:
        raise FileNotFoundError(f"{name} is neither in Triton's wheel nor on the PATH: pip install 'jaxext[triton]'")
    return found


def functions(code: str) -> dict[str, str]:
    """The disassembly of each function in that of a file, by its name."""
    _, *parts = _FUNCTION.split(code)
    return dict(zip(parts[::2], parts[1::2], strict=True))


def instructions(code: str) -> Iterator[Instruction]:
    for place, predicate, instruction, operands in _INSTRUCTION.findall(code):
        name, *modifiers = instruction.split(".")
        yield Instruction(int(place, 16), name, modifiers, operands, predicate.strip())


def access_bytes(modifiers: list[str]) -> int:
    """The bytes of one memory access: `.128` and the like give bits, `.U16` or `.S8` a short one; the default is a word."""
    widths = [int(m) // 8 for m in (modifier.lstrip("US") for modifier in modifiers) if m in ("8", "16", "32", "64", "128", "256")]
    return widths[-1] if widths else 4


def own() -> pathlib.Path | None:
    """The compiled module.  It is read but not loaded, so it need not fit this jaxlib."""
    spec = native.find("_cuda_module")
    return pathlib.Path(spec.origin) if spec and spec.origin else None


@dataclasses.dataclass(frozen=True)
class Image:
    """A compile unit's code for one architecture."""

    arch: str
    source: str  # "code" or "PTX"
    path: pathlib.Path


def images(module: pathlib.Path, folder: pathlib.Path, archs: Collection[int]) -> list[Image]:
    for kind in ("elf", "ptx"):
        tool("cuobjdump", f"-x{kind}", "all", module.resolve(), cwd=folder)
    compiled = [Image(path.suffixes[-2].removeprefix(".sm_"), "code", path) for path in sorted(folder.glob("*.cubin"))]
    assembled = [Image(str(arch), "PTX", path) for path in sorted(folder.glob("*.sm_90.ptx")) for arch in NEWER]
    return [image for image in compiled + assembled if not archs or int(image.arch.rstrip("af")) in archs]
