"""Norms of per-example gradients and clipped sums of them, for differentially private training, without storing the gradients."""

from jaxext.privacy.clipping import Aux, ClippedGrad, clipped_grad, per_example_norms
from jaxext.privacy.report import Parameter, Report, explain_norms

__all__ = ["Aux", "ClippedGrad", "Parameter", "Report", "clipped_grad", "explain_norms", "per_example_norms"]


def __dir__() -> list[str]:
    return __all__
