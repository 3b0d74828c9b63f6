"""What the softmax partition of both decode kernels does: query rows, masks, the running maximum, the plan's records.

A piece is a run of key tiles of one request (see plan.py). Rows are the q_len x H query rows of a request, flattened
so that all new tokens share the keys they load; a block owns ROWS of them, padded to `TILE` for the score product.
"""

import math

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from .plan import TILE

# The maximum that weights are relative to follows the true one only where it falls behind by a factor of 2^8: weights
# stay exact in fp16 and bf16 up to there, and the accumulator need not be rescaled at nearly every tile.
LAZY = gl.constexpr(8.0)
LN_2 = gl.constexpr(math.log(2.0))  # from base 2 to the natural log of an LSE


@gluon.jit
def visible(row, heads, length, q_len, window, causal):
    """Keys [low, high) that query row `row`, of q_len x heads, sees of a request of `length` keys."""
    position = gl.minimum(row // heads, q_len - 1)
    high = gl.where(causal != 0, gl.maximum(length - (q_len - 1) + position, 0), length)
    low = gl.where(window >= 0, gl.maximum(length - q_len - window + position, 0), 0)
    return low, high


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
def record(records, index, request, first, last):
    """For combine.py: the request whose pieces the workers `first` to `last` hold."""
    gl.store(records + index * 3, request)
    gl.store(records + index * 3 + 1, first)
    gl.store(records + index * 3 + 2, last)


@gluon.jit
def store(pointers, values, live, FULL: gl.constexpr):
    """Where every row is live, without a mask: a store then takes one instruction, not three."""
    if FULL:
        gl.store(pointers, values)
    else:
        gl.store(pointers, values, mask=live)
