"""Epilogues (epilogue.py) applied to a tile of sums in registers.

They are computed in float32.  Each activation is exact to a few units in the last place for arguments of any size
(gelu_tanh far below zero: to the rounding of tanh's argument).  Nothing cancels or overflows, and infinities and NaN give the same results
as in jax.nn.
"""

import triton
import triton.language as tl

from .tile import exists

_LOG2E, _LOG2E_LOW, _LN2 = tl.constexpr(1.44269502162933349609375), tl.constexpr(1.925963033500e-8), tl.constexpr(0.6931471805599453)
MOST_AT_ONCE = tl.constexpr(16)  # sums of a thread
AHEAD = tl.constexpr(3)  # parts of a tile whose residuals are read before they are added
_FAR = tl.constexpr(150.0)  # exp(-150) is zero in float32


@triton.jit
def finish(
    total, pointers, row, row_in, tile_col, PROBLEM: tl.constexpr, CONFIG: tl.constexpr, COLUMNS: tl.constexpr, scale=None, present=None
):  # fmt: skip
    """Apply the epilogue to a tile of sums, of a gated product the gate's and the linear part's, and store the result.

    `pointers` lead to the bias, the residual, the result and the saved z; `row` is the offset of each of the tile's rows in the result.  A
    wide tile is processed in parts, since its intermediate values do not fit the registers.  The residuals of a few parts are loaded ahead.
    `scale` has one number for each row.  Rows that are not `present` become zero.
    """
    bias_ptr, residual_ptr, result_ptr, saved_ptr = pointers
    sums, linear = _halves(total) if PROBLEM.epilogue.gated else (total, None)
    BLOCK: tl.constexpr = CONFIG.tile_n // 2 if PROBLEM.epilogue.gated else CONFIG.tile_n
    sums = _parts(sums, CONFIG.num_warps)
    if PROBLEM.epilogue.gated:
        linear = _parts(linear, CONFIG.num_warps)
    PARTS: tl.constexpr = len(sums)
    WIDTH: tl.constexpr = sums[0].shape[1]
    lane = tile_col * BLOCK + tl.arange(0, WIDTH)[None, :]
    residuals = ()
    if PROBLEM.epilogue.residual is not None:
        for i in tl.static_range(min(AHEAD, PARTS)):
            residuals = residuals + (_residual(residual_ptr, row, row_in, lane + i * WIDTH, COLUMNS, BLOCK),)
    for i in tl.static_range(PARTS):
        col = lane + i * WIDTH
        col_in = exists(col, COLUMNS, BLOCK)
        mask = row_in & col_in
        if PROBLEM.epilogue.gated:
            if PROBLEM.epilogue.saves:
                at = saved_ptr + (2 * row + col)
                tl.store(at, sums[i].to(saved_ptr.dtype.element_ty), mask=mask)
                tl.store(at + COLUMNS, linear[i].to(saved_ptr.dtype.element_ty), mask=mask)
            y = _scaled(activate(sums[i], PROBLEM) * linear[i], scale, present)
            tl.store(result_ptr + (row + col), y.to(result_ptr.dtype.element_ty), mask=mask)
        else:
            if PROBLEM.epilogue.residual is not None:
                if i + AHEAD < PARTS:
                    residuals = residuals + (_residual(residual_ptr, row, row_in, col + AHEAD * WIDTH, COLUMNS, BLOCK),)
                residual = residuals[i]
            else:
                residual = 0
            bias = load_bias(bias_ptr, col, col_in, PROBLEM)
            store(sums[i], bias, residual, result_ptr, saved_ptr, row + col, mask, PROBLEM, scale, present)


@triton.jit
def _parts(tile, WARPS: tl.constexpr):
    """The tile's columns from left to right, halved until a part has few sums per thread or 16 columns."""
    parts = (tile,)
    for _ in tl.static_range(4):
        if parts[0].shape[1] > 16 and parts[0].shape[0] * parts[0].shape[1] > MOST_AT_ONCE * 32 * WARPS:
            halved = ()
            for i in tl.static_range(len(parts)):
                left, right = _halves(parts[i])
                halved = halved + (left, right)
            parts = halved
    return parts


@triton.jit
def _residual(residual_ptr, row, row_in, col, COLUMNS: tl.constexpr, BLOCK: tl.constexpr):
    return tl.load(residual_ptr + (row + col), mask=row_in & exists(col, COLUMNS, BLOCK), other=0)


@triton.jit
def _scaled(y, scale, present):
    if scale is not None:
        y *= scale
    if present is not None:
        y = tl.where(present, y, 0.0)
    return y


@triton.jit
def store(sums, bias, residual, result_ptr, saved_ptr, at, mask, PROBLEM: tl.constexpr, scale=None, present=None):
    """Store a tile without a gate; `at` and `mask` belong to the result and to the saved z."""
    z = sums
    if PROBLEM.epilogue.bias is not None:
        z = _scaled(z + bias, None, present)
    if PROBLEM.epilogue.saves:
        tl.store(saved_ptr + at, z.to(saved_ptr.dtype.element_ty), mask=mask)
    y = _scaled(activate(z, PROBLEM), scale, present)
    if PROBLEM.epilogue.residual is not None:
        y += residual.to(y.dtype)
    tl.store(result_ptr + at, y.to(result_ptr.dtype.element_ty), mask=mask)


@triton.jit
def load_bias(bias_ptr, at, mask, PROBLEM: tl.constexpr):
    """The bias in float32; zero if there is none."""
    if PROBLEM.epilogue.bias is None:
        return 0
    else:
        return tl.load(bias_ptr + at, mask=mask, other=0).to(tl.int32 if PROBLEM.epilogue.bias == "i32" else tl.float32)


@triton.jit
def _halves(tile):
    """The left and the right columns.  In the tensor cores' layout both are in registers of the same threads."""
    return tl.split(tl.permute(tl.reshape(tile, (tile.shape[0], 2, tile.shape[1] // 2)), (0, 2, 1)))


@triton.jit
def activate(z, PROBLEM: tl.constexpr):
    NAME: tl.constexpr = PROBLEM.epilogue.activation
    if NAME == "relu":
        return _relu(z)
    elif NAME == "relu6":
        return tl.where(z > 6, 6.0, _relu(z))
    elif NAME == "squared_relu":
        return _relu(z) * _relu(z)
    elif NAME == "leaky_relu":
        return tl.where(z < 0, 0.01 * z, z)
    elif NAME == "sigmoid":
        return _sigmoid(z, tl.abs(z))
    elif NAME == "silu":
        return z * _sigmoid(z, tl.abs(z))
    elif NAME == "gelu_tanh":
        # (1 + tanh(u)) / 2 = sigmoid(2u), u = √(2/π) (z + 0.044715 z³)
        a = tl.abs(z)
        return z * _sigmoid(z, a * (1.5957691216057308 + 0.07135481627260025 * (a * a)))
    elif NAME == "gelu":
        return z * _normal(z)
    elif NAME == "tanh":
        return _tanh(z)
    else:
        return z


@triton.jit
def derivative(z, PROBLEM: tl.constexpr):
    """The derivative of the activation; at its kinks, that of jax.nn."""
    NAME: tl.constexpr = PROBLEM.epilogue.activation
    if NAME == "relu":
        return tl.where(z > 0, 1.0, 0.0 * z)
    elif NAME == "relu6":
        return tl.where((z > 0) & (z < 6), 1.0, tl.where((z == 0) | (z == 6), 0.5, 0.0))
    elif NAME == "squared_relu":
        return 2 * _relu(z)
    elif NAME == "leaky_relu":
        return tl.where(z < 0, 0.01, 1.0)
    elif NAME == "sigmoid":
        return _sigmoid(z, tl.abs(z)) * _sigmoid(-z, tl.abs(z))
    elif NAME == "silu":
        s = _sigmoid(z, tl.abs(z))
        return tl.fma(s, z * _sigmoid(-z, tl.abs(z)), s)
    elif NAME == "gelu_tanh":
        a, zz = tl.abs(z), z * z
        twice = a * (1.5957691216057308 + 0.07135481627260025 * zz)
        s = _sigmoid(z, twice)
        return tl.fma(s, z * _sigmoid(-z, twice) * (1.5957691216057308 + 0.21406444881780075 * zz), s)
    elif NAME == "gelu":
        return _normal(z) + 0.3989422804014327 * z * _exp(-0.5 * _least(z * z, 300.0), 0.0)
    elif NAME == "tanh":
        return 4 * _sigmoid(2 * z, 2 * tl.abs(z)) * _sigmoid(-2 * z, 2 * tl.abs(z))
    else:
        return tl.full(z.shape, 1.0, tl.float32)


@triton.jit
def _relu(z):
    return tl.where(z < 0, 0.0, z)  # NaN stays NaN


@triton.jit
def _least(a, LIMIT: tl.constexpr):
    return tl.where(a > LIMIT, LIMIT, a)  # NaN stays NaN


@triton.jit
def _exp(x, beside):
    """exp(x + beside), for x not very negative and `beside` smaller than a unit in the last place of x.

    exp2(x·log₂e) would be inexact: an error of one unit in the last place of the exponent is many units in that of the power.
    """
    power = x * _LOG2E
    rest = tl.fma(x, _LOG2E_LOW, tl.fma(x, _LOG2E, -power))
    e = tl.exp2(power)
    return tl.fma(e, rest * _LN2 + beside, e)


@triton.jit
def _sigmoid(z, a):
    """The logistic function of z with a = |z|: 1 / (1 + exp(-a)), or exp(-a) / (1 + exp(-a)) if z is negative."""
    e = _exp(-_least(a, _FAR), 0.0)
    return tl.where(z < 0, e, 1.0) / (1.0 + e)


@triton.jit
def _tanh(z):
    a, zz = tl.abs(z), z * z
    # Where 1 - exp(-2a) cancels: the polynomial of Cephes's tanhf, S. Moshier.
    p = ((-5.70498872745e-3 * zz + 2.06390887954e-2) * zz - 5.37397155531e-2) * zz
    small = ((p + 1.33314422036e-1) * zz - 3.33332819422e-1) * zz * z + z
    e = _exp(-2 * _least(a, 20.0), 0.0)
    large = (1.0 - e) / (1.0 + e)
    return tl.where(a < 0.625, small, tl.where(z < 0, -large, large))


@triton.jit
def _normal(z):
    """The cumulative distribution function of the standard normal distribution at z.

    At -a it is  exp(-a²/2) t p(t),  t = 1 / (1 + 0.3a): p was fitted to a relative error of 3e-9 in 0 ≤ a ≤ 15.
    """
    a = _least(tl.abs(z), 20.0)
    t = 1.0 / (1.0 + 0.3 * a)
    u = t - 0.5
    p = (-0.0206286631 * u + 0.0196358203) * u + 0.0359164323
    p = (p * u - 0.0364608573) * u - 0.0775515832
    p = (p * u + 0.0290565245) * u + 0.222082684
    p = (p * u + 0.34619884) * u + 0.329158971
    p = p * u + 0.221970613
    square = a * a
    below = p * t * _exp(-0.5 * square, -0.5 * tl.fma(a, a, -square))
    return tl.where(z < 0, below, 1.0 - below)
