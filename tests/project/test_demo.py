"""The demo: jaxext and jax.lax learn the same, and it fails when it learned too little."""

import ast
import functools
import pathlib
import re

import digits
import jax
import numpy as np
import pytest

import jaxext


@pytest.fixture(autouse=True)
def as_users_run_it():
    with jax.enable_x64(False):
        yield


def test_both_runs_learn_the_same():
    _, ours, accuracies = digits.train(digits.OURS, epochs=2)
    _, reference, _ = digits.train(digits.REFERENCE, epochs=2)
    assert np.isfinite(ours).all()
    np.testing.assert_allclose(ours, reference, rtol=0, atol=1e-4)
    assert accuracies[0] < accuracies[1]
    assert accuracies[1] > 0.85


def test_only_one_of_them_runs_jaxext():
    params = digits.init(jax.random.key(0))
    (images, labels), _ = digits.load()

    def products(ops):
        return {row.op for row in jaxext.explain(jax.grad(functools.partial(digits.mean_loss, ops)))(params, images[:8], labels[:8]).rows}

    conv, matmul = {"conv2d_fprop", "conv2d_dgrad", "conv2d_wgrad"}, {"matmul_nn", "matmul_nt", "matmul_tn"}
    assert products(digits.OURS) == conv | matmul
    assert products(digits.REFERENCE) == set()


def test_gradient_norms_of_single_examples():
    params = digits.init(jax.random.key(0))
    _, (images, labels) = digits.load()
    worst, losses, norms = digits.hardest(digits.OURS, params, images, labels)
    assert np.isfinite(norms).all() and (np.diff(losses) <= 0).all()
    np.testing.assert_allclose(losses, digits.losses(digits.REFERENCE, params, images[worst], labels[worst]), rtol=1e-4)
    gradient = jax.jit(jax.grad(digits.mean_loss, argnums=1), static_argnums=0)
    for i, norm in zip(np.asarray(worst), norms, strict=True):
        grads = gradient(digits.REFERENCE, params, images[[i]], labels[[i]])
        assert norm == pytest.approx(np.sqrt(sum(np.sum(np.square(g)) for g in grads.values())), rel=1e-3)


def test_a_missed_goal_is_a_failure(tmp_path, capsys):
    path = tmp_path / "plot.png"
    assert digits.main(["--epochs", "1", "--plot", str(path)]) == 1
    assert path.read_bytes().startswith(b"\x89PNG")
    assert "goal" in capsys.readouterr().out


def test_examples_that_need_the_extra_say_so():
    """Their first lines say it, the line that a traceback shows, and the gallery."""
    folder, extra, need = pathlib.Path(digits.__file__).parent, "pip install '.[demo]'", set()
    for path in folder.glob("*.py"):
        text = path.read_text()
        imports = re.findall(r"^(?:from|import) (?:matplotlib|sklearn)\b.*$", text, re.MULTILINE)
        assert all(line.endswith(f"  # {extra}") for line in imports), path
        assert (extra in (ast.get_docstring(ast.parse(text)) or "")) == bool(imports), path
        need |= {path.stem} if imports else set()
    (line,) = [line for line in (folder.parent / "docs" / "gallery.md").read_text().splitlines() if extra in line]
    assert need == {*re.findall(r"`(\w+)`", line.partition(" need ")[0])} != set()
