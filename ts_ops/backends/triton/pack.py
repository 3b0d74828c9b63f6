"""mla_kv_pack_quantize_fp8: expanded keys and values of a prefill, to e4m3.

Bound by memory, and shaped like the merge (rows.py): a program owns a tile of (token, head) rows and writes, for each,
the key's nope and rope columns and the value. The rope columns of a token are the same for all heads; every head loads
them anew, which costs L1 traffic only.
"""

import triton
import triton.language as tl
from torch import Tensor

from ...meta.contract import PackQuantize
from .launch import OPTIONS, kernel, on_device, row_strides
from .rows import load_rows, saturate, store_rows, tile_height, tile_rows, token_and_head_tile

TILE_ELEMENTS = 4096  # of k_nope that a program holds, and as many of v
NUM_WARPS = 4


@triton.jit
def _quantise(values, scale_inv):
    return saturate(values.to(tl.float32) * scale_inv)


@kernel(wide=["k_nope", "k_nope_t", "k_nope_h", "k_pe", "k_pe_t", "v", "v_t", "v_h", "key", "value"])
def _pack_kernel(
    k_nope, k_nope_t: tl.int64, k_nope_h: tl.int64, k_pe, k_pe_t: tl.int64, v, v_t: tl.int64, v_h: tl.int64,
    key, value, k_scale_inv: tl.float32, v_scale_inv: tl.float32, tokens: tl.int64, heads: tl.int32,
    NOPE: tl.constexpr, ROPE: tl.constexpr, VALUE: tl.constexpr,
    NOPE_PAD: tl.constexpr, ROPE_PAD: tl.constexpr, VALUE_PAD: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    token, head, live = tile_rows(tokens, heads, BLOCK_T, BLOCK_H)
    row = token * heads + head
    nope = load_rows(k_nope + token * k_nope_t + head * k_nope_h, live, NOPE, NOPE_PAD)
    values = load_rows(v + token * v_t + head * v_h, live, VALUE, VALUE_PAD)
    if ROPE:
        rope = load_rows(k_pe + token * k_pe_t, live, ROPE, ROPE_PAD)

    key += row * (NOPE + ROPE)
    store_rows(key, _quantise(nope, k_scale_inv), live, NOPE, NOPE_PAD)
    if ROPE:
        store_rows(key + NOPE, _quantise(rope, k_scale_inv), live, ROPE, ROPE_PAD)
    store_rows(value + row * VALUE, _quantise(values, v_scale_inv), live, VALUE, VALUE_PAD)


def mla_kv_pack_quantize_fp8(problem: PackQuantize, key: Tensor, value: Tensor) -> None:
    k_nope, k_pe, v = problem.k_nope, problem.k_pe, problem.v
    nope_pad, value_pad = triton.next_power_of_2(problem.dim_nope), triton.next_power_of_2(problem.dim_v)
    block_t, block_h = token_and_head_tile(tile_height(TILE_ELEMENTS, max(nope_pad, value_pad)), problem.heads)
    grid = (triton.cdiv(problem.tokens, block_t) * (problem.heads // block_h),)
    with on_device(problem.device):
        _pack_kernel.launch(
            grid,
            k_nope, *row_strides(k_nope), k_pe, *row_strides(k_pe), v, *row_strides(v),
            key, value, problem.k_scale_inv, problem.v_scale_inv, problem.tokens, problem.heads,
            NOPE=problem.dim_nope, ROPE=problem.dim_rope, VALUE=problem.dim_v,
            NOPE_PAD=nope_pad, ROPE_PAD=triton.next_power_of_2(max(1, problem.dim_rope)), VALUE_PAD=value_pad,
            BLOCK_T=block_t, BLOCK_H=block_h, num_warps=NUM_WARPS, **OPTIONS,
        )  # fmt: skip
