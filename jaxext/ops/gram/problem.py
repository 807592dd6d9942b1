"""A product with its own transpose, on one device, as the problem of a kernel, and when a kernel is expected to be faster than XLA."""

from __future__ import annotations

from jaxext.backends.fields import DTYPES, factor_fields
from jaxext.core.call import Call
from jaxext.kernels.matmul.problem import MatmulProblem

LARGEST_SHARE = 0.7  # of the time of a whole product, that half of one may take


def gram_problem(call: Call, kind: type[MatmulProblem], arch: int) -> MatmulProblem | str:
    """A call of `gram` as a problem of this class, which has fields for what is added, or the reason why it is not one."""
    numbers = factor_fields(call, arch)
    if isinstance(numbers, str):
        return numbers
    added = {}
    if "addend" in call.dtypes:
        if (dtype := call.dtypes["addend"].name) not in DTYPES:
            return f"addend is {dtype}, want one of {sorted(DTYPES)}"
        added = dict(addend=DTYPES[dtype], of_addend=call.static.of_addend)
    return kind(**{label: call.sizes[label] for label in "BMNK"}, scale=call.static.scale, **added, **numbers)


def slower(share: float) -> str | None:
    """Return why XLA, which computes both halves of a product with its own transpose, is expected to be as fast as a kernel that computes
    one in this share of the time; or None."""
    if share <= LARGEST_SHARE:
        return None
    return f"it is expected to take {share:.2f} of a product's time, want {LARGEST_SHARE} or less, as XLA's (cuBLAS) are fast"
