"""The CUDA kernels of causal convolutions on a CPU: how the driver tests/csrc/causal_driver.cc is asked (simt.py builds it)."""

import dataclasses
import math
import os
import subprocess

import numpy as np
from simt import CODES, DTYPES, EVERY_BLOCK

from jaxext.kernels.epilogue import ACTIVATIONS

OPERANDS = ("x", "weight", "bias", "initial_states", "seq_idx", "idx_of_states", "d_y")
RESULTS = ("first", "sums", "d_initial_states")
KINDS = ("exact", "up to", "many")  # jaxext::causal::Kind
HEAD = 7  # numbers of a Reply


@dataclasses.dataclass(frozen=True, kw_only=True)
class Reply:
    code: int
    message: str
    kind: str  # of the kernel that was taken
    vector: int
    grid: int
    shared_bytes: int
    remembered: int  # the error that CUDA still knows of
    results: list[np.ndarray]  # in the order of test_causal_kernel.true, but partial sums in float32, added up


def operand_shapes(problem):
    """Those that exist."""
    B, T, C, J = problem.B, problem.T, problem.C, problem.J
    there = {"x": (B, T, C), "weight": (J, C)}
    there |= {"bias": (C,)} if problem.epilogue.bias else {}
    there |= {"initial_states": (B, J - 1, C)} if problem.state else {}
    there |= {"seq_idx": (B, T)} if problem.idx else {}
    there |= {"idx_of_states": (B, J - 1)} if problem.idx_of_states else {}
    return there | ({"d_y": (B, T, C)} if problem.role == "backward" else {})


def result_shapes(problem, splits):
    B, T, C, J = problem.B, problem.T, problem.C, problem.J
    there = {"first": (B, T, C)}
    if problem.role == "backward":
        there["sums"] = (splits, J + bool(problem.epilogue.bias), C)
        there |= {"d_initial_states": (B, J - 1, C)} if problem.state else {}
    return there


def itemsize(problem, name):
    dtypes = {"weight": problem.dtypes[1], "bias": problem.epilogue.bias, "sums": "fp32", "seq_idx": "fp32", "idx_of_states": "fp32"}
    return np.dtype(DTYPES[dtypes.get(name, problem.dtypes[0])]).itemsize


def run(driver, folder, asked, *, shifts=None, dry=False, whole=None, blocks=EVERY_BLOCK, pending=0, refusal=0, environment=None):
    """The replies to (problem, config, operands), from one process.  With `whole`, a problem, the operands and the results are the ends of
    its arrays, and zeros the rest; sums are left out.  `shifts`: by the names of arrays."""
    request = [np.int64(len(asked)).tobytes()]
    for case, config, operands in asked:
        problem = whole or case
        small = operand_shapes(case) | result_shapes(case, config.splits)
        large = operand_shapes(problem) | result_shapes(problem, config.splits)
        bytes_of = lambda shapes, name, case=case: math.prod(shapes[name]) * itemsize(case, name) if name in shapes else -1
        epilogue = problem.epilogue
        numbers = [["forward", "backward"].index(problem.role), CODES.index(problem.dtypes[0]), CODES.index(problem.dtypes[1])]
        numbers += [CODES.index(epilogue.bias or "fp32"), 0 if epilogue.activation is None else 1 + ACTIVATIONS.index(epilogue.activation)]
        numbers += [problem.B, problem.T, problem.C, problem.J, config.lanes, config.strip, config.splits, dry, blocks, pending, refusal]
        names = (*OPERANDS, *RESULTS)
        numbers += [(shifts or {}).get(name, 0) for name in names]
        numbers += [bytes_of(large, name) for name in names]
        numbers += [0 if whole and name == "sums" else max(0, bytes_of(small, name)) for name in names]
        arrays = [] if dry else [np.ascontiguousarray(operands[name]).tobytes() for name in OPERANDS if name in small]
        request += [np.array(numbers, np.int64).tobytes(), *arrays]
    (folder / "request").write_bytes(b"".join(request))
    ran = subprocess.run(
        [driver, folder / "request", folder / "response"], capture_output=True, text=True, env=os.environ | (environment or {})
    )
    assert ran.returncode == 0, ran.stderr[-4000:].split("Shadow bytes")[0]
    return list(_replies((folder / "response").read_bytes(), asked, dry, whole))


def _replies(response, asked, dry, whole):
    at = 0
    for case, config, _ in asked:
        code, length, kind, vector, grid, shared, remembered = np.frombuffer(response, np.int64, HEAD, at).tolist()
        at += 8 * HEAD
        message = response[at : at + length].decode()
        at += length
        results = {}
        for name, shape in () if dry else result_shapes(case, config.splits).items():
            if whole and name == "sums":
                continue
            dtype = np.dtype(np.float32 if name == "sums" else DTYPES[case.dtypes[0]])
            results[name] = np.frombuffer(response, dtype, math.prod(shape), at).reshape(shape)
            at += results[name].nbytes
        yield Reply(
            code=code,
            message=message,
            kind=KINDS[kind],
            vector=vector,
            grid=grid,
            shared_bytes=shared,
            remembered=remembered,
            results=in_order(case, results) if results and not code else [],
        )


def in_order(case, results):
    """The results by name as test_causal_kernel.true has them, with partial sums added up."""
    if "sums" not in results:
        return [results["first"]]
    total = results["sums"].sum(0, dtype=np.float32)
    found = [results["first"], total[: case.J], *([total[case.J]] if case.epilogue.bias else [])]
    return [*found, *([results["d_initial_states"]] if case.state else [])]
