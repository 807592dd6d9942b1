"""The arrays of causal convolutions that the CUDA kernels take and give."""

import numpy as np


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


def in_order(case, results):
    """The results by name as test_causal_kernel.true has them, with partial sums added up."""
    if "sums" not in results:
        return [results["first"]]
    total = results["sums"].sum(0, dtype=np.float32)
    found = [results["first"], total[: case.J], *([total[case.J]] if case.epilogue.bias else [])]
    return [*found, *([results["d_initial_states"]] if case.state else [])]
