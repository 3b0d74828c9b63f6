"""mla_kv_cache_write and mla_kv_cache_gather: rows into and out of the paged latent cache.

Both are bound by memory and move whole rows (rows.py): a program takes a few tokens, works out where each row lies,
loads all columns, converts, stores all columns. Offsets are int64 from the slot or page on, for a cache past 2^31
elements. A slot or page outside the cache is skipped, so a stale one neither writes nor reads foreign memory.

The gather finds the request of every token by a binary search over cum_seq_lens, all tokens of the program in step.
The lengths stay in L1, so its few dependent loads hide behind the rows that other programs on the SM have in flight.
"""

import triton
import triton.language as tl
from torch import Tensor

from ...meta.contract import CacheGather, CacheWrite
from .launch import OPTIONS, kernel, on_device, row_strides
from .rows import body_and_tail, load_rows, saturate, store_rows, tile_height

WRITE_ELEMENTS = 2048  # of kv_c that a program holds: 4 tokens of rank 512
GATHER_BYTES = 16384  # of cache or result, the wider of the two, that a program holds: 16 tokens of 576 in bf16
NUM_WARPS = 4
# Left alone, ptxas aims for 48 registers in some variants and spills two. With 64 the SM still holds 8 programs. The
# general variant, with an address for each element, needs more.
GATHER_MAX_REGISTERS = 64


@triton.jit
def _convert(values, scale, dtype: tl.constexpr):
    """`values` as the cache stores them; `scale` is None or a scalar."""
    if values.dtype == dtype:
        return values
    values = values.to(tl.float32)
    if dtype == tl.float8e4nv:
        if scale is not None:
            values = tl.div_rn(values, tl.broadcast_to(scale, values.shape))
        values = saturate(values)
    return values.to(dtype)


@kernel(wide=["kv_cache", "page_stride", "token_stride", "kv_c", "kv_c_stride", "k_pe", "k_pe_stride"])
def _write_kernel(
    kv_cache, page_stride: tl.int64, token_stride: tl.int64, kv_c, kv_c_stride: tl.int64, k_pe, k_pe_stride: tl.int64,
    slot_mapping, slot_stride: tl.int64, k_scale, slots: tl.int64, tokens: tl.int64,
    PAGE_SIZE: tl.constexpr, RANK: tl.constexpr, ROPE: tl.constexpr,
    RANK_PAD: tl.constexpr, ROPE_PAD: tl.constexpr, BLOCK_T: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    slot = tl.load(slot_mapping + token * slot_stride, mask=token < tokens, other=-1)
    # Loaded whether or not the slot is skipped, so as not to wait for it.
    latent = load_rows(kv_c + token * kv_c_stride, token < tokens, RANK, RANK_PAD)
    if ROPE:
        rope = load_rows(k_pe + token * k_pe_stride, token < tokens, ROPE, ROPE_PAD)
    scale = None
    if k_scale is not None:
        scale = tl.load(k_scale)

    live = (slot >= 0) & (slot < slots)
    row = kv_cache + (slot // PAGE_SIZE) * page_stride + (slot % PAGE_SIZE) * token_stride
    dtype: tl.constexpr = kv_cache.dtype.element_ty
    store_rows(row, _convert(latent, scale, dtype), live, RANK, RANK_PAD)
    if ROPE:
        store_rows(row + RANK, _convert(rope, scale, dtype), live, ROPE, ROPE_PAD)


def mla_kv_cache_write(problem: CacheWrite) -> None:
    cache, kv_c, k_pe, slot_mapping = problem.kv_cache, problem.kv_c, problem.k_pe, problem.slot_mapping
    rank_pad = triton.next_power_of_2(problem.kv_lora_rank)
    block_t = tile_height(WRITE_ELEMENTS, rank_pad)
    with on_device(problem.device):
        _write_kernel.launch(
            (triton.cdiv(problem.rows, block_t),),
            cache, *row_strides(cache), kv_c, *row_strides(kv_c), k_pe, *row_strides(k_pe),
            slot_mapping, slot_mapping.stride(0), problem.k_scale,
            cache.shape[0] * problem.page_size, problem.rows,
            PAGE_SIZE=problem.page_size, RANK=problem.kv_lora_rank, ROPE=problem.rope_dim,
            RANK_PAD=rank_pad, ROPE_PAD=triton.next_power_of_2(max(1, problem.rope_dim)), BLOCK_T=block_t,
            num_warps=NUM_WARPS, **OPTIONS,
        )  # fmt: skip


@triton.jit
def _owner(cum, cum_stride, token, batch, steps):
    """The last request that starts at or before each token: empty requests share a start, and the last owns it."""
    low = tl.zeros_like(token)
    high = low + batch
    for _ in range(steps):
        middle = (low + high) // 2
        below = tl.load(cum + middle * cum_stride) <= token
        low = tl.where(below, middle, low)
        high = tl.where(below, high, middle)
    return low


@triton.jit
def _dequantise(values, scale, live, dtype: tl.constexpr):
    """`values` in `dtype`: unchanged bits in their own, else scaled; rows not live stay 0 whatever `scale` holds."""
    if values.dtype == dtype:
        return values
    values = values.to(tl.float32)
    if scale is not None:
        values = tl.where(live[:, None], values * scale, 0.0)
    return values.to(dtype)


@kernel(wide=["kv_cache", "page_stride", "token_stride", "out"])
def _gather_kernel(
    kv_cache, page_stride: tl.int64, token_stride: tl.int64,
    block_tables, table_row_stride: tl.int64, table_stride: tl.int64, cum_seq_lens, cum_stride: tl.int64,
    seq_starts, start_stride: tl.int64, k_scale, out,
    batch: tl.int32, steps: tl.int32, max_pages: tl.int32, num_pages: tl.int32, tokens: tl.int64,
    PAGE_SIZE: tl.constexpr, DIM: tl.constexpr, BODY: tl.constexpr, TAIL: tl.constexpr, BLOCK_T: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    written = token < tokens
    live = written & (token < tl.load(cum_seq_lens + batch.to(tl.int64) * cum_stride))
    request = _owner(cum_seq_lens, cum_stride, token, batch, steps)
    position = token - tl.load(cum_seq_lens + request * cum_stride, mask=live, other=0)
    if seq_starts is not None:
        position += tl.load(seq_starts + request * start_stride, mask=live, other=0)

    entry = position // PAGE_SIZE
    # Only a bad length or table makes one of these false; the row is then 0 and no foreign memory is read.
    readable = live & (position >= 0) & (entry < max_pages)
    page = tl.load(block_tables + request * table_row_stride + entry * table_stride, mask=readable, other=-1)
    readable = (page >= 0) & (page < num_pages)
    source = kv_cache + page.to(tl.int64) * page_stride + (position % PAGE_SIZE) * token_stride
    scale = None
    if k_scale is not None:
        scale = tl.load(k_scale)

    body = load_rows(source, readable, BODY, BODY)
    if TAIL:
        tail = load_rows(source + BODY, readable, DIM - BODY, TAIL)

    target = out + token * DIM
    dtype: tl.constexpr = out.dtype.element_ty
    store_rows(target, _dequantise(body, scale, readable, dtype), written, BODY, BODY)
    if TAIL:
        store_rows(target + BODY, _dequantise(tail, scale, readable, dtype), written, DIM - BODY, TAIL)


def mla_kv_cache_gather(problem: CacheGather, out: Tensor) -> None:
    cache, table, cum, starts = problem.kv_cache, problem.block_tables, problem.cum_seq_lens, problem.seq_starts
    body, tail = body_and_tail(problem.head_dim)
    block_t = tile_height(GATHER_BYTES, body * max(cache.element_size(), out.element_size()))
    with on_device(problem.device):
        _gather_kernel.launch(
            (triton.cdiv(problem.total_tokens, block_t),),
            cache, *row_strides(cache), table, *table.stride(), cum, cum.stride(0),
            starts, 0 if starts is None else starts.stride(0), problem.k_scale, out,
            problem.batch, max(problem.batch - 1, 0).bit_length(), problem.max_pages, problem.num_pages,
            problem.total_tokens,
            PAGE_SIZE=problem.page_size, DIM=problem.head_dim, BODY=body, TAIL=tail, BLOCK_T=block_t,
            num_warps=NUM_WARPS, maxnreg=GATHER_MAX_REGISTERS, general={"maxnreg": None}, **OPTIONS,
        )  # fmt: skip
