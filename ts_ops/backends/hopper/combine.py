"""Merge the pieces of the requests that the plan split (see plan.py) into the output.

A program owns some columns of some rows of one record. Most records name a request that is whole, and its programs
return at once.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_wait as wait_for_kernel_before

from ..triton.launch import LN_2


@triton.jit(do_not_specialize=["records", "lse", "partial_lse", "output_scale", "rows", "row_tiles"])
def combine_kernel(
    records, partial, partial_lse, out, lse, output_scale, rows, row_tiles, ROWS: tl.constexpr, DIM: tl.constexpr,
    COLUMNS: tl.constexpr, PER_PROGRAM: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    wait_for_kernel_before()
    record = records + tl.program_id(1) * 3
    first = tl.load(record + 1)
    last = tl.load(record + 2)
    if last > first:
        request = tl.load(record).to(tl.int64)
        parts = last - first + 1
        column_tile = tl.program_id(0) % (DIM // COLUMNS)
        column = column_tile * COLUMNS + tl.arange(0, COLUMNS)
        begin = tl.program_id(0) // (DIM // COLUMNS) * PER_PROGRAM
        for row in range(begin, tl.minimum(begin + PER_PROGRAM, rows)):
            peak = tl.full([], float("-inf"), tl.float32)
            total = tl.zeros([], tl.float32)
            acc = tl.zeros([COLUMNS], tl.float32)
            for start in range(0, parts, CHUNK):
                part = start + tl.arange(0, CHUNK)
                # The first piece is in slot 1 of its worker, the others in slot 0 of theirs.
                slot_row = (2 * (first + part) + tl.where(part == 0, 1, 0)) * row_tiles * ROWS + row
                lses = tl.load(partial_lse + slot_row, part < parts, float("-inf"))
                values = tl.load(partial + slot_row[:, None] * DIM + column[None, :], (part < parts)[:, None], 0.0)
                peak_then = tl.maximum(peak, tl.max(lses, axis=0))
                shift = tl.where(peak_then == float("-inf"), 0.0, peak_then)
                weights = tl.exp2(lses - shift)
                rescale = tl.exp2(peak - shift)
                acc = acc * rescale + tl.sum(values * weights[:, None], axis=0)
                total = total * rescale + tl.sum(weights, axis=0)
                peak = peak_then
            empty = total == 0.0
            total = tl.where(empty, 1.0, total)
            flat_row = request * rows + row
            tl.store(out + flat_row * DIM + column, (acc * (output_scale / total)).to(out.dtype.element_ty))
            if lse is not None:
                if column_tile == 0:
                    tl.store(lse + flat_row, tl.where(empty, float("-inf"), peak + tl.log2(total)) * LN_2)
