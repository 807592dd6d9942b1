"""The implementations of a declared operation that a `CudaKernel` gives: a launch on GPUs, and ptxsim on CPUs if it is named."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from jaxext import _target
from jaxext.backends import launcher, nvrtc
from jaxext.core.call import Call, Partitioner, no_kernel
from jaxext.core.implementation import Implementation
from jaxext.core.reference import Declaration
from jaxext.extend.cuda_kernel import CudaKernel

SIMULATED = "it simulates a GPU on a CPU, thousands of times slower"


def implementations(declaration: Declaration, name: str, kernel: CudaKernel) -> Iterator[Implementation]:
    """The kernel on GPUs, and simulated."""
    yield Launched(declaration, name, kernel)
    yield Simulated(declaration, f"{name}_simulated", kernel)


class Launched(Implementation):
    """The kernel's launch.

    Its pointers are operands and results of the operation: those of their names if all of them have such, else all in their order.  Scalars
    are static keywords of the call, defaults of the reference, or the sizes of the labels of their names.
    """

    def __init__(self, declaration: Declaration, name: str, kernel: CudaKernel):
        self.name, self.version, self.coded_as = name, kernel._digest, f"{declaration.name} {name}"
        self.kernel = kernel
        inputs, results = list(declaration.inputs), list(declaration.results)
        pointers = [each.name for each in kernel.parameters if each.pointer]
        if {*pointers} <= {*inputs, *results} and not kernel._aliases:
            named = [each for each in pointers if each in inputs], [each for each in pointers if each in results]
            if pointers != [*named[0], *named[1]]:
                raise ValueError(
                    f"register: {kernel!r} has a result before an operand, want the pointers of {inputs} before those of {results}"
                )
            inputs, results = named
        elif len(pointers) != (count := len(inputs) + len(results) - len(kernel._aliases)):
            raise ValueError(
                f"register: {kernel!r} has {len(pointers)} pointers, want {count} in the order {[*inputs, *results]}, or these names alone"
            )
        elif swapped := [
            name for name, array in zip(pointers, [*inputs, *results], strict=False) if name != array and name in (*inputs, *results)
        ]:
            raise ValueError(
                f"register: pointer {swapped[0]} of {kernel!r} would not get the operand or result of its name: want every pointer to"
                f" have the name of one, or the order {[*inputs, *results]}"
            )
        self.inputs, self.results = inputs, results

    def refuses(self, call: Call) -> str | None:
        return self.lacks(call) or self._refusal(call)

    def lacks(self, call: Call) -> str | None:
        """Return the reason why no kernel can run there, or None."""
        return (
            no_kernel(call, "cuda")
            or (None if _target.named() else launcher.missing())
            or (nvrtc.missing() if self.kernel._source else None)
        )

    def run(self, call: Call, config: Any, operands: Mapping[str, jax.Array]) -> Any:
        flat = call.flatten(operands)
        results = self.compute(call, [flat[name] for name in self.inputs])
        made = dict(zip(self.results, results, strict=True))
        return tuple(made[name].reshape(call.shape_of(name)) for name in call.results)

    def compute(self, call: Call, operands: list[jax.Array]) -> Any:
        return self.kernel._bind(operands, self._launch(call))

    def _keywords(self, call: Call) -> dict[str, Any]:
        """The sizes and the defaults that the kernel takes, and the keywords of the call, all of which it has to take."""
        sizes = {label: size for label, size in call.sizes.items() if label in self.kernel._scalars}
        defaults = {name: value for name, value in call.static.defaults.items() if self.kernel._takes(name, len(self.inputs))}
        return {**sizes, **defaults, **dict(call.static.items)}

    def _launch(self, call: Call):
        structs = [jax.ShapeDtypeStruct([call.sizes[label] for label in call.labels[name]], call.dtypes[name]) for name in self.inputs]
        return self.kernel._launch(structs, self._keywords(call))

    def _refusal(self, call: Call) -> str | None:
        if call.empty:
            return "an axis has size 0"
        try:
            launch = self._launch(call)
        except (TypeError, ValueError) as error:
            return str(error)
        if missing := [name for name in call.results if name not in self.results]:
            return f"it does not compute {missing[0]}"
        if len(launch.out) != len(self.results):
            return f"it gives {len(launch.out)} results, want {len(self.results)}: {', '.join(self.results)}"
        for name, y in zip(self.results, launch.out, strict=True):
            if name in call.results:
                shape = tuple(call.sizes[label] for label in call.labels[name])
                if (y.shape, y.dtype) != (shape, call.results[name]):
                    return f"it gives {name} as {y.dtype}{[*y.shape]}, want {call.results[name]}{[*shape]}"
        return None


class Simulated(Launched):
    """The kernel's PTX, executed by ptxsim in a callback."""

    def lacks(self, call: Call) -> str | None:
        if call.platform != "cpu":
            return f"platform is {call.platform!r}, want 'cpu'"
        if call.partitioner is not Partitioner.NOBODY:
            return "XLA stores the program or splits it over devices, and has no callbacks then: call it in a shard_map over all axes"
        if importlib.util.find_spec("ptxsim") is None:
            return "ptxsim is not installed: pip install ./ptxsim of jaxext's repository"
        return nvrtc.missing() if self.kernel._source else None

    def not_preferred(self, call: Call) -> str | None:
        return SIMULATED

    def compute(self, call: Call, operands: list[jax.Array]) -> Any:
        keywords, launch = self._keywords(call), self._launch(call)
        self.kernel._for_ptxsim(launch)  # errors of the compiler are raised here, not in the callback
        results = [jax.ShapeDtypeStruct(y.shape, y.dtype) for y in launch.out]

        def simulate(*arrays):
            made = self.kernel.simulate(*arrays, **keywords)
            return list(made) if isinstance(made, tuple) else [made]

        return jax.pure_callback(simulate, results, *map(jnp.asarray, operands))
