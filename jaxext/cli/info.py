"""Data for the command `info`: devices, the availability of each implementation, the active table, and the build.

Implementations are asked in the same way as by programs.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import os
import pathlib

import jax

import jaxext
from jaxext._messages import PAGES
from jaxext._target import compute_capability
from jaxext.backends import launcher, native, nvrtc
from jaxext.backends.cuda import cuda_binding
from jaxext.cli.arguments import shape
from jaxext.cli.terminal import Failure
from jaxext.core import entry_points
from jaxext.tables import active, environment, record

TO_GET = "JAXEXT_CUDA=ON pip install . in a clone with nvcc, or pip install --find-links wheels 'jaxext[cuda13]' of its make kernel-wheel"


def facts(arch: str | None) -> dict:
    """All facts.  Implementations are also asked about the GPU `arch`, or about sm_90a if there is no GPU and `arch` is None."""
    here = environment.default_platform()
    targets = [(here, arch if here == "cuda" else None)] + ([] if here == "cuda" else [("cuda", arch or "sm_90a")])
    table = active.active_on(here)
    kinds = collections.Counter((device.platform, device.device_kind) for device in jax.devices())
    return {
        "environment": environment.report(),
        "devices": [{"platform": on, "kind": kind, "count": count} for (on, kind), count in kinds.items()],
        "implementations": [row for on, named in targets for row in _available(on, named)],
        "packages": dict(entry_points.states),
        "table": {"file": table.source, "valid rows": len(table.rows), "ignored": table.ignored},
        "verified": _verified(arch),
        "build": _build(),
    }


def _available(on: str, named: str | None) -> list[dict]:
    """The answer of each implementation to a small call of each kind."""
    conv = functools.partial(jaxext.conv_general_dilated, window_strides=(1, 1), padding="SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
    kinds = {
        "matmul": (jaxext.matmul, shape("bf16[512,512]"), shape("bf16[512,512]")),
        "convolution": (conv, shape("bf16[8,32,32,64]"), shape("bf16[3,3,64,64]")),
        "depthwise convolution": (functools.partial(conv, feature_group_count=64), shape("bf16[8,32,32,64]"), shape("bf16[3,3,1,64]")),
    }
    where = f"{on} {named}" if named else on
    rows = []
    with jaxext.use_target(named), jaxext.use_table(None):
        for kind, (fun, *arrays) in kinds.items():
            (preferred,) = jaxext.explain(fun, platform=on)(*arrays).rows
            for name in sorted([preferred.chosen or "", *preferred.refused]):
                with jaxext.use_implementation(name):
                    (row,) = jaxext.explain(fun, platform=on)(*arrays).rows
                state = "preferred" if name == preferred.chosen else f"available; {preferred.refused[name]}"
                state = state if row.chosen else f"not available: {row.refused[name]}"
                rows.append({"platform": where, "call": kind, "implementation": name, "is": state})
    return rows


def _verified(arch: str | None) -> dict:
    """The record of verified kernels for the GPU `arch`, or for that which is here, or for sm_90a."""
    with jaxext.use_target(arch):
        capability = compute_capability("cuda") or 90
    found = record.read(capability)
    right = sum(verified.right for verified in found.rows.values())
    facts = {"compute capability": capability / 10, "right kinds": right, "wrong kinds": len(found.rows) - right}
    facts["compilers"] = ", ".join(sorted({verified.compiler for verified in found.rows.values()}))  # of none else
    return facts | {"file": found.source if pathlib.Path(found.source).exists() else "jaxext's own alone", "ignored": found.ignored}


def _build() -> dict[str, str]:
    """Return how the CUDA kernels were built, if they were; otherwise how to get them."""
    reason = cuda_binding.missing()
    facts = {"state": reason, "install": TO_GET, "documentation": f"{PAGES}gpus.md"} if reason else {"state": "loaded"}
    with contextlib.suppress(ImportError):
        module = native.cuda_module()
        facts["from"] = native.origin("_cuda_module")
        facts |= {"nvcc": module.cuda_version, "compiled for": module.archs, "XLA FFI": ".".join(map(str, module.ffi_version()))}
    with contextlib.suppress(ImportError):
        from jaxext._cuda_build import SOURCES

        facts["source hash"] = SOURCES[:16]
    nvrtc_here = nvrtc.missing() or "{}.{}".format(*nvrtc.version())
    if native.kernels().taken:  # else they are in the reason
        facts |= {f"{name}, not used": why for name, why in native.kernels().refused.items()}
    launched = launcher.missing() or f"loaded, from {native.origin('_launcher')}"
    return facts | {"NVRTC": nvrtc_here, "launcher": launched}


def check_device() -> None:
    """Raise `Failure` if jax finds no device."""
    try:
        jax.devices()
    except Exception as error:  # jax raises RuntimeError, or AssertionError without a message
        platforms = os.environ.get("JAX_PLATFORMS")
        why = str(error).strip().partition("\n")[0]
        where = f"no device of JAX_PLATFORMS={platforms!r} was found" if platforms else "no device was found"
        raise Failure(f"jax: {where}{why and f' ({why})'}") from None
