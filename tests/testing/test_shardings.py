"""The verifier of splits: a sample of all operations, and what it makes of faults that are known."""

import dataclasses
import datetime
import os
import subprocess
import sys

import numpy as np
import pytest

from benchmarks.sharding_subjects import SUBJECTS
from jaxext.testing import sharding_worker, shardings

AUTOMATIC, EXPLICIT, *_ = sharding_worker.WAYS
SEED = int(os.environ.get("JAXEXT_SHARDINGS_SEED", f"{datetime.date.today():%Y%m%d}"))
CONV = 'lambda x, w: OPS.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))'
X, W = (sharding_worker.drawn(shape, k).astype("float32") for k, shape in enumerate(((8, 8, 8, 8), (3, 3, 8, 8))))
ROWS_BY_FEATURES = sharding_worker.Layout(AUTOMATIC, (2, 2), ((1, None, None), (None, 3, None)))


OURS = [function for function in SUBJECTS if function.name.endswith("jaxext")]


def test_every_operation_is_right_however_it_is_split():
    """Each operation in two ways, which change from day to day.  Set JAXEXT_SHARDINGS_SEED to repeat the sample of a report."""
    ways = [tuple(sharding_worker.WAYS[(SEED + at + step) % 5] for step in (0, 2)) for at in range(len(OURS))]
    chosen = [dataclasses.replace(of, ways=two if {*two} <= {*of.ways} else of.ways) for of, two in zip(OURS, ways, strict=True)]
    report = shardings.verify(chosen, sample=1, seed=SEED, workers=1, most=2, limit=300)
    print(report)
    report.raise_if_failed()
    assert {function.name for function in OURS} == {name for name, _ in report.tried}
    assert {way for _, way in report.tried} == {*sharding_worker.WAYS}


def run(program):
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)


def test_rows_by_features_of_lax_are_found_and_minimised():
    """openxla/xla#49382: the result itself is wrong.  The program shows it by itself, and with jaxext's operation it does not."""
    function = sharding_worker.Function("f", CONV.replace("OPS", "lax"), (X, W))
    with sharding_worker.Workers(1, 8, 300) as pool:
        finding = shardings.minimised(pool, function, shardings.Finding("f", ROWS_BY_FEATURES, "values", ""))
    assert sum(at is not None for axes in finding.layout.axes for at in axes) == 2 and "off by" in finding.detail
    assert finding.program.count("\n") < 20 and "(8, 8, 8, 8)" not in finding.program
    shown = run(finding.program)
    assert shown.returncode == 1 and "Mismatched elements" in shown.stderr
    assert run(finding.program.replace("lax.conv_general", "jaxext.conv_general")).returncode == 0


def test_an_abort_and_communication_without_need_are_findings():
    """Another process takes the place of the one that ended.  lax gathers the batch of a grouped convolution."""
    grouped = CONV.replace("OPS", "lax").replace('"NHWC"))', '"NHWC"), feature_group_count={})')
    depthwise, halves = (grouped.format(8), X, W[:1, :1, :1]), (grouped.format(2), X, W[:, :, :4])
    by_batch = sharding_worker.Layout(AUTOMATIC, (2,), ((0, None, 0),))
    jobs = [
        (depthwise, sharding_worker.Layout(AUTOMATIC, (4, 2), ((None, None, None), (3, None, None))), "all"),
        (depthwise, by_batch, "values"),
        (halves, by_batch, "values"),
    ]
    with sharding_worker.Workers(1, 8, 300) as pool:
        outcomes = [
            pool.one((shardings._pickled(sharding_worker.Function("f", source, tuple(args))), layout, part))
            for (source, *args), layout, part in jobs
        ]
    assert outcomes[0][0] == "abort" and outcomes[0][1].startswith("SIGABRT")
    assert outcomes[1][0] != "abort" and outcomes[2][0] == "communication"


def test_axes_that_do_not_belong_together_may_need_communication():
    """A number added to a whole row does not change its softmax: rows were held to belong to every axis of the result."""
    args = np.eye(8, dtype=np.float32), np.ones((8, 8), np.float32)
    known = sharding_worker.Known(sharding_worker.Function("f", "lambda x, w: jax.nn.softmax(x) @ w", args))
    assert {cut: axes for cut, axes in known.facts.cuts.items() if cut[1] == 2} == {(0, 2): (0, None), (1, 2): (None, 1)}


def test_equivalent_splits_count_once():
    """Each of two mesh axes splits an axis of a 2 x 2 array or none, not both the same: 7 ways.  One operand and the result have 49, one of
    which splits nothing, and each of the others has its mirror image."""
    function = sharding_worker.Function("twice", "lambda x: 2 * x", (np.ones((2, 2)),))
    facts = sharding_worker.Facts((2, 2), True, {}, frozenset(), ())
    assert len([*shardings.layouts(function, facts, ((2, 2),), (EXPLICIT,), None, 0)]) == 24


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (dict(fn=3), TypeError, "fn is 3, want a function, or its source"),
        (dict(args=()), TypeError, "args is .*, want a sequence of arrays"),
        (dict(ways=["jit"]), ValueError, "ways has .*jit.*, want some of"),
        (dict(meshes=[(2, 1)]), ValueError, "meshes has .*, want shapes of one or two axes"),
        (dict(fn=lambda x: x), TypeError, "cannot be sent to another process .* want a function of a module"),
        (dict(fn="lambda x: x.foo"), ValueError, "fails on one device: AttributeError"),
    ],
    ids=lambda v: None,
)
def test_refusals_name_the_argument(arguments, error, message):
    with pytest.raises(error, match=message):
        shardings.check_shardings(**{"fn": "lambda x: x", "args": [np.ones(2, "float32")]} | arguments)
