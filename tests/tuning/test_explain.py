"""`explain`: each product of a program, how often, on what shapes, by whom and why not by others; and nothing is run."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import jaxext
from jaxext import extend
from jaxext.core.implementation import Algorithm
from jaxext.ops.conv import fft, xla
from jaxext.ops.conv import form as conv
from jaxext.ops.matmul import form as matmul
from jaxext.tuning.explain import EXPECTED

NHWC = ("NHWC", "HWIO", "NHWC")
NO_GPU = {"cuda": "platform is 'cpu', want 'cuda'", "triton": "platform is 'cpu', want 'cuda' (or TRITON_INTERPRET=1)"}
UNNAMED = {"fft": fft.IN_THE_NORM}  # of a convolution


def struct(*shape):
    return jax.ShapeDtypeStruct(shape, np.float32)


def mlp(params, x):
    for w in params:
        x = jnp.tanh(jaxext.matmul(x, w))
    return x.sum()


PARAMS, X = [struct(8, 16), struct(16, 16), struct(16, 16), struct(16, 4)], struct(32, 8)


def table(explanation):
    """Return the count of each row, by what identifies it."""
    return {(row.op, *row.operands, *row.results): row.times for row in explanation.rows}


def test_products_of_a_gradient():
    """Each product has two more, but the first layer's input, which nobody wants a gradient of."""
    forward = {
        ("matmul_nn", "a:f32[32,8]", "b:f32[8,16]", "c:f32[32,16]"): 1,
        ("matmul_nn", "a:f32[32,16]", "b:f32[16,16]", "c:f32[32,16]"): 2,
        ("matmul_nn", "a:f32[32,16]", "b:f32[16,4]", "c:f32[32,4]"): 1,
    }
    explanation = jaxext.explain(mlp)(PARAMS, X)
    assert table(explanation) == forward and explanation.platform == jax.default_backend().replace("gpu", "cuda")
    assert {row.chosen for row in explanation.rows} == {"xla"} and explanation.rows[0].refused == NO_GPU
    assert table(jaxext.explain(jax.grad(mlp))(PARAMS, X)) == forward | {
        ("matmul_tn", "a:f32[32,16]", "c:f32[32,4]", "b:f32[16,4]"): 1,
        ("matmul_nt", "b:f32[16,4]", "c:f32[32,4]", "a:f32[32,16]"): 1,
        ("matmul_tn", "a:f32[32,16]", "c:f32[32,16]", "b:f32[16,16]"): 2,
        ("matmul_nt", "b:f32[16,16]", "c:f32[32,16]", "a:f32[32,16]"): 2,
        ("matmul_tn", "a:f32[32,8]", "c:f32[32,16]", "b:f32[8,16]"): 1,
    }


def convnet(w, head, x):
    x = jaxext.conv_general_dilated(x, w, (2, 2), "SAME", dimension_numbers=NHWC)
    return jaxext.matmul(x.mean((1, 2)), head).sum()


CONVNET = struct(3, 3, 2, 8), struct(8, 4), struct(16, 6, 6, 2)


def test_roles_of_a_convolution():
    explanation = jaxext.explain(jax.grad(convnet, argnums=(0, 2)))(*CONVNET)
    assert [row.op for row in explanation.rows] == ["conv2d_fprop", "matmul_nn", "matmul_nt", "conv2d_wgrad", "conv2d_dgrad"]
    assert explanation.rows[0].operands == ("x:f32[16,6,6,2]", "w:f32[8,3,3,2]")
    assert explanation.rows[0].results == ("y:f32[16,3,3,8]",)


def test_scans_and_other_programs_inside():
    """A scan counts its steps, scans within scans multiply; jit, cond, while, checkpoint and vmap are looked into."""
    a = struct(5, 5)

    def f(a):
        def repeat(step, times):
            return lambda c: jax.lax.scan(lambda c, _: (step(c), None), c, length=times)[0]

        c = repeat(repeat(lambda c: jax.jit(jaxext.matmul)(c, a), 4), 3)(a)
        c = jax.lax.cond(c[0, 0] > 0, lambda c: jaxext.matmul(c, c[:, :1]), lambda c: c[:, :1], c)
        c = jax.checkpoint(lambda c: jaxext.matmul(c.T, c))(c)
        c = jax.lax.while_loop(lambda c: c[0, 0] < 3, lambda c: jaxext.matmul(c, c), c)
        return jax.vmap(jaxext.matmul, in_axes=(None, 0))(c, jnp.ones((7, 1, 2), np.float32))

    assert table(jaxext.explain(f)(a)) == {
        ("matmul_nn", "a:f32[5,5]", "b:f32[5,5]", "c:f32[5,5]"): 12,
        ("matmul_nn", "a:f32[5,5]", "b:f32[5,1]", "c:f32[5,1]"): 1,
        ("matmul_nn", "a:f32[1,5]", "b:f32[5,1]", "c:f32[1,1]"): 1,
        ("matmul_nn", "a:f32[1,1]", "b:f32[1,1]", "c:f32[1,1]"): 1,
        ("matmul_nn", "a:f32[1,1]", "b:f32[1,7,2]", "c:f32[1,7,2]"): 1,
    }


def test_per_device_shapes_in_shard_map():
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    f = jax.shard_map(jaxext.matmul, mesh=mesh, in_specs=(P("data"), P(None, "model")), out_specs=P("data", "model"))
    assert table(jaxext.explain(f)(struct(16, 8), struct(8, 6))) == {("matmul_nn", "a:f32[4,8]", "b:f32[8,3]", "c:f32[4,3]"): 1}


class OnlyCuda(extend.Implementation):
    name = "only_cuda"

    def refuses(self, call):
        return None if call.platform == "cuda" else f"{call.platform} is no GPU"

    def candidates(self, call):
        return (Algorithm("kernel"),)

    def describe(self, call, config):
        return f"{call.op} {config.algorithm}"

    def run(self, call, config, operands):
        raise AssertionError("explain ran something")


def test_platform_and_refusals(monkeypatch):
    """Another implementation is asked for the platform that the user names, and says why not."""
    monkeypatch.setitem(vars(conv.FAMILY), "implementations", [OnlyCuda(), *conv.FAMILY.implementations])
    forward, matmul = jaxext.explain(convnet, platform="cpu")(*CONVNET).rows
    assert (forward.chosen, forward.refused) == ("xla", {"only_cuda": "cpu is no GPU"} | NO_GPU | UNNAMED)
    assert matmul.refused == NO_GPU
    on_cuda = jaxext.explain(convnet, platform="cuda")(*CONVNET)
    assert (on_cuda.platform, on_cuda.rows[0].chosen, on_cuda.rows[0].how) == ("cuda", "only_cuda", "conv2d_fprop kernel")
    assert on_cuda.rows[0].refused["xla"] == "'only_cuda' is preferred"
    monkeypatch.setitem(vars(conv.FAMILY), "implementations", [OnlyCuda()])
    nothing = jaxext.explain(convnet, platform="cpu")(*CONVNET)
    assert nothing.rows[0].chosen is None
    assert str(nothing).splitlines()[2].split()[:3] == ["conv2d_fprop", "1", "nothing"]
    assert "; not only_cuda[1]" in str(nothing) and "[1] only_cuda: cpu is no GPU" in str(nothing)


def test_named_implementation():
    with jaxext.use_implementation("xla"):
        assert jaxext.explain(convnet)(*CONVNET).rows[0].chosen == "xla"


def test_table():
    """A title, a head, two lines for each row, and a legend; the columns begin below one another."""
    explanation = jaxext.explain(jax.grad(convnet))(*CONVNET)
    table, legend = (part.splitlines() for part in str(explanation).split("\n\n"))
    title, head, *lines = table
    assert title == f"{len(explanation.rows)} operations on {explanation.platform}"
    assert len(lines) == 2 * len(explanation.rows)
    assert head.split() == ["op", "times", "by", "operands", "result"]
    for line, details, row in zip(lines[::2], lines[1::2], explanation.rows, strict=True):
        cells = (row.op, str(row.times), f"{row.chosen} {row.how}", " ".join(row.shapes[:-1]), row.shapes[-1])
        for column, cell in zip(head.split(), cells, strict=True):
            assert line[head.index(column) :].startswith(cell)
        assert line == line.rstrip()
        refused = "cuda[1] triton[2]" + " fft[3]" * row.op.startswith("conv")
        assert details.endswith(f"{row.layout}; precision default; preferred, not {refused}")
    expected = [line for line in legend if re.fullmatch(r"  conv2d_\w+ \S+ \S+: lax [\d.]+\+\d+, .*", line)]
    assert legend == [
        *(f"[1] cuda: {NO_GPU['cuda']}", f"[2] triton: {NO_GPU['triton']}", f"[3] fft: {UNNAMED['fft']}"),
        *(EXPECTED, *expected, "4 calls: 4 as lax"),
    ]
    assert [line.split()[0] for line in expected] == ["conv2d_fprop", "conv2d_wgrad"]


def test_every_result_of_an_operation():
    operands = [jnp.ones(shape, jnp.float32) for shape in ((8, 16), (16, 4), (4,))]
    gradient = jax.grad(lambda *args: jaxext.linear(*args, activation="gelu").sum())
    (forward, *_) = jaxext.explain(gradient)(*operands).rows
    assert forward.results == forward.shapes[3:] == ("c:f32[8,4]", "preactivation:f32[8,4]")
    assert forward.layout.split()[3:] == ["MN", "MN"]


def test_summary(monkeypatch):
    """The last line: how many products are lax's own, XLA's by other means, an operation's reference, and of other implementations."""
    monkeypatch.setitem(vars(conv.FAMILY), "implementations", [OnlyCuda(), *conv.FAMILY.implementations])

    def f(x, w, v):
        depthwise = CONV(x, w, (1, 1), "SAME", dimension_numbers=NHWC, feature_group_count=8)
        return jaxext.linear(depthwise.sum((1, 2)), v, activation="relu"), jaxext.matmul(jaxext.matmul(v, v), v)

    arrays = struct(8, 64, 64, 8), struct(3, 3, 1, 8), struct(8, 8)
    assert str(jaxext.explain(f, platform="cpu")(*arrays)).splitlines()[-1] == "4 calls: 2 as lax, 1 composed, 1 rewritten"
    assert str(jaxext.explain(f, platform="cuda")(*arrays)).splitlines()[-1] == "4 calls: 2 as lax, 1 by only_cuda, 1 composed"
    assert " calls: " not in str(jaxext.explain(jaxext.matmul)(*arrays[2:], *arrays[2:]))


def test_the_product_inside_an_operation(monkeypatch):
    """It has an implementation and an algorithm of its own, as the parts of a convolution have."""
    monkeypatch.setitem(vars(matmul.FAMILY), "implementations", [OnlyCuda(), *matmul.FAMILY.implementations])

    def how(platform, call, *shapes):
        (row,) = jaxext.explain(call, platform=platform)(*(struct(*shape) for shape in shapes)).rows
        return row.chosen, row.how

    linear = functools.partial(jaxext.linear, activation="gelu")
    dilated = functools.partial(CONV_BIAS_ACT, padding=((2, 1), (2, 1)), lhs_dilation=(2, 2))
    operands = (16, 8), (8, 4), (4,)
    assert how("cpu", linear, *operands) == ("xla", "composition of dot_general")
    assert how("cuda", linear, *operands) == ("xla", "composition of only_cuda matmul_nn kernel")
    assert how("cuda", functools.partial(linear, implementation="xla"), *operands) == ("xla", "composition of dot_general")
    assert how("cpu", dilated, (8, 16, 16, 32), (3, 3, 32, 64)) == ("xla", "composition of phases of lax")
    with jaxext.in_place_of_lax():
        assert how("cpu", linear, *operands) == ("xla", "composition of dot_general")


def details(explanation):
    """Return the lines below those of the products."""
    return [line.strip() for line in str(explanation).partition("\n\n")[0].splitlines()[3::2]]


CONV = jaxext.conv_general_dilated
CONV_BIAS_ACT = functools.partial(jaxext.conv_bias_act, window_strides=(2, 2), activation="relu", dimension_numbers=NHWC)


@pytest.mark.parametrize(("arguments", "geometry"), [
    (((1, 1), "VALID"), "stride 1; "),
    (((1, 1), "SAME"), "stride 1, padding 1; "),
    (((2, 1), [(0, 1), (2, 2)]), "stride 2x1, padding 0:1/2; "),
    (((1, 1), "SAME", None, (2, 2)), "stride 1, padding 2, dilation 2; "),
    (((1, 1), [(0, 0), (0, 0)], (1, 3)), "stride 1, input dilation 1x3; "),
    (((1, 1), [(-1, -1), (0, 0)]), "stride 1, padding -1/0; "),
])  # fmt: skip
def test_geometry(arguments, geometry):
    explanation = jaxext.explain(lambda x, w: CONV(x, w, *arguments))(struct(2, 3, 9, 9), struct(4, 3, 3, 3))
    assert details(explanation)[0].startswith(geometry + "layout NCHW OIHW NCHW; precision")
    (row,) = explanation.rows
    assert row.window is not None and row.window.stride == arguments[0]


def test_plain_dilated_and_precise_convolutions_can_be_told_apart():
    x, w = struct(1, 8, 8, 2), struct(3, 3, 2, 2)

    def f(x, w):
        plain = CONV(CONV(x, w, (1, 1), "SAME", None, None, NHWC), w, (1, 1), "SAME", None, None, NHWC)
        dilated = CONV(x, w, (1, 1), "SAME", None, (2, 2), NHWC)
        return plain, dilated, CONV(x, w, (1, 1), "SAME", None, None, NHWC, precision="highest")

    explanation = jaxext.explain(f)(x, w)
    assert len({*details(explanation)}) == 3 and [row.times for row in explanation.rows] == [2, 1, 1]
    with jax.default_matmul_precision("highest"):
        assert [(row.precision, row.times) for row in jaxext.explain(f)(x, w).rows] == [("highest", 3), ("highest", 1)]


TF32, ALLOWED = "TF32: 11 bits", "TF32 allowed: 11 bits"
MULTIPLIED = [  # platform, GPU, dtype, precision, implementation -> what is told
    ("cpu", None, "float32", None, "xla", "default", ""),
    ("cpu", None, "float32", "BF16_BF16_F32", "xla", "BF16_BF16_F32", ""),
    ("cpu", None, "float32", "F16_F16_F16", "xla", "F16_F16_F16", "FP16: 11 bits, sums of 11 bits"),
    ("cpu", None, "bfloat16", None, "xla", "default", ""),
    ("cuda", "sm_90a", "float32", None, "xla", "default", ALLOWED),
    ("cuda", None, "float32", None, "xla", "default", ALLOWED),
    ("cuda", "sm_90a", "complex64", None, "xla", "default", ALLOWED),
    ("cuda", "sm_90a", "float32", "high", "xla", "high", ALLOWED),
    ("cuda", "sm_90a", "float32", "highest", "xla", "highest", ""),
    ("cuda", "sm_90a", "float32", ("default", "high"), "xla", "default,high", ALLOWED),
    ("cuda", "sm_90a", "float32", ("default", "highest"), "xla", "default,highest", ""),
    ("cuda", "sm_75", "float32", None, "xla", "default", ""),
    ("cuda", "sm_90a", "bfloat16", None, "xla", "default", ""),
    ("cuda", "sm_90a", "float32", "BF16_BF16_F32_X9", "xla", "BF16_BF16_F32_X9", "9 products of BF16: 24 bits"),
    ("rocm", None, "float32", None, "xla", "default", ""),
    ("tpu", None, "float32", None, "xla", "default", "BF16: 8 bits"),
    ("tpu", None, "float32", "high", "xla", "high", "3 products of BF16: 16 bits"),
    ("cuda", "sm_90a", "float32", None, "triton", "default", TF32),
    ("cuda", "sm_90a", "float32", "high", "triton", "high", TF32),
    ("cuda", "sm_90a", "float32", "highest", "triton", "highest", ""),
    ("cuda", "sm_90a", "float32", "F32_F32_F32", "triton", "F32_F32_F32", ""),
    ("cuda", "sm_90a", "float32", "TF32_TF32_F32_X3", "triton", "TF32_TF32_F32_X3", "3 products of TF32: 22 bits"),
    ("cuda", "sm_90a", "float32", "BF16_BF16_F32_X6", "triton", "BF16_BF16_F32_X6", "6 products of BF16: 24 bits"),
    ("cuda", "sm_90a", "bfloat16", "highest", "triton", "highest", ""),
]


@pytest.mark.parametrize(("platform", "arch", "dtype", "precision", "by", "named", "told"), MULTIPLIED)
def test_precision(platform, arch, dtype, precision, by, named, told):
    x = jax.ShapeDtypeStruct((8, 8), jnp.dtype(dtype))
    with jaxext.use_target(arch):
        explanation = jaxext.explain(lambda x: jaxext.matmul(x, x, precision=precision, implementation=by), platform=platform)(x)
    (row,) = explanation.rows
    if row.chosen is None:
        pytest.skip(row.refused[by])  # jax-triton is not here
    assert (row.precision, row.multiplies) == (named, told)
    assert f"precision {named} ({told}); " in str(explanation) if told else f"precision {named}; " in str(explanation)


def test_precision_of_other_operations():
    """Sums of depthwise convolutions are no products of matrices; scales within a block of 32 are multiplied with factors of 16 bits."""
    halves = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((8, 64), (64, 8))]
    images, of = struct(1, 8, 8, 8), {"implementation": "triton"}
    dense = functools.partial(CONV, window_strides=(1, 1), padding="SAME", dimension_numbers=NHWC, **of)

    def scaled(x, w, scale, **more):
        return jaxext.scaled_dot(x, w, lhs_scale=scale, implementation="triton", **more)

    calls = {
        "linear": (functools.partial(jaxext.linear, **of), [struct(8, 64), struct(64, 8)], TF32),
        "conv": (dense, [images, struct(3, 3, 8, 8)], TF32),
        "depthwise": (functools.partial(dense, feature_group_count=8), [images, struct(3, 3, 1, 8)], ""),
        "causal": (functools.partial(jaxext.causal_conv1d, **of), [struct(2, 16, 8), struct(4, 8)], ""),
        "scaled": (scaled, [*halves, struct(8, 1)], ""),
        "fine": (functools.partial(scaled, preferred_element_type=jnp.bfloat16), [*halves, struct(8, 4)], "BF16: 8 bits"),
    }
    with jaxext.use_target("sm_90a"):
        for name, (call, arrays, told) in calls.items():
            (row,) = jaxext.explain(call, platform="cuda")(*arrays).rows
            if row.chosen is None:
                pytest.skip(row.refused["triton"])
            assert row.multiplies == told, name


@pytest.mark.parametrize(("call", "x", "w", "layout"), [
    (lambda x, w: CONV(x, w, (1, 1), "SAME"), (2, 4, 9, 9), (8, 4, 3, 3), "NCHW OIHW NCHW"),
    (lambda x, w: CONV(x, w, (1, 1), "SAME", dimension_numbers=NHWC), (2, 9, 9, 4), (3, 3, 4, 8), "NHWC HWIO NHWC"),
    (lambda x, w: CONV(x, w, (1,), "SAME", dimension_numbers=("WNC", "IWO", "NWC")), (9, 2, 4), (4, 3, 8), "WNC IWO NWC"),
    (lambda x, w: CONV(x, w, (1, 1), "SAME", feature_group_count=2), (2, 4, 9, 9), (8, 2, 3, 3), "NCHW OIHW NCHW"),
    (lambda x, w: CONV(x, w, (1, 1), "SAME", batch_group_count=2), (2, 4, 9, 9), (8, 4, 3, 3), "NCHW OIHW NCHW"),
    (jax.vmap(lambda x, w: CONV(x, w, (1,), "SAME")), (5, 2, 4, 9), (5, 8, 4, 3), "BNCW BOIW BNCW"),
    (jax.grad(lambda x, w: CONV(x, w, (1, 1), "VALID").sum()), (2, 4, 9, 9), (8, 4, 3, 3), "OIHW NCHW NCHW"),
    (jax.grad(lambda x, w: CONV(x, w, (1, 1), "VALID", feature_group_count=2).sum(), 1), (2, 4, 9, 9), (8, 2, 3, 3), "NCHW NCHW OIHW"),
    (jax.vmap(lambda x, w: CONV(x[None], w, (1, 1), "SAME")[0], (0, None)), (2, 4, 9, 9), (8, 4, 3, 3), "NCHW OIHW NCHW"),
    (lambda x, w: jnp.sin(jaxext.matmul(x, w)).T, (2, 3), (3, 4), "MK KN MN"),
    (lambda x, w: jaxext.matmul(x.T, w), (3, 2), (3, 4), "KM KN MN"),
])  # fmt: skip
def test_layout(call, x, w, layout):
    """Layouts are those of the arrays, not of the form; so are shapes."""
    rows = jaxext.explain(call)(struct(*x), struct(*w)).rows
    assert rows[-1].layout == layout
    given = {slot: shape for slot, _, shape in (each.partition(":f32") for each in rows[-1].shapes)}
    ours = {"x": x, "w": w, "a": x, "b": w}
    assert len(given) == 3 and all(given[slot] == f"[{','.join(map(str, ours[slot]))}]" for slot in given.keys() & ours.keys())
    assert " ".join(rows[-1].shapes[:-1]) in str(jaxext.explain(call)(struct(*x), struct(*w)))


@pytest.mark.skipif(jax.__version_info__ < (0, 11), reason="there an operation has no jit of its own")
def test_an_array_between_two_operations():
    """It has the layout in which it leaves one, not that in which the other computes; so have residuals of the gradients."""

    def loss(x, v, w):
        return (CONV(CONV(x, v, (1, 1), "SAME"), w, (1, 1), "SAME", feature_group_count=2) ** 2).sum()

    rows = jaxext.explain(jax.grad(loss, argnums=(0, 1, 2)))(struct(2, 4, 9, 9), struct(6, 4, 3, 3), struct(8, 3, 3, 3)).rows
    of = {"fprop": "NCHW OIHW NCHW", "wgrad": "NCHW NCHW OIHW", "dgrad": "OIHW NCHW NCHW"}
    assert len(rows) == 6 and all(row.layout == of[row.op[-5:]] for row in rows)


def test_equal_products_of_two_layouts_are_one_row():
    def f(x, w):
        return CONV(x, w, (1,), "SAME"), CONV(x.transpose(0, 2, 1), w, (1,), "SAME", dimension_numbers=("NWC", "OIW", "NWC"))

    (row,) = jaxext.explain(f)(struct(2, 4, 9), struct(8, 4, 3)).rows
    assert (row.times, row.layout) == (2, "NCW OIW NCW or NCW OIW NWC")


def test_lines_are_120_columns_wide(monkeypatch):
    """A network's, with its gradient; each reason is told once, however many rows have it, and long ones are folded."""

    def net(w, x):
        for kernel in w:
            x = CONV(x, kernel, (2, 2), "SAME", None, None, NHWC)
        return x.sum()

    never = OnlyCuda()
    monkeypatch.setattr(never, "refuses", lambda call: "word " * 60, raising=False)
    monkeypatch.setitem(vars(conv.FAMILY), "implementations", [never, *conv.FAMILY.implementations])
    explanation = jaxext.explain(jax.grad(net))([struct(7, 7, 3, 64), struct(3, 3, 64, 512)], struct(256, 224, 224, 3))
    text = str(explanation)
    assert len(explanation.rows) > 3 and max(map(len, text.splitlines())) <= 120 and text.count("word") == 60
    assert all(text.count(reason) == 1 for reason in (f"cuda: {NO_GPU['cuda']}", f"triton: {NO_GPU['triton']}"))


def test_bad_arguments():
    for fun in (3, None, np.ones((2, 2))):  # such as the function's result
        with pytest.raises(TypeError, match=r"explain: fun is .*, want the function itself: explain\(fun\)"):
            jaxext.explain(fun)(np.ones((2, 2)))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="explain: platform is 'abacus', want one of "):
        jaxext.explain(mlp, platform="abacus")(PARAMS, X)


def test_keyword_arguments_and_concrete_arrays():
    got = jaxext.explain(lambda *, a, b: jaxext.matmul(a["x"], b))(a={"x": np.ones((2, 3))}, b=jnp.ones((3, 4)))
    assert table(got) == {("matmul_nn", "a:f64[2,3]", "b:f64[3,4]", "c:f64[2,4]"): 1}


def test_no_products():
    explanation = jaxext.explain(jnp.matmul)(np.ones((2, 2)), np.ones((2, 2)))
    assert explanation.rows == ()
    assert str(explanation).startswith("no operation of jaxext")


def test_nothing_is_run(monkeypatch):
    def boom(*_, **__):
        raise AssertionError("explain ran something")

    monkeypatch.setattr(xla.XlaConvPlan, "run", boom)
    assert jaxext.explain(jax.grad(convnet))(struct(5, 3, 2, 8), *CONVNET[1:]).rows
    with pytest.raises(AssertionError, match="explain ran something"):  # so it would be noticed
        jax.grad(convnet)(*(np.ones(s.shape, s.dtype) for s in (struct(5, 3, 2, 8), *CONVNET[1:])))
