"""The softmax and the sums of decode_fp8.py with weights in FP8 too: faster, and less exact.

Vᵀ stays the operand that comes from registers. What ldmatrix has transposed as 16-bit pairs of columns, `_columns`
sorts into even and odd ones, four keys to a register. These keys are not next to each other, so the weights are stored
in the order in which they come, `_in_order_of_columns`.

The products take half as long as in FP16, and the softmax decides the pace. So the scores of the next tile are asked
for in parts between the steps of this one's softmax, for wgmma lets a warp go on only while few are waiting. That
needs registers, which sums in halves of the columns leave over; and it needs the next tile early, so that a stage is
`empty` when its last values are in registers, before they are multiplied. Hence one more buffer of weights than stages.

64 query rows by 64 keys ask as much of shared memory as of the tensor cores where both are read from there, and all
partitions share it. So the query's left half is read once a piece, into registers.
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
from .dialect import view
from .partials import WORDS, store_pairs, store_partial_pairs
from .plan import HALF, RANK, ROPE, TILE, first_slot_row, is_whole, piece, record_piece, start_records
from .softmax import (
    FP8_HEADROOM,
    add_weights,
    bounds,
    clear_unseen,
    follow,
    hand_over,
    hide_unseen,
    left_and_right,
    must_rescale,
    no_weights,
    publish,
    store_lse,
    take,
    unknown_zero,
    visible,
)

STAGES = gl.constexpr(4)
BUFFERS = gl.constexpr(5)  # of weights
REGISTERS = gl.constexpr(136)  # a thread of the softmax
BOX = gl.constexpr(128)  # columns of a TMA copy
BLOCK = gl.constexpr(16)  # keys that ldmatrix transposes at once
KEYS = gl.constexpr(32)  # of a slice: as many as a product takes


@gluon.jit
def score_views(latents, ropes, q_boxes):
    """Of the boxes in shared memory: keys and rope keys of each stage, and the latent columns of the query."""
    SWIZZLED: gl.constexpr = gl.NVMMASharedLayout(128, 8, 2)
    keys = view(latents, gl.float8e4nv, [STAGES, TILE, RANK], SWIZZLED)
    rope_keys = view(ropes, gl.float8e4nv, [STAGES, TILE, ROPE], gl.NVMMASharedLayout(64, 8, 2))
    return keys, rope_keys, view(q_boxes, gl.float8e4nv, [1, TILE, RANK], SWIZZLED)


@gluon.jit
def values_view(latents):
    """Of the same, values as 16-bit pairs of columns."""
    return view(latents, gl.int16, [STAGES, TILE, RANK // 2], gl.NVMMASharedLayout(128, 16, 2))


@gluon.jit
def _columns(pairs, more_pairs, LAYOUT: gl.constexpr):
    """int16 pairs of columns of 16 keys and of 16 more -> their even and their odd columns, as operands."""
    even, odd = gl.inline_asm_elementwise(
        "prmt.b32 $0, $2, $3, 0x6420; prmt.b32 $1, $2, $3, 0x7531;",
        "=r,=r,r,r", [pairs, more_pairs], dtype=(gl.int16, gl.int16), is_pure=False, pack=2,
    )  # fmt: skip
    return _numbers(even, LAYOUT), _numbers(odd, LAYOUT)


@gluon.jit
def _numbers(pairs, LAYOUT: gl.constexpr):
    """16-bit pairs of keys as e4m3; no instructions."""
    both = gl.join(pairs.to(gl.int8), (pairs >> 8).to(gl.int8))
    numbers = gl.reshape(both, [pairs.shape[0], 2 * pairs.shape[1]])
    return gl.convert_layout(numbers, LAYOUT).to(gl.float8e4nv, bitcast=True)


@gluon.jit
def _in_order_of_columns(weight):
    """[rows, keys] with the keys as `_columns` has them: bits 0, 4, 1, 2, 3 of a key, from the lowest."""
    bits = gl.reshape(weight, [weight.shape[0], weight.shape[1] // 32, 2, 2, 4, 2])
    return gl.reshape(gl.permute(bits, [0, 1, 3, 4, 2, 5]), weight.shape)


@gluon.jit
def _pairs(values, step, part: gl.constexpr, LAYOUT: gl.constexpr):
    """Slice part // 2 of the keys of a tile [TILE, pairs] and half part % 2 of its columns, transposed; two blocks."""
    block = values.index(step % STAGES).slice(part // 2 * KEYS, KEYS, dim=0)
    block = block.slice(part % 2 * (HALF // 2), HALF // 2, dim=1).permute((1, 0))
    return block.slice(0, BLOCK, dim=1).load(LAYOUT), block.slice(BLOCK, BLOCK, dim=1).load(LAYOUT)


@gluon.jit
def _times(values, factors):
    # Not pure: the accumulators must be read before the products that come next.
    return gl.inline_asm_elementwise(
        "mul.rn.f32 $0, $1, $2;", "=f,f,f", [values, factors], dtype=gl.float32, is_pure=False, pack=1
    )


@gluon.jit
def _exp2(values):
    # Not pure: it stays between the products that it is written between.
    return gl.inline_asm_elementwise(
        "ex2.approx.ftz.f32 $0, $1;", "=f,f", [values], dtype=gl.float32, is_pure=False, pack=1
    )


@gluon.jit
def _scores(scores, query, keys, step, first: gl.constexpr):
    """Add the products of `query`, latent columns from `first` on, or begin with them. Not waited for."""
    latent = keys.index(step % STAGES).slice(first, query.shape[1], dim=1)
    return warpgroup_mma(query, latent.permute((1, 0)), scores, use_acc=first > 0, is_async=True)


@gluon.jit
def _rope_scores(scores, q_rope, rope_keys, step):
    return warpgroup_mma(q_rope, rope_keys.index(step % STAGES).permute((1, 0)), scores, is_async=True)


@gluon.jit
def weigh(shared):
    """The softmax partition: weights of each tile, then 1 / total and the LSE of each piece."""
    (
        latents, ropes, q_boxes, q_rope, weight_buffers, rescales, rescaled, state, full, empty, weighed, query_ready,
        query_read, finished, taken, plan, lens, first_row, rows, heads, q_len, window, causal, scale_log2,
    ) = shared  # fmt: skip
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TILE, 32])
    QUERY: gl.constexpr = gl.DotOperandLayout(0, SCORES, 4)
    PAIRS: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    seq_lens, stride_lens, capacity = lens
    first_request, end_request, offset, quota = plan
    keys, rope_keys, q_latents = score_views(latents, ropes, q_boxes)
    values = values_view(latents)
    zeros = gl.full([TILE, TILE], 0.0, gl.float32, layout=SCORES)
    scale = gl.full([TILE, TILE], scale_log2, gl.float32, layout=SCORES)
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
        q_latent = q_latents.index(q_index)
        q_left = q_latent.slice(0, HALF, dim=1).load(QUERY)
        q_right = q_latent.slice(HALF, HALF, dim=1)
        mbarrier.wait(full.index(step % STAGES), (step // STAGES) & 1, pred=begin_tile < end_tile)
        next_scores = _scores(zeros, q_left, keys, step, 0)
        next_scores = _scores(next_scores, q_right, keys, step, HALF)
        next_scores = _rope_scores(next_scores, q_rope, rope_keys, step)
        for tile in range(first + begin_tile, first + end_tile):
            stage = step % STAGES
            buffer = step % BUFFERS
            first_key = tile * TILE
            # After the last tile its scores once more, and no one looks at them.
            later = gl.where(tile + 1 < first + end_tile, step + 1, step)
            q_index += zero
            q_right = q_latents.index(q_index).slice(HALF, HALF, dim=1)
            next_scores = warpgroup_mma_wait(0, deps=(next_scores,))
            scores = _times(next_scores, scale)
            mbarrier.wait(full.index(later % STAGES), (later // STAGES) & 1)
            next_scores = _scores(next_scores, q_left, keys, later, 0)
            if (first_key + TILE > all_high) | (first_key < all_low):
                scores = hide_unseen(scores, first_key + column, low, high)
                if (first_key + TILE > length) | (first_key < any_low):
                    clear_unseen(values.index(stage), first_key, any_low, length, PAIRS, RANK // 2, 64)
            peak, shift, rescale = follow(scores, peak, 1.0, FP8_HEADROOM)
            left, right = left_and_right(scores - shift[:, None])
            next_scores = _scores(next_scores, q_right.slice(0, BOX, dim=1), keys, later, HALF)
            left = _exp2(left)
            next_scores = _scores(next_scores, q_right.slice(BOX, BOX, dim=1), keys, later, HALF + BOX)
            right = _exp2(right)
            next_scores = _rope_scores(next_scores, q_rope, rope_keys, later)
            weight = gl.reshape(gl.permute(gl.join(left, right), [0, 2, 1]), [TILE, TILE])
            weight = gl.convert_layout(weight, SCORES)
            total = add_weights(total, rescale, weight)
            weight_buffers.index(buffer).store(_in_order_of_columns(weight.to(gl.float8e4nv)))
            publish(rescale, rescales.index(buffer), rescaled.index(buffer), weighed.index(buffer))
            step += 1
        next_scores = warpgroup_mma_wait(0, deps=(next_scores,))
        mbarrier.arrive(query_read, count=1)
        hand_over(peak, total, state, finished, taken, pieces)
        offset -= units
        request += 1
        pieces += 1


@gluon.jit
def sum_values(
    shared, ROWS: gl.constexpr, FULL: gl.constexpr, TWO_PAIRS: gl.constexpr, FOUR_PAIRS: gl.constexpr
):  # fmt: skip
    """The default partition: the weighted sum of the values of each piece, and its store."""
    (
        out, lse, wants_lse, partial, partial_lse, records, latents, weight_buffers, rescales, rescaled, state, empty,
        weighed, finished, taken, plan, lens, row_tile, row_tiles, rows, batch, worker, workers, q_len, window,
        output_scale,
    ) = shared  # fmt: skip
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [8, 1], [16, ROWS, KEYS])
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, SUMS, 4)
    TRANSPOSED: gl.constexpr = gl.DotOperandLayout(0, gl.NVMMADistributedLayout([3, 0], [8, 1], [16, ROWS, BLOCK]), 2)
    PER_ROW: gl.constexpr = gl.SliceLayout(0, SUMS)
    PARTS: gl.constexpr = 2 * TILE // KEYS
    PAIRS: gl.constexpr = HALF // 2
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
        zeros = gl.full([PAIRS, ROWS], 0.0, gl.float32, layout=SUMS)
        left_even = warpgroup_mma_init(zeros)
        left_odd = warpgroup_mma_init(zeros)
        right_even = warpgroup_mma_init(zeros)
        right_odd = warpgroup_mma_init(zeros)
        mbarrier.wait(weighed.index(step % BUFFERS), (step // BUFFERS) & 1, pred=begin_tile < end_tile)
        pairs, more_pairs = _pairs(values, step, 0, TRANSPOSED)
        rescale_next = must_rescale(rescaled.index(step % BUFFERS))
        for tile in range(begin_tile, end_tile):
            stage = step % STAGES
            buffer = step % BUFFERS
            if rescale_next:
                left_even, left_odd, right_even, right_odd = warpgroup_mma_wait(
                    0, deps=(left_even, left_odd, right_even, right_odd)
                )
                rescale = rescales.index(buffer).slice(0, ROWS).load(PER_ROW)[None, :]
                left_even = warpgroup_mma_init(left_even * rescale)
                left_odd = warpgroup_mma_init(left_odd * rescale)
                right_even = warpgroup_mma_init(right_even * rescale)
                right_odd = warpgroup_mma_init(right_odd * rescale)
            for part in gl.static_range(PARTS):
                weight = weight_buffers.index(buffer).slice(0, ROWS, dim=0).slice(part // 2 * KEYS, KEYS, dim=1)
                weight = weight.permute((1, 0))
                even, odd = _columns(pairs, more_pairs, OPERAND)
                if part % 2 == 0:
                    left_even = warpgroup_mma(even, weight, left_even, is_async=True)
                    left_odd = warpgroup_mma(odd, weight, left_odd, is_async=True)
                else:
                    right_even = warpgroup_mma(even, weight, right_even, is_async=True)
                    right_odd = warpgroup_mma(odd, weight, right_odd, is_async=True)
                if part + 1 < PARTS:
                    pairs, more_pairs = _pairs(values, step, part + 1, TRANSPOSED)
                else:
                    mbarrier.arrive(empty.index(stage), count=1)
                    # Of the next tile, if there is one.
                    later = step + 1
                    mbarrier.wait(weighed.index(later % BUFFERS), (later // BUFFERS) & 1, pred=tile + 1 < end_tile)
                    pairs, more_pairs = _pairs(values, later, 0, TRANSPOSED)
                    rescale_next = must_rescale(rescaled.index(later % BUFFERS))
                # The part before has been multiplied, so that registers are free.
                pairs, more_pairs = warpgroup_mma_wait(2, deps=(pairs, more_pairs))
            step += 1
        left_even, left_odd, right_even, right_odd = warpgroup_mma_wait(
            0, deps=(left_even, left_odd, right_even, right_odd)
        )
        norm, row_lse = take(state, finished, taken, pieces, ROWS, PER_ROW)
        record_piece(records, batch, workers, request, worker, begin_tile, units, offset, quota, row_tile)
        pieces += 1
        flat_row = request.to(gl.int64) * rows + row_tile * ROWS
        live_rows = gl.minimum(rows - row_tile * ROWS, ROWS)
        if is_whole(worker, begin_tile, units, offset, quota):
            if wants_lse != 0:
                store_lse(lse + flat_row, row_lse * LN_2, live_rows)
            norm = norm * output_scale
            result = out + flat_row * WORDS
            store_pairs(result, left_even, left_odd, norm, live_rows, TWO_PAIRS, FOUR_PAIRS, FULL)
            store_pairs(result + PAIRS, right_even, right_odd, norm, live_rows, TWO_PAIRS, FOUR_PAIRS, FULL)
        else:
            slot_row = first_slot_row(worker, begin_tile, row_tile, row_tiles, ROWS)
            store_lse(partial_lse + slot_row, row_lse, live_rows)
            block = partial + slot_row * WORDS
            store_partial_pairs(block, left_even, left_odd, norm, tile_row, 0, SUMS)
            store_partial_pairs(block, right_even, right_odd, norm, tile_row, PAIRS, SUMS)
        offset -= units
        request += 1
