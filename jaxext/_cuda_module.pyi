"""The module that csrc/module.cc makes."""

from typing import Any

archs: str
cuda_version: str

def handlers() -> dict[str, Any]: ...
def matmul_kernels() -> list[dict[str, Any]]: ...
def ragged_kernels() -> list[dict[str, Any]]: ...
def scaled_kernels() -> list[dict[str, Any]]: ...
def conv_kernels() -> list[dict[str, Any]]: ...
def wide_weight_only_kernels() -> list[dict[str, Any]]: ...
def ffi_version() -> tuple[int, int]: ...
def matmul_refuses(*, role: str, B: int, M: int, N: int, K: int, dtypes: tuple[str, str, str], fused: bool, arch: int) -> str | None: ...
def ragged_refuses(
    *, role: str, B: int, P: int, R: int, M: int, N: int, K: int, G: int, dtypes: tuple[str, str, str], arch: int
) -> str | None: ...
def scaled_refuses(*, B: int, M: int, N: int, K: int, I: int, J: int, S: int, dtypes: tuple[str, str, str], arch: int) -> str | None: ...
def causal_refuses(
    *, role: str, B: int, T: int, C: int, J: int, dtypes: tuple[str, str, str], bias: str | None, arch: int
) -> str | None: ...
def weight_only_refuses(*, B: int, M: int, N: int, K: int, S: int, bits: int, dtypes: tuple[str, str, str], arch: int) -> str | None: ...
def conv_refuses(
    *,
    role: str,
    rank: int,
    B: int,
    N: int,
    G: int,
    C: int,
    K: int,
    input: tuple[int, int, int],
    filter: tuple[int, int, int],
    output: tuple[int, int, int],
    stride: tuple[int, int, int],
    low: tuple[int, int, int],
    input_dilation: tuple[int, int, int],
    filter_dilation: tuple[int, int, int],
    dtypes: tuple[str, str, str],
    arch: int,
) -> str | None: ...

depthwise_refuses = conv_refuses
