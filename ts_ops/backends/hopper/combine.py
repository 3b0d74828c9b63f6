"""Merge the pieces of the requests that the plan split (see plan.py) into the output.

A program owns a part of the words of some pairs of rows of one record (see partials.py). Most records name a request
that is whole, and its programs return at once.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_wait as wait_for_kernel_before

from ..triton.launch import LN_2
from .partials import WORDS, place_of_word, rows_of_pair


@triton.jit
def _states(lses, peak, total):
    """LSEs of more pieces of a row -> (their weights, peak, total, what to rescale sums by)."""
    peak_then = tl.maximum(peak, tl.max(lses, axis=0))
    shift = tl.where(peak_then == float("-inf"), 0.0, peak_then)
    weights = tl.exp2(lses - shift)
    rescale = tl.exp2(peak - shift)
    return weights, peak_then, total * rescale + tl.sum(weights, axis=0), rescale


@triton.jit
def _scale_and_lse(peak, total, output_scale):
    empty = total == 0.0
    total = tl.where(empty, 1.0, total)
    return output_scale / total, tl.where(empty, float("-inf"), peak + tl.log2(total)) * LN_2


@triton.jit
def _numbers(words, BF16: tl.constexpr):
    """The two numbers of a word, in fp32."""
    if BF16:
        low = (words << 16).to(tl.float32, bitcast=True)
        high = (words & -65536).to(tl.float32, bitcast=True)
    else:
        low = words.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
        high = (words >> 16).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    return low, high


@triton.jit
def _word(low, high, BF16: tl.constexpr):
    dtype: tl.constexpr = tl.bfloat16 if BF16 else tl.float16
    low = low.to(dtype).to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
    return low | (high.to(dtype).to(tl.int16, bitcast=True).to(tl.int32) << 16)


@triton.jit(do_not_specialize=["records", "lse", "wants_lse", "partial_lse", "output_scale", "rows", "row_tiles"])
def combine_kernel(
    records, partial, partial_lse, out, lse, wants_lse, output_scale, rows, row_tiles, ROWS: tl.constexpr,
    TRANSPOSED: tl.constexpr, FROM_BF16: tl.constexpr, TO_BF16: tl.constexpr, PART: tl.constexpr,
    PER_PROGRAM: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """`partial` and `out` are int32: two columns in bf16 or fp16.

    With LSE and without are one variant, for another may add in another order.
    """
    PARTS: tl.constexpr = 2 * WORDS // PART
    wait_for_kernel_before()
    record = records + tl.program_id(1) * 3
    first_piece = tl.load(record + 1)
    last_piece = tl.load(record + 2)
    if last_piece > first_piece:
        request = tl.load(record).to(tl.int64)
        pieces = last_piece - first_piece + 1
        part = tl.program_id(0) % PARTS
        word = part * PART + tl.arange(0, PART)
        of_second, column = place_of_word(word, TRANSPOSED)
        begin = tl.program_id(0) // PARTS * PER_PROGRAM
        for pair in range(begin, tl.minimum(begin + PER_PROGRAM, row_tiles * (ROWS // 2))):
            row_tile = pair // (ROWS // 2)
            in_tile = pair % (ROWS // 2)
            first, second = rows_of_pair(in_tile, TRANSPOSED)
            first_row = row_tile * ROWS + first
            second_row = row_tile * ROWS + second
            first_peak = tl.full([], float("-inf"), tl.float32)
            second_peak = first_peak
            first_total = tl.zeros([], tl.float32)
            second_total = first_total
            sums = tl.zeros([PART], tl.float32)
            odd_sums = sums
            for start in range(0, pieces, CHUNK):
                piece = start + tl.arange(0, CHUNK)
                there = piece < pieces
                # The first piece is in slot 1 of its worker, the others in slot 0 of theirs.
                slot = 2 * (first_piece + piece) + tl.where(piece == 0, 1, 0)
                block_row = (slot * row_tiles + row_tile) * ROWS
                words = block_row * WORDS + in_tile * (2 * WORDS)
                values = tl.load(partial + words[:, None] + word[None, :], there[:, None], 0)
                lses = tl.load(partial_lse + block_row + first, there & (first_row < rows), float("-inf"))
                second_lses = tl.load(partial_lse + block_row + second, there & (second_row < rows), float("-inf"))
                weights, first_peak, first_total, rescale = _states(lses, first_peak, first_total)
                other, second_peak, second_total, rescale_other = _states(second_lses, second_peak, second_total)
                weights = tl.where(of_second[None, :], other[:, None], weights[:, None])
                rescale = tl.where(of_second, rescale_other, rescale)
                even, odd = _numbers(values, FROM_BF16)
                sums = sums * rescale + tl.sum(even * weights, axis=0)
                odd_sums = odd_sums * rescale + tl.sum(odd * weights, axis=0)
            first_scale, first_lse = _scale_and_lse(first_peak, first_total, output_scale)
            second_scale, second_lse = _scale_and_lse(second_peak, second_total, output_scale)
            scale = tl.where(of_second, second_scale, first_scale)
            row = tl.where(of_second, second_row, first_row)
            flat_row = request * rows + row
            results = _word(sums * scale, odd_sums * scale, TO_BF16)
            tl.store(out + flat_row * WORDS + column, results, row < rows)
            if (wants_lse != 0) & (part == 0):
                tl.store(lse + request * rows + first_row, first_lse, first_row < rows)
                tl.store(lse + request * rows + second_row, second_lse, second_row < rows)
