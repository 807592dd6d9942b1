"""The parameters of a CUDA kernel: names and types from its source, types from its mangled name, sizes and limits from its PTX."""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import math
import re

import jax.numpy as jnp
import numpy as np

# Types of C++ that have a dtype, without const and volatile.
_INTEGERS = {"char": 8, "short": 16, "int": 32, "long": 64, "long long": 64}
_TYPES = {
    **{name: f"int{bits}" for name, bits in _INTEGERS.items()},
    **{f"unsigned {name}": f"uint{bits}" for name, bits in _INTEGERS.items()},
    **{f"{sign}int{bits}_t": f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)},
    **{"signed char": "int8", "size_t": "uint64", "ptrdiff_t": "int64", "bool": "bool", "float": "float32", "double": "float64"},
    **{"__half": "float16", "half": "float16", "__nv_bfloat16": "bfloat16"},
    **{"__nv_fp8_e4m3": "float8_e4m3fn", "__nv_fp8_e5m2": "float8_e5m2"},
}
DTYPES = {name: jnp.dtype(dtype) for name, dtype in _TYPES.items()}
_OF_INTEGERS = {"unsigned", "signed", "long", "short", "char", "int"}  # words in any order
_WORDS = re.compile(r"\b(?:const|volatile|restrict|__restrict__|__restrict|__grid_constant__|std::|struct)(?:\b|(?<=::))")


@dataclasses.dataclass(frozen=True)
class Parameter:
    """A parameter: a pointer to numbers of a type, or a scalar.

    Attributes:
      name: "" if it is not known.
      type: in C++, without const, such as "float"; "" if it is not known.
      pointer: whether it is a pointer.
      bytes: of a scalar, or None if they are not known.
      const: whether it is a pointer through which the kernel cannot write.
    """

    name: str
    type: str
    pointer: bool
    bytes: int | None = None
    const: bool = False

    @property
    def dtype(self) -> np.dtype | None:
        """The dtype of the scalar, or of what it points to; None of a type that has none, or of a template's."""
        return DTYPES.get(self.type)

    def is_other(self, dtype: np.dtype) -> bool:
        """Return whether it is known to have another dtype."""
        return self.dtype is not None and self.dtype != dtype

    def __str__(self) -> str:
        return f"{self.type or 'unknown type'}{'*' if self.pointer else ''} {self.name}".strip()


def of_text(text: str) -> tuple[Parameter, ...]:
    """The parameters that C++ text declares, such as "const float* x, int n".

    Raises:
      ValueError: one is neither a pointer nor a scalar.
    """
    parts = [each for each in split(re.sub(r"\s+", " ", text)) if each not in ("", "void")]
    return tuple(map(_parameter, parts))


def of_source(source: str, kernel: str) -> tuple[Parameter, ...] | None:
    """The parameters of the kernel that C++ source defines or declares, or None if it has none of this name.

    Raises:
      ValueError: it has several of this name with other parameters.
    """
    found = {of_text(text) for name, text in _kernels(source) if name == _base(kernel)}
    if len(found) > 1:
        raise ValueError(f"the source declares {_base(kernel)} with different parameters, want those of the kernel as `parameters`")
    return found.pop() if found else None


def names(source: str) -> list[str]:
    """The names of the kernels of a source."""
    return list(dict.fromkeys(name for name, _ in _kernels(source)))


def of_mangled(name: str) -> tuple[Parameter, ...] | None:
    """The types of the parameters, without their names, by a kernel's name in compiled code; None of an `extern "C"` one."""
    text = _demangled(name)
    if text is None or not text.endswith(")"):
        return None
    opening = len(text) - 1 - _balanced(text[::-1].translate(str.maketrans("()", ")(")), 0)
    try:
        return tuple(dataclasses.replace(each, name="") for each in of_text(text[opening + 1 : -1]))
    except ValueError:  # of a type that no call passes, which the sizes tell
        return None


@dataclasses.dataclass(frozen=True)
class Entry:
    """An entry of PTX.

    Attributes:
      sizes: the bytes of each parameter.
      shared: the bytes of shared memory whose size it declares.
      threads: the most threads of a block, or None.
      cluster: the sizes of clusters that it declares, or None.
      target: what it is compiled for, such as "sm_90a".
    """

    sizes: tuple[int, ...]
    shared: int
    threads: int | None
    cluster: tuple[int, ...] | None
    target: str


def of_ptx(ptx: str, name: str) -> Entry | None:
    """The entry of this name, or None."""
    found = re.search(rf"\.entry\s+{re.escape(name)}\s*(?:\(([^)]*)\))?([^{{;]*)\{{", ptx)
    if found is None:
        return None
    of_parameter = r"\.param\s+(?:\.align\s+\d+\s+)?\.[a-z]+(\d+)\s+(?:\.ptr[^,)]*?\s)?[\w$%]+(?:\[(\d+)\])?"
    body = ptx[found.end() : found.end() - 1 + _balanced(ptx[found.end() - 1 :].translate(str.maketrans("{}()", "()  ")), 0)]
    arrays = re.findall(r"^\s*\.shared\s+(?:\.align\s+\d+\s+)?\.[a-z](\d+)\s+([\w$%]+)(?:\[(\d+)\])?;", ptx, re.MULTILINE)
    own = {(bits, array, count) for bits, array, count in arrays if re.search(rf"(?<![\w$%]){re.escape(array)}(?![\w$%])", body)}
    directives = {key: tuple(map(int, re.findall(r"\d+", value))) for key, value in re.findall(r"\.(\w+)\s+([\d, ]+)", found[2])}
    threads = directives.get("reqntid") or directives.get("maxntid")
    target = re.search(r"^\.target\s+(\w+)", ptx, re.MULTILINE)
    return Entry(
        sizes=tuple(int(bits) // 8 * int(count or 1) for bits, count in re.findall(of_parameter, found[1] or "")),
        shared=sum(int(bits) // 8 * int(count or 1) for bits, _, count in own),
        threads=math.prod(threads) if threads else None,
        cluster=directives.get("reqnctapercluster"),
        target=target[1] if target else "",
    )


def entries(ptx: str) -> list[str]:
    """The names of the kernels of PTX."""
    return re.findall(r"\.entry\s+([\w$%]+)", ptx)


def split(text: str) -> list[str]:
    """The parts between commas that no bracket encloses."""
    parts, depth = [""], 0
    for character in text:
        depth += (character in "(<[{") - (character in ")>]}")
        if character == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += character
    return [part.strip() for part in parts]


def _parameter(text: str) -> Parameter:
    """The parameter of a declaration, or of a type without a name."""
    plain = " ".join(_WORDS.sub(" ", re.sub(r"=.*", "", text)).replace("*", " * ").split())
    array = re.search(r"\[[^\]]*\]", plain)
    plain = plain[: array.start()].strip() if array else plain
    words = [word for word in plain.split() if word != "*"]
    stars = plain.count("*") + (array is not None)
    if "&" in plain or "(" in plain or stars > 1:
        raise ValueError(f"parameter is {text!r}, want a pointer to numbers, or a scalar")
    name = ""
    if len(words) > 1 and words[-1] not in _OF_INTEGERS and re.fullmatch(r"\w+", words[-1]):
        name = words.pop()
    kind = _integer(words) if {*words} <= _OF_INTEGERS else " ".join(words)
    dtype = DTYPES.get(kind)
    const = re.search(r"\bconst\b[^*\[]*[*\[]", text) is not None
    return Parameter(name, kind, stars == 1, None if stars or dtype is None else dtype.itemsize, const)


def _integer(words: list[str]) -> str:
    """A type of integers by the words of it, which may have any order."""
    size = "char" if "char" in words else "short" if "short" in words else " ".join(["long"] * words.count("long")) or "int"
    return f"unsigned {size}" if "unsigned" in words else "signed char" if size == "char" and "signed" in words else size


@functools.lru_cache(64)
def _kernels(source: str) -> tuple[tuple[str, str], ...]:
    """The name and the parameters' text of each `__global__` function."""
    quoted = r"\"(?:\\.|[^\"\\])*\"|'(?:\\.|[^'\\])'"
    text = re.sub(rf"//[^\n]*|/\*.*?\*/|{quoted}", " ", source, flags=re.DOTALL)
    found = []
    for head in re.finditer(r"\b__global__\b", text):
        rest = text[head.end() :]
        while attribute := re.match(r"[^({;]*\b__\w+__\s*\(", rest):  # such as __launch_bounds__(256)
            rest = rest[_balanced(rest, attribute.end() - 1) + 1 :]
        if declared := re.match(r"[^({;]*?([A-Za-z_]\w*)\s*\(", rest):
            found.append((declared[1], rest[declared.end() : _balanced(rest, declared.end() - 1)]))
    return tuple(found)


def _balanced(text: str, opening: int) -> int:
    """The place of the bracket that closes the one at `opening`."""
    depth = 0
    for i in range(opening, len(text)):
        depth += (text[i] == "(") - (text[i] == ")")
        if depth == 0:
            return i
    return len(text)


def _base(kernel: str) -> str:
    """The name of a function without its namespaces and template arguments."""
    return re.sub(r"<.*", "", kernel, flags=re.DOTALL).strip().rpartition("::")[2]


def _demangled(name: str) -> str | None:
    """The declaration that a mangled name stands for, by the C++ runtime that jaxlib loads; None if it is no such name."""
    if not name.startswith("_Z"):
        return None
    library = ctypes.CDLL("libstdc++.so.6")
    library.__cxa_demangle.restype = ctypes.c_void_p
    status = ctypes.c_int()
    made = library.__cxa_demangle(name.encode(), None, None, ctypes.byref(status))
    if status.value != 0 or not made:
        return None
    text = ctypes.string_at(made).decode()
    ctypes.CDLL(None).free(ctypes.c_void_p(made))
    return text
