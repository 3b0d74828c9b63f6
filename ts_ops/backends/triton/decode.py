"""Split-KV MLA decode: each cache row is loaded once and serves as key (all columns) and as value (the latent ones).

A program owns a tile of query rows, the q_len x H rows of one request flattened so that all new tokens share the keys
they load, and one split of that tile's keys. It walks its split BLOCK_N keys at a time with an online softmax in base
2. With one split the result goes straight to the output, else the fp32 partials go to scratch and `combine.py` merges
them. The split ranges come from the live lengths on the device; only the number of splits is fixed by the host, from
shapes and hints, so a captured launch stays right and balanced when lengths change.

On Hopper the score and value products of 64-row tiles are wgmma; smaller tiles use mma with M 16. Of 16 rows, such a
tile reads an aligned FP8 cache as pairs of columns, 16 bits like all that ldmatrix can transpose for the value product:
byte by byte, that takes longer than a BF16 cache does. Even and odd columns are operands, and sums, of their own.
"""

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...meta.contract import FP8, Decode
from ...workspace import HOPPER, max_splits, sm_count
from .combine import combine_splits
from .launch import (
    GENERAL_BLOCK_N,
    LN_2,
    LOG2_E,
    OPTIONS,
    SMALLEST_NORMAL,
    kernel,
    on_device,
    row_strides,
    shared_bytes,
    target_capability,
)
from .pairs import even_and_odd

MIN_TILES = 2  # a split of fewer key tiles costs more in the combine than it saves
MAX_SPLITS = 128
MAX_RANK, MAX_ROPE = 512, 128
MIN_DOT_K = 32  # the least reduction length of an FP8 product
ALIGNMENT = 16  # bytes, of a row's rope columns if FP8 tensor cores are to read them
TRITON_DTYPES = {
    torch.float8_e4m3fn: tl.float8e4nv,
    torch.bfloat16: tl.bfloat16,
    torch.float16: tl.float16,
    torch.float32: tl.float32,
}
INTERPRETER_SMS = 8  # on a CPU there are none to count; enough for tests to reach many splits


@triton.jit
def visible_range(
    row, batch, length, visible_lens, causal_seqs, q_len, window, cp_world, cp_rank, cp_interleave,
    stride_visible_b, stride_visible_q, stride_causal,
    IS_CAUSAL: tl.constexpr, HAS_WINDOW: tl.constexpr, HAS_VISIBLE: tl.constexpr, HAS_CP: tl.constexpr,
):  # fmt: skip
    """Law 3: keys [low, high) of each query position `row` (0 to q_len - 1, a vector) of a request of `length` keys."""
    low = row * 0
    high = low + length
    if HAS_VISIBLE:
        pointers = visible_lens + batch * stride_visible_b + row.to(tl.int64) * stride_visible_q
        high = tl.load(pointers, mask=row < q_len, other=0)
    elif IS_CAUSAL:
        if HAS_CP:
            bound = tl.load(causal_seqs + batch * stride_causal) - (q_len - 1) + row
            bound = tl.maximum(bound, 0).to(tl.int64)
            cycle = tl.cast(cp_interleave, tl.int64) * cp_world
            in_cycle = bound % cycle - tl.cast(cp_rank, tl.int64) * cp_interleave
            held = bound // cycle * cp_interleave + tl.minimum(tl.maximum(in_cycle, 0), cp_interleave)
            high = tl.minimum(held, length).to(tl.int32)
        else:
            high = length - (q_len - 1) + row
    if HAS_WINDOW:
        low = tl.maximum(length - q_len - window + row, 0)
    return low, tl.minimum(tl.maximum(high, 0), length)


@triton.jit
def _load_columns(key_row, key_live, column, DIM: tl.constexpr, DIM_PAD: tl.constexpr, MASKED: tl.constexpr):
    """[keys, DIM_PAD] of the cache; 0 past DIM and, if MASKED, where not `key_live`."""
    pointers = key_row[:, None] + column[None, :]
    if MASKED and DIM < DIM_PAD:
        tile = tl.load(pointers, mask=key_live[:, None] & (column < DIM)[None, :], other=0.0)
    elif MASKED:
        tile = tl.load(pointers, mask=key_live[:, None], other=0.0)
    elif DIM < DIM_PAD:
        tile = tl.load(pointers, mask=(column < DIM)[None, :], other=0.0)
    else:
        tile = tl.load(pointers)
    return tile


@triton.jit
def _query_columns(
    row, row_live, DIM: tl.constexpr, DIM_PAD: tl.constexpr, DTYPE: tl.constexpr, PAIRS: tl.constexpr,
    QUERY_PAIRS: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """Columns of query rows, 0 past DIM: all of them, twice, or with PAIRS the even and the odd ones.

    QUERY_PAIRS: `row` points to pairs.
    """
    if PAIRS:
        column = tl.arange(0, DIM_PAD // 2)
        mask = row_live[:, None] & (column < DIM // 2)[None, :]
        if QUERY_PAIRS:
            even, odd = even_and_odd(tl.load(row[:, None] + column[None, :], mask=mask, other=0.0), DTYPE, PTX)
        else:
            even = tl.load(row[:, None] + 2 * column[None, :], mask=mask, other=0.0).to(DTYPE)
            odd = tl.load(row[:, None] + 2 * column[None, :] + 1, mask=mask, other=0.0).to(DTYPE)
    else:
        column = tl.arange(0, DIM_PAD)
        mask = row_live[:, None] & (column < DIM)[None, :]
        even = tl.load(row[:, None] + column[None, :], mask=mask, other=0.0).to(DTYPE)
        odd = even
    return even, odd


@triton.jit
def _attend(
    acc, odd_acc, peak, total, q, q_rope, odd_q, odd_q_rope, tile, kv_cache, table, low, high, first_key, end_key,
    scale_log2, stride_page, stride_token, stride_table_p,
    RANK: tl.constexpr, ROPE: tl.constexpr, RANK_PAD: tl.constexpr, ROPE_PAD: tl.constexpr, PAGE: tl.constexpr,
    BLOCK_N: tl.constexpr, HAS_WINDOW: tl.constexpr, QK_DTYPE: tl.constexpr, PV_DTYPE: tl.constexpr,
    PRECISION: tl.constexpr, ALIGNED: tl.constexpr, PAIRS: tl.constexpr, PTX: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """One tile of keys into the running (acc, odd_acc, peak, total). Not MASKED: every row sees every key of it."""
    column = tl.arange(0, RANK_PAD)
    rope_column = tl.arange(0, ROPE_PAD)
    key = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    # What no row sees is loaded as 0, never multiplied by 0: NaN past the request cannot spread.
    key_live = key < end_key
    if HAS_WINDOW:
        key_live &= key >= first_key
    if PAGE >= BLOCK_N:
        page = tl.load(table + tile * BLOCK_N // PAGE * stride_table_p).to(tl.int64)
    else:
        page = tl.load(table + key // PAGE * stride_table_p, mask=key_live, other=0).to(tl.int64)
    offset = key % PAGE
    key_row = kv_cache + page * stride_page + offset * stride_token
    latent = _load_columns(key_row, key_live, column, RANK, RANK_PAD, MASKED)
    if PAIRS:
        even, odd = even_and_odd(tl.trans(latent), QK_DTYPE, PTX)
        scores = tl.dot(odd_q, odd, acc=tl.dot(q, even))
    else:
        scores = tl.dot(q, tl.trans(latent.to(QK_DTYPE)), input_precision=PRECISION)
    if ROPE > 0:
        rope = _load_columns(key_row + RANK, key_live, rope_column, ROPE, ROPE_PAD, MASKED)
        if PAIRS:
            even, odd = even_and_odd(tl.trans(rope), QK_DTYPE, PTX)
            scores = tl.dot(odd_q_rope, odd, acc=tl.dot(q_rope, even, acc=scores))
        else:
            scores = tl.dot(q_rope, tl.trans(rope.to(QK_DTYPE)), acc=scores, input_precision=PRECISION)
    if not ALIGNED:
        scores = scores * scale_log2
    if MASKED:
        seen = key[None, :] < high[:, None]
        if HAS_WINDOW:
            seen &= key[None, :] >= low[:, None]
        scores = tl.where(seen, scores, float("-inf"))
    if ALIGNED:
        new_peak = tl.maximum(peak, tl.max(scores, axis=1) * scale_log2)
    else:
        new_peak = tl.maximum(peak, tl.max(scores, axis=1))
    shift = tl.where(new_peak == float("-inf"), 0.0, new_peak)
    rescale = tl.exp2(peak - shift)
    if ALIGNED:
        weight = tl.exp2(scores * scale_log2 - shift[:, None])
    else:
        weight = tl.exp2(scores - shift[:, None])
    total = total * rescale + tl.sum(weight, axis=1)
    acc = acc * rescale[:, None]
    weight = weight.to(PV_DTYPE)
    if PAIRS:
        even, odd = even_and_odd(latent, PV_DTYPE, PTX)
        acc = tl.dot(weight, even, acc=acc)
        odd_acc = tl.dot(weight, odd, acc=odd_acc * rescale[:, None])
    else:
        acc = tl.dot(weight, latent.to(PV_DTYPE), acc=acc, input_precision=PRECISION)
    return acc, odd_acc, new_peak, total


@kernel(
    wide=[
        "query", "stride_query_b", "stride_query_q", "stride_query_h", "kv_cache", "stride_page", "stride_token", "out",
    ],
    model=["heads"],
)  # fmt: skip
def _decode_kernel(
    query, kv_cache, block_tables, seq_lens, visible_lens, causal_seqs, out, lse,
    scale_log2: tl.float32, output_scale: tl.float32, q_len: tl.int32, heads: tl.int32, max_pages: tl.int32,
    num_splits: tl.int32, window: tl.int32, cp_world: tl.int64, cp_rank: tl.int64, cp_interleave: tl.int64,
    stride_query_b: tl.int64, stride_query_q: tl.int64, stride_query_h: tl.int64,
    stride_page: tl.int64, stride_token: tl.int64, stride_table_b: tl.int64, stride_table_p: tl.int64,
    stride_lens: tl.int64, stride_visible_b: tl.int64, stride_visible_q: tl.int64, stride_causal: tl.int64,
    RANK: tl.constexpr, ROPE: tl.constexpr, RANK_PAD: tl.constexpr, ROPE_PAD: tl.constexpr, PAGE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, MIN_TILES: tl.constexpr,
    IS_CAUSAL: tl.constexpr, HAS_WINDOW: tl.constexpr, HAS_VISIBLE: tl.constexpr, HAS_CP: tl.constexpr,
    HAS_LSE: tl.constexpr, SPLIT: tl.constexpr, QK_DTYPE: tl.constexpr, PV_DTYPE: tl.constexpr,
    PRECISION: tl.constexpr, PEEL: tl.constexpr, PAIRS: tl.constexpr, PTX: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    # ALIGNED also says that a block table's row is dense, that a page's tokens lie within 2^31 elements, and that the
    # scale is a normal positive number, which can be applied after the max; 0 * -inf or a change of sign cannot.
    if ALIGNED:
        stride_table_p = 1
    # PAIRS: of the columns of an FP8 cache; else a "pair" is one column.
    BY_PAIRS: tl.constexpr = PAIRS and ALIGNED
    WIDTH: tl.constexpr = 2 if BY_PAIRS else 1
    # An FP8 query too, or Triton lays out both operands of a product for FP8.
    QUERY_PAIRS: tl.constexpr = BY_PAIRS and query.dtype.element_ty == tl.float8e4nv
    if QUERY_PAIRS:
        query = query.to(tl.pointer_type(tl.int16), bitcast=True)
        stride_query_b = stride_query_b // 2
        stride_query_q = stride_query_q // 2
        stride_query_h = stride_query_h // 2
    if BY_PAIRS:
        kv_cache = kv_cache.to(tl.pointer_type(tl.int16), bitcast=True)
        stride_page = stride_page // 2
        stride_token = stride_token // 2
    rows = q_len * heads
    row_tiles = tl.cdiv(rows, BLOCK_M)
    # Row tiles of one split are neighbours: they read the same keys at the same time, once from memory.
    program = tl.program_id(0)
    row_tile = program % row_tiles
    split = program // row_tiles % num_splits
    batch = (program // row_tiles // num_splits).to(tl.int64)

    row = row_tile * BLOCK_M + tl.arange(0, BLOCK_M)
    row_live = row < rows
    position = tl.minimum(row // heads, q_len - 1)
    head = row % heads
    length = tl.load(seq_lens + batch * stride_lens)
    length = tl.minimum(tl.maximum(length, 0), max_pages * PAGE)
    low, high = visible_range(
        position, batch, length, visible_lens, causal_seqs, q_len, window, cp_world, cp_rank, cp_interleave,
        stride_visible_b, stride_visible_q, stride_causal, IS_CAUSAL, HAS_WINDOW, HAS_VISIBLE, HAS_CP,
    )  # fmt: skip
    first_key = tl.min(low, axis=0)
    end_key = tl.max(high, axis=0)

    first_tile = first_key // BLOCK_N
    tiles = tl.maximum(tl.cdiv(end_key, BLOCK_N) - first_tile, 0)
    tiles_per_split = tl.maximum(tl.cdiv(tiles, num_splits), MIN_TILES)
    begin = first_tile + split * tiles_per_split
    end = tl.minimum(begin + tiles_per_split, first_tile + tiles)

    peak = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, RANK_PAD // WIDTH], tl.float32)
    odd_acc = acc
    if begin < end:
        query_row = (
            query + batch * stride_query_b + position.to(tl.int64) * stride_query_q + head.to(tl.int64) * stride_query_h
        )
        q, odd_q = _query_columns(query_row, row_live, RANK, RANK_PAD, QK_DTYPE, BY_PAIRS, QUERY_PAIRS, PTX)
        query_row += RANK // 2 if QUERY_PAIRS else RANK
        q_rope, odd_q_rope = _query_columns(query_row, row_live, ROPE, ROPE_PAD, QK_DTYPE, BY_PAIRS, QUERY_PAIRS, PTX)
        table = block_tables + batch * stride_table_b
        # PEEL: only the tiles at either end, which some row does not see whole, are masked; not the bulk between them.
        bulk = end
        bulk_tiles = 0
        if PEEL:
            bulk = tl.minimum(tl.maximum(tl.cdiv(tl.max(low, axis=0), BLOCK_N), begin), end)
            bulk_tiles = tl.maximum(tl.minimum(tl.min(high, axis=0) // BLOCK_N, end) - bulk, 0)
        for index in range(begin, end - bulk_tiles):
            tile = tl.where(index < bulk, index, index + bulk_tiles) if PEEL else index
            acc, odd_acc, peak, total = _attend(
                acc, odd_acc, peak, total, q, q_rope, odd_q, odd_q_rope, tile, kv_cache, table, low, high,
                first_key, end_key, scale_log2, stride_page, stride_token, stride_table_p, RANK // WIDTH,
                ROPE // WIDTH, RANK_PAD // WIDTH, ROPE_PAD // WIDTH, PAGE, BLOCK_N, HAS_WINDOW, QK_DTYPE, PV_DTYPE,
                PRECISION, ALIGNED, BY_PAIRS, PTX, True,
            )  # fmt: skip
        if PEEL:
            for tile in range(bulk, bulk + bulk_tiles):
                acc, odd_acc, peak, total = _attend(
                    acc, odd_acc, peak, total, q, q_rope, odd_q, odd_q_rope, tile, kv_cache, table, low, high,
                    first_key, end_key, scale_log2, stride_page, stride_token, stride_table_p, RANK // WIDTH,
                    ROPE // WIDTH, RANK_PAD // WIDTH, ROPE_PAD // WIDTH, PAGE, BLOCK_N, HAS_WINDOW, QK_DTYPE, PV_DTYPE,
                    PRECISION, ALIGNED, BY_PAIRS, PTX, False,
                )  # fmt: skip

    empty = total == 0.0
    total = tl.where(empty, 1.0, total)
    row_lse = tl.where(empty, float("-inf"), peak + tl.log2(total))
    if BY_PAIRS:
        acc = tl.reshape(tl.join(acc, odd_acc), [BLOCK_M, RANK_PAD])
    acc = acc / total[:, None]
    column = tl.arange(0, RANK_PAD)
    store_mask = row_live[:, None] & (column < RANK)[None, :]
    flat_row = batch * rows + row
    if SPLIT:
        slot = flat_row * num_splits + split
        tl.store(lse + slot, row_lse, mask=row_live)
        # A split without keys leaves its partial unwritten; the combine skips it by its LSE.
        if begin < end:
            tl.store(out + slot[:, None] * RANK + column[None, :], acc, mask=store_mask)
    else:
        value = (acc * output_scale).to(out.dtype.element_ty)
        tl.store(out + flat_row[:, None] * RANK + column[None, :], value, mask=store_mask)
        if HAS_LSE:
            tl.store(lse + flat_row, row_lse * LN_2, mask=row_live)


def why_not(problem: Decode) -> str | None:
    rope = problem.head_dim - problem.kv_lora_rank
    if problem.kv_lora_rank > MAX_RANK or rope > MAX_ROPE:
        return (
            f"Triton's decode takes a kv_lora_rank up to {MAX_RANK} and {MAX_ROPE} rope columns, "
            f"got {problem.kv_lora_rank} and {rope}"
        )
    return None


@cache
def tile_config(
    rows: int, page_size: int, columns: int, query_dtype: torch.dtype, cache_dtype: torch.dtype, by_pairs: bool,
    capability: tuple[int, int] | None,
) -> tuple[int, int, int, int]:  # fmt: skip
    """(BLOCK_M, BLOCK_N, warps, stages) for `rows` = q_len * H query rows a request and `columns` padded cache columns.

    `capability` is None under the interpreter. The best of a sweep on an H200, made smaller where shared memory is.
    """
    block_m, block_n, warps, stages = _fastest_tiles(rows, page_size, query_dtype, cache_dtype, by_pairs)

    def used() -> int:
        query = block_m * columns * (torch.float16 if by_pairs else query_dtype).itemsize
        # wgmma reads keys where they were loaded, one tile while the next arrives; mma takes them to registers first.
        buffers = 2 if capability == HOPPER and block_m == 64 and cache_dtype != FP8 else 1
        keys = buffers * block_n * columns * cache_dtype.itemsize
        converted = block_n * columns * torch.float16.itemsize if cache_dtype == FP8 and not by_pairs else 0
        return query + keys + converted

    while capability and used() > shared_bytes(capability) and block_m * block_n > 16 * 16:
        if block_n > 32 or block_m == 16:
            block_n //= 2
        else:
            block_m //= 2
    return block_m, block_n, warps, stages


def _fastest_tiles(
    rows: int, page_size: int, query_dtype: torch.dtype, cache_dtype: torch.dtype, by_pairs: bool
) -> tuple[int, int, int, int]:
    """Small tiles are for where memory bounds them: 16-bit caches, and FP8 by pairs. Else an FP8 tile passes through
    registers on its way to the value product; with 64 rows, wgmma takes it from shared memory at least. Pages smaller
    than a tile need a pointer a key: FP8 tiles have more warps then and large ones are smaller, lest they spill. Small
    16-bit ones spill a little, which costs less than more warps do.
    """
    small_pages = page_size < 64
    if query_dtype == torch.float32:
        return 16, 16, 4, 2
    if by_pairs:
        return 16, 64, 4, 2
    if cache_dtype == FP8:
        return (16, 32, 8 if small_pages else 4, 2) if query_dtype != FP8 and rows <= 16 else (64, 64, 8, 2)
    if rows > 32:
        return 64, 32 if small_pages else 64, 8, 2
    return (32, 64, 8, 2) if rows > 16 else (16, 64, 4, 2)


def num_splits(problem: Decode, tiles: int, block_m: int, block_n: int) -> int:
    """Splits that fill the GPU with `tiles` row tiles each, within the workspace bound; from shapes and hints alone."""
    sms = sm_count(problem.device) if problem.device.type == "cuda" else INTERPRETER_SMS
    keys = problem.capacity if problem.max_seq_len is None else min(problem.max_seq_len, problem.capacity)
    programs = sms * (1 if block_m == 64 else 2)
    useful = triton.cdiv(keys, block_n * MIN_TILES)
    bound = max_splits(problem.rows, problem.kv_lora_rank + 1, sms)
    return max(1, min(programs // tiles, useful, bound, MAX_SPLITS))


def _no_fp8_wgmma(fp8: bool, capability: tuple[int, int] | None) -> dict:
    """Of the general variant: scores in FP16, which holds e4m3 exactly.

    Where rope, or all of a row, is loaded byte by byte, FP8 wgmma gives garbage under Triton 3.6 (seen with RANK_PAD
    128 and up, ROPE_PAD 64). In some of these kernels ptxas 12.8 reads wgmma descriptors from registers that it never
    writes.
    """
    return {"QK_DTYPE": tl.float16} if fp8 and capability == HOPPER else {}


def mla_decode(problem: Decode, out: Tensor, lse: Tensor | None = None) -> None:
    query, kv_cache = problem.query, problem.kv_cache
    rows = problem.q_len * problem.heads
    rank, rope = problem.kv_lora_rank, problem.head_dim - problem.kv_lora_rank
    rank_pad = max(MIN_DOT_K, triton.next_power_of_2(rank))
    rope_pad = max(MIN_DOT_K, triton.next_power_of_2(rope))
    capability = target_capability(problem.device)
    by_pairs = rows <= 16 and kv_cache.dtype == FP8 and query.dtype != torch.float32 and rank % 2 == 0 and rope % 2 == 0
    block_m, block_n, warps, stages = tile_config(
        rows, problem.page_size, rank_pad + (rope_pad if rope else 0), query.dtype, kv_cache.dtype, by_pairs, capability
    )
    row_tiles = triton.cdiv(rows, block_m)
    splits = num_splits(problem, problem.batch * row_tiles, block_m, block_n)
    partial, partial_lse = out, lse
    if splits > 1:
        states = problem.rows * splits
        scratch = torch.empty(states * (rank + 1), dtype=torch.float32, device=problem.device)
        partial, partial_lse = scratch.split((states * rank, states))
    tables, visible, causal_seqs = problem.block_tables, problem.local_visible_lens, problem.causal_seqs
    fp8 = query.dtype == FP8
    qk_dtype = torch.float16 if fp8 and by_pairs else query.dtype
    pv_dtype = torch.float16 if fp8 or by_pairs else query.dtype
    scale_log2 = problem.softmax_scale * LOG2_E
    page_stride, token_stride = row_strides(kv_cache)
    table_strides = tables.stride()
    usual = (
        scale_log2 >= SMALLEST_NORMAL
        and (table_strides[1] == 1 or problem.max_pages <= 1)
        and problem.page_size * token_stride < 2**31
        and (not fp8 or rank % ALIGNMENT == 0)
    )
    with on_device(problem.device):
        _decode_kernel.launch(
            (problem.batch * splits * row_tiles,),
            query, kv_cache, tables, problem.seq_lens, visible, causal_seqs, partial, partial_lse,
            scale_log2, problem.output_scale, problem.q_len, problem.heads, problem.max_pages, splits,
            min(problem.window_left, problem.capacity + problem.q_len),
            problem.cp_world, problem.cp_rank, problem.cp_interleave_size,
            *row_strides(query), page_stride, token_stride, *table_strides, problem.seq_lens.stride(0),
            *((0, 0) if visible is None else visible.stride()), 0 if causal_seqs is None else causal_seqs.stride(0),
            RANK=rank, ROPE=rope, RANK_PAD=rank_pad, ROPE_PAD=rope_pad,
            PAGE=problem.page_size, BLOCK_M=block_m, BLOCK_N=block_n, MIN_TILES=MIN_TILES,
            IS_CAUSAL=problem.is_causal, HAS_WINDOW=problem.window_left >= 0, HAS_VISIBLE=visible is not None,
            HAS_CP=causal_seqs is not None, HAS_LSE=partial_lse is not None, SPLIT=splits > 1,
            QK_DTYPE=TRITON_DTYPES[qk_dtype], PV_DTYPE=TRITON_DTYPES[pv_dtype],
            PRECISION="ieee",
            # A second loop pays where memory is the bound; the registers of a large tile do not stretch to it.
            PEEL=block_m < 64, PAIRS=by_pairs, PTX=capability is not None and not torch.version.hip,
            num_warps=warps, num_stages=stages, **OPTIONS,
            aligned_if=usual,
            general={"BLOCK_N": min(block_n, GENERAL_BLOCK_N), "num_warps": 8} | _no_fp8_wgmma(fp8, capability),
        )  # fmt: skip
        if splits > 1:
            combine_splits(partial, partial_lse, out, lse, splits, problem.output_scale)


mla_decode_lse = mla_decode
