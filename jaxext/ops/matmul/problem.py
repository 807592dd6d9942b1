"""A matrix product on one device as the problem of a kernel."""

from __future__ import annotations

import dataclasses

from jaxext.backends.fields import common_fields
from jaxext.core.call import Call
from jaxext.kernels.matmul.problem import MatmulProblem


def matmul_problem(call: Call, kind: type[MatmulProblem], arch: int) -> MatmulProblem | str:
    """A call of a form of matrix products as a problem of this class, which has a field for each label, or the reason why it is not one."""
    common = common_fields(call, arch)
    labels = (field.name for field in dataclasses.fields(kind) if field.name in call.sizes)
    return common if isinstance(common, str) else kind(**{label: call.sizes[label] for label in labels}, **common)
