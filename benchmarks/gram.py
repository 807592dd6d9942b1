"""Products with their own transposes, and Muon's iteration: jaxext's against the same in jnp, interleaved, with errors against float64.

    python -m benchmarks.gram --json gram_cpu.json

`jnp` is `x @ x.mT`, or the iteration with such products.  Times are medians in ms, and errors those of the norm.  On a GPU implementations
have columns, and sizes are those of larger models.  `--cpu-time` counts the time of all threads instead, where others use the machine.
"""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable, Iterator, Sequence

import jax
import jax.numpy as jnp

import jaxext
from jaxext.bench.own import gram_by_jnp as by_jnp
from jaxext.tuning import timing

from .race import outcome, parser, race, tell

Shape = tuple[int, ...]

# Square; fewer rows than columns, and fewer columns; several matrices.
ON_CPU = (
    *((256, 256), (512, 512), (1024, 1024), (2048, 2048)),
    *((512, 8192), (1024, 4096), (4096, 64), (768, 3072), (8, 512, 512), (4, 1024, 1024)),
)
ON_GPU = ((1024, 1024), (2048, 2048), (4096, 4096), (8192, 8192), (2048, 16384), (16384, 1024), (16, 2048, 2048))
MATRICES = {"cpu": ((768, 3072), (1024, 4096)), "gpu": ((2048, 8192), (4096, 4096), (24, 2048, 5632))}  # of Muon


def newton_schulz_by_jnp(x):
    """Five steps with Muon's coefficients, of a matrix with fewer rows than columns."""
    wide = x.astype(jnp.float32) if x.dtype.itemsize < 4 else x
    x = (wide / (jnp.sqrt(jnp.square(wide).sum((-2, -1), keepdims=True)) + 1e-8)).astype(x.dtype)
    for _ in range(5):
        square = by_jnp(x)
        x = 3.4445 * x + jnp.matmul(-4.7750 * square + 2.0315 * jnp.matmul(square, square), x)
    return x


OPERATIONS = {"gram": (jaxext.gram, by_jnp), "newton_schulz": (jaxext.newton_schulz, newton_schulz_by_jnp)}


def gradient(f: Callable) -> Callable:
    return jax.grad(lambda x: jnp.square(f(x).astype(jnp.float32)).sum())


class CpuTime:
    """A clock."""

    name = "CPU time of all threads"

    def sampler(self, program: Callable[[], object]) -> timing.Sampler:
        def sample():
            start = time.process_time()
            program()
            return (time.process_time() - start) * 1e3

        program()
        return sample


def rows(shapes: Sequence[Shape], matrices: Sequence[Shape], dtypes: Sequence[str], rounds: int, clock) -> Iterator[dict]:
    backend = jax.default_backend()
    kinds = [("gram", shape, dtype) for dtype in dtypes for shape in shapes]
    kinds += [("newton_schulz", shape, dtype) for dtype in dtypes for shape in matrices]
    for kind, shape, dtype in kinds:
        operation, plain = OPERATIONS[kind]
        forms = {"jaxext": operation, "jnp": plain}
        forms |= {name: functools.partial(operation, implementation=name) for name in ("triton", "xla")} if backend == "gpu" else {}
        x = jax.random.normal(jax.random.key(math.prod(shape)), shape, dtype)
        row = {"operation": kind, "shape": list(shape), "dtype": dtype}
        yield {"row": "forward"} | row | race(forms, (x,), clock, rounds, plain)
        if kind == "gram" and len(set(shape)) == 1:
            yield {"row": "gradient"} | row | race({n: gradient(f) for n, f in forms.items()}, (x,), clock, rounds, gradient(plain))


def line(row: dict) -> str:
    return f"{row['operation']:14} {row['row']:9} {'x'.join(map(str, row['shape'])):14} {row['dtype']:9} {outcome(row)}"


def main(arguments=None) -> None:
    command = parser(__doc__, 9)
    command.add_argument("--dtypes", default="float32,bfloat16", help="of x (default: float32,bfloat16)")
    command.add_argument("--cpu-time", action="store_true", help="instead of wall time")
    options = command.parse_args(arguments)
    clock = CpuTime() if options.cpu_time else timing.timer()[0]
    backend = jax.default_backend()
    shapes = ON_GPU if backend == "gpu" else ON_CPU
    tell(rows(shapes, MATRICES[backend], options.dtypes.split(","), options.rounds, clock), line, options.json, clock)


if __name__ == "__main__":
    main()
