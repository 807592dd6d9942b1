"""The examples of networks on one device: what they print is so, by jaxext's products alone, and they fail where it is not."""

import functools
import re

import decoder
import dp_sgd
import fp8_training
import jax
import jax.numpy as jnp
import long_convolution
import mamba
import muon
import numpy as np
import pytest
import video_stream

import jaxext


@pytest.fixture(autouse=True)
def as_users_run_it():
    with jax.enable_x64(False), jax.numpy_rank_promotion("allow"):
        yield


def said(capsys, example, *args):
    """Return the output of a run that succeeds."""
    assert example.main(args) == 0
    return capsys.readouterr().out


def numbers(text):
    return [float(number) for number in re.findall(r"-?\d+\.?\d*(?:e[+-]\d+)?", text)]


def products(function, *args):
    """The products that a function runs, of which none is lax's own."""
    text = str(jax.make_jaxpr(function)(*args))
    assert "dot_general[" not in text and "conv_general_dilated[" not in text  # a program that is called may have such a name
    return [(row.op, row.times) for row in jaxext.explain(function)(*args).rows]


@pytest.mark.slow
@pytest.mark.skipif(jax.default_backend() != "cpu", reason="triton runs there")
def test_fp8_training(capsys):
    """The accuracy is within 0.3 % of bfloat16, by products of jaxext alone."""
    out = said(capsys, fp8_training)
    accuracy = {line.split()[0]: numbers(line.split(maxsplit=1)[1])[0] for line in out.splitlines()}
    assert accuracy.keys() == {"bfloat16", "fp8", "int8", "int4"} and min(accuracy.values()) > 96
    assert accuracy["fp8"] >= accuracy["bfloat16"] - 0.3
    step = lambda weights, x, y: jax.grad(fp8_training.loss)(weights, x, y, fp8_training.in_fp8)
    text = str(jax.make_jaxpr(step)(fp8_training.init(), np.ones((8, 64), np.float32), np.zeros(8, np.int32)))
    assert "dot_general" not in text and text.count("= scaled_dot_") == 8  # the first layer's input has no gradient


@pytest.mark.slow
def test_mamba(capsys, tmp_path):
    out = said(capsys, mamba, "--epochs", "8", "--plot", str(tmp_path / "plot.png"))
    losses = [float(loss) for loss in re.findall(r"loss (\S+)", out)]
    assert len(losses) == 8 and losses[0] > 1.5 and losses[-1] < 0.2
    assert "Step by step the same scores: True" in out and (tmp_path / "plot.png").stat().st_size > 10_000
    _, (sequences, _) = mamba.load()
    rows = jaxext.explain(jax.grad(mamba.mean_loss))(mamba.init(), sequences[:4], np.zeros(4, np.int32)).rows
    assert {"causal_conv1d", "causal_conv1d_backward"} <= {row.op for row in rows}


def test_mamba_notices_a_step_that_is_not_the_sequence_s(capsys, tmp_path, monkeypatch):
    whole = jaxext.causal_conv1d_update

    def forgetful(x, state, *args, **keywords):
        y, _ = whole(x, state, *args, **keywords)
        return y, jnp.zeros_like(state)

    monkeypatch.setattr(jaxext, "causal_conv1d_update", forgetful)
    assert mamba.main(["--epochs", "1", "--plot", str(tmp_path / "plot.png")]) == 1
    assert "Step by step the same scores: False" in capsys.readouterr().out


def test_a_hyena_block_recalls_by_its_long_convolution(capsys):
    (named,) = long_convolution.train(50, 128, (128,))
    losses = [numbers(line)[1] for line in re.findall(r"^ +\d+ .*$", capsys.readouterr().out, re.MULTILINE)]
    assert len(losses) == 3 and losses[0] > 2 and losses[-1] < 0.7
    assert named > 0.7  # one of 8 is chance
    batch = long_convolution.sequences(np.random.default_rng(0), 2, 128)
    rows = products(jax.grad(long_convolution.loss_of), long_convolution.init(), *batch)
    assert {("long_conv_fprop", 1), ("long_conv_dgrad", 1), ("long_conv_wgrad", 1), ("causal_conv1d", 1)} <= {*rows}


def test_the_sequences_that_the_hyena_block_reads():
    tokens, labels = long_convolution.sequences(np.random.default_rng(0), 50, 128)
    pairs, keys = long_convolution.PAIRS, long_convolution.KEYS
    for row, values in zip(tokens, labels, strict=True):
        (heard,) = np.nonzero(row[:-pairs] >= 0)
        said = {int(key): int(value) for key, value in row[heard].reshape(-1, 2)}
        assert len(said) == pairs and heard.max() < 32 and {*said} <= {*range(keys)}
        assert [said[key] - keys for key in row[-pairs:]] == [*values]


@pytest.mark.slow
def test_long_convolution(capsys):
    out = said(capsys, long_convolution, "--steps", "100", "--length", "128")
    assert out.count(": True") == 2


@pytest.mark.slow
def test_video_stream(capsys, tmp_path):
    """The error falls, and streams have the bits of the whole, by convolutions of jaxext alone."""
    out = said(capsys, video_stream, "--steps", "40", "--plot", str(tmp_path / "plot.png"))
    losses = [float(loss) for loss in re.findall(r"^step .* error (\S+)", out, re.MULTILINE)]
    before, after, _, black = numbers(out[out.index("Error") :].splitlines()[0])
    assert len(losses) == 2 and losses[1] < losses[0] / 2 and before > black > 2 * after
    assert out.count(": True") == 2 and (tmp_path / "plot.png").stat().st_size > 10_000
    times = [numbers(line) for line in re.findall(r"^.* take.* ms$", out, re.MULTILINE)]
    assert [len(row) for row in times] == [2, 3, 3] and "have 100352 bytes" in out
    frames = video_stream.videos(np.random.default_rng(0), 2, 8)
    assert {op for op, _ in products(video_stream.network, video_stream.init(), frames)} == {"causal_conv_3d_fprop"}


def test_video_stream_notices_a_lost_state(capsys, monkeypatch):
    whole = jaxext.causal_conv

    def forgetful(*args, **keywords):
        y, state = whole(*args, **keywords)
        return y, jnp.zeros_like(state)

    params, frames = video_stream.init(), video_stream.videos(np.random.default_rng(2), 1, 16)
    jax.clear_caches()  # `network` may be compiled already
    monkeypatch.setattr(jaxext, "causal_conv", forgetful)
    _, _, same = video_stream.show_stream(params, frames)
    jax.clear_caches()
    assert [*same.values()] == [False, False]


def test_the_digits_of_a_video_move():
    frames = video_stream.videos(np.random.default_rng(0), 8, 40)
    assert frames.shape == (8, 40, 32, 32, 1) and frames.min() == 0 and 0.9 < frames.max() <= 1
    inked = frames.sum((2, 3, 4))
    assert (np.abs(np.diff(frames, axis=1)).sum((2, 3, 4)) > 0).all() and inked.min() > 0.3 * inked.max()
    assert (frames.max((0, 1))[..., 0] > 0).mean() > 0.9  # they come everywhere


@pytest.mark.slow
def test_decoder(capsys):
    out = said(capsys, decoder, "--steps", "4")
    rows = [numbers(line) for line in re.findall(r"^ +\d+ .*$", out, re.MULTILINE)]
    assert [row[0] for row in rows] == [1, 4] and rows[0][1] > 3 and rows[-1][1] < 2.5
    assert out.count(": True") == 4 and "Written by int8" in out
    assert len(re.findall(r"[1-9]\d* characters per second by (?:jaxext|float32|int8)", out)) == 3
    rows = jaxext.explain(jax.grad(functools.partial(decoder.loss_of, decoder.JAXEXT)))(decoder.init(), next(decoder.batches())).rows
    assert {"causal_conv1d_backward", "ragged_linear", "ragged_tn", "matmul_tn"} <= {row.op for row in rows}


def test_the_decoder_s_sentences():
    sums, facts = decoder.SUMS, decoder.FACTS
    assert len({*sums}) == len(sums) == 15 * 4 and len({*facts}) == len(facts) == 16 * 3 * 4 * 3 * 4
    assert "one cat and two cats make three cats" in sums and {"one old dog sees two ants", "two old dogs see one ant"} <= {*facts}
    text = "".join(decoder.ALPHABET[next(decoder.batches())].ravel())
    assert {*text} <= {*"\n".join(sums + facts)} and len(text) == decoder.BATCH * (decoder.LENGTH + 1)


def test_muon(capsys, tmp_path):
    """The losses of optax's Muon, and products of jaxext alone."""
    pytest.importorskip("optax")
    with jax.numpy_dtype_promotion("standard"):  # for optax
        out = said(capsys, muon, "--epochs", "4", "--plot", str(tmp_path / "plot.png"))
    assert (tmp_path / "plot.png").stat().st_size > 10_000
    assert re.search(r"epoch  4   loss 0\.0\d+   optax.contrib.muon 0\.0", out) and "The same losses as optax's: True" in out
    params, optimizer = muon.init(), muon.muon(0.1)
    rows = products(optimizer.update, params, optimizer.init(params))
    assert sorted(rows) == sorted(3 * products(jaxext.newton_schulz, params[0][0]))  # of matrices of three shapes


@pytest.mark.slow
def test_dp_sgd(capsys, tmp_path):
    out = said(capsys, dp_sgd, "--epochs", "2", "--plot", str(tmp_path / "plot.png"))
    assert "no gradient is written" in out and out.count("of the gradients are clipped") == 2
    assert float(re.findall(r"(\S+)% of the test images", out)[0]) > 30 and (tmp_path / "plot.png").stat().st_size > 10_000


def test_dp_sgd_notices_a_sum_of_other_gradients(capsys, monkeypatch):
    monkeypatch.setattr(dp_sgd, "of_gradients", lambda p, *batch: jax.grad(dp_sgd.loss)(p, *batch))
    assert dp_sgd.main(["--epochs", "1"]) == 1
    assert "the clipped sum is not that of the gradients" in capsys.readouterr().out
