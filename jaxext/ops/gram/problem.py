"""A product with its own transpose, on one device, as the problem of a kernel, and when a kernel is expected to be faster than XLA."""

from __future__ import annotations

from jaxext.backends.fields import factor_fields, named_dtypes
from jaxext.backends.kernel import KernelImplementation
from jaxext.kernels.gram.problem import Problem

LARGEST_SHARE = 0.7  # of the time of a whole product, that half of one may take


class GramKernels(KernelImplementation):
    def problem(self, call):
        numbers = factor_fields(call, self.arch(call))
        if isinstance(numbers, str):
            return numbers
        added = named_dtypes({"addend": call.dtypes["addend"]} if "addend" in call.dtypes else {})
        if isinstance(added, str):
            return added
        scales = dict(scale=call.static.scale, of_addend=call.static.of_addend if added else 0.0)
        return Problem(**{label: call.sizes[label] for label in "BMNK"}, **scales, **added, **numbers)


def slower(share: float) -> str | None:
    """Return why XLA, which computes both halves of a product with its own transpose, is expected to be as fast as a kernel that computes
    one in this share of the time; or None."""
    if share <= LARGEST_SHARE:
        return None
    return f"it is expected to take {share:.2f} of a product's time, want {LARGEST_SHARE} or less, as XLA's (cuBLAS) are fast"
