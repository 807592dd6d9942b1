"""A decoder language model with Mamba-like layers and mixtures of experts, trained by jaxext and by lax, quantised, and run token by token.

    v, g = u I, u G of u = norm(x);   v = silu(causal_conv1d(v))   each channel sees the last TAPS tokens
    a = exp(-softplus(v A + b));      h = a h + (1 - a) v          what is kept depends on what is read
    x = x + (h silu(g)) O;            x = x + Σ_e p_e expert_e(norm(x)) over the TOP experts with the largest p = softmax(norm(x) R)

    python examples/decoder.py

What to see: `lax.scan` runs over the layers' stacked weights.  One line, `jaxext.slices_in_place()`, lets GPU kernels read them without a
copy.  The same steps by lax's depthwise convolution, sort and ragged matmul have the same losses.  Every TOGETHER steps both start again
from the same parameters.  The text is generated: sentences about animals, some of them sums.  Then the dense weights are quantised to
int8, and the network writes.  It keeps only the last TAPS - 1 inputs of each convolution and the state h.
"""

import argparse
import collections
import functools
import itertools
import math
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import jaxext
from jaxext.quantization import Quantized, quantize

WIDTH, INNER, TAPS, LAYERS = 64, 128, 4, 2
EXPERTS, HIDDEN, TOP = 8, 64, 2
BATCH, LENGTH, PROMPT = 16, 96, 24
RATE = 0.006
TOGETHER = 10  # steps after which lax goes on from jaxext's parameters: a router enlarges rounding where two experts are as good
ROUNDING = 1e-3  # of the losses, and of the logits in parts of the largest
MOST = 0.9  # of the characters int8 chooses as float32 does

# --- the text


def language():
    """Return all sentences of the language: sums, and who sees whom.  Verbs agree with their subjects."""
    numbers, nouns = "one two three four five six".split(), ("cat", "dog", "bird", "ant")

    def counted(number, noun):
        return f"{numbers[number - 1]} {noun}{'s' if number > 1 else ''}"

    pairs = [(a, b) for a in range(1, 6) for b in range(1, 7 - a)]
    sums = [f"{counted(a, noun)} and {counted(b, noun)} make {counted(a + b, noun)}" for a, b in pairs for noun in nouns]
    facts = [
        f"{counted(n, f'{kind} {noun}')} {verb}{'s' if n == 1 else ''} {counted(m, other)}"
        for n, m in itertools.product(range(1, 5), repeat=2)
        for kind, noun, verb, other in itertools.product(("big", "old", "red"), nouns, ("see", "hear", "like"), nouns)
    ]
    return sums, facts


SUMS, FACTS = language()
ALPHABET = np.array(sorted({*"\n".join(SUMS + FACTS)}))


def batches(seed=0):
    """Yield pieces (BATCH, LENGTH + 1) of a text, half of whose sentences are sums."""
    rng = np.random.default_rng(seed)
    sentences = np.where(rng.random(8000) < 0.5, rng.choice(SUMS, 8000), rng.choice(FACTS, 8000))
    text = np.searchsorted(ALPHABET, [*"\n".join(sentences)]).astype(np.int32)
    while True:
        begin = rng.integers(len(text) - LENGTH, size=(BATCH, 1))
        yield text[begin + np.arange(LENGTH + 1)]


# --- the operations, by jaxext and by lax


def dense(x, w):
    return jaxext.quantized_matmul(x, w) if isinstance(w, Quantized) else jaxext.matmul(x, w)


def convolution_of_lax(x, w, bias, *, activation):
    numbers = ("NWC", "WIO", "NWC")
    y = lax.conv_general_dilated(x, w[:, None], (1,), [(TAPS - 1, 0)], dimension_numbers=numbers, feature_group_count=x.shape[-1])
    return getattr(jax.nn, activation)(y + bias)


def mixture_of_lax(x, indices, weights, w_gate, w_up, w_down):
    """The rows sorted by expert, and added up where they came from."""
    rows = x.reshape(-1, WIDTH)
    order = jnp.argsort(indices.ravel())
    sizes = jnp.bincount(indices.ravel(), length=EXPERTS)
    sent = rows[order // TOP]
    hidden = jax.nn.silu(lax.ragged_dot(sent, w_gate, sizes)) * lax.ragged_dot(sent, w_up, sizes)
    computed = lax.ragged_dot(hidden, w_down, sizes) * weights.ravel()[order, None]
    return jnp.zeros_like(rows).at[order // TOP].add(computed).reshape(x.shape)


Operations = collections.namedtuple("Operations", "dense convolution mixture")
JAXEXT = Operations(dense, jaxext.causal_conv1d, jaxext.moe)
LAX = Operations(jnp.matmul, convolution_of_lax, mixture_of_lax)

# --- the network


def init(seed=0):
    rng = np.random.default_rng(seed)

    def matrix(*shape):
        return (rng.normal(size=shape) / math.sqrt(shape[-2])).astype(np.float32)

    ones, zeros = np.ones((LAYERS, WIDTH), np.float32), np.zeros((LAYERS, INNER), np.float32)
    mixer = {"I": (WIDTH, INNER), "G": (WIDTH, INNER), "A": (INNER, INNER), "O": (INNER, WIDTH), "taps": (TAPS, INNER)}
    experts = {"gate": (EXPERTS, WIDTH, HIDDEN), "up": (EXPERTS, WIDTH, HIDDEN), "down": (EXPERTS, HIDDEN, WIDTH), "R": (WIDTH, EXPERTS)}
    layers = {name: matrix(LAYERS, *shape) for name, shape in (mixer | experts).items()}
    layers |= {"bias": zeros, "b": zeros - 1, "norm": ones, "norm of experts": ones}
    return {"embedding": matrix(len(ALPHABET), WIDTH), "layers": layers, "norm": ones[0], "head": matrix(WIDTH, len(ALPHABET))}


def norm(x, scale):
    return x * lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-6) * scale


def layer(ops, p, x, state=None):
    """A layer of whole sequences (..., T, WIDTH), or of what follows a state: (its result, the state after it)."""
    u = norm(x, p["norm"])
    v = ops.dense(u, p["I"])
    inputs, h = state or (None, jnp.zeros((*x.shape[:-2], INNER)))
    if inputs is None:
        v = ops.convolution(v, p["taps"], p["bias"], activation="silu")
    else:
        v, inputs = jaxext.causal_conv1d_update(v, inputs, p["taps"], p["bias"], activation="silu")
    a = jnp.exp(-jax.nn.softplus(ops.dense(v, p["A"]) + p["b"]))

    def step(h, av):
        a, v = av
        h = a * h + (1 - a) * v
        return h, h

    last, h = lax.scan(step, h, (jnp.moveaxis(a, -2, 0), jnp.moveaxis(v, -2, 0)))
    x = x + ops.dense(jnp.moveaxis(h, 0, -2) * jax.nn.silu(ops.dense(u, p["G"])), p["O"])
    u = norm(x, p["norm of experts"])
    weights, indices = lax.top_k(jax.nn.softmax(ops.dense(u, p["R"])), TOP)
    return x + ops.mixture(u, indices, weights, p["gate"], p["up"], p["down"]), state and (inputs, last)


def logits_of(ops, params, tokens, states=None):
    """The logits after each token (..., T), and the layers' states, if they are given those before."""
    x, states = lax.scan(lambda x, of: layer(ops, of[0], x, of[1]), params["embedding"][tokens], (params["layers"], states))
    return ops.dense(norm(x, params["norm"]), params["head"]), states


def loss_of(ops, params, text):
    """Mean cross-entropy of the next character, in nats."""
    logp = jax.nn.log_softmax(logits_of(ops, params, text[:, :-1])[0])
    return -jnp.take_along_axis(logp, text[:, 1:, None], axis=-1).mean()


@functools.partial(jax.jit, static_argnums=0)
@jaxext.slices_in_place()
def update(ops, params, moments, text, count):
    """A step of Adam: (parameters, moments, loss)."""
    loss, grads = jax.value_and_grad(functools.partial(loss_of, ops))(params, text)
    first = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, moments[0], grads)
    second = jax.tree.map(lambda m, g: 0.99 * m + 0.01 * g * g, moments[1], grads)

    rate, unbias = RATE / (1 - 0.9**count), 1 / (1 - 0.99**count)
    params = jax.tree.map(lambda p, m, s: p - rate * m / (jnp.sqrt(unbias * s) + 1e-6), params, first, second)
    return params, (first, second), loss


@jax.jit
@jaxext.slices_in_place()
def generate(params, text, read, temperature):
    """Read so many characters of text (N, T) and write on: the character chosen after each one (N, T), and the logits."""

    def step(carry, at):
        (states, chosen), (t, given) = carry, at
        logits, states = logits_of(JAXEXT, params, jnp.where(t < read, given, chosen)[:, None], states)
        noise = jax.random.gumbel(jax.random.fold_in(jax.random.key(0), t), logits.shape)
        chosen = (logits + temperature * noise).argmax(-1)[:, 0].astype(text.dtype)
        return (states, chosen), (chosen, logits[:, 0])

    count, length = text.shape
    empty = (jnp.zeros((LAYERS, count, TAPS - 1, INNER)), jnp.zeros((LAYERS, count, INNER)))
    _, (chosen, logits) = lax.scan(step, (empty, text[:, 0]), (jnp.arange(length), text.T))
    return chosen.T, logits.swapaxes(0, 1)


# --- what is shown


def timed(function, *args):
    """The result, and the seconds it took."""
    start = time.perf_counter()
    result = jax.block_until_ready(function(*args))
    return result, time.perf_counter() - start


def train(steps):
    """Train by jaxext and by lax in turn, on the same batches: the parameters by jaxext, and the losses (steps, 2)."""
    zeros = jax.tree.map(np.zeros_like, init())
    runs = {ops: (init(), (zeros, zeros)) for ops in (JAXEXT, LAX)}
    losses, seconds = np.zeros((2, steps, 2))
    print("step   loss by jaxext   loss by lax   difference")
    for i, text in enumerate(itertools.islice(batches(), steps)):
        if i % TOGETHER == 0:
            runs[LAX] = runs[JAXEXT]
        for j, (ops, run) in enumerate(runs.items()):
            (params, moments, losses[i, j]), seconds[i, j] = timed(update, ops, *run, text, i + 1)
            runs[ops] = params, moments
        if i == 0 or (i + 1) % TOGETHER == 0 or i + 1 == steps:
            print(f"{i + 1:4}   {losses[i, 0]:14.6f}   {losses[i, 1]:11.6f}   {abs(np.diff(losses[i])[0]):10.1e}")
    rates = BATCH * LENGTH / np.median(seconds[1:], axis=0)  # the first step compiles
    print(f"\nTraining: {rates[0]:.0f} characters per second by jaxext, {rates[1]:.0f} by lax")
    return runs[JAXEXT][0], losses


def show_generation(params):
    """Write by float32 and by int8: (share of characters that both choose, difference of the logits step by step and all at once)."""
    text = next(batches(seed=1))[:, :-1]
    at_once = jax.jit(functools.partial(logits_of, JAXEXT))(params, text)[0]
    _, by_steps = generate(params, text, LENGTH, 0.0)
    difference = float(jnp.abs(at_once - by_steps).max() / jnp.abs(at_once).max())

    small = "I", "G", "A", "O", "gate", "up", "down"  # each with a scale for each column, of each layer and expert
    int8_layers = {name: quantize(params["layers"][name]) for name in small}
    quantised = params | {"layers": params["layers"] | int8_layers, "head": quantize(params["head"])}
    for name, weights in (("int8", quantised), ("float32", params)):
        chosen, _ = generate(weights, text, PROMPT, 0.0)  # compiles
        seconds = np.median([timed(generate, weights, text, PROMPT, 0.0)[1] for _ in range(5)])
        print(f"Generation: {text.size / seconds:.0f} characters per second by {name}")
    float_text = np.concatenate([text[:, :PROMPT], chosen[:, PROMPT - 1 : -1]], axis=1)
    same = float((generate(quantised, float_text, LENGTH, 0.0)[0] == chosen)[:, PROMPT - 1 :].mean())

    newlines = np.full_like(text, list(ALPHABET).index("\n"))
    lines = [line for row in generate(quantised, newlines, 1, 0.3)[0] for line in "".join(ALPHABET[row]).split("\n")[:-1]]
    correct = sum(line in {*SUMS, *FACTS} for line in lines)
    print("\nWritten by int8:", *lines[:8], sep="\n    ")
    print(f"{correct} of {len(lines)} such sentences belong to the language, {len({*lines})} are different\n")
    return same, difference


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=30, help="of training (%(default)s)")
    args = parser.parse_args(argv)
    if args.steps < 2:
        parser.error(f"argument --steps: it is {args.steps}, want at least 2")

    # GPUs round float32 operands to TF32 by default, by which the two would differ more than by order of summation.
    with jax.default_matmul_precision("highest"):
        params, losses = train(args.steps)
        same, difference = show_generation(params)
    first, last = losses[[0, -1], 0]
    claims = {
        "The same losses by jaxext and by lax": np.ptp(losses, axis=1).max() < ROUNDING,
        f"The loss falls, from {first:.2f} to {last:.2f}": last < first,
        f"The same logits step by step and all at once (they differ by {difference:.0e} of the largest)": difference < ROUNDING,
        f"int8 continues float32's text with the same character in {same:.1%} of places (goal: at least {MOST:.0%})": same >= MOST,
    }
    for claim, holds in claims.items():
        print(f"{claim}: {holds}")
    return 0 if all(claims.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
