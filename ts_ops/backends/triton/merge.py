"""merge_attn_states and merge_attn_states_n: combine softmax states of disjoint sets of keys (law 4).

Bound by memory: each output element is read once and written once. A program owns a tile of (token, head) rows; the
LSEs of a row give its weights once, the columns then stream through (rows.py). With TILE_BYTES of each side in flight
for every program and eight or more programs on an SM, that is several times what hides the latency of HBM.

For N states the loop over them is unrolled, so that the loads of a chunk of states are in flight together; a first pass
over the LSEs alone, 4 bytes for a row of D columns, finds the largest, and the outputs are read once.

Natural log throughout. A side with an infinite LSE is dropped by selection, never by a weight of 0: its output may
hold NaN.
"""

import triton
import triton.language as tl
from torch import Tensor

from ...meta.contract import Merge, MergeN
from .launch import OPTIONS, kernel, on_device, row_strides
from .rows import body_and_tail, load_rows, store_rows, tile_height, tile_rows, token_and_head_tile

TILE_BYTES = 8192  # of a side's rows that a program holds: 64 bytes a thread
CHUNK = 4  # states of merge_n whose rows a program loads together, 2 * TILE_BYTES of them all
NUM_WARPS = 4


@triton.jit
def _finite(lse):
    """-inf for every LSE that marks an empty row."""
    return tl.where(tl.abs(lse) == float("inf"), float("-inf"), lse)


@triton.jit
def _weighted_sum(prefix, prefix_weight, prefix_empty, suffix, suffix_weight, suffix_empty):
    prefix = tl.where(prefix_empty[:, None], 0.0, prefix.to(tl.float32) * prefix_weight[:, None])
    return prefix + tl.where(suffix_empty[:, None], 0.0, suffix.to(tl.float32) * suffix_weight[:, None])


@kernel(wide=["prefix", "prefix_t", "prefix_h", "suffix", "suffix_t", "suffix_h", "out"])
def _merge_kernel(
    prefix, prefix_t: tl.int64, prefix_h: tl.int64, prefix_lse, prefix_lse_t: tl.int64, prefix_lse_h: tl.int64,
    suffix, suffix_t: tl.int64, suffix_h: tl.int64, suffix_lse, suffix_lse_t: tl.int64, suffix_lse_h: tl.int64,
    out, lse, tokens: tl.int64, heads: tl.int32,
    DIM: tl.constexpr, BODY: tl.constexpr, TAIL: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    token, head, live = tile_rows(tokens, heads, BLOCK_T, BLOCK_H)
    row = token * heads + head
    prefix += token * prefix_t + head * prefix_h
    suffix += token * suffix_t + head * suffix_h
    out += row * DIM

    prefix_log = tl.load(prefix_lse + token * prefix_lse_t + head * prefix_lse_h, mask=live, other=float("-inf"))
    suffix_log = tl.load(suffix_lse + token * suffix_lse_t + head * suffix_lse_h, mask=live, other=float("-inf"))
    prefix_body = load_rows(prefix, live, BODY, BODY)
    suffix_body = load_rows(suffix, live, BODY, BODY)
    if TAIL:
        prefix_tail = load_rows(prefix + BODY, live, DIM - BODY, TAIL)
        suffix_tail = load_rows(suffix + BODY, live, DIM - BODY, TAIL)

    prefix_log, suffix_log = _finite(prefix_log), _finite(suffix_log)
    prefix_empty, suffix_empty = prefix_log == float("-inf"), suffix_log == float("-inf")
    peak = tl.maximum(prefix_log, suffix_log)
    shift = tl.where(peak == float("-inf"), 0.0, peak)
    prefix_weight, suffix_weight = tl.exp(prefix_log - shift), tl.exp(suffix_log - shift)
    total = prefix_weight + suffix_weight
    norm = 1.0 / tl.where(total == 0.0, 1.0, total)
    tl.store(lse + row, tl.log(total) + peak, mask=live)

    prefix_weight *= norm
    suffix_weight *= norm
    body = _weighted_sum(prefix_body, prefix_weight, prefix_empty, suffix_body, suffix_weight, suffix_empty)
    store_rows(out, body, live, BODY, BODY)
    if TAIL:
        tail = _weighted_sum(prefix_tail, prefix_weight, prefix_empty, suffix_tail, suffix_weight, suffix_empty)
        store_rows(out + BODY, tail, live, DIM - BODY, TAIL)


def merge_attn_states(problem: Merge, out: Tensor, lse: Tensor) -> None:
    body, tail = body_and_tail(problem.dim)
    rows = tile_height(TILE_BYTES, body * out.element_size())
    block_t, block_h = token_and_head_tile(rows, problem.heads)
    grid = (triton.cdiv(problem.tokens, block_t) * (problem.heads // block_h),)
    prefix, prefix_lse, suffix, suffix_lse = (
        problem.prefix_output, problem.prefix_lse, problem.suffix_output, problem.suffix_lse
    )  # fmt: skip
    with on_device(problem.device):
        _merge_kernel.launch(
            grid,
            prefix, *row_strides(prefix), prefix_lse, *prefix_lse.stride(),
            suffix, *row_strides(suffix), suffix_lse, *suffix_lse.stride(),
            out, lse, problem.tokens, problem.heads,
            DIM=problem.dim, BODY=body, TAIL=tail, BLOCK_T=block_t, BLOCK_H=block_h,
            num_warps=NUM_WARPS, **OPTIONS,
        )  # fmt: skip


@triton.jit
def _load_log(lses, lses_n, state, states, live):
    """LSEs of one state's rows, -inf where they are empty or past the last state."""
    # int64: the stride between states may be that of a whole tensor.
    logs = tl.load(lses + tl.cast(state, tl.int64) * lses_n, mask=live & (state < states), other=float("-inf"))
    return _finite(logs)


@kernel(wide=["outputs", "outputs_n", "outputs_t", "outputs_h", "out"])
def _merge_n_kernel(
    outputs, outputs_n: tl.int64, outputs_t: tl.int64, outputs_h: tl.int64,
    lses, lses_n: tl.int64, lses_t: tl.int64, lses_h: tl.int64,
    out, lse, states: tl.int32, tokens: tl.int64, heads: tl.int32,
    DIM: tl.constexpr, BODY: tl.constexpr, TAIL: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_H: tl.constexpr,
    CHUNK_N: tl.constexpr,
):  # fmt: skip
    token, head, live = tile_rows(tokens, heads, BLOCK_T, BLOCK_H)
    row = token * heads + head
    outputs += token * outputs_t + head * outputs_h
    lses += token * lses_t + head * lses_h
    out += row * DIM

    peak = tl.full([BLOCK_T * BLOCK_H], float("-inf"), tl.float32)
    for first in range(0, states, CHUNK_N):
        for i in tl.static_range(CHUNK_N):
            peak = tl.maximum(peak, _load_log(lses, lses_n, first + i, states, live))
    shift = tl.where(peak == float("-inf"), 0.0, peak)

    total = tl.zeros([BLOCK_T * BLOCK_H], tl.float32)
    body = tl.zeros([BLOCK_T * BLOCK_H, BODY], tl.float32)
    if TAIL:
        tail = tl.zeros([BLOCK_T * BLOCK_H, TAIL], tl.float32)
    for first in range(0, states, CHUNK_N):
        # A masked load reads nothing, so an empty state costs no traffic; NaN compares unequal and stays. The LSEs are
        # in L1 since the first pass.
        logs = ()
        bodies = ()
        tails = ()
        for i in tl.static_range(CHUNK_N):
            log = _load_log(lses, lses_n, first + i, states, live)
            used = log != float("-inf")
            state = outputs + tl.cast(first + i, tl.int64) * outputs_n
            logs += (log,)
            bodies += (load_rows(state, used, BODY, BODY),)
            if TAIL:
                tails += (load_rows(state + BODY, used, DIM - BODY, TAIL),)
        for i in tl.static_range(CHUNK_N):
            weight = tl.exp(logs[i] - shift)
            total += weight
            body += bodies[i].to(tl.float32) * weight[:, None]
            if TAIL:
                tail += tails[i].to(tl.float32) * weight[:, None]

    norm = 1.0 / tl.where(total == 0.0, 1.0, total)
    tl.store(lse + row, tl.log(total) + peak, mask=live)
    store_rows(out, body * norm[:, None], live, BODY, BODY)
    if TAIL:
        store_rows(out + BODY, tail * norm[:, None], live, DIM - BODY, TAIL)


def merge_attn_states_n(problem: MergeN, out: Tensor, lse: Tensor) -> None:
    body, tail = body_and_tail(problem.dim)
    chunk = 1 if problem.states == 1 else 2 if problem.states == 2 else CHUNK
    rows = tile_height(2 * TILE_BYTES, chunk * body * out.element_size())
    block_t, block_h = token_and_head_tile(rows, problem.heads)
    grid = (triton.cdiv(problem.tokens, block_t) * (problem.heads // block_h),)
    with on_device(problem.device):
        _merge_n_kernel.launch(
            grid,
            problem.outputs, *row_strides(problem.outputs), problem.lses, *problem.lses.stride(),
            out, lse, problem.states, problem.tokens, problem.heads,
            DIM=problem.dim, BODY=body, TAIL=tail, BLOCK_T=block_t, BLOCK_H=block_h, CHUNK_N=chunk,
            num_warps=NUM_WARPS, **OPTIONS,
        )  # fmt: skip
