"""mla_prefill: ragged attention of packed queries over packed keys and values, one FlashAttention-2 style forward.

A program owns BLOCK_M query rows of one sequence and one head, keeps their running max, sum and output in registers,
and walks over that sequence's keys BLOCK_N at a time: first the few tiles on the causal diagonal or at the sequence's
end, with a mask, then those that every row sees whole, without one. Tiles that no row sees are never loaded.

Which sequence a program serves is found on the device, so the grid depends on shapes alone and a captured launch serves
any lengths: sequence b starts at tile cum_seq_lens_q[b] // BLOCK_M + b, which leaves it at least as many tiles as it
needs, Tq // BLOCK_M + B + 1 in all. The rows past the last sequence are served as a sequence without keys.

Tiles run fastest in the grid, heads next: programs that run at the same time share a head's keys through L2. Within a
head the last tiles go first, for under a causal mask they have the most keys, and short ones then fill the tail.
"""

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...meta.contract import FP8, Prefill
from . import launch
from .launch import LN_2, kernel, row_strides

OWNER_BLOCK = 256  # sequences that the search for a tile's owner compares at once
MAX_DIM_QK, MAX_DIM_V = 576, 512
MAX_BLOCK_DV = 256  # wider values are cut into blocks of this, each with a program (and scores) of its own


def why_not(problem: Prefill) -> str | None:
    if problem.dim_qk > MAX_DIM_QK or problem.dim_v > MAX_DIM_V:
        return (
            f"Triton's prefill takes head dims up to {MAX_DIM_QK} for keys and {MAX_DIM_V} for values, "
            f"got {problem.dim_qk} and {problem.dim_v}"
        )
    return None


def mla_prefill(problem: Prefill, out: Tensor, lse: Tensor | None = None) -> None:
    query, key, value = problem.query, problem.key, problem.value
    tiles = tile_parameters(query.dtype, problem.dim_qk, problem.dim_v, launch.target_capability(problem.device))
    scale_log2 = problem.softmax_scale * launch.LOG2_E
    grid = (
        problem.tokens_q // tiles["BLOCK_M"] + problem.batch + 1,
        problem.heads,
        triton.cdiv(problem.dim_v, tiles["BLOCK_DV"]),
    )
    with launch.on_device(problem.device):
        _prefill.launch(
            grid,
            query, key, value, out, lse,
            problem.cum_seq_lens_q, problem.cum_seq_lens_q.stride(0),
            problem.cum_seq_lens_kv, problem.cum_seq_lens_kv.stride(0),
            problem.tokens_q, problem.tokens_kv, problem.batch, problem.heads // problem.heads_kv,
            scale_log2, problem.output_scale,
            *row_strides(query), *row_strides(key), *row_strides(value),
            DIM_QK=problem.dim_qk, DIM_V=problem.dim_v, CAUSAL=problem.is_causal,
            OWNER_BLOCK=OWNER_BLOCK, **tiles, **launch.OPTIONS,
            aligned_if=scale_log2 >= launch.SMALLEST_NORMAL,
            general={"BLOCK_N": min(tiles["BLOCK_N"], launch.GENERAL_BLOCK_N)},
        )  # fmt: skip


mla_prefill_lse = mla_prefill


@cache
def tile_parameters(dtype: torch.dtype, dim_qk: int, dim_v: int, capability: tuple[int, int] | None) -> dict[str, int]:
    """Block sizes, warps and pipeline stages; `capability` is None for the interpreter.

    BLOCK_D1 + BLOCK_D2 cover the head dimension of query and key: 192 is 128 + 64, where one block would be 256.
    """
    smallest = 32 if dtype == FP8 else 16  # what a tensor core multiplies at once along the head dimension
    block_d1, block_d2 = _two_blocks(dim_qk, smallest)
    block_dv = min(MAX_BLOCK_DV, max(16, triton.next_power_of_2(dim_v)))
    blocks = {"BLOCK_D1": block_d1, "BLOCK_D2": block_d2, "BLOCK_DV": block_dv}
    if capability is None:
        return {**blocks, "BLOCK_M": 64, "BLOCK_N": 64}

    limit = launch.shared_bytes(capability)
    large, wide = limit >= launch.SHARED_BYTES[9, 0], block_dv > 128
    if dtype == torch.float32:  # exact products on the plain units, which keep whole operand tiles in registers
        block_m, block_n, warps, stages = 32, 16, (8 if wide else 4), 2
    elif large and dtype == FP8:
        block_m, block_n, warps, stages = (64, 64, 8, 2) if wide else (128, 128, 8, 2)
    elif large:  # 128 keys with their addresses, the scores and the output would not fit 255 registers
        block_m, block_n, warps, stages = (64 if wide else 128), 64, 8, 3
    else:
        block_m, block_n, warps, stages = (64 if wide else 128), 32, 8, 3

    def shared_bytes() -> int:
        query = block_m * (block_d1 + block_d2) * dtype.itemsize
        keys_values = block_n * (block_d1 + block_d2 + block_dv) * dtype.itemsize
        converted = block_n * block_dv * torch.float16.itemsize if dtype == FP8 else 0
        return query + stages * keys_values + converted

    while shared_bytes() > limit and block_m > 16:
        if stages > 2:
            stages -= 1
        elif block_n > 32:
            block_n //= 2
        else:
            block_m //= 2
    return {**blocks, "BLOCK_M": block_m, "BLOCK_N": block_n, "num_warps": warps, "num_stages": stages}


def _two_blocks(dim: int, smallest: int) -> tuple[int, int]:
    """One power of two that covers `dim`, or two where they are less together; the second is 0 for one."""
    whole = max(smallest, triton.next_power_of_2(dim))
    half = whole // 2
    rest = max(smallest, triton.next_power_of_2(dim - half)) if dim > half else whole
    return (half, rest) if half >= smallest and half + rest < whole else (whole, 0)


@kernel(
    wide=[
        "query", "query_stride_t", "query_stride_h", "key", "key_stride_t", "key_stride_h", "value", "value_stride_t",
        "value_stride_h", "out",
    ]
)  # fmt: skip
def _prefill(
    query, key, value, out, lse, cum_q, cum_q_stride: tl.int64, cum_kv, cum_kv_stride: tl.int64,
    tokens_q: tl.int32, tokens_kv: tl.int32, batch: tl.int32, group: tl.int32,
    scale_log2: tl.float32, output_scale: tl.float32,
    query_stride_t: tl.int64, query_stride_h: tl.int64, key_stride_t: tl.int64, key_stride_h: tl.int64,
    value_stride_t: tl.int64, value_stride_h: tl.int64,
    DIM_QK: tl.constexpr, DIM_V: tl.constexpr, CAUSAL: tl.constexpr, ALIGNED: tl.constexpr,
    OWNER_BLOCK: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_D1: tl.constexpr, BLOCK_D2: tl.constexpr, BLOCK_DV: tl.constexpr,
):  # fmt: skip
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    head = tl.program_id(1)
    first_column = tl.program_id(2) * BLOCK_DV

    # The owner is the last sequence that starts at or before this tile: count those that do. One vector load serves
    # OWNER_BLOCK sequences, where a binary search would be a chain of loads.
    owner = -1
    for start in range(0, batch + 1, OWNER_BLOCK):
        sequence = start + tl.arange(0, OWNER_BLOCK)
        exists = sequence <= batch
        first_tile = tl.load(cum_q + sequence * cum_q_stride, mask=exists, other=0) // BLOCK_M + sequence
        owner += tl.sum((exists & (first_tile <= tile)).to(tl.int32))
    # Bounds by the sizes of the tensors: lengths that are no lengths may give nonsense, but no write outside `out`.
    owner = tl.maximum(owner, 0)
    q_start = tl.maximum(tl.load(cum_q + owner * cum_q_stride), 0)
    q_end = tl.minimum(tl.load(cum_q + (owner + 1) * cum_q_stride, mask=owner < batch, other=tokens_q), tokens_q)
    kv_start = tl.load(cum_kv + owner * cum_kv_stride)
    kv_end = tl.minimum(tl.load(cum_kv + (owner + 1) * cum_kv_stride, mask=owner < batch, other=kv_start), tokens_kv)
    first_row = tl.maximum(tile - q_start // BLOCK_M - owner, 0) * BLOCK_M  # within the sequence
    q_len = q_end - q_start
    kv_len = kv_end - kv_start
    if first_row >= q_len:
        return

    row = first_row + tl.arange(0, BLOCK_M)
    row_exists = row < q_len
    token = (q_start + row).to(tl.int64)
    query_rows = query + head * tl.cast(query_stride_h, tl.int64) + token[:, None] * query_stride_t
    q1 = _load(query_rows, row_exists, 0, BLOCK_D1, DIM_QK, True, BLOCK_D1 > DIM_QK)
    q2 = q1
    if BLOCK_D2:
        q2 = _load(query_rows, row_exists, BLOCK_D1, BLOCK_D2, DIM_QK, True, BLOCK_D1 + BLOCK_D2 > DIM_QK)

    # int64: a token times its stride passes 2^31 elements at 128 heads x 192 and 87 thousand tokens.
    kv_head = head // group
    key_stride = tl.cast(key_stride_t, tl.int64)
    value_stride = tl.cast(value_stride_t, tl.int64)
    key_base = key + kv_start * key_stride + kv_head * tl.cast(key_stride_h, tl.int64)
    value_base = value + kv_start * value_stride + kv_head * tl.cast(value_stride_h, tl.int64)

    # Row i sees the keys below bound[i]; `seen` is the most of the tile's rows, the first `whole` are seen by all.
    if CAUSAL:
        bound = kv_len - q_len + 1 + row
        seen = tl.maximum(kv_len - q_len + tl.minimum(first_row + BLOCK_M, q_len), 0)
        whole = tl.minimum(tl.maximum(kv_len - q_len + 1 + first_row, 0), seen) // BLOCK_N * BLOCK_N
    else:
        bound = tl.full([BLOCK_M], 0, tl.int32) + kv_len
        seen = kv_len
        whole = kv_len // BLOCK_N * BLOCK_N

    peak = tl.full([BLOCK_M], float("-inf"), tl.float32)  # running max of score * log2(e)
    total = tl.zeros([BLOCK_M], tl.float32)
    state = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
    # Masked tiles first: in the other order ptxas serialises every wgmma of the variant that is not causal (C7515), as
    # it finds the zeros of `state` set between the instructions of the first loop.
    peak, total, state = _attend(
        peak, total, state, q1, q2, key_base, key_stride, value_base, value_stride, scale_log2,
        whole, seen, bound, kv_len, first_column,
        DIM_QK, DIM_V, ALIGNED, True, BLOCK_N, BLOCK_D1, BLOCK_D2, BLOCK_DV,
    )  # fmt: skip
    peak, total, state = _attend(
        peak, total, state, q1, q2, key_base, key_stride, value_base, value_stride, scale_log2,
        0, whole, bound, kv_len, first_column,
        DIM_QK, DIM_V, ALIGNED, False, BLOCK_N, BLOCK_D1, BLOCK_D2, BLOCK_DV,
    )  # fmt: skip

    # A row that saw no key has total 0 and peak -inf: the identity (0, -inf) falls out.
    heads = tl.num_programs(1)
    total = tl.where(total == 0.0, 1.0, total)
    state *= (output_scale / total)[:, None]
    column = first_column + tl.arange(0, BLOCK_DV)
    out_tile = out + (token[:, None] * heads + head) * DIM_V + column[None, :]
    tl.store(out_tile, state.to(out.dtype.element_ty), mask=row_exists[:, None] & (column < DIM_V)[None, :])
    if lse is not None:
        natural = (peak + tl.log2(total)) * LN_2
        tl.store(lse + token * heads + head, natural, mask=row_exists & (first_column == 0))


@triton.jit
def _attend(
    peak, total, state, q1, q2, key_base, key_stride, value_base, value_stride, scale_log2,
    first_key, end_key, bound, kv_len, first_column,
    DIM_QK: tl.constexpr, DIM_V: tl.constexpr, ALIGNED: tl.constexpr, MASKED: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_D1: tl.constexpr, BLOCK_D2: tl.constexpr, BLOCK_DV: tl.constexpr,
):  # fmt: skip
    """The online softmax over keys [first_key, end_key) of the sequence, first_key a multiple of BLOCK_N.

    MASKED: some row does not see some key of these tiles. Keys past the sequence are then not loaded: they may be NaN,
    and a weight of 0 would not silence them. Those past a causal bound are, for other rows do see them.
    ALIGNED also says that the scale is a normal positive number, which can be applied after the max; 0 * -inf or a
    change of sign cannot.
    """
    VALUE_BITS: tl.constexpr = value_base.dtype.element_ty.primitive_bitwidth
    tile_key = tl.arange(0, BLOCK_N)
    key_offset = tile_key[:, None] * key_stride
    value_offset = tile_key[:, None] * value_stride
    for start in range(first_key, end_key, BLOCK_N):
        exists = start + tile_key < kv_len
        key_rows = key_base + start * key_stride + key_offset
        k1 = _load(key_rows, exists, 0, BLOCK_D1, DIM_QK, MASKED, BLOCK_D1 > DIM_QK)
        # Hopper's FP8 units keep about 14 bits of a sum. Six instructions' worth of sums (192 dims) stay below what a
        # BF16 result resolves; summing each in fp32 (max_num_imprecise_acc) would cost as much as the softmax.
        scores = tl.dot(q1, k1.T, input_precision="ieee")
        if BLOCK_D2:
            k2 = _load(key_rows, exists, BLOCK_D1, BLOCK_D2, DIM_QK, MASKED, BLOCK_D1 + BLOCK_D2 > DIM_QK)
            scores = tl.dot(q2, k2.T, scores, input_precision="ieee")

        if not ALIGNED:
            scores *= scale_log2
        if MASKED:
            scores = tl.where((start + tile_key)[None, :] < bound[:, None], scores, float("-inf"))
        highest = tl.max(scores, axis=1)
        if ALIGNED:
            highest *= scale_log2
        new_peak = tl.maximum(peak, highest)
        reference = new_peak
        if MASKED:  # -inf - -inf is NaN: a row that has seen nothing yet is measured against 0
            reference = tl.where(new_peak == float("-inf"), 0.0, new_peak)
        if ALIGNED:
            weights = tl.exp2(scores * scale_log2 - reference[:, None])
        else:
            weights = tl.exp2(scores - reference[:, None])
        decay = tl.exp2(peak - reference)
        total = total * decay + tl.sum(weights, axis=1)
        state *= decay[:, None]
        peak = new_peak

        value_rows = value_base + start * value_stride + value_offset
        v = _load(value_rows, exists, first_column, BLOCK_DV, DIM_V, MASKED, DIM_V % BLOCK_DV != 0)
        if VALUE_BITS == 8:
            # Hopper multiplies FP8 only with keys innermost, and FP8 weights cost accuracy; FP16 holds e4m3 exactly.
            v = v.to(tl.float16)
        state = tl.dot(weights.to(v.dtype), v, state, input_precision="ieee")
    return peak, total, state


@triton.jit
def _load(
    rows, row_exists, first, BLOCK: tl.constexpr, DIM: tl.constexpr, MASK_ROWS: tl.constexpr, MASK_COLUMNS: tl.constexpr
):
    """Columns [first, first + BLOCK) of `rows` (pointers [N, 1]); rows that do not exist and columns past DIM are 0."""
    column = (first + tl.arange(0, BLOCK))[None, :]
    if MASK_ROWS and MASK_COLUMNS:
        tile = tl.load(rows + column, mask=row_exists[:, None] & (column < DIM), other=0.0)
    elif MASK_ROWS:
        tile = tl.load(rows + column, mask=row_exists[:, None], other=0.0)
    elif MASK_COLUMNS:
        tile = tl.load(rows + column, mask=column < DIM, other=0.0)
    else:
        tile = tl.load(rows + column)
    return tile
