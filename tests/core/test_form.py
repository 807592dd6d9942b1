"""The label algebra, on a form that no operation has: shape, transposes, batching and the choice of an implementation follow from labels.

The form is  t[z,i,k,p] = Σ_j u[z,i,j,p] v[z,j,k,p]  without a window: labels Z and P stand in all three slots, I, J and K in two.
"""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import random
from jax import lax

from jaxext.core.choose import choose
from jaxext.core.family import Family
from jaxext.core.form import Form, define, dimension_numbers, owner
from jaxext.core.implementation import Algorithm, Implementation
from jaxext.core.static import Static
from jaxext.tables.table_format import Measurement

SLOTS = {"u": ("Z", "I", "J", "P"), "v": ("Z", "J", "K", "P"), "t": ("Z", "I", "K", "P")}
LETTERS = str.maketrans("ZIJKP", "zijkp")


class Einsum(Implementation):
    """The definition of the form; `asked` remembers every call."""

    name = "einsum"

    def __init__(self):
        self.asked = []

    def refuses(self, call):
        return None

    def candidates(self, call):
        return (Algorithm("einsum"), Algorithm("again"))

    def run(self, call, config, operands):
        self.asked.append(call)
        letters = {slot: "".join(labels).translate(LETTERS) for slot, labels in call.labels.items()}
        y = jnp.einsum(f"{','.join(letters[slot] for slot in operands)}->{letters[call.open]}", *call.flatten(operands).values())
        return y.reshape(call.shape).astype(call.dtype)


class Refusing(Einsum):
    """Supports one role only."""

    name = "refusing"

    def refuses(self, call):
        return None if call.open == "t" else f"no {call.open}"


EINSUM, REFUSING = Einsum(), Refusing()
FORM = define(
    Form(
        name="toy",
        slots=SLOTS,
        roles={"t": "forward", "u": "first", "v": "second"},
        window=(),
        family=Family("toy", lax_primitive=lax.dot_general_p, names="toy", implementations=[EINSUM, REFUSING]),
    )
)
RANKS = dict(Z=0, I=1, J=2, P=1, K=1)
SIZES = {"I0": 2, "J0": 3, "J1": 1, "P0": 2, "K0": 4}


def product(u, v, implementation=None, ranks=None):
    static = Static(ranks=FORM.pack(ranks or RANKS), dtypes=(np.dtype(np.float64),), implementation=implementation)
    return FORM.bind("t", {"u": u, "v": v}, static)


def truth(u, v):
    return jnp.einsum("ijap,jakp->ikp", u, v)


def operands():
    shapes = {slot: [SIZES[axis] for axis in FORM.axes(slot, [RANKS[label] for label in FORM.free])] for slot in SLOTS}
    return tuple(random(shapes[slot], np.float64, seed, integers=True) for seed, slot in enumerate("uvt"))


def test_labels():
    assert FORM.free == ("Z", "I", "J", "P", "K")
    assert [FORM.factors(open) for open in "tuv"] == [("u", "v"), ("v", "t"), ("u", "t")]
    assert [FORM.shared(*slots) for slots in ("uv", "ut", "vt", "uvt")] == ["J", "I", "K", "Z"]
    ranks = (2, 1, 0, 1, 3)
    assert FORM.axes("u", ranks) == ("Z0", "Z1", "I0", "P0")
    assert FORM.axes("v", ranks) == ("Z0", "Z1", "K0", "K1", "K2", "P0")
    assert [FORM.position("v", label, ranks) for label in "ZJKP"] == [0, 2, 2, 5]


def test_window_labels_are_one_axis_each():
    form = Form("windowed", dict(x=("N", "H", "C"), w=("K", "R", "C"), y=("N", "P", "K")), {}, ("H", "R", "P"), FORM.family)
    assert form.free == ("N", "C", "K")
    assert form.axes("x", (2, 0, 1)) == ("N0", "N1", "H")
    assert form.position("w", "C", (2, 0, 1)) == 2


def test_dimension_numbers():
    """The order is the left operand's; labels of both operands and the result are batches, labels that the result lacks are summed."""
    assert dimension_numbers("zij", "jkz", "zik") == (((2,), (0,)), ((0,), (2,)))
    assert dimension_numbers("ij", "kl", "ijkl") == (((), ()), ((), ()))
    assert dimension_numbers("iab", "bja", "ij") == (((1, 2), (2, 0)), ((), ()))


def test_primitives_know_their_role():
    assert {p.name: role for p, (form, role) in owner.items() if form is FORM} == {"toy_forward": "t", "toy_first": "u", "toy_second": "v"}


def test_each_role_is_the_transpose_of_the_others():
    u, v, t = operands()
    np.testing.assert_array_equal(product(u, v), truth(u, v))
    for got, want in zip(jax.vjp(product, u, v)[1](t), jax.vjp(truth, u, v)[1](t), strict=True):
        np.testing.assert_array_equal(got, want)
    primitives = [eqn.primitive.name for eqn in jax.make_jaxpr(lambda u, v, t: jax.vjp(product, u, v)[1](t))(u, v, t).eqns]
    assert {"toy_first", "toy_second"} <= set(primitives) <= {"toy_forward", "toy_first", "toy_second"}
    tangents = random(u.shape, np.float64, 5), random(v.shape, np.float64, 6)
    got, want = (jax.jvp(f, (u, v), tangents) for f in (product, truth))
    np.testing.assert_array_equal(got[0], want[0])
    np.testing.assert_allclose(got[1], want[1], rtol=1e-12)

    def third(f):
        return jax.grad(lambda u: jax.grad(lambda v: jax.grad(lambda u: (f(u, v) ** 3).sum())(u).sum())(v).sum())(u)

    np.testing.assert_array_equal(third(product), third(truth))


@pytest.mark.parametrize("mapped", ["u", "v", "uv"])
def test_a_mapped_axis_joins_the_label_of_the_mapped_slots(mapped):
    """The axis moves from any position to the front of its label and nothing is merged: one product, of one more rank."""
    u, v, _ = operands()

    def grow(x, d):
        return x if d is None else np.stack([x, 2 * x, x - 1], axis=d)

    for du, dv in itertools.product(range(u.ndim + 1) if "u" in mapped else [None], range(v.ndim + 1) if "v" in mapped else [None]):
        f = jax.vmap(product, in_axes=(du, dv))
        args = grow(u, du), grow(v, dv)
        np.testing.assert_array_equal(f(*args), jax.vmap(truth, in_axes=(du, dv))(*args))
    (eqn,) = [eqn for eqn in jax.make_jaxpr(f)(*args).eqns if eqn.primitive in owner]
    label = {"u": "I", "v": "K", "uv": "Z"}[mapped]
    assert FORM.unpack(eqn.params["static"].ranks) == RANKS | {label: RANKS[label] + 1}


def test_rules_leave_the_static_parameters_alone():
    """Parameters that the user named govern every product that the rules derive."""
    u, v, t = operands()
    f = functools.partial(product, implementation="einsum")
    jaxpr = jax.make_jaxpr(jax.vmap(lambda u: jax.vjp(f, u, v)[1](t)))(u[None])
    found = [eqn.params for eqn in jaxpr.eqns if eqn.primitive in owner]
    assert len(found) >= 2
    for params in found:
        assert (params["static"].implementation, params["static"].precision, params["static"].window) == ("einsum", None, None)


def test_call_says_what_is_asked():
    u, v, t = operands()
    EINSUM.asked.clear()
    product(*(x.astype(np.float32) for x in (u, v)), ranks=RANKS)
    (call,) = EINSUM.asked
    assert (call.op, call.open, call.platform, call.partitioner) == ("toy_forward", "t", jax.default_backend(), "nobody")
    assert call.sizes == {"Z": 1, "I": 2, "J": 3, "P": 2, "K": 4}
    assert call.shape == t.shape
    assert call.axes["u"] == ("I0", "J0", "J1", "P0")
    assert call.dtypes == {"u": np.float32, "v": np.float32}
    assert call.dtype == np.float64
    assert {slot: x.shape for slot, x in call.flatten({"u": u}).items()} == {"u": (1, 2, 3, 2)}


def test_sizes_that_do_not_match_are_our_own_fault():
    u, v, _ = operands()
    with pytest.raises(AssertionError, match="toy: axis P0 of v is 1, elsewhere 2"):
        product(u, v[..., :1])


@functools.cache
def calls():
    """One call of each role."""
    EINSUM.asked.clear()
    u, v, t = operands()
    ranks = dict(RANKS, Z=1)
    jax.vjp(functools.partial(product, ranks=ranks), u[None], v[None])[1](t[None])
    by_slot = {call.open: call for call in EINSUM.asked}
    assert set(by_slot) == {"t", "u", "v"}
    return by_slot


def test_choice():
    """The first in order of preference is taken; each of the others has a reason."""
    by_slot = calls()
    both = (REFUSING, EINSUM)
    assert choose(by_slot["t"], both, None).implementation == "refusing"
    assert choose(by_slot["t"], both, None).refusals == {"einsum": "'refusing' is preferred"}
    assert choose(by_slot["u"], both, None).implementation == "einsum"
    assert choose(by_slot["u"], both, None).refusals == {"refusing": "no u"}
    assert choose(by_slot["t"], both, "einsum").implementation == "einsum"
    assert choose(by_slot["t"], both, "einsum").refusals == {"refusing": "'einsum' was named"}
    refused = choose(by_slot["v"], both, "refusing")
    assert refused.implementation is None
    assert refused.refusals == {"refusing": "no v", "einsum": "'refusing' was named"}


def measurement(implementation, algorithm, ms):
    return Measurement(implementation=implementation, config={"algorithm": algorithm}, ms=(0.9 * ms, ms, 1.1 * ms), error=0.0)


def test_choice_by_measurements():
    """The fastest that still is a candidate, before any preference; of a named implementation's alone if one is named."""
    call, both = calls()["t"], (REFUSING, EINSUM)
    slow, quick, gone = measurement("refusing", "einsum", 3.0), measurement("einsum", "again", 2.0), measurement("refusing", "gone", 1.0)
    choice = choose(call, both, None, [slow, gone, quick])
    assert (choice.implementation, choice.config, choice.why) == ("einsum", Algorithm("again"), "measured at 2 ms")
    assert choice.refusals == {"refusing": "it was measured at 3 ms"}
    assert choose(call, both, None, [quick]).refusals == {"refusing": "it was not measured"}
    named = choose(call, both, "refusing", [slow, gone, quick])
    assert (named.implementation, named.why) == ("refusing", "measured at 3 ms")
    for nothing in ([gone], [], [measurement("unknown", "einsum", 1.0)]):
        choice = choose(call, both, None, nothing)
        assert (choice.implementation, choice.config, choice.why) == ("refusing", Algorithm("einsum"), "preferred")
    assert choose(calls()["u"], both, None, [slow, quick]).refusals == {"refusing": "no u"}


def test_xla_is_to_beat_even_by_what_is_gone():
    """No implementation wins by a greater time than the last one's fastest config, even if that is no candidate any more."""
    call, both = calls()["t"], (REFUSING, EINSUM)
    gone, other = measurement("einsum", "gone", 1.0), measurement("refusing", "again", 1.5)
    choice = choose(call, both, None, [other, gone, measurement("einsum", "einsum", 9.0), measurement("einsum", "again", 2.0)])
    assert (choice.implementation, choice.config, choice.why) == ("einsum", Algorithm("again"), "measured at 2 ms")
    choice = choose(call, both, None, [other, gone])
    assert (choice.implementation, choice.config) == ("einsum", Algorithm("einsum"))
    assert choice.why == "measured at 1 ms, with a config that is no candidate any more"
    choice = choose(call, both, None, [gone, measurement("refusing", "again", 0.5)])
    assert (choice.implementation, choice.config) == ("refusing", Algorithm("again"))


def test_a_problem_in_one_line():
    by_slot = calls()
    assert by_slot["t"].problem == "toy_forward Z=1 I=2 J=3 P=2 K=4 float64 float64 -> float64 precision=default"
    assert by_slot["u"].problem == "toy_first Z=1 I=2 J=3 P=2 K=4 float64 float64 -> float64 precision=default"


def test_a_named_implementation_that_refuses_raises_its_reason():
    """It raises it too if only the backward pass is refused, and never falls back silently."""
    u, v, t = operands()
    f = functools.partial(product, implementation="refusing")
    REFUSING.asked.clear()
    np.testing.assert_array_equal(f(u, v), truth(u, v))
    assert [call.op for call in REFUSING.asked] == ["toy_forward"]
    with pytest.raises(NotImplementedError, match="toy_first: implementation 'refusing' does not support this call: no u"):
        jax.jit(jax.grad(lambda u: f(u, v).sum()))(u)
    with pytest.raises(NotImplementedError, match="toy_second: implementation 'refusing' does not support this call: no v"):
        jax.jit(jax.grad(lambda v: f(u, v).sum()))(v)
