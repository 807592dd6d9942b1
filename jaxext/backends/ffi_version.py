"""The version of XLA's foreign function interface (FFI) that a compiled library may be of.

XLA refuses every program, not only ours, once a handler is registered that was compiled with newer headers than its own.
"""

import pathlib
import re

import jax


def running_version() -> tuple[int, int]:
    """Return the version of the FFI that this jaxlib runs, as its headers say."""
    header = (pathlib.Path(jax.ffi.include_dir()) / "xla/ffi/api/c_api.h").read_text()
    major, minor = (int(re.findall(rf"define XLA_FFI_API_{part} (\d+)", header)[0]) for part in ("MAJOR", "MINOR"))
    return major, minor


def refused_version(built: tuple[int, int]) -> str | None:
    """Return the reason why no handler that was compiled with headers of this version may be registered, or None."""
    running = running_version()
    if built[0] == running[0] and built <= running:
        return None
    compiled, here = (".".join(map(str, version)) for version in (built, running))
    return f"built with headers of XLA's FFI {compiled}, this jaxlib runs {here}: install jaxext anew, beside this jaxlib"
