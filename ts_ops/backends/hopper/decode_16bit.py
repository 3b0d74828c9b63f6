"""MLA decode on SM90 for a BF16 or FP16 query over a cache of its dtype.

Three partitions work on a tile of keys at a time: one warp copies it to shared memory (TMA), four warps compute the
scores and their softmax, and eight (the default partition) multiply the weights with the values. Shared memory is what
bounds them, in size and in speed. So tiles are copied and freed in halves of 256 columns, in a ring of five; the left
half of the query passes through it too, on its way to registers, for which it makes the fifth; and the weights are
multiplied from registers.

While the softmax works, no one asks for scores. So of a tile's sums only the left half, which frees a half of the ring
early, goes along with the scores of the next tile; the right half waits until these have been asked for.

Barriers of a half: `full`, copied; `empty`, read by all who do; of the weights: `weighed`, `read`, and `turns`, two in
turn, for the softmax can be a tile ahead: the right half of the sums may begin.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from ..triton.launch import LN_2
from .dialect import barrier, tma_load, view
from .partials import WORDS, store_words, word, words_of_16bit
from .plan import (
    HALF,
    RANK,
    ROPE,
    TILE,
    UNSPECIALIZED,
    ask_for,
    ask_for_page,
    first_slot_row,
    is_whole,
    make_plan,
    piece,
    record_piece,
    start_records,
)
from .softmax import (
    EACH_WARP,
    ONE,
    barriers_of_pieces,
    bounds,
    clear_unseen,
    follow,
    hand_over,
    hide_unseen,
    late,
    must_rescale,
    no_weights,
    store,
    store_lse,
    take,
    tell,
    unknown_zero,
    visible,
    weights,
)

BOX = gl.constexpr(64)  # columns of a TMA copy
HALVES = gl.constexpr(5)
ROPES = gl.constexpr(2)  # rope keys of so many tiles
REGISTERS = gl.constexpr(136)  # a thread of the softmax; the sums take what is left
SWIZZLED = gl.constexpr(gl.NVMMASharedLayout(128, 16, 2))


@gluon.jit
def _wait(barriers, half, before: gl.constexpr = 0):
    """For the barrier of a half of the ring, counted from the first; or for its phase before."""
    mbarrier.wait(barriers.index(half % HALVES), ((half // HALVES) & 1) ^ before)


@gluon.jit
def _expect(full, empty, half, columns: gl.constexpr):
    """The barrier that so many columns of a tile complete, once the half of the ring is free."""
    _wait(empty, half, 1)
    ready = full.index(half % HALVES)
    mbarrier.expect(ready, TILE * columns * 2)
    return ready


@gluon.jit
def _copy(shared, PAGE: gl.constexpr):
    """The TMA partition."""
    (
        boxes, query_boxes, latents, ropes, q_right, q_rope, full, empty, query_ready, query_read, block_tables,
        stride_table, page_rows, plan, lens, first_row, rows, q_len, window,
    ) = shared  # fmt: skip
    seq_lens, stride_lens, capacity = lens
    first_request, end_request, offset, quota = plan
    PARTS: gl.constexpr = 1 if PAGE >= TILE else TILE // PAGE
    ROWS: gl.constexpr = TILE // PARTS
    PER_HALF: gl.constexpr = HALF // BOX
    boxes_of_query = view(latents, latents.dtype, [HALVES * PER_HALF, TILE, BOX], SWIZZLED)
    step = first_request * 0
    half = first_request * 0
    pieces = first_request * 0
    request = first_request
    while request < end_request:
        length, first, low, high, units = piece(request, offset, quota, seq_lens, stride_lens, capacity, q_len, window)
        table = block_tables + request.to(gl.int64) * stride_table
        last_page = (length - 1) // PAGE
        # The query first: it would wait for whatever is asked for before it.
        mbarrier.wait(query_read, (pieces & 1) ^ 1)
        query_row = request * rows + first_row
        ready = _expect(full, empty, half, HALF)
        for box in gl.static_range(PER_HALF):
            tma_load(query_boxes, [query_row, box * BOX], ready, boxes_of_query.index(half % HALVES * PER_HALF + box))
        half += 1
        mbarrier.expect(query_ready, TILE * (HALF + ROPE) * 2)
        for box in gl.static_range(PER_HALF):
            tma_load(query_boxes, [query_row, HALF + box * BOX], query_ready, q_right.index(box))
        tma_load(query_boxes, [query_row, RANK], query_ready, q_rope)
        for tile in range(first + low, first + high):
            # The second half of the last tile may lie past the request's pages: any of them will do.
            page = gl.load(table + gl.minimum(tile * TILE // PAGE, last_page))
            second = gl.load(table + gl.minimum(tile * PARTS + 1, last_page)) if PARTS == 2 else page
            for right in gl.static_range(2):
                ready = _expect(full, empty, half, HALF + right * ROPE)
                for part in gl.static_range(PARTS):
                    row = (page if part == 0 else second) * page_rows + (tile * TILE + part * ROWS) % PAGE
                    for box in gl.static_range(PER_HALF):
                        where = (half % HALVES * PER_HALF + box) * PARTS + part
                        tma_load(boxes, [row, right * HALF + box * BOX], ready, latents.index(where))
                    if right == 1:
                        tma_load(boxes, [row, RANK], ready, ropes.index(step % ROPES * PARTS + part))
                half += 1
            step += 1
        offset -= units
        request += 1
        pieces += 1


@gluon.jit
def _weigh(shared):
    """The softmax partition: weights of each tile, then 1 / total and the LSE of each piece."""
    (
        latents, ropes, q_boxes, q_rope, weight_buffer, rescales, rescaled, state, full, empty, weighed, turns, read,
        query_ready, query_read, finished, taken, plan, lens, first_row, rows, heads, q_len, window, causal, scale_log2,
    ) = shared  # fmt: skip
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TILE, 16])
    QUERY: gl.constexpr = gl.DotOperandLayout(0, SCORES, 2)
    VALUES: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    dtype: gl.constexpr = latents.dtype
    seq_lens, stride_lens, capacity = lens
    first_request, end_request, offset, quota = plan
    halves = view(latents, dtype, [HALVES, TILE, HALF], SWIZZLED)
    rope_keys = view(ropes, dtype, [ROPES, TILE, ROPE], SWIZZLED)
    q_rights = view(q_boxes, dtype, [1, TILE, HALF], SWIZZLED)
    zeros = gl.full([TILE, TILE], 0.0, gl.float32, layout=SCORES)
    step = first_request * 0
    half = first_request * 0
    pieces = first_request * 0
    request = first_request
    while request < end_request:
        length, first, begin_tile, end_tile, units = piece(
            request, offset, quota, seq_lens, stride_lens, capacity, q_len, window
        )
        any_low, all_low, all_high = bounds(first_row, rows, heads, length, q_len, window, causal)
        _wait(full, half)
        q_left = halves.index(half % HALVES).load(QUERY)
        mbarrier.arrive(empty.index(half % HALVES), count=1)
        half += 1
        mbarrier.wait(query_ready, pieces & 1)
        peak = gl.full([TILE], -float("inf"), gl.float32, layout=gl.SliceLayout(1, SCORES))
        total = no_weights()
        zero = unknown_zero(capacity)
        q_index = zero
        for tile in range(first + begin_tile, first + end_tile):
            first_key = tile * TILE
            q_right = q_rights.index(q_index)
            q_index += zero
            left = halves.index(half % HALVES)
            right = halves.index((half + 1) % HALVES)
            _wait(full, half)
            scores = warpgroup_mma(q_left, left.permute((1, 0)), zeros, use_acc=False, is_async=True)
            _wait(full, half + 1)
            scores = warpgroup_mma(q_right, right.permute((1, 0)), scores, is_async=True)
            scores = warpgroup_mma(q_rope, rope_keys.index(step % ROPES).permute((1, 0)), scores, is_async=True)
            mbarrier.arrive(turns.index((step + 1) & 1), count=1, pred=tile > first + begin_tile)
            scores = warpgroup_mma_wait(0, deps=(scores,))
            if tile + 1 == first + end_tile:
                mbarrier.arrive(query_read, count=1)
            if (first_key + TILE > all_high) | (first_key < all_low):
                # Which keys a row sees is found out here, for few tiles need it, and there are no registers to keep it.
                row = late(first_row) + gl.arange(0, TILE, layout=gl.SliceLayout(1, SCORES))
                low, high = visible(row, heads, length, q_len, window, causal)
                key = first_key + gl.arange(0, TILE, layout=gl.SliceLayout(0, SCORES))
                scores = hide_unseen(scores, key, low, high)
                if (first_key + TILE > length) | (first_key < any_low):
                    clear_unseen(left, first_key, any_low, length, VALUES, HALF, 64)
                    clear_unseen(right, first_key, any_low, length, VALUES, HALF, 64)
                    fence_async_shared()
            mbarrier.wait(read, (step & 1) ^ 1)
            peak, shift, rescale = follow(scores, peak, scale_log2, 0.0)
            tell(rescale, rescales, rescaled)
            weight, total = weights(scores, total, scale_log2, shift, rescale)
            weight_buffer.store(weight.to(dtype))
            mbarrier.arrive(weighed, count=1)
            step += 1
            half += 2
        if begin_tile >= end_tile:
            mbarrier.arrive(query_read, count=1)
        mbarrier.arrive(turns.index((step + 1) & 1), count=1, pred=begin_tile < end_tile)
        hand_over(peak, total, state, finished, taken, pieces)
        offset -= units
        request += 1
        pieces += 1


@gluon.jit
def _store_half(pointer, values, live_rows, LAYOUT: gl.constexpr, FULL: gl.constexpr):
    """[rows, HALF] to rows of RANK columns, 16 bytes a store; rearranged within a warp, without shared memory."""
    values = gl.convert_layout(values, LAYOUT)
    row = gl.arange(0, TILE, layout=gl.SliceLayout(1, LAYOUT))
    column = gl.arange(0, HALF, layout=gl.SliceLayout(0, LAYOUT))
    store(pointer + row[:, None] * RANK + column[None, :], values, (row < live_rows)[:, None], FULL)


@gluon.jit
def _store_partial_half(block, values, first_pair: gl.constexpr, ROWS: gl.constexpr, dtype: gl.constexpr):
    """[rows, HALF], from `first_pair` of the columns on."""
    low, high = gl.split(gl.reshape(values, [TILE, HALF // 2, 2]))
    words = word(low, high, dtype)
    LAYOUT: gl.constexpr = words.type.layout
    row = gl.arange(0, TILE, layout=gl.SliceLayout(1, LAYOUT))
    pair = first_pair + gl.arange(0, HALF // 2, layout=gl.SliceLayout(0, LAYOUT))
    index = words_of_16bit(row, pair)
    within = (row < ROWS).to(gl.int32)[:, None] + index * 0
    store_words(block, index, words, within, LAYOUT)


@gluon.jit
def _sum_values(
    shared, ROWS: gl.constexpr, FULL: gl.constexpr, FOUR_COLUMNS: gl.constexpr, EIGHT_COLUMNS: gl.constexpr
):  # fmt: skip
    """The default partition: the weighted sum of the values of each piece, and its store."""
    (
        out, lse, wants_lse, partial, partial_lse, records, latents, weight_buffer, rescales, rescaled, state, empty,
        weighed, turns, read, finished, taken, plan, lens, row_tile, row_tiles, rows, batch, worker, workers, q_len,
        window, output_scale,
    ) = shared  # fmt: skip
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, HALF // 2, 16])
    WEIGHTS: gl.constexpr = gl.DotOperandLayout(0, SUMS, 2)
    PER_ROW: gl.constexpr = gl.SliceLayout(1, SUMS)
    seq_lens, stride_lens, capacity = lens
    first_request, end_request, offset, quota = plan
    halves = view(latents, latents.dtype, [HALVES, TILE, HALF], SWIZZLED)
    step = first_request * 0
    half = first_request * 0
    pieces = first_request * 0
    start_records(records, batch, workers, worker, row_tile)
    request = first_request
    while request < end_request:
        length, first, begin_tile, end_tile, units = piece(
            request, offset, quota, seq_lens, stride_lens, capacity, q_len, window
        )
        left = gl.full([TILE, HALF], 0.0, gl.float32, layout=SUMS)
        right = gl.full([TILE, HALF], 0.0, gl.float32, layout=SUMS)
        half += 1  # the query's
        for _ in range(begin_tile, end_tile):
            mbarrier.wait(weighed, step & 1)
            weight = weight_buffer.load(WEIGHTS)
            if must_rescale(rescaled):
                rescale = rescales.load(PER_ROW)
                left = left * rescale[:, None]
                right = right * rescale[:, None]
            mbarrier.arrive(read, count=1)
            left = warpgroup_mma(weight, halves.index(half % HALVES), left, is_async=True)
            left = warpgroup_mma_wait(0, deps=(left,))
            mbarrier.arrive(empty.index(half % HALVES), count=1)
            mbarrier.wait(turns.index(step & 1), (step >> 1) & 1)
            right = warpgroup_mma(weight, halves.index((half + 1) % HALVES), right, is_async=True)
            right, weight = warpgroup_mma_wait(0, deps=(right, weight))
            mbarrier.arrive(empty.index((half + 1) % HALVES), count=1)
            step += 1
            half += 2
        norm, row_lse = take(state, finished, taken, pieces, TILE, PER_ROW)
        record_piece(records, batch, workers, request, worker, begin_tile, units, offset, quota, row_tile)
        pieces += 1
        flat_row = request.to(gl.int64) * rows + row_tile * ROWS
        live_rows = gl.minimum(rows - row_tile * ROWS, ROWS)
        if is_whole(worker, begin_tile, units, offset, quota):
            if wants_lse != 0:
                store_lse(lse + flat_row, row_lse * LN_2, live_rows)
            scale = (norm * output_scale)[:, None]
            result = out + flat_row * RANK
            left_half = gl.convert_layout((left * scale).to(out.dtype.element_ty), FOUR_COLUMNS)
            _store_half(result, left_half, live_rows, EIGHT_COLUMNS, FULL)
            right_half = gl.convert_layout((right * scale).to(out.dtype.element_ty), FOUR_COLUMNS)
            _store_half(result + HALF, right_half, live_rows, EIGHT_COLUMNS, FULL)
        else:
            slot_row = first_slot_row(worker, begin_tile, row_tile, row_tiles, ROWS)
            store_lse(partial_lse + slot_row, row_lse, live_rows)
            block = partial + slot_row * WORDS
            _store_partial_half(block, left * norm[:, None], 0, ROWS, out.dtype.element_ty)
            _store_partial_half(block, right * norm[:, None], HALF // 2, ROWS, out.dtype.element_ty)
        offset -= units
        request += 1


@gluon.jit(do_not_specialize=UNSPECIALIZED)
def decode_16bit_kernel(
    boxes, query_boxes, block_tables, seq_lens, out, lse, wants_lse, partial, partial_lse, records,
    scale_log2, output_scale, batch, q_len, heads, page_rows, capacity, window, causal, stride_table, stride_lens,
    ROWS: gl.constexpr, PAGE: gl.constexpr, FULL: gl.constexpr, FOUR_COLUMNS: gl.constexpr,
    EIGHT_COLUMNS: gl.constexpr,
):  # fmt: skip
    """The grid is (row tiles, workers). The boxes are of the cache and of the query, each as [rows, 576]."""
    PARTS: gl.constexpr = 1 if PAGE >= TILE else TILE // PAGE
    dtype: gl.constexpr = out.dtype.element_ty
    row_tile = gl.program_id(0)
    worker = gl.program_id(1)
    row_tiles = gl.num_programs(0)
    workers = gl.num_programs(1)
    rows = q_len * heads
    ask_for(seq_lens)

    latents = gl.allocate_shared_memory(dtype, [HALVES * (HALF // BOX) * PARTS, TILE // PARTS, BOX], boxes.layout)
    ropes = gl.allocate_shared_memory(dtype, [ROPES * PARTS, TILE // PARTS, ROPE], boxes.layout)
    q_right = gl.allocate_shared_memory(dtype, [HALF // BOX, TILE, BOX], query_boxes.layout)
    q_rope = gl.allocate_shared_memory(dtype, [TILE, ROPE], query_boxes.layout)
    weight_buffer = gl.allocate_shared_memory(dtype, [TILE, TILE], SWIZZLED)
    rescales = gl.allocate_shared_memory(gl.float32, [TILE], ONE)
    rescaled = gl.allocate_shared_memory(gl.float32, [TILE // 4, 4], EACH_WARP)
    state = gl.allocate_shared_memory(gl.float32, [2, TILE], ONE)
    full = gl.allocate_shared_memory(gl.int64, [HALVES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [HALVES, 1], mbarrier.MBarrierLayout())
    weighed = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    read = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    turns = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for half in gl.static_range(HALVES):
        mbarrier.init(full.index(half), count=1)
        mbarrier.init(empty.index(half), count=1)
    mbarrier.init(weighed, count=1)
    mbarrier.init(read, count=1)
    mbarrier.init(turns.index(0), count=1)
    mbarrier.init(turns.index(1), count=1)
    query_ready, query_read, finished, taken = barriers_of_pieces()
    plan = make_plan(worker, workers, seq_lens, stride_lens, batch, capacity, q_len, window, 8)
    ask_for_page(plan, block_tables, stride_table, batch, capacity, PAGE)
    barrier()
    lens = (seq_lens, stride_lens, capacity)
    sums = (
        out, lse, wants_lse, partial, partial_lse, records, latents, weight_buffer, rescales, rescaled, state, empty,
        weighed, turns, read, finished, taken, plan, lens, row_tile, row_tiles, rows, batch, worker, workers, q_len,
        window, output_scale,
    )  # fmt: skip
    weigh = (
        latents, ropes, q_right, q_rope, weight_buffer, rescales, rescaled, state, full, empty, weighed, turns, read,
        query_ready, query_read, finished, taken, plan, lens, row_tile * ROWS, rows, heads, q_len, window, causal,
        scale_log2,
    )  # fmt: skip
    copy = (
        boxes, query_boxes, latents, ropes, q_right, q_rope, full, empty, query_ready, query_read, block_tables,
        stride_table, page_rows, plan, lens, row_tile * ROWS, rows, q_len, window,
    )  # fmt: skip
    gl.warp_specialize(
        [
            (_sum_values, (sums, ROWS, FULL, FOUR_COLUMNS, EIGHT_COLUMNS)),
            (_weigh, (weigh,)),
            (_copy, (copy, PAGE)),
        ],
        [4, 1],
        [REGISTERS, 24],
    )
