"""Kernels from a few lines of PTX: what the tests of the interpreter itself run."""

import itertools
from typing import Any

import numpy as np
import pytest
from ptxsim import EARLY, LATE, Array, Input, Module, Output

HEAD = ".version 8.6\n.target sm_90a\n.address_size 64\n"
REGISTERS = ".reg .pred %p<16>; .reg .b16 %h<32>; .reg .b32 %r<160>; .reg .f32 %f<160>; .reg .b64 %d<32>; .reg .f64 %g<16>;"
BLOCK = 256
both = pytest.mark.parametrize("late", [LATE, EARLY], ids=["late", "early"])

executed: set[str] = set()


def launch(
    body, arguments=(), grid=(1,), block=(32,), *, shared=0, cluster=(1,), maps=(), late=LATE, arrays=(), declare="", most_steps=10**7
):
    """Runs a kernel: its parameters are p0, p1 and so on, its registers those of `REGISTERS` and of `declare`.

    Pointers to arguments that are arrays are in %d20, %d21 and so on, by the argument's place.  %r100 is %tid.x, and %r101 where shared
    memory starts.
    """
    parameters, prologue = [], ["mov.u32 %r100, %tid.x;", "mov.u32 %r101, dynamic;"]
    for n, argument in enumerate(arguments):
        if isinstance(argument, bytes):
            parameters.append(f".param .align 64 .b8 p{n}[{len(argument)}]")
            continue
        pointer = isinstance(argument, Array)
        parameters.append(f".param .b{64 if pointer else 8 * np.asarray(argument).itemsize} p{n}")
        if pointer:
            prologue.append(f"ld.param.b64 %d{20 + n}, [p{n}];")
    text = f"""{HEAD}.extern .shared .align 1024 .b8 dynamic[];
.visible .entry kernel({", ".join(parameters)}) {{
{REGISTERS} {declare}
{" ".join(prologue)}
{body}
ret;
}}"""
    module = Module(text)
    where: dict[str, Any] = dict(arrays=arrays, shared=shared, cluster=cluster, maps=maps, late=late, most_steps=most_steps)
    steps = module.run("kernel", grid, block, arguments, **where)
    executed.update(opcode for (opcode, *_), flag in zip(module.instructions("kernel"), module.executed["kernel"], strict=True) if flag)
    return steps


def of_each(body, *inputs, out) -> Any:
    """Run `body` on each element of the inputs, with a thread for each.

    It finds them in %a, %b, %c and %e, and leaves results of the dtypes `out` (one, or a list) in %x, %y, %z and %w.
    """
    outs = out if isinstance(out, list) else [out]
    inputs = [np.asarray(values) for values in inputs]
    count = max(values.size for values in inputs)
    padded = -(-count // 32) * 32 if count < BLOCK else -(-count // BLOCK) * BLOCK
    arrays = [Input(np.resize(values.ravel(), padded)) for values in inputs]
    made = [Output(np.zeros(padded, dtype)) for dtype in outs]
    lines, declare = ["mov.u32 %r102, %ctaid.x; mov.u32 %r103, %ntid.x; mad.lo.u32 %r104, %r102, %r103, %r100;"], []
    for n, (name, array) in enumerate(itertools.chain(zip("abce", arrays, strict=False), zip("xyzw", made, strict=False))):
        size = array.values.itemsize
        declare.append(f".reg .b{max(16, 8 * size)} %{name};")
        lines.append(f"mul.wide.u32 %d10, %r104, {size}; add.u64 %d{20 + n}, %d{20 + n}, %d10;")
        if name in "abce":
            lines.append(f"ld.global.b{8 * size} %{name}, [%d{20 + n}];")
    lines.append(body)
    for n, (name, array) in enumerate(zip("xyzw", made, strict=False)):
        lines.append(f"st.global.b{8 * array.values.itemsize} [%d{20 + len(arrays) + n}], %{name};")
    threads = min(padded, BLOCK)
    launch("\n".join(lines), [*arrays, *made], (padded // threads,), (threads,), declare=" ".join(declare))
    results = [array.values[:count].reshape(np.broadcast_shapes(*(v.shape for v in inputs))) for array in made]
    return results if isinstance(out, list) else results[0]
