"""Partial results in scratch: where they lie, and their store; the store of FP8's results.

A word is two columns of a row in 16 bits: in the query's dtype, or of FP8 in fp16, which holds any mean of e4m3 values.
Words lie as the accumulators lie in registers, so that a thread stores 16 bytes at a time and exchanges nothing first.
Rows come in pairs, [pair of rows, 2 * WORDS] for the rows of a block, and four words next to each other are of one
thread. Bits of a word's index, from the lowest:

- BF16 and FP16: which row, bit 2 of the pair of columns, its bits 0 and 1, its bits 3 to 7. Of 16 rows, r and r + 8
  are a pair.
- FP8, transposed: which row, bit 3 of the pair of columns, its bits 0 to 2, its bits 4 to 7. Rows 2r and 2r + 1 are a
  pair.
"""

import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from .softmax import store

WORDS = gl.constexpr(256)  # a row


@gluon.jit
def words_of_16bit(row, pair):
    """Index of the words [rows, pairs of columns] in a block."""
    in_row = (row // 16 * 8 + row % 8) * (2 * WORDS) + row // 8 % 2
    return in_row[:, None] + (pair // 4 % 2 * 2 + pair % 4 * 4 + pair // 8 * 16)[None, :]


@gluon.jit
def words_of_fp8(pair, row):
    """Index of the words [pairs of columns, rows] in a block."""
    in_row = pair // 8 % 2 * 2 + pair % 8 * 4 + pair // 16 * 32
    return in_row[:, None] + (row // 2 * (2 * WORDS) + row % 2)[None, :]


@gluon.jit
def store_words(block, index, words, live, LAYOUT: gl.constexpr):
    """32-bit `words` to `block` at `index`, which counts up over every four registers of a thread, where `live`."""
    shape: gl.constexpr = words.shape
    gl.inline_asm_elementwise(
        """{
        .reg .pred live; .reg .b64 to;
        setp.ne.b32 live, $16, 0;
        mad.wide.s32 to, $12, 4, $8;
        @live st.global.v4.b32 [to], {$4, $5, $6, $7};
        }""",
        "=r,=r,=r,=r,r,r,r,r,l,l,l,l,r,r,r,r,r,r,r,r",
        [words, gl.full(shape, block.to(gl.int64), gl.int64, layout=LAYOUT), index, live],
        dtype=gl.int32, is_pure=False, pack=4,
    )  # fmt: skip


@gluon.jit
def word(low, high, dtype: gl.constexpr):
    """Two fp32 numbers as bf16 or fp16."""
    pair: gl.constexpr = "bf16x2" if dtype == gl.bfloat16 else "f16x2"
    return gl.inline_asm_elementwise(
        "cvt.rn." + pair + ".f32 $0, $2, $1;", "=r,f,f", [low, high], dtype=gl.int32, is_pure=True, pack=1
    )


@gluon.jit
def store_partial_pairs(block, even, odd, norm, row, first_pair: gl.constexpr, LAYOUT: gl.constexpr):
    """[pairs of columns, rows] from `first_pair` on, in fp16."""
    words = word(even * norm[None, :], odd * norm[None, :], gl.float16)
    pair = first_pair + gl.arange(0, words.shape[0], layout=gl.SliceLayout(1, LAYOUT))
    everywhere = gl.full(words.shape, 1, gl.int32, layout=LAYOUT)
    store_words(block, words_of_fp8(pair, row), words, everywhere, LAYOUT)


@gluon.jit
def store_pairs(
    rows_of_pairs, even, odd, norm, live_rows, TWO_PAIRS: gl.constexpr, FOUR_PAIRS: gl.constexpr, FULL: gl.constexpr
):  # fmt: skip
    """[pairs of columns, rows] transposed to rows of bf16, 16 bytes a store; rearranged within a warp."""
    pairs = word(even * norm[None, :], odd * norm[None, :], gl.bfloat16)
    pairs = gl.convert_layout(gl.convert_layout(pairs, TWO_PAIRS), FOUR_PAIRS)
    pair = gl.arange(0, pairs.shape[0], layout=gl.SliceLayout(1, FOUR_PAIRS))
    row = gl.arange(0, pairs.shape[1], layout=gl.SliceLayout(0, FOUR_PAIRS))
    store(rows_of_pairs + row[None, :] * WORDS + pair[:, None], pairs, (row < live_rows)[None, :], FULL)


@triton.jit
def rows_of_pair(pair, TRANSPOSED: tl.constexpr):
    """The two rows of a block whose words are in `pair`."""
    if TRANSPOSED:
        first = pair * 2
        second = first + 1
    else:
        first = pair // 8 * 16 + pair % 8
        second = first + 8
    return first, second


@triton.jit
def place_of_word(word, TRANSPOSED: tl.constexpr):
    """(is it the second row's, pair of columns) of a word of a pair of rows."""
    if TRANSPOSED:
        pair = word // 4 % 8 + word // 2 % 2 * 8 + word // 32 * 16
    else:
        pair = word // 4 % 4 + word // 2 % 2 * 4 + word // 16 * 8
    return word % 2 != 0, pair
