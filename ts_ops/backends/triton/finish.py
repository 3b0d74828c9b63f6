"""The small launches around a TokenSpeed kernel that turn what it does into the laws.

Before a causal prefill: `separate_empty_rows`, so that no query tile is without keys. Before a decode whose bound the
kernel cannot express: `visible_lens`. After either: `finish_decode` and `finish_prefill`, which write the rows that see
no key and convert the LSE. They move a few bytes a row, so no load of theirs needs to be wide.
"""

import triton
import triton.language as tl
from torch import Tensor

from ...meta.contract import Decode, Prefill
from .decode import visible_range
from .launch import LN_2, OPTIONS, kernel, on_device

CHUNK = 1024  # elements that a program writes at a time
FINISH_TOKENS = 16  # prefill tokens of a program


def _positions(problem: Decode) -> tuple:
    """The arguments of `_bounds`: where lengths lie, and law 3's options."""
    causal = problem.causal_seqs
    return (
        problem.seq_lens, problem.seq_lens.stride(0), causal, 0 if causal is None else causal.stride(0),
        problem.q_len, problem.capacity, min(problem.window_left, problem.capacity + problem.q_len),
        problem.cp_world, problem.cp_rank, problem.cp_interleave_size,
    )  # fmt: skip


def _flags(problem: Decode) -> dict[str, bool]:
    return {
        "IS_CAUSAL": problem.is_causal,
        "HAS_WINDOW": problem.window_left >= 0,
        "HAS_CP": problem.causal_seqs is not None,
    }


@triton.jit
def _bounds(
    row, seq_lens, stride_lens, causal_seqs, stride_causal, q_len, capacity, window, cp_world, cp_rank, cp_interleave,
    IS_CAUSAL: tl.constexpr, HAS_WINDOW: tl.constexpr, HAS_CP: tl.constexpr,
):  # fmt: skip
    """Keys [low, high) that query row `row` of B * q_len sees."""
    batch = (row // q_len).to(tl.int64)
    length = tl.minimum(tl.maximum(tl.load(seq_lens + batch * stride_lens), 0), capacity)
    position = row % q_len + tl.arange(0, 1)
    low, high = visible_range(
        position, batch, length, None, causal_seqs, q_len, window, cp_world, cp_rank, cp_interleave,
        0, 0, stride_causal, IS_CAUSAL, HAS_WINDOW, False, HAS_CP,
    )  # fmt: skip
    return tl.max(low, axis=0), tl.max(high, axis=0)


@kernel(wide=[])
def _visible_lens_kernel(
    lens, seq_lens, stride_lens: tl.int64, causal_seqs, stride_causal: tl.int64, q_len: tl.int32, capacity: tl.int32,
    window: tl.int32, cp_world: tl.int64, cp_rank: tl.int64, cp_interleave: tl.int64,
    IS_CAUSAL: tl.constexpr, HAS_WINDOW: tl.constexpr, HAS_CP: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    _, high = _bounds(
        row, seq_lens, stride_lens, causal_seqs, stride_causal, q_len, capacity, window, cp_world, cp_rank,
        cp_interleave, IS_CAUSAL, HAS_WINDOW, HAS_CP,
    )  # fmt: skip
    tl.store(lens + row, high)


def visible_lens(problem: Decode) -> Tensor:
    """Law 3's upper bounds of a problem without window, [B, q_len] int32."""
    lens = problem.seq_lens.new_empty(problem.batch, problem.q_len)
    with on_device(problem.device):
        _visible_lens_kernel.launch(
            (lens.numel(),), lens, *_positions(problem), **_flags(problem), num_warps=1, **OPTIONS
        )
    return lens


@kernel(wide=[])
def _finish_decode_kernel(
    out, lse, log2_lse, heads: tl.int32, seq_lens, stride_lens: tl.int64, causal_seqs, stride_causal: tl.int64,
    q_len: tl.int32, capacity: tl.int32, window: tl.int32,
    cp_world: tl.int64, cp_rank: tl.int64, cp_interleave: tl.int64,
    RANK: tl.constexpr, MAX_HEADS: tl.constexpr, BLOCK: tl.constexpr,
    IS_CAUSAL: tl.constexpr, HAS_WINDOW: tl.constexpr, HAS_CP: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    low, high = _bounds(
        row, seq_lens, stride_lens, causal_seqs, stride_causal, q_len, capacity, window, cp_world, cp_rank,
        cp_interleave, IS_CAUSAL, HAS_WINDOW, HAS_CP,
    )  # fmt: skip
    empty = high <= low
    first = row.to(tl.int64) * heads
    if lse is not None:
        head = tl.arange(0, MAX_HEADS)
        natural = tl.load(log2_lse + first + head, mask=head < heads, other=0.0) * LN_2
        tl.store(lse + first + head, tl.where(empty, float("-inf"), natural), mask=head < heads)
    if empty:
        for start in range(0, heads * RANK, BLOCK):
            element = start + tl.arange(0, BLOCK)
            tl.store(out + first * RANK + element, tl.zeros([BLOCK], out.dtype.element_ty), mask=element < heads * RANK)


def finish_decode(problem: Decode, out: Tensor, lse: Tensor | None, log2_lse: Tensor | None) -> None:
    """(0, -inf) in the rows that see no key, and the natural log in the others'. Tensors are [B, q_len, H, ...]."""
    with on_device(problem.device):
        _finish_decode_kernel.launch(
            (problem.batch * problem.q_len,),
            out, lse, log2_lse, problem.heads, *_positions(problem), **_flags(problem),
            RANK=problem.kv_lora_rank, MAX_HEADS=triton.next_power_of_2(problem.heads), BLOCK=CHUNK,
            num_warps=4, **OPTIONS,
        )  # fmt: skip


@kernel(wide=[])
def _separate_kernel(
    cum_q, cum_q_stride: tl.int64, cum_kv, cum_kv_stride: tl.int64, split_q, split_kv, batch: tl.int32,
    BLOCK: tl.constexpr,
):  # fmt: skip
    sequence = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    exists = sequence <= batch
    inside = sequence < batch
    q_start = tl.load(cum_q + sequence * cum_q_stride, mask=exists, other=0)
    kv_start = tl.load(cum_kv + sequence * cum_kv_stride, mask=exists, other=0)
    q_end = tl.load(cum_q + (sequence + 1) * cum_q_stride, mask=inside, other=0)
    kv_end = tl.load(cum_kv + (sequence + 1) * cum_kv_stride, mask=inside, other=0)
    empty = tl.maximum((q_end - q_start) - tl.maximum(kv_end - kv_start, 0), 0)
    tl.store(split_q + 2 * sequence, q_start, mask=exists)
    tl.store(split_kv + 2 * sequence, kv_start, mask=exists)
    tl.store(split_q + 2 * sequence + 1, q_start + empty, mask=inside)
    tl.store(split_kv + 2 * sequence + 1, kv_start, mask=inside)


def separate_empty_rows(problem: Prefill) -> tuple[Tensor, Tensor]:
    """Cumulative lengths, [2 * B + 1] int32 each, of the same rows as twice as many sequences.

    The first of each pair holds the rows of a causal sequence that see no key, those beyond its keys, and has no keys;
    the second holds the rest, and at least as many keys as rows.
    """
    batch = problem.batch
    split_q, split_kv = (problem.cum_seq_lens_q.new_empty(2 * batch + 1) for _ in range(2))
    cum_q, cum_kv = problem.cum_seq_lens_q, problem.cum_seq_lens_kv
    with on_device(problem.device):
        _separate_kernel.launch(
            (triton.cdiv(batch + 1, CHUNK),),
            cum_q, cum_q.stride(0), cum_kv, cum_kv.stride(0), split_q, split_kv, batch,
            BLOCK=CHUNK, **OPTIONS,
        )  # fmt: skip
    return split_q, split_kv


@kernel(wide=[])
def _finish_prefill_kernel(
    out, lse, kernel_lse, cum_q, cum_q_stride: tl.int64, batch: tl.int32, tokens: tl.int64, heads: tl.int32,
    DIM: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64) * BLOCK_T
    end = tl.minimum(token + BLOCK_T, tokens)
    seen = tl.minimum(tl.maximum(tl.load(cum_q + batch.to(tl.int64) * cum_q_stride), 0).to(tl.int64), tokens)
    if lse is not None:
        for start in range(token * heads, end * heads, BLOCK):
            element = start + tl.arange(0, BLOCK)
            written = tl.load(kernel_lse + element, mask=element < tl.minimum(seen, end) * heads, other=float("-inf"))
            tl.store(lse + element, written, mask=element < end * heads)
    for start in range(tl.maximum(token, seen) * heads * DIM, end * heads * DIM, BLOCK):
        element = start + tl.arange(0, BLOCK)
        tl.store(out + element, tl.zeros([BLOCK], out.dtype.element_ty), mask=element < end * heads * DIM)


def finish_prefill(problem: Prefill, out: Tensor, lse: Tensor | None, kernel_lse: Tensor | None) -> None:
    """(0, -inf) in the rows past the last sequence; the kernel's LSE in the others'."""
    cum_q = problem.cum_seq_lens_q
    with on_device(problem.device):
        _finish_prefill_kernel.launch(
            (triton.cdiv(problem.tokens_q, FINISH_TOKENS),),
            out, lse, kernel_lse, cum_q, cum_q.stride(0), problem.batch, problem.tokens_q, problem.heads,
            DIM=problem.dim_v, BLOCK_T=FINISH_TOKENS, BLOCK=CHUNK, **OPTIONS,
        )  # fmt: skip
