"""The kernel of custom_kernel.cc in Triton, for GPUs."""

import triton
import triton.language as tl


@triton.jit
def channelwise(
    first_ptr,
    second_ptr,
    out_ptr,
    I: tl.constexpr,  # noqa: E741 (the labels' names)
    J: tl.constexpr,
    S: tl.constexpr,
    C: tl.constexpr,
    first_i: tl.constexpr,  # strides, in elements
    first_s: tl.constexpr,
    second_s: tl.constexpr,
    second_j: tl.constexpr,
    BLOCK_IJ: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """out[b,i,j,c] = Σ_s first[b,i,s,c] second[b,s,j,c].

    A program computes a tile of BLOCK_IJ x BLOCK_IJ results for BLOCK_C channels of one b.
    """
    tiles_i, tiles_j, tiles_c = tl.cdiv(I, BLOCK_IJ), tl.cdiv(J, BLOCK_IJ), tl.cdiv(C, BLOCK_C)
    tile = tl.program_id(0)
    c = (tile % tiles_c * BLOCK_C + tl.arange(0, BLOCK_C))[None, None, :]
    tile = tile // tiles_c
    j = (tile % tiles_j * BLOCK_IJ + tl.arange(0, BLOCK_IJ))[None, :, None]
    tile = tile // tiles_j
    i = (tile % tiles_i * BLOCK_IJ + tl.arange(0, BLOCK_IJ))[:, None, None]
    b = tile // tiles_i

    x_ptr = first_ptr + b * (I * S * C) + i * first_i + c
    w_ptr = second_ptr + b * (S * J * C) + j * second_j + c
    sums = tl.zeros((BLOCK_IJ, BLOCK_IJ, BLOCK_C), tl.float32)
    for s in range(S):
        x = tl.load(x_ptr + s * first_s, (i < I) & (c < C), 0.0)  # (BLOCK_IJ, 1, BLOCK_C)
        w = tl.load(w_ptr + s * second_s, (j < J) & (c < C), 0.0)  # (1, BLOCK_IJ, BLOCK_C)
        sums += x * w
    tl.store(out_ptr + ((b * I + i) * J + j) * C + c, sums, (i < I) & (j < J) & (c < C))
