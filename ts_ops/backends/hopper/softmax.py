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
# Layouts: of small arrays in shared memory, and, in the partition of sums, of a row a thread and of the four minima.
ONE = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))
EACH_ROW = gl.constexpr(gl.BlockedLayout([1], [32], [8], [0]))
FOUR = gl.constexpr(gl.BlockedLayout([4], [32], [8], [0]))


@gluon.jit
def unknown_zero(capacity):
    """0, though no compiler can know.

    The query is addressed by an index that grows by it at each tile. Else the descriptors of the query's parts, two
    registers each, are kept over the loop, and the softmax spills.
    """
    return capacity >> 31


@gluon.jit
def visible(row, heads, length, q_len, window, causal):
    """Keys [low, high) that query row `row`, of q_len x heads, sees of a request of `length` keys."""
    position = gl.minimum(row // heads, q_len - 1)
    high = gl.where(causal != 0, gl.maximum(length - (q_len - 1) + position, 0), length)
    low = gl.where(window >= 0, gl.maximum(length - q_len - window + position, 0), 0)
    return low, high


@gluon.jit
def bounds(row, first_row, rows, heads, length, q_len, window, causal):
    """Of a block's rows: low and high of each, the least low, the greatest low and the least high."""
    low, high = visible(row, heads, length, q_len, window, causal)
    any_low, all_high = visible(first_row, heads, length, q_len, window, causal)
    all_low, _ = visible(gl.minimum(first_row + TILE, rows) - 1, heads, length, q_len, window, causal)
    return low, high, any_low, all_low, all_high


@gluon.jit
def hide_unseen(scores, key, low, high):
    seen = (key[None, :] >= low[:, None]) & (key[None, :] < high[:, None])
    return gl.where(seen, scores, -float("inf"))


@gluon.jit
def weights(scores, peak, total, scale_log2):
    """exp2 of the scaled scores relative to `peak`, which may grow -> (weights, peak, total, rescale)."""
    tile_peak = gl.max(scores, axis=1) * scale_log2
    peak_then = gl.where(tile_peak > peak + LAZY, tile_peak, peak)
    shift = gl.where(peak_then == -float("inf"), 0.0, peak_then)  # a row that has seen no key yet
    rescale = gl.exp2(peak - shift)
    weight = gl.exp2(scores * scale_log2 - shift[:, None])
    # What has been summed is 0 where the peak was -inf: nothing to rescale.
    rescale = gl.where(peak == -float("inf"), 1.0, rescale)
    return weight, peak_then, total * rescale + gl.sum(weight, axis=1), rescale


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
def publish(rescale, rescales, rescaled, weighed):
    """Tell the sums that a tile's weights, stored before, are there; `rescaled`, the least of a warp, if to rescale."""
    rescales.store(rescale)
    rescaled.store(gl.min(gl.reshape(rescale, [4, TILE // 4]), axis=1))
    fence_async_shared()
    mbarrier.arrive(weighed, count=1)


@gluon.jit
def hand_over(peak, total, state, finished, taken, pieces):
    """Give 1 / total and the LSE in base 2 of a piece's rows to `take`, once it has taken those of the piece before.

    Rows that saw no key: 0 and -inf.
    """
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
def store(pointers, values, live, FULL: gl.constexpr):
    """Where every row is live, without a mask: a store then takes one instruction, not three."""
    if FULL:
        gl.store(pointers, values)
    else:
        gl.store(pointers, values, mask=live)
