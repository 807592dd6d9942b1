"""The Triton kernel of rows times numbers (kernels/rowscale)."""

from jaxext.backends.fields import DTYPES
from jaxext.backends.triton.triton_binding import TritonKernels
from jaxext.kernels import rowscale


class TritonRowscale(TritonKernels):
    module = rowscale

    def problem(self, call):
        dtypes = tuple(
            DTYPES.get(dtype.name, dtype.name)
            for dtype in (*call.dtypes.values(), call.dtype)
        )
        sizes = {label: call.sizes[label] for label in "BMN"}
        return rowscale.Problem(
            name=call.op, **sizes, dtypes=dtypes, arch=self.arch(call), device=call.device
        )

    def slower(self, call):
        return None
