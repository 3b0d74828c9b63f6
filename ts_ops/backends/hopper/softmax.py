"""What the softmax of both decode kernels does: masks, the running maximum, the totals of a piece.

A piece is a run of key tiles of one request (see plan.py). Rows are the q_len x H query rows of a request, flattened
so that all new tokens share the keys they load; a block owns ROWS of them, padded to `TILE` for the score product.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from .plan import TILE

# The maximum that weights are relative to follows the true one only where it falls behind by a factor of 2^8: weights
# stay exact in fp16 and bf16 up to there, and the accumulator need not be rescaled at nearly every tile.
LAZY = gl.constexpr(8.0)
# In FP8 they are relative to 2^-4 of the maximum, when it is followed: the least normal e4m3 is 2^-6, the greatest 448.
FP8_HEADROOM = gl.constexpr(4.0)
REGISTERS = gl.constexpr(104)  # a thread of this partition; the sums take what is left
# Layouts: of small arrays in shared memory, of `rescaled` there, and, in the partition of sums, of a row a thread and
# of the four minima.
ONE = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))
EACH_WARP = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
EACH_ROW = gl.constexpr(gl.BlockedLayout([1], [32], [8], [0]))
FOUR = gl.constexpr(gl.BlockedLayout([1, 4], [32, 1], [8, 1], [1, 0]))
# Of the accumulators of scores, [TILE, TILE]: the rows, and the four lanes that share one. There weights are added up.
QUADS = gl.constexpr(
    gl.DistributedLinearLayout(
        reg_bases=[[8, 0]], lane_bases=[[0, 1], [0, 2], [1, 0], [2, 0], [4, 0]], warp_bases=[[16, 0], [32, 0]],
        block_bases=[], shape=[TILE.value, 4],
    )
)  # fmt: skip


@gluon.jit
def unknown_zero(capacity):
    """0, though no compiler can know.

    The query is addressed by an index that grows by it at each tile. Else the descriptors of the query's parts, two
    registers each, are kept over the loop, and the softmax spills.
    """
    return capacity >> 31


@gluon.jit
def late(number):
    """The same, but no compiler knows, nor computes what follows from it before this."""
    return gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [number], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def visible(row, heads, length, q_len, window, causal):
    """Keys [low, high) that query row `row`, of q_len x heads, sees of a request of `length` keys."""
    position = gl.minimum(row // heads, q_len - 1)
    high = gl.where(causal != 0, gl.maximum(length - (q_len - 1) + position, 0), length)
    low = gl.where(window >= 0, gl.maximum(length - q_len - window + position, 0), 0)
    return low, high


@gluon.jit
def bounds(first_row, rows, heads, length, q_len, window, causal):
    """Of a block's rows: the least low, the greatest low and the least high."""
    any_low, all_high = visible(first_row, heads, length, q_len, window, causal)
    all_low, _ = visible(gl.minimum(first_row + TILE, rows) - 1, heads, length, q_len, window, causal)
    return any_low, all_low, all_high


@gluon.jit
def hide_unseen(scores, key, low, high):
    seen = (key[None, :] >= low[:, None]) & (key[None, :] < high[:, None])
    return gl.where(seen, scores, -float("inf"))


@gluon.jit
def left_and_right(values):
    """The halves of the columns, in the registers that hold them."""
    return gl.split(gl.permute(gl.reshape(values, [values.shape[0], 2, values.shape[1] // 2]), [0, 2, 1]))


@gluon.jit
def _row_peaks(scores, LAYOUT: gl.constexpr):
    """The greatest score of a row; pairwise, for Triton takes one after the other, and each waits for the last."""
    for _ in gl.static_range(3):
        left, right = left_and_right(scores)
        scores = gl.maximum(left, right)
    return gl.convert_layout(gl.max(scores, axis=1), LAYOUT)


@gluon.jit
def no_weights():
    """A total of `weights`: the lanes' sums, to be added up at the end of a piece."""
    return gl.full([TILE, 4], 0.0, gl.float32, layout=QUADS)


@gluon.jit
def add_weights(total, rescale, weight):
    for _ in gl.static_range(3):
        left, right = left_and_right(weight)
        weight = left + right
    even, odd = gl.split(gl.reshape(weight, [TILE, 4, 2]))
    rescale = gl.convert_layout(rescale, gl.SliceLayout(1, QUADS))
    return total * rescale[:, None] + gl.convert_layout(even + odd, QUADS)


@gluon.jit
def follow(scores, peak, scale_log2, HEADROOM: gl.constexpr):
    """What weights of these scores are relative to, which may grow -> (peak, the same but finite, rescale)."""
    ROWS: gl.constexpr = peak.type.layout
    tile_peak = _row_peaks(scores, ROWS) * scale_log2
    peak_then = gl.where(tile_peak > peak + LAZY, tile_peak - HEADROOM, peak)
    shift = gl.where(peak_then == -float("inf"), 0.0, peak_then)  # a row that has seen no key yet
    rescale = gl.exp2(peak - shift)
    # What has been summed is 0 where the peak was -inf: nothing to rescale.
    return peak_then, shift, gl.where(peak == -float("inf"), 1.0, rescale)


@gluon.jit
def weights(scores, total, scale_log2, shift, rescale):
    """exp2 of the scaled scores relative to what `follow` says -> (weights, total)."""
    weight = gl.exp2(scores * scale_log2 - shift[:, None])
    return weight, add_weights(total, rescale, weight)


@gluon.jit
def clear_unseen(values, first_key, low, high, LAYOUT: gl.constexpr, columns: gl.constexpr, CHUNK: gl.constexpr):
    """Zero, in shared memory [TILE, columns], the keys outside [low, high): their weights are 0, but 0 * NaN is NaN."""
    key = first_key + gl.arange(0, TILE, layout=gl.SliceLayout(1, LAYOUT))
    seen = (key >= low) & (key < high)
    for start in gl.static_range(0, columns, CHUNK):
        part = values.slice(start, CHUNK, dim=1)
        tile = part.load(LAYOUT)
        part.store(gl.where(seen[:, None], tile, gl.full([TILE, CHUNK], 0, tile.dtype, layout=LAYOUT)))


@gluon.jit
def _least_of_warp(values):
    """The least of a warp's rows, in each of them. Of numbers that are not negative, hence in the order of bits."""
    least = gl.inline_asm_elementwise(
        """{
        .reg .b32 least;
        min.u32 least, $2, $3;
        redux.sync.min.u32 least, least, 0xffffffff;
        mov.b32 $0, least;
        mov.b32 $1, least;
        }""",
        "=r,=r,r,r", [values.to(gl.int32, bitcast=True)], dtype=gl.int32, is_pure=True, pack=2,
    )  # fmt: skip
    return least.to(gl.float32, bitcast=True)


@gluon.jit
def tell(rescale, rescales, rescaled):
    """Tell the sums what to rescale by before they add a tile.

    `rescaled` [TILE // 4, 4] is told the least of each warp's rows, once for each of them; `must_rescale` reads one.
    """
    rescales.store(rescale)
    rescaled.store(gl.permute(gl.reshape(_least_of_warp(rescale), [4, TILE // 4]), [1, 0]))


@gluon.jit
def publish(rescale, rescales, rescaled, weighed):
    """The same, and that the tile's weights, stored before for wgmma to read, are there."""
    tell(rescale, rescales, rescaled)
    fence_async_shared()
    mbarrier.arrive(weighed, count=1)


@gluon.jit
def must_rescale(rescaled):
    """Whether what `tell` told of a tile asks for any row to be rescaled."""
    return gl.min(gl.reshape(rescaled.slice(0, 1, dim=0).load(FOUR), [4]), axis=0) < 1.0


@gluon.jit
def barriers_of_pieces():
    """(query_ready, query_read, finished, taken): what is waited for once a piece."""
    barriers = gl.allocate_shared_memory(gl.int64, [4, 1], mbarrier.MBarrierLayout())
    for index in gl.static_range(4):
        mbarrier.init(barriers.index(index), count=1)
    return barriers.index(0), barriers.index(1), barriers.index(2), barriers.index(3)


@gluon.jit
def hand_over(peak, total, state, finished, taken, pieces):
    """Give 1 / total and the LSE in base 2 of a piece's rows to `take`, once it has taken those of the piece before.

    Rows that saw no key: 0 and -inf.
    """
    ROWS: gl.constexpr = peak.type.layout
    total = gl.convert_layout(gl.sum(total, axis=1), ROWS)
    empty = total == 0.0
    norm = gl.where(empty, 0.0, 1.0 / total)
    row_lse = gl.where(empty, -float("inf"), peak + gl.log2(total))
    mbarrier.wait(taken, (pieces & 1) ^ 1)
    state.index(0).store(norm)
    state.index(1).store(row_lse)
    mbarrier.arrive(finished, count=1)


@gluon.jit
def take(state, finished, taken, pieces, ROWS: gl.constexpr, PER_ROW: gl.constexpr):
    """(1 / total, LSE in base 2) of a piece, the LSE in a layout that has each row once."""
    mbarrier.wait(finished, pieces & 1)
    norm = state.index(0).slice(0, ROWS).load(PER_ROW)
    row_lse = state.index(1).slice(0, ROWS).load(EACH_ROW)
    mbarrier.arrive(taken, count=1)
    return norm, row_lse


@gluon.jit
def store_lse(pointer, row_lse, live_rows):
    """The LSE of `take`, a row an element."""
    row = gl.arange(0, row_lse.shape[0], layout=EACH_ROW)
    gl.store(pointer + row, row_lse, mask=row < live_rows)


@gluon.jit
def store(pointers, values, live, FULL: gl.constexpr):
    """Where every row is live, without a mask: a store then takes one instruction, not three."""
    if FULL:
        gl.store(pointers, values)
    else:
        gl.store(pointers, values, mask=live)
