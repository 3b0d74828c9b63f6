"""MLA decode on SM90 for an FP8 query over an FP8 cache: scores in FP8, weights and values in FP16.

With weights in FP8 too, where the caller allows it, the partitions of fp8_weights.py take the place of two here.

wgmma takes FP8 operands from shared memory only along the reduction; values lie the other way. So the output is
computed transposed, outᵀ = Vᵀ Pᵀ, with Vᵀ as the operand that comes from registers: a cache tile read as 16-bit pairs
of columns is transposed by ldmatrix on its way there, and a pair becomes two fp16 numbers, exactly. Even and odd
columns have an accumulator each and meet again in the store.

Three partitions work on a tile at a time: one warp copies it to shared memory (TMA), four warps compute the scores and
their softmax, and eight (the default partition) multiply the weights with the values. Barriers of a tile's stage:
`full`, copied; `weighed`, its weights are there; `empty`, both products have read it. There are as many buffers of
weights as stages, so that what is `full` again has also let go of its weights.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)

from ..triton.launch import LN_2
from ..triton.pairs import PAIRS_TO_FP16
from . import fp8_weights
from .dialect import barrier, tma_load

# Constants by their names: one read as an attribute of a module is not part of the key of Triton's cache.
from .fp8_weights import BOX, BUFFERS, STAGES, score_views, values_view
from .fp8_weights import REGISTERS as FP8_WEIGHTS_REGISTERS
from .partials import WORDS, store_pairs, store_partial_pairs
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
    REGISTERS,
    barriers_of_pieces,
    bounds,
    clear_unseen,
    follow,
    hand_over,
    hide_unseen,
    must_rescale,
    no_weights,
    publish,
    store_lse,
    take,
    unknown_zero,
    visible,
    weights,
)

KEYS = gl.constexpr(16)  # of a slice: as many as a product takes


@gluon.jit
def _halves(pairs):
    """int16 pairs of e4m3 columns, two keys to a register -> their even and their odd columns in fp16."""
    # Not pure: else ptxas moves the conversion below the wait that follows it.
    return gl.inline_asm_elementwise(
        PAIRS_TO_FP16, "=r,=r,r", [pairs], dtype=(gl.float16, gl.float16), is_pure=False, pack=2
    )


@gluon.jit
def _columns(values, step, part: gl.constexpr, LAYOUT: gl.constexpr):
    """Of KEYS of the keys of a tile [TILE, pairs], transposed: even and odd columns in fp16."""
    pairs = values.index(step % STAGES).slice(part * KEYS, KEYS, dim=0).permute((1, 0)).load(LAYOUT)
    return _halves(pairs)


@gluon.jit
def _copy(shared, PAGE: gl.constexpr):
    """The TMA partition."""
    (
        latent_boxes, rope_boxes, query_boxes, query_rope_boxes, latents, ropes, q_latent, q_rope, full, empty,
        query_ready, query_read, block_tables, stride_table, page_rows, plan, lens, first_row, rows, q_len, window,
    ) = shared  # fmt: skip
    seq_lens, stride_lens, capacity = lens
    first_request, end_request, offset, quota = plan
    PARTS: gl.constexpr = 1 if PAGE >= TILE else TILE // PAGE
    ROWS: gl.constexpr = TILE // PARTS
    step = first_request * 0
    pieces = first_request * 0
    request = first_request
    while request < end_request:
        length, first, low, high, units = piece(request, offset, quota, seq_lens, stride_lens, capacity, q_len, window)
        table = block_tables + request.to(gl.int64) * stride_table
        last_page = (length - 1) // PAGE
        # The query first: it would wait for whatever is asked for before it.
        mbarrier.wait(query_read, (pieces & 1) ^ 1)
        mbarrier.expect(query_ready, TILE * (RANK + ROPE))
        query_row = request * rows + first_row
        for box in gl.static_range(RANK // BOX):
            tma_load(query_boxes, [query_row, box * BOX], query_ready, q_latent.index(box))
        tma_load(query_rope_boxes, [query_row, RANK], query_ready, q_rope)
        for tile in range(first + low, first + high):
            stage = step % STAGES
            # The second half of the last tile may lie past the request's pages: any of them will do.
            page = gl.load(table + gl.minimum(tile * TILE // PAGE, last_page))
            second = gl.load(table + gl.minimum(tile * PARTS + 1, last_page)) if PARTS == 2 else page
            mbarrier.wait(empty.index(stage), ((step // STAGES) & 1) ^ 1)
            ready = full.index(stage)
            mbarrier.expect(ready, TILE * (RANK + ROPE))
            for part in gl.static_range(PARTS):
                row = (page if part == 0 else second) * page_rows + (tile * TILE + part * ROWS) % PAGE
                for box in gl.static_range(RANK // BOX):
                    where = (stage * (RANK // BOX) + box) * PARTS + part
                    tma_load(latent_boxes, [row, box * BOX], ready, latents.index(where))
                tma_load(rope_boxes, [row, RANK], ready, ropes.index(stage * PARTS + part))
            step += 1
        offset -= units
        request += 1
        pieces += 1


@gluon.jit
def _weigh(shared):
    """The softmax partition: weights of each tile, then 1 / total and the LSE of each piece."""
    (
        latents, ropes, q_boxes, q_rope, weight_buffers, rescales, rescaled, state, full, empty, weighed, query_ready,
        query_read, finished, taken, plan, lens, first_row, rows, heads, q_len, window, causal, scale_log2,
    ) = shared  # fmt: skip
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TILE, 32])
    PAIRS: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    seq_lens, stride_lens, capacity = lens
    first_request, end_request, offset, quota = plan
    keys, rope_keys, q_latents = score_views(latents, ropes, q_boxes)
    values = values_view(latents)
    zeros = gl.full([TILE, TILE], 0.0, gl.float32, layout=SCORES)
    column = gl.arange(0, TILE, layout=gl.SliceLayout(0, SCORES))
    row = first_row + gl.arange(0, TILE, layout=gl.SliceLayout(1, SCORES))
    step = first_request * 0
    pieces = first_request * 0
    request = first_request
    while request < end_request:
        length, first, begin_tile, end_tile, units = piece(
            request, offset, quota, seq_lens, stride_lens, capacity, q_len, window
        )
        low, high = visible(row, heads, length, q_len, window, causal)
        any_low, all_low, all_high = bounds(first_row, rows, heads, length, q_len, window, causal)
        mbarrier.wait(query_ready, pieces & 1)
        peak = gl.full([TILE], -float("inf"), gl.float32, layout=gl.SliceLayout(1, SCORES))
        total = no_weights()
        zero = unknown_zero(capacity)
        q_index = zero
        for tile in range(first + begin_tile, first + end_tile):
            stage = step % STAGES
            first_key = tile * TILE
            q_latent = q_latents.index(q_index)
            q_index += zero
            mbarrier.wait(full.index(stage), (step // STAGES) & 1)
            # Two sums, for the FP8 units keep about 14 bits of one: the longer it is, the larger the error.
            left = keys.index(stage).slice(0, HALF, dim=1).permute((1, 0))
            right = keys.index(stage).slice(HALF, HALF, dim=1).permute((1, 0))
            rope = rope_keys.index(stage).permute((1, 0))
            scores = warpgroup_mma(q_latent.slice(0, HALF, dim=1), left, zeros, use_acc=False, is_async=True)
            scores = warpgroup_mma(q_rope, rope, scores, is_async=True)
            others = warpgroup_mma(q_latent.slice(HALF, HALF, dim=1), right, zeros, use_acc=False, is_async=True)
            scores, others = warpgroup_mma_wait(0, deps=(scores, others))
            scores = scores + others
            if tile + 1 == first + end_tile:
                mbarrier.arrive(query_read, count=1)
            if (first_key + TILE > all_high) | (first_key < all_low):
                scores = hide_unseen(scores, first_key + column, low, high)
                if (first_key + TILE > length) | (first_key < any_low):
                    clear_unseen(values.index(stage), first_key, any_low, length, PAIRS, RANK // 2, 64)
            peak, shift, rescale = follow(scores, peak, scale_log2, 0.0)
            weight, total = weights(scores, total, scale_log2, shift, rescale)
            weight_buffers.index(stage).store(weight.to(gl.float16))
            publish(rescale, rescales.index(stage), rescaled.index(stage), weighed.index(stage))
            step += 1
        if begin_tile >= end_tile:
            mbarrier.arrive(query_read, count=1)
        hand_over(peak, total, state, finished, taken, pieces)
        offset -= units
        request += 1
        pieces += 1


@gluon.jit
def _sum_values(
    shared, ROWS: gl.constexpr, FULL: gl.constexpr, TWO_PAIRS: gl.constexpr, FOUR_PAIRS: gl.constexpr
):  # fmt: skip
    """The default partition: the weighted sum of the values of each piece, and its store."""
    (
        out, lse, wants_lse, partial, partial_lse, records, latents, weight_buffers, rescales, rescaled, state, empty,
        weighed, finished, taken, plan, lens, row_tile, row_tiles, rows, batch, worker, workers, q_len, window,
        output_scale,
    ) = shared  # fmt: skip
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [8, 1], [16, ROWS, 16])
    VALUES: gl.constexpr = gl.DotOperandLayout(0, SUMS, 2)
    PER_ROW: gl.constexpr = gl.SliceLayout(0, SUMS)
    SLICES: gl.constexpr = TILE // KEYS
    PAIRS: gl.constexpr = RANK // 2
    seq_lens, stride_lens, capacity = lens
    first_request, end_request, offset, quota = plan
    values = values_view(latents)
    tile_row = gl.arange(0, ROWS, layout=PER_ROW)
    step = first_request * 0
    pieces = first_request * 0
    start_records(records, batch, workers, worker, row_tile)
    request = first_request
    while request < end_request:
        length, first, begin_tile, end_tile, units = piece(
            request, offset, quota, seq_lens, stride_lens, capacity, q_len, window
        )
        even = warpgroup_mma_init(gl.full([PAIRS, ROWS], 0.0, gl.float32, layout=SUMS))
        odd = warpgroup_mma_init(gl.full([PAIRS, ROWS], 0.0, gl.float32, layout=SUMS))
        mbarrier.wait(weighed.index(step % STAGES), (step // STAGES) & 1, pred=begin_tile < end_tile)
        next_even, next_odd = _columns(values, step, 0, VALUES)
        rescale_next = must_rescale(rescaled.index(step % STAGES))
        last_even = next_even
        last_odd = next_odd
        for tile in range(begin_tile, end_tile):
            stage = step % STAGES
            if rescale_next:
                even, odd = warpgroup_mma_wait(0, deps=(even, odd))
                rescale = rescales.index(stage).slice(0, ROWS).load(PER_ROW)
                even = warpgroup_mma_init(even * rescale[None, :])
                odd = warpgroup_mma_init(odd * rescale[None, :])
            weight = weight_buffers.index(stage).slice(0, ROWS, dim=0)
            for k in gl.static_range(SLICES):
                part = weight.slice(k * KEYS, KEYS, dim=1).permute((1, 0))
                even = warpgroup_mma(next_even, part, even, is_async=True)
                odd = warpgroup_mma(next_odd, part, odd, is_async=True)
                # The slice before has been multiplied, and before the first one the last tile.
                last_even, last_odd = warpgroup_mma_wait(2, deps=(last_even, last_odd))
                last_even = next_even
                last_odd = next_odd
                if k == 0:
                    mbarrier.arrive(empty.index((step + STAGES - 1) % STAGES), count=1, pred=tile > begin_tile)
                if k + 1 < SLICES:
                    next_even, next_odd = _columns(values, step, k + 1, VALUES)
                else:
                    # Of the next tile, if there is one.
                    later = step + 1
                    mbarrier.wait(weighed.index(later % STAGES), (later // STAGES) & 1, pred=tile + 1 < end_tile)
                    next_even, next_odd = _columns(values, later, 0, VALUES)
                    rescale_next = must_rescale(rescaled.index(later % STAGES))
            step += 1
        even, odd, last_even, last_odd = warpgroup_mma_wait(0, deps=(even, odd, last_even, last_odd))
        mbarrier.arrive(empty.index((step + STAGES - 1) % STAGES), count=1, pred=begin_tile < end_tile)
        norm, row_lse = take(state, finished, taken, pieces, ROWS, PER_ROW)
        record_piece(records, batch, workers, request, worker, begin_tile, units, offset, quota, row_tile)
        pieces += 1
        flat_row = request.to(gl.int64) * rows + row_tile * ROWS
        live_rows = gl.minimum(rows - row_tile * ROWS, ROWS)
        if is_whole(worker, begin_tile, units, offset, quota):
            if wants_lse != 0:
                store_lse(lse + flat_row, row_lse * LN_2, live_rows)
            result = out + flat_row * WORDS
            store_pairs(result, even, odd, norm * output_scale, live_rows, TWO_PAIRS, FOUR_PAIRS, FULL)
        else:
            slot_row = first_slot_row(worker, begin_tile, row_tile, row_tiles, ROWS)
            store_lse(partial_lse + slot_row, row_lse, live_rows)
            store_partial_pairs(partial + slot_row * WORDS, even, odd, norm, tile_row, 0, SUMS)
        offset -= units
        request += 1


@gluon.jit(do_not_specialize=UNSPECIALIZED)
def decode_fp8_kernel(
    latent_boxes, rope_boxes, query_boxes, query_rope_boxes, block_tables, seq_lens, out, lse, wants_lse, partial,
    partial_lse, records, scale_log2, output_scale, batch, q_len, heads, page_rows, capacity, window, causal,
    stride_table, stride_lens, ROWS: gl.constexpr, PAGE: gl.constexpr, FULL: gl.constexpr, WEIGHTS: gl.constexpr,
    TWO_PAIRS: gl.constexpr, FOUR_PAIRS: gl.constexpr,
):  # fmt: skip
    """`out` and `partial` are int32: pairs of columns in bf16 and in fp16.

    The grid is (row tiles, workers). The boxes are of the cache and of the query, each as [rows, 576].
    """
    PARTS: gl.constexpr = 1 if PAGE >= TILE else TILE // PAGE
    row_tile = gl.program_id(0)
    worker = gl.program_id(1)
    row_tiles = gl.num_programs(0)
    workers = gl.num_programs(1)
    rows = q_len * heads
    ask_for(seq_lens)

    latents = gl.allocate_shared_memory(
        gl.float8e4nv, [STAGES * (RANK // BOX) * PARTS, TILE // PARTS, BOX], latent_boxes.layout
    )
    ropes = gl.allocate_shared_memory(gl.float8e4nv, [STAGES * PARTS, TILE // PARTS, ROPE], rope_boxes.layout)
    q_latent = gl.allocate_shared_memory(gl.float8e4nv, [RANK // BOX, TILE, BOX], query_boxes.layout)
    q_rope = gl.allocate_shared_memory(gl.float8e4nv, [TILE, ROPE], query_rope_boxes.layout)
    BITS: gl.constexpr = WEIGHTS.primitive_bitwidth
    IN_FP8: gl.constexpr = WEIGHTS == gl.float8e4nv
    DEPTH: gl.constexpr = BUFFERS if IN_FP8 else STAGES  # of what the softmax hands to the sums
    weight_buffers = gl.allocate_shared_memory(
        WEIGHTS, [DEPTH, TILE, TILE], gl.NVMMASharedLayout(TILE * BITS // 8, BITS, 2)
    )
    rescales = gl.allocate_shared_memory(gl.float32, [DEPTH, TILE], ONE)
    rescaled = gl.allocate_shared_memory(gl.float32, [DEPTH, TILE // 4, 4], EACH_WARP)
    state = gl.allocate_shared_memory(gl.float32, [2, TILE], ONE)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    weighed = gl.allocate_shared_memory(gl.int64, [DEPTH, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=1)
    for buffer in gl.static_range(DEPTH):
        mbarrier.init(weighed.index(buffer), count=1)
    query_ready, query_read, finished, taken = barriers_of_pieces()
    plan = make_plan(worker, workers, seq_lens, stride_lens, batch, capacity, q_len, window, 8)
    ask_for_page(plan, block_tables, stride_table, batch, capacity, PAGE)
    barrier()
    lens = (seq_lens, stride_lens, capacity)
    sums = (
        out, lse, wants_lse, partial, partial_lse, records, latents, weight_buffers, rescales, rescaled, state, empty,
        weighed, finished, taken, plan, lens, row_tile, row_tiles, rows, batch, worker, workers, q_len, window,
        output_scale,
    )  # fmt: skip
    weigh = (
        latents, ropes, q_latent, q_rope, weight_buffers, rescales, rescaled, state, full, empty, weighed, query_ready,
        query_read, finished, taken, plan, lens, row_tile * ROWS, rows, heads, q_len, window, causal, scale_log2,
    )  # fmt: skip
    copy = (
        latent_boxes, rope_boxes, query_boxes, query_rope_boxes, latents, ropes, q_latent, q_rope, full, empty,
        query_ready, query_read, block_tables, stride_table, page_rows, plan, lens, row_tile * ROWS, rows, q_len,
        window,
    )  # fmt: skip
    gl.warp_specialize(
        [
            (fp8_weights.sum_values if IN_FP8 else _sum_values, (sums, ROWS, FULL, TWO_PAIRS, FOUR_PAIRS)),
            (fp8_weights.weigh if IN_FP8 else _weigh, (weigh,)),
            (_copy, (copy, PAGE)),
        ],
        [4, 1],
        [FP8_WEIGHTS_REGISTERS if IN_FP8 else REGISTERS, 24],
    )
