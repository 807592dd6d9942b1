"""The implementation `cuda` of matrix products: plain, symmetric, ragged, of scaled 8-bit floats, and with quantised weights."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxext.backends import preference
from jaxext.backends.cuda import cuda_gram, cuda_matmul, cuda_pieces, cuda_ragged, cuda_scaled, cuda_weight_only
from jaxext.backends.cuda.cuda_binding import Cuda, called, compiled, ffi_call, kernel_call, not_compiled_for
from jaxext.backends.cuda.cuda_weight_only import WeightOnlyProblem
from jaxext.backends.kernel import KernelCall, apart
from jaxext.backends.problems import gram_problem, matmul_problem, scaled_problem
from jaxext.kernels.matmul.problem import MatmulProblem
from jaxext.kernels.ragged.problem import RaggedProblem, visits

_CLEARLY = 1.25  # models of two kernels differ by less than that without a reason


# The names of handlers carry a version, which is raised where a meaning changes, since exported programs outlive releases.
class CudaMatmul(Cuda):
    """Products of 16 and 8 bits, and of float32 where a precision asks for pieces of bfloat16."""

    custom_calls = (
        *(f"jaxext_{kernel}_{role}_v1" for kernel in ("matmul", "pieces") for role in ("nn", "nt", "tn")),
        "jaxext_linear_v1",
    )

    def problem(self, call):
        return matmul_problem(call, MatmulProblem, call.arch or 0)

    def refuses(self, problem):
        return cuda_pieces.refused(problem) if _float32(problem) else cuda_matmul.refused(problem)

    def multiplied(self, problem):
        return problem.precision if _float32(problem) else "ieee"

    def family(self, problem, config):
        return "pieces" if _float32(problem) else "matmul"

    def slower(self, call):
        return "XLA's matrix products (cuBLAS) are expected to be as fast"

    def configs(self, problem):
        if _float32(problem):
            return cuda_pieces.candidates(problem, compiled("pieces"))
        return cuda_matmul.candidates(problem, compiled("matmul"))

    def launch(self, call, problem, config):
        op = call.op.replace("matmul", "pieces") if _float32(problem) else call.op
        return kernel_call(call, problem, cuda_matmul.fields(problem), op, config)


def _float32(problem: MatmulProblem) -> bool:
    """Whether the kernels of products in pieces are those to ask.  They fuse no epilogue."""
    return problem.dtypes[:2] == ("fp32", "fp32") and problem.epilogue is None


class CudaGram(Cuda):
    """Half of a product with its own transpose."""

    custom_calls = ("jaxext_gram_v1",)

    def problem(self, call):
        return gram_problem(call, cuda_gram.GramProblem, call.arch or 0)

    def refuses(self, problem):
        return cuda_gram.refused(problem)

    def family(self, problem, config):
        return "gram"

    def slower(self, call):
        problem = self.problem(call)
        assert not isinstance(problem, str)  # it is asked of calls that it supports
        return preference.of_half(cuda_gram.share(problem, compiled("gram")))

    def configs(self, problem):
        return cuda_gram.candidates(problem, compiled("gram"))

    def launch(self, call, problem, config):
        slots = ("c", "addend") if problem.addend else ("c",)
        shapes = {"c": (problem.B, problem.rows, problem.depth)} | dict.fromkeys(("addend", "result"), (problem.B, *(problem.rows,) * 2))
        scales = {name: float(getattr(problem, name)) for name in ("scale", "of_addend")}
        attributes = cuda_gram.fields(problem) | dataclasses.asdict(config) | scales
        return KernelCall(
            describe="gram" + (f" in {config.splits} parts" if config.splits > 1 else ""),
            slots=slots,
            splits=config.splits,
            call=functools.partial(called, *self.custom_calls, attributes, slots, shapes),
        )


class CudaRagged(Cuda):
    custom_calls = tuple(f"jaxext_ragged_{role}_v1" for role in ("nn", "nt", "tn"))
    epilogues = False

    def problem(self, call):
        return matmul_problem(call, RaggedProblem, call.arch or 0)

    def refuses(self, problem):
        return cuda_ragged.refused(problem)

    def family(self, problem, config):
        return "ragged"

    def slower(self, call):
        return preference.ragged(call)

    def yields(self, call):
        return call.op != "ragged_tn"

    def configs(self, problem):
        return cuda_ragged.candidates(problem, compiled("ragged"))

    def launch(self, call, problem, config):
        plain = kernel_call(call, problem, cuda_ragged.fields(problem), call.op, config, "places")

        def with_places(result, first, second, begin, end):
            places = jnp.stack([begin, end], -1) if problem.role == "tn" else visits(jnp, begin, end, problem.M, config.tile_m)
            return plain.call(result, first, second, places)

        return dataclasses.replace(plain, slots=(*plain.slots[:2], "begin", "end"), call=with_places)


class CudaWeightOnly(Cuda):
    """Products with int8 and int4, which have a scale for each column, or for blocks of each: of few rows, and on Hopper of many."""

    custom_calls = ("jaxext_weight_only_v1",)
    epilogues = False

    def problem(self, call):
        return scaled_problem(call, WeightOnlyProblem, call.arch or 0)

    def refuses(self, problem):
        return cuda_weight_only.refused(problem) or not_compiled_for(problem.arch)

    def family(self, problem, config):
        return "wide_weight_only" if config.tile_m > cuda_weight_only.FEW_ROWS else "weight_only"

    def slower(self, call):
        if call.sizes["S"] == 1:
            return "XLA converts factors inside of its products, which are expected to be as fast"
        problem = self.problem(call)
        assert not isinstance(problem, str)  # it is asked of calls that it supports
        if problem.M <= cuda_weight_only.FEW_ROWS:
            return None  # XLA writes the scaled weight to memory, in 16 bits, and reads it again
        if problem.arch != 90:
            return "Triton's kernels are expected to be as fast"
        if cuda_weight_only.clocks(problem, self.configs(problem)[0]) * _CLEARLY < cuda_weight_only.dequantised_clocks(problem):
            return None
        return "XLA's product with a weight that it makes wide before is expected to be as fast"

    def configs(self, problem):
        return cuda_weight_only.candidates(problem)

    def launch(self, call, problem, config):
        return KernelCall(
            describe="weight_only" + (f" in {config.splits} parts" if config.splits > 1 else ""),
            slots=("x", "w", "w_scale"),
            splits=config.splits,
            call=functools.partial(_weight_only, problem, cuda_weight_only.fields(problem) | dataclasses.asdict(config)),
        )


class CudaScaled(Cuda):
    """Products of 8-bit floats, and those with integers by `CudaWeightOnly`."""

    custom_calls = ("jaxext_scaled_v1", *CudaWeightOnly.custom_calls)
    epilogues = False

    def plan(self, call):
        integers = any(jnp.issubdtype(call.dtypes[slot], jnp.integer) for slot in call.factors)
        return _WEIGHT_ONLY.plan(call) if integers else super().plan(call)

    def problem(self, call):
        return scaled_problem(call, cuda_scaled.ScaledProblem, call.arch or 0)

    def refuses(self, problem):
        return cuda_scaled.refused(problem)

    def family(self, problem, config):
        return "scaled"

    def slower(self, call):
        problem = self.problem(call)
        assert not isinstance(problem, str)  # it is asked of calls that it supports
        if cuda_scaled.clocks(problem, self.configs(problem)[0]) < cuda_scaled.wide_clocks(problem):
            return None  # others multiply numbers of 16 bits
        return "XLA's products of 16-bit numbers are expected to be as fast"

    def configs(self, problem):
        return cuda_scaled.candidates(problem, compiled("scaled"))

    def launch(self, call, problem, config):
        slots, attributes = cuda_scaled.slots(problem), cuda_scaled.fields(problem) | dataclasses.asdict(config)
        shapes = {"result": tuple(attributes[name] for name in "BMN")}

        def prepared(result, *operands):
            """A result of 8 bits is float32 to the kernel."""
            given = cuda_scaled.arrays(problem, dict(zip(slots, operands, strict=True)))
            wide = result if result.dtype.itemsize > 1 else jax.ShapeDtypeStruct(result.shape, jnp.float32)
            return called("jaxext_scaled_v1", attributes, tuple(given), shapes, wide, *given.values()).astype(result.dtype)

        splits = config.splits
        return KernelCall(describe="scaled" + (f" in {splits} parts" if splits > 1 else ""), slots=slots, splits=splits, call=prepared)


_WEIGHT_ONLY = CudaWeightOnly()


def _weight_only(problem: WeightOnlyProblem, attributes: Mapping[str, Any], result, x, w, scale) -> jax.Array:
    """The call of the handler, which takes two int4 in a byte, the first in the low half, as XLA packs them on GPUs."""
    B, M, N, K, S = (getattr(problem, label) for label in "BMNKS")
    if problem.packed:
        w = lax.bitcast_convert_type(w.reshape(-1, 2), jnp.int8)
    given = [x.reshape(B, M, K), w.reshape(B, K, -1), scale.reshape(B, S, N).astype(jnp.float32)]
    parts = (attributes["splits"],) if attributes["splits"] > 1 else ()
    made = jax.ShapeDtypeStruct((*parts, B, M, N), result.dtype if result.dtype.itemsize > 1 else jnp.float32)
    y = ffi_call("jaxext_weight_only_v1", made, [*map(apart, given)], attributes)
    return apart(y).reshape(result.shape).astype(result.dtype)
