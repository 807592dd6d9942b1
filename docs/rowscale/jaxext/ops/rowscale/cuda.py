"""The CUDA kernel of rows times numbers (csrc/rowscale)."""

import dataclasses
import functools

from jaxext.backends.cuda.cuda_binding import (
    Cuda,
    called,
    compiled,
    config_of,
    fields_named,
    not_compiled_for,
    refusal,
)
from jaxext.backends.fields import DTYPES
from jaxext.backends.kernel import KernelCall


@dataclasses.dataclass(frozen=True, kw_only=True)
class RowscaleProblem:
    name: str  # of the primitive
    B: int
    M: int
    N: int
    dtypes: tuple[str, ...]  # of x, scale and y
    arch: int
    device: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class RowscaleConfig:
    lanes: int


class CudaRowscale(Cuda):
    kernel_family = "rowscale"
    custom_calls = ("jaxext_rowscale_v1",)

    def problem(self, call):
        dtypes = tuple(
            DTYPES.get(dtype.name, dtype.name)
            for dtype in (*call.dtypes.values(), call.dtype)
        )
        sizes = {label: call.sizes[label] for label in "BMN"}
        return RowscaleProblem(
            name=call.op, **sizes, dtypes=dtypes, arch=self.arch(call), device=call.device
        )

    def refuses_problem(self, problem):
        return not_compiled_for(problem.arch) or refusal(
            "rowscale", fields_named(problem, "BMN"), problem.dtypes, problem.arch
        )

    def slower(self, call):
        return None

    def configs(self, problem):
        rows = [
            row
            for row in compiled("rowscale")
            if row["operands"] == problem.dtypes[0] and problem.N % row["lanes"] == 0
        ]
        # instructions for an element
        return sorted(
            (config_of(RowscaleConfig, row) for row in rows),
            key=lambda config: 1 / config.lanes,
        )

    def launch(self, call, problem, config):
        attributes, shapes = (
            fields_named(problem, "BMN") | dataclasses.asdict(config),
            {"result": (problem.B, problem.M, problem.N)},
        )
        slots = ("x", "scale")
        return KernelCall(
            describe=f"rowscale, {config.lanes} lanes",
            slots=slots,
            splits=1,
            call=functools.partial(called, *self.custom_calls, attributes, slots, shapes),
        )
