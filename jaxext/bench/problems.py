"""The suite: real problems, named and tagged, that benchmarks, tuning, compile sweeps and tests share.

Tags are the kind ("matmul", "skinny", "batched", "ragged", "mlp", "fused", "gated"; "one-axis", "two-axes", "three-axes", "dense",
"pointwise", "stem", "grouped", "depthwise", "strided", "dilated", "transposed", "causal", "batched-filters", "per-example"; of jaxext's own
operations "own" and the name), the network that a problem is from ("llama", "resnet50", "wrn", ...), and

    target      has targets on a GPU: by kind, or because it is "large", "thin", "long" or "short" in the contracted axis, in "waves", or of
                "few-images" or "many-images"
    sweep       compiled with every candidate config, not only with the one that is picked
    precision   float32 by other means than TF32, or 8-bit numbers
    cpu         small enough for a CPU without reduction, in float32
    reduced     a smaller problem of the same kind, without targets
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Collection, Iterable
from typing import Any

from jaxext.bench.case import Problem
from jaxext.bench.kinds import FPROP, NN, NT, STEP, WGRAD, Conv, Fused, Labelled, Matmul, Mlp, Ragged
from jaxext.bench.own import SUITE
from jaxext.core.family import families
from jaxext.core.form import Form, owner

DEFAULT = 1e8  # operations of a reduced problem for a CPU, per role
ELEMENT = 32  # operations that take a CPU as long as one element does to go through its memory


def _matmul(name: str, M: int, K: int, N: int, tags: str = "", **more) -> Matmul:
    kinds = "batched" if "B" in more else "matmul skinny" if min(M, N) <= 128 else "matmul"
    return _named(Matmul(name=name, M=M, N=N, K=K, **more), f"{kinds} {tags}")


def _conv(name: str, x: tuple[int, ...], w: tuple[int, ...], tags: str = "", **more) -> Conv:
    problem = Conv(name=name, x=x, w=w, **more)
    return _named(problem, " ".join([*problem.kinds, tags]))


def _mlp(name: str, *widths: int, batch: int) -> Mlp:
    return _named(Mlp(name=name, widths=widths, batch=batch), "mlp")


def _fused(operation: str, name: str, M: int, K: int, N: int, tags: str, **more) -> Fused:
    return _named(Fused(name=name, operation=operation, activation=name.split()[1], M=M, K=K, N=N, **more), f"fused {tags}")


def _ragged(name: str, sizes: Iterable[int], K: int, N: int, tags: str = "", **more) -> Ragged:
    return _named(Ragged(name=name, sizes=tuple(sizes), K=K, N=N, **more), f"ragged {tags}")


def _skewed(rows: int, groups: int) -> tuple[int, ...]:
    """Group sizes proportional to 1 / (1 + g), like the popularity of experts that are trained without a balancing loss."""
    ends = [round(rows * sum(1 / (1 + g) for g in range(upto)) / sum(1 / (1 + g) for g in range(groups))) for upto in range(groups + 1)]
    return tuple(end - begin for begin, end in itertools.pairwise(ends))


def _named(problem: Any, tags: str) -> Any:
    """The problem with its sizes in its name."""
    return dataclasses.replace(problem, name=f"{problem.name}, {problem.size}", tags=frozenset(tags.split()))


BOTH: Any = ("bf16", "tf32")
BEFORE: Any = dict(padding=((3, 0),))  # causal, for 4 taps: an output sees no later input
PRESETS: Any = ("tf32", "ieee", "bf16x6", "fp8", "int8")

MATMULS = [
    _matmul("4096 cubed", 4096, 4096, 4096, "target large sweep clocks"),
    _matmul("4096 cubed by other means", 4096, 4096, 4096, "precision sweep", roles=(NN,), numbers=PRESETS),
    _matmul("4096 cubed in parts", 4096, 4096, 4096, "precision", roles=(NN,), numbers=("tf32x3", "bf16x3")),
    _matmul("4096 cubed of 8 bits", 4096, 4096, 4096, "precision", roles=(NT,), numbers=("fp8",)),
    _matmul("8192 cubed", 8192, 8192, 8192, "target large precision clocks", numbers=("bf16", "fp16", "tf32", "tf32x3", "bf16x3", "fp8")),
    *(_matmul("waves", 4096, 4096, n, "target waves") for n in (3072, 5376, 7168, 11008)),
    _matmul("llama 8B up", 4096, 4096, 14336, "target waves llama"),
    *(_matmul("short", 8192, k, 8192, "target waves" + " clocks" * (k == 256)) for k in (1024, 512, 256)),
    _matmul("short", 8192, 64, 8192),
    *(_matmul("llama 70B attention out", m, 8192, 8192, "target thin llama" + " clocks" * (m == 1)) for m in (16, 8, 1)),
    *(_matmul("llama 8B up", m, 4096, 14336, "llama") for m in (1, 128, 1024, 8192, 16384)),
    _matmul("llama 8B down", 1, 14336, 4096, "llama", roles=(NN, NT), numbers=BOTH),
    _matmul("llama 8B down", 8192, 14336, 4096, "llama"),
    _matmul("llama 70B up", 8192, 8192, 28672, "llama precision", numbers=("bf16", "fp8")),
    _matmul("llama 70B up", 16, 8192, 28672, "llama"),
    _matmul("llama 70B down", 16384, 28672, 8192, "llama"),
    _matmul("deepseek latents down", 4096, 7168, 2112, "deepseek"),
    _matmul("deepseek queries up", 4096, 1536, 24576, "deepseek"),
    _matmul("deepseek keys up", 4096, 512, 32768, "deepseek"),
    _matmul("deepseek attention out", 128, 16384, 7168, "deepseek"),
    _matmul("deepseek expert up", 128, 7168, 4096, "deepseek"),
    _matmul("deepseek expert down", 1, 2048, 7168, "deepseek", roles=(NN, NT)),
    _matmul("long and narrow", 65536, 64, 64, numbers=BOTH),
    _matmul("odd sizes", 4095, 257, 511, numbers=("bf16", "tf32", "ieee", "int8")),
    _matmul("odd sizes", 4095, 4097, 4093),
    _matmul("attention", 512, 64, 512, "precision", B=64, numbers=("bf16", "fp32bf16", "fp8 both")),
    _matmul("experts", 2048, 4096, 4096, B=8),
    _matmul("small", 32, 32, 32, B=4096),
    _matmul("rotations", 1048576, 3, 3, numbers=("tf32",)),
    *(_matmul("cube", n, n, n, "cpu", roles=(NN,), numbers=("tf32",)) for n in (256, 512, 1024, 2048)),
]

MLPS = [_mlp("mlp", 784, width, width, width, 10, batch=batch) for width in (8192, 2048) for batch in (8192, 128)]

IMAGES = [
    _conv("resnet50 3x3", (64, 56, 56, 64), (3, 3, 64, 64), "resnet50 target many-images clocks"),
    _conv("resnet50 3x3", (64, 14, 14, 256), (3, 3, 256, 256), "resnet50 target many-images clocks"),
    _conv("resnet50 3x3", (64, 28, 28, 128), (3, 3, 128, 128), "resnet50 target many-images"),
    _conv("resnet50 3x3", (4, 28, 28, 256), (3, 3, 256, 256), "resnet50 target few-images"),
    _conv("resnet50 3x3", (32, 56, 56, 64), (3, 3, 64, 64), "resnet50 sweep"),
    _conv("resnet50 3x3 fp32", (32, 56, 56, 64), (3, 3, 64, 64), "resnet50 sweep precision", roles=(FPROP,), numbers=("tf32", "bf16x6")),
    _conv("resnet50 3x3", (32, 14, 14, 256), (3, 3, 256, 256), "resnet50 precision", numbers=("bf16", "fp16", "tf32", "ieee")),
    _conv("resnet50 3x3", (64, 7, 7, 512), (3, 3, 512, 512), "resnet50"),
    _conv("resnet50 3x3 by 2", (32, 56, 56, 128), (3, 3, 128, 128), "resnet50", stride=2),
    _conv("resnet50 1x1 to 256", (32, 56, 56, 64), (1, 1, 64, 256), "resnet50"),
    _conv("resnet50 1x1 to 128", (64, 28, 28, 512), (1, 1, 512, 128), "resnet50"),
    _conv("resnet50 1x1 by 2 to 512", (64, 56, 56, 256), (1, 1, 256, 512), "resnet50", stride=2),
    _conv("resnet50 7x7 by 2", (32, 224, 224, 3), (7, 7, 3, 64), "resnet50 sweep", stride=2, roles=(FPROP,)),
    _conv("resnet50 7x7 by 2 fp32", (32, 224, 224, 3), (7, 7, 3, 64), "resnet50", stride=2, numbers=("tf32",)),
    _conv("resnet50 7x7 by 2", (64, 224, 224, 3), (7, 7, 3, 64), "resnet50", stride=2),
    _conv("resnext 32 of 4", (64, 56, 56, 128), (3, 3, 4, 128), "resnext", groups=32),
    _conv("resnext 32 of 4", (32, 56, 56, 128), (3, 3, 4, 128), "resnext", groups=32, numbers=BOTH),
    _conv("resnext 32 of 4 by 2", (64, 56, 56, 128), (3, 3, 4, 128), "resnext target", groups=32, stride=2),
    _conv("resnext 32 of 16 by 2", (64, 28, 28, 512), (3, 3, 16, 512), "resnext target", groups=32, stride=2),
    _conv("resnext 32 of 16", (32, 14, 14, 512), (3, 3, 16, 512), "resnext", groups=32),
    _conv("convnext 7x7", (64, 56, 56, 96), (7, 7, 1, 96), "convnext target clocks", groups=96, numbers=BOTH),
    _conv("convnext 7x7", (64, 14, 14, 384), (7, 7, 1, 384), "convnext target", groups=384),
    _conv("convnext 7x7", (32, 56, 56, 96), (7, 7, 1, 96), "convnext sweep", groups=96),
    _conv("convnext 7x7 fp32", (32, 56, 56, 96), (7, 7, 1, 96), "convnext", groups=96, numbers=("tf32",)),
    _conv("convnext 2x2 by 2 to 192", (64, 56, 56, 96), (2, 2, 96, 192), "convnext", stride=2),
    _conv("mobilenet 3x3", (32, 112, 112, 96), (3, 3, 1, 96), "mobilenet", groups=96),
    _conv("mobilenet 3x3 by 2", (32, 112, 112, 96), (3, 3, 1, 96), "mobilenet", groups=96, stride=2),
    _conv("mobilenet 3x3", (64, 56, 56, 144), (3, 3, 1, 144), "mobilenet target clocks", groups=144),
    _conv("mobilenet 1x1 to 24", (64, 56, 56, 144), (1, 1, 144, 24), "mobilenet"),
    _conv("efficientnet 5x5 by 2", (64, 56, 56, 144), (5, 5, 1, 144), "efficientnet", groups=144, stride=2),
    _conv("efficientnet 5x5", (64, 14, 14, 480), (5, 5, 1, 480), "efficientnet", groups=480),
    _conv("unet 3x3", (1, 64, 64, 320), (3, 3, 320, 320), "unet target few-images"),
    _conv("unet 3x3", (8, 64, 64, 320), (3, 3, 320, 320), "unet precision", numbers=("bf16", "fp8")),
    _conv("unet 3x3 to 640", (8, 32, 32, 1280), (3, 3, 1280, 640), "unet"),
    _conv("unet transposed 4x4 by 2", (8, 32, 32, 256), (4, 4, 256, 128), "unet", input_dilation=2, padding=((2, 2),) * 2),
    _conv("unet transposed 4x4 by 2", (16, 32, 32, 256), (4, 4, 256, 128), "unet target clocks", input_dilation=2, padding=((2, 2),) * 2),
    _conv("vae 3x3", (4, 256, 256, 128), (3, 3, 128, 128), "vae"),
    _conv("vae strided 4x4 by 2", (8, 64, 64, 128), (4, 4, 128, 256), "vae", stride=2, padding=((1, 1),) * 2, numbers=BOTH),
    _conv("odd channels", (4, 27, 29, 33), (3, 5, 33, 65), numbers=BOTH),
    _conv("two outputs per channel 5x5", (8, 28, 28, 60), (5, 5, 1, 120), groups=60),
    _conv("depthwise 15x15", (8, 32, 32, 64), (15, 15, 1, 64), groups=64),
]

VOLUMES = [
    _conv("video 3x3x3", (2, 16, 56, 56, 64), (3, 3, 3, 64, 64), "video target"),
    _conv("vae 3x3x3", (1, 9, 60, 104, 128), (3, 3, 3, 128, 128), "vae target clocks"),
    _conv("vae transposed 3x3x3 by 2", (2, 16, 32, 32, 64), (3, 3, 3, 64, 64), "vae", input_dilation=2, padding=((1, 2),) * 3),
    _conv("unet 3x3x3 to 64", (2, 32, 64, 64, 32), (3, 3, 3, 32, 64), "unet", numbers=BOTH),
    _conv("unet 3x3x3", (1, 128, 128, 128, 32), (3, 3, 3, 32, 32), "unet"),
    _conv("depthwise 3x3x3", (2, 16, 28, 28, 128), (3, 3, 3, 1, 128), "video", groups=128),
]

SEQUENCES = [
    _conv("mamba k=4", (8, 2048, 5376), (4, 1, 5376), "mamba target sweep clocks", groups=5376, **BEFORE),
    _conv("mamba k=4 fp32", (8, 2048, 5376), (4, 1, 5376), "mamba", groups=5376, numbers=("tf32",), **BEFORE),
    _conv("hyena k=4", (1, 16384, 12288), (4, 1, 12288), "hyena target", groups=12288, **BEFORE),
    _conv("wavenet k=5 dilated by 4", (8, 8192, 256), (5, 256, 256), "wavenet target", dilation=4),
    _conv("wavenet k=5 dilated by 16", (8, 4096, 512), (5, 512, 512), "wavenet", dilation=16, padding=((64, 0),)),
    *(
        _conv(f"wavenet k=2 dilated by {d} to 256", (8, 16384, 128), (2, 128, 256), "wavenet", dilation=d, padding=((d, 0),))
        for d in (1, 8, 64, 512)
    ),
    _conv("wav2vec2 k=10 by 5", (8, 80000, 1), (10, 1, 512), "wav2vec2", stride=5, padding=((0, 0),)),
    _conv("wav2vec2 k=3 by 2", (8, 15999, 512), (3, 512, 512), "wav2vec2", stride=2, padding=((0, 0),)),
    _conv("wav2vec2 k=128, 16 of 48", (8, 499, 768), (128, 48, 768), "wav2vec2", groups=16, padding=((64, 64),)),
    _conv("whisper k=3", (16, 1500, 768), (3, 768, 768), "whisper target clocks"),
    _conv("whisper k=3 to 1280", (8, 3000, 128), (3, 128, 1280), "whisper", padding=((1, 1),)),
    _conv("whisper k=3 by 2", (8, 3000, 1280), (3, 1280, 1280), "whisper", stride=2, padding=((1, 1),)),
    _conv("encodec k=7 to 32", (8, 24000, 1), (7, 1, 32), "encodec", padding=((6, 0),)),
    _conv("encodec k=16 by 8 to 512", (8, 8000, 256), (16, 256, 512), "encodec", stride=8, padding=((8, 0),)),
    _conv("encodec transposed k=16 by 8", (8, 1024, 512), (16, 512, 256), "encodec", input_dilation=8, padding=((11, 12),)),
]

FEW: Any = dict(roles=(WGRAD,), numbers=("bf16", "tf32", "fp32bf16"))
BATCHES = [
    _conv("ensemble 3x3", (8, 28, 28, 128), (3, 3, 128, 128), "ensemble target clocks", batch=16),
    _conv("ensemble 3x3", (4, 28, 28, 32), (3, 3, 32, 32), "ensemble", batch=16),
    _conv("hypernetwork 3x3", (1, 32, 32, 64), (3, 3, 64, 64), "hypernetwork", batch=64),
    _conv("hypernetwork 5x5 depthwise", (1, 56, 56, 96), (5, 5, 1, 96), "hypernetwork", batch=64, groups=96),
    _conv("wrn 3x3", (1, 32, 32, 64), (3, 3, 64, 64), "wrn target", batch=256, per_example=True, roles=(WGRAD, STEP)),
    _conv("wrn 3x3", (1, 16, 16, 128), (3, 3, 128, 128), "wrn", batch=256, per_example=True, roles=(WGRAD, STEP)),
    _conv("wrn 3x3", (1, 8, 8, 256), (3, 3, 256, 256), "wrn", batch=256, per_example=True, roles=(WGRAD, STEP)),
    _conv("wrn 3x3 of few", (1, 32, 32, 64), (3, 3, 64, 64), "wrn precision", batch=16, per_example=True, **FEW),
    _conv("resnet50 3x3 of each", (1, 14, 14, 256), (3, 3, 256, 256), "resnet50 target", batch=64, per_example=True, roles=(WGRAD, STEP)),
]

FLOAT: Any = dict(numbers=("tf32",))
ON_CPU = [
    _conv("depthwise 7x7", (8, 56, 56, 96), (7, 7, 1, 96), "cpu convnext", groups=96, **FLOAT),
    _conv("depthwise 3x3", (8, 56, 56, 64), (3, 3, 1, 64), "cpu mobilenet", groups=64, **FLOAT),
    _conv("causal depthwise k=4", (4, 2048, 512), (4, 1, 512), "cpu mamba", groups=512, **BEFORE, **FLOAT),
    _conv("32 groups of 4, 3x3", (8, 28, 28, 128), (3, 3, 4, 128), "cpu resnext", groups=32, **FLOAT),
    _conv("batched filters", (2, 28, 28, 32), (3, 3, 32, 32), "cpu ensemble", batch=16, **FLOAT),
    _conv("per-example", (1, 28, 28, 32), (3, 3, 32, 32), "cpu", batch=16, per_example=True, roles=(WGRAD,), **FLOAT),
    _conv("transposed 4x4 stride 2", (4, 32, 32, 64), (4, 4, 64, 64), "cpu unet", input_dilation=2, padding=((2, 2),) * 2, **FLOAT),
    _conv("strided 4x4 by 2", (4, 64, 64, 64), (4, 4, 64, 64), "cpu", stride=2, **FLOAT),
    _conv("dense 1x1", (8, 28, 28, 128), (1, 1, 128, 128), "cpu resnet50", **FLOAT),
    _conv("dense 3x3", (8, 28, 28, 64), (3, 3, 64, 64), "cpu resnet50", **FLOAT),
    _conv("dense 7x7", (2, 56, 56, 16), (7, 7, 16, 16), "cpu", **FLOAT),
    _conv("dense 1-D k=5", (8, 512, 64), (5, 64, 64), "cpu", **FLOAT),
    _conv("dense 3-D 3x3x3", (2, 12, 12, 12, 16), (3, 3, 3, 16, 16), "cpu video", **FLOAT),
    _conv("depthwise 3x3", (1, 14, 14, 64), (3, 3, 1, 64), "cpu", groups=64, **FLOAT),
    _conv("depthwise 5x5 by 2", (4, 28, 28, 32), (5, 5, 1, 32), "cpu efficientnet", groups=32, stride=2, **FLOAT),
    _conv("depthwise 3x3 dilated", (4, 28, 28, 32), (3, 3, 1, 32), "cpu", groups=32, dilation=2, **FLOAT),
    _conv("depthwise 15x15", (2, 32, 32, 32), (15, 15, 1, 32), "cpu", groups=32, **FLOAT),
    _conv("2 groups of 32, 3x3", (4, 28, 28, 64), (3, 3, 32, 64), "cpu", groups=2, **FLOAT),
    _conv("64 groups of 16, 3x3", (4, 7, 7, 1024), (3, 3, 16, 1024), "cpu", groups=64, **FLOAT),
    _conv("29 groups of 12, 3x3", (8, 14, 14, 348), (3, 3, 12, 348), "cpu", groups=29, **FLOAT),
    _conv("batched filters", (1, 8, 8, 4), (3, 3, 4, 4), "cpu hypernetwork", batch=64, **FLOAT),
    _conv("batched filters", (1, 14, 14, 32), (3, 3, 32, 32), "cpu hypernetwork", batch=32, **FLOAT),
    *(_fused("linear", "linear gelu", *sizes, "cpu", numbers=BOTH) for sizes in ((1024, 256, 1024), (64, 512, 512), (4096, 64, 256))),
    _fused("linear", "linear silu", 256, 784, 1024, "cpu", numbers=BOTH),
    _fused("gated_linear_unit", "gated silu", 512, 256, 512, "cpu gated", numbers=BOTH),
    _ragged("experts", (256,) * 8, 512, 512, "cpu", **FLOAT),
    _ragged("experts, skewed", _skewed(2048, 32), 512, 512, "cpu", **FLOAT),
    _ragged("experts, half empty", (128, 0) * 16, 512, 512, "cpu", **FLOAT),
    _ragged("experts, all in one", (0, 0, 0, 2048, 0, 0, 0, 0), 256, 512, "cpu", **FLOAT),
    _ragged("experts, small", (16,) * 8, 64, 64, "cpu", **FLOAT),
    _ragged("experts, decoding", (1, 0, 2, 1) * 4, 256, 512, "cpu", **FLOAT),
    _ragged("experts, decoding", (1,) * 64, 256, 512, "cpu", **FLOAT),
    _ragged("experts, decoding", (8,) * 16, 256, 512, "cpu", **FLOAT),
    _ragged("experts, many", (8,) * 64, 256, 512, "cpu", **FLOAT),
    _ragged("one group", (1024,), 256, 256, "cpu", **FLOAT),
]

FUSED = [
    _fused("linear", "linear gelu", 8192, 4096, 14336, "target long"),
    _fused("linear", "linear gelu fp32", 8192, 4096, 14336, "", roles=("forward",), numbers=("tf32",)),
    _fused("linear", "linear gelu", 8192, 4096, 4096, "target long"),
    _fused("linear", "linear gelu", 8192, 768, 3072, "target short"),
    _fused("linear", "linear silu", 8192, 512, 8192, "target short"),
    _fused("gated_linear_unit", "gated silu", 8192, 4096, 14336, "target long gated"),
    _fused("gated_linear_unit", "gated silu", 8192, 768, 2048, "target short gated"),
]

EXPERTS = [
    _ragged("deepseek experts up", (4096,) * 8, 7168, 4096, "deepseek target"),
    _ragged("deepseek experts up, skewed", _skewed(32768, 8), 7168, 4096, "deepseek"),
    _ragged("deepseek experts down", (4096,) * 8, 2048, 7168, "deepseek"),
    _ragged("deepseek experts up, most empty", (16, 0, 0, 0) * 64, 7168, 4096, "deepseek", roles=(NN, NT)),
    _ragged("mixtral experts up", (1024,) * 8, 4096, 14336, "mixtral target"),
    _ragged("mixtral experts down, skewed", _skewed(8192, 8), 14336, 4096, "mixtral"),
    _ragged("mixtral experts up, decoding", (2,) * 8, 4096, 14336, "mixtral", roles=(NN,)),
    _ragged("gpt-oss experts up", (512,) * 32, 2880, 5760, "gpt-oss target sweep"),
    _ragged("gpt-oss experts up, skewed", _skewed(16384, 32), 2880, 5760, "gpt-oss"),
    _ragged("gpt-oss experts down, half empty", (512, 0) * 16, 2880, 2880, "gpt-oss"),
]

OWN = [_named(problem, f"own {problem.operation} {tags}") for problem, tags in SUITE]

PRODUCTS: tuple[Matmul | Conv | Ragged, ...] = (*MATMULS, *IMAGES, *VOLUMES, *SEQUENCES, *BATCHES, *EXPERTS)
PROBLEMS: tuple[Problem, ...] = (*PRODUCTS, *MLPS, *FUSED, *OWN, *ON_CPU)


def select(tags: Collection[str] = (), names: Collection[str] = ()) -> list[Problem]:
    """The problems with one of the tags and one of these parts in their names; those with targets first, as a run may end early.

    ValueError for a tag that no problem has.
    """
    problems = [*PROBLEMS, *declared()]
    known = frozenset().union(*(problem.tags for problem in problems))
    if unknown := sorted(set(tags) - known):
        by_reference = [name for name in unknown if name in families and families[name].lax_primitive is None]
        why = f" ({', '.join(by_reference)}: of `extend.operation`, whose operands may not be random)" if by_reference else ""
        raise ValueError(f"tags: no problem is tagged {', '.join(unknown)}{why}; there are {', '.join(sorted(known))}")
    found = [problem for problem in problems if not tags or problem.tags & set(tags)]
    found = [problem for problem in found if not names or any(name in problem.name for name in names)]
    return sorted(found, key=lambda problem: "target" not in problem.tags)


def declared() -> list[Labelled]:
    """One problem for each form that a user declared, tagged with its name.  jaxext's own forms are measured by lax's operations."""
    forms = (form for form, _ in owner.values() if isinstance(form, Form))
    declared = (form for form in forms if families.get(form.family.name) is form.family)
    of_users = dict.fromkeys(form for form in declared if form.family.read is None and not form.companions and not form.window)
    return [Labelled.of(form, DEFAULT) for form in of_users]


def reduced(problem: Problem, flops: float = DEFAULT) -> Problem:
    """A problem of the same kind with at most about that many operations per role: itself, if it has no more.

    First what is a batch becomes smaller (but stays one), then space, then channels; filter, stride, padding and dilations stay, groups
    stay several and odd channels odd.  The name of a reduced problem says its sizes, and it is tagged "reduced".
    """
    small = problem
    for stage in problem.stages:
        while _work(small) > flops and (smaller := small.halved(stage)) != small:
            small = smaller
    return (
        small if small is problem else dataclasses.replace(small, name=f"{problem.name} as {small.size}", tags=problem.tags | {"reduced"})
    )


def cpu_problems(problems: Iterable[Problem], flops: float = DEFAULT) -> list[Problem]:
    """The problems for a CPU: those tagged "cpu" unchanged, and the others reduced; of equal ones only the one with the most roles."""
    found: dict[Problem, Problem] = {}
    for problem in problems:
        small = problem if "cpu" in problem.tags and flops >= DEFAULT else reduced(problem, flops)
        asked = dataclasses.replace(small, name="", tags=frozenset(), roles=())
        found[asked] = max(found.get(asked, small), small, key=lambda problem: len(problem.roles))
    return list(found.values())


def _work(problem: Problem) -> float:
    """The operations of one role, or as many as take a CPU as long as moving its arrays."""
    role = problem.roles[0]
    elements = sum(math.prod(shape) for shape in problem.shapes(role))
    return max(problem.flops(role), ELEMENT * elements)
