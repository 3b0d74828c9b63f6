"""What the kernels that move rows share: merge.py, cache.py and pack.py.

They are bound by memory, so all of them work alike. A program owns a small two-dimensional tile, rows by columns, and
loads all of it before it stores any of it: Triton keeps loads and stores in the order written, and a load behind a
store would wait for the data of that store. Rows are contiguous, so a thread moves 16 bytes at a time.

A row of D columns is a body, the largest power of two within D, and a tail, the rest rounded up to a power of two.
One tile of next_power_of_2(576) = 1024 columns would leave 44 % of the lanes idle; 512 + 64 leaves none.
"""

import triton
import triton.language as tl

FP8_MAX = tl.constexpr(448.0)
MAX_ROWS = 128  # of a program: one for each thread, so that the bookkeeping of narrow rows stays in registers


def body_and_tail(dim: int) -> tuple[int, int]:
    """Columns of the two tiles that cover a row of `dim` columns; no tail (0) where `dim` is a power of two."""
    body = 1 << (dim.bit_length() - 1)
    return body, triton.next_power_of_2(dim - body) if dim > body else 0


def tile_height(budget: int, row: int) -> int:
    """Rows of size `row` that a program takes to hold `budget` (both powers of two, in one unit); at least one."""
    return max(1, min(MAX_ROWS, budget // row))


def token_and_head_tile(rows: int, heads: int) -> tuple[int, int]:
    """Tokens and heads whose product is `rows`, a power of two, such that the head tiles divide `heads`."""
    head_tile = min(rows, heads & -heads)
    return rows // head_tile, head_tile


@triton.jit
def tile_rows(tokens, heads, BLOCK_T: tl.constexpr, BLOCK_H: tl.constexpr):
    """Token, head and validity of the program's rows, each [BLOCK_T * BLOCK_H]; BLOCK_H divides `heads`.

    int64, so that no product with a stride overflows. Programs that follow each other own neighbouring heads.
    """
    head_tiles = heads // BLOCK_H
    row = tl.arange(0, BLOCK_T * BLOCK_H)
    token = (tl.program_id(0) // head_tiles).to(tl.int64) * BLOCK_T + row // BLOCK_H
    head = (tl.program_id(0) % head_tiles).to(tl.int64) * BLOCK_H + row % BLOCK_H
    return token, head, token < tokens


@triton.jit
def load_rows(pointers, live, COLUMNS: tl.constexpr, BLOCK: tl.constexpr):
    """COLUMNS columns of the rows at `pointers` [rows] as [rows, BLOCK]; 0 beyond them and where not `live`."""
    column = tl.arange(0, BLOCK)
    mask = live[:, None]
    if COLUMNS < BLOCK:
        mask = mask & (column < COLUMNS)[None, :]
    return tl.load(pointers[:, None] + column[None, :], mask=mask, other=0.0)


@triton.jit
def store_rows(pointers, values, live, COLUMNS: tl.constexpr, BLOCK: tl.constexpr):
    """Store `values` [rows, BLOCK], in the dtype of the memory, to COLUMNS columns of the live rows at `pointers`."""
    column = tl.arange(0, BLOCK)
    mask = live[:, None]
    if COLUMNS < BLOCK:
        mask = mask & (column < COLUMNS)[None, :]
    tl.store(pointers[:, None] + column[None, :], values.to(pointers.dtype.element_ty), mask=mask)


@triton.jit
def saturate(values):
    """Clamp fp32 to the range of e4m3; a NaN stays one."""
    return tl.where(values > FP8_MAX, FP8_MAX, tl.where(values < -FP8_MAX, -FP8_MAX, values))
