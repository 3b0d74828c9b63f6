"""Second step of split-KV decode: merge the partial results of a row's splits.

A program owns BLOCK_D columns of one row. The weights of all splits come from one vector load of their LSEs; the
partials are then summed CHUNK splits at a time, each element read once. A split that saw no key left its partial
unwritten: its LSE of -inf masks the load.
"""

import triton
import triton.language as tl
from torch import Tensor

from .launch import LN_2, OPTIONS, kernel


@kernel(wide=["partial", "out"])
def _combine_kernel(
    partial, partial_lse, out, lse, num_splits: tl.int32, output_scale: tl.float32,
    DIM: tl.constexpr, BLOCK_D: tl.constexpr, SPLITS_PAD: tl.constexpr, CHUNK: tl.constexpr, HAS_LSE: tl.constexpr,
):  # fmt: skip
    column_tiles: tl.constexpr = (DIM + BLOCK_D - 1) // BLOCK_D
    row = (tl.program_id(0) // column_tiles).to(tl.int64)
    column_tile = tl.program_id(0) % column_tiles
    column = column_tile * BLOCK_D + tl.arange(0, BLOCK_D)
    column_live = column < DIM

    split = tl.arange(0, SPLITS_PAD)
    lses = tl.load(partial_lse + row * num_splits + split, mask=split < num_splits, other=float("-inf"))
    peak = tl.max(lses, axis=0)
    shift = tl.where(peak == float("-inf"), 0.0, peak)
    total = tl.sum(tl.exp2(lses - shift), axis=0)
    empty = total == 0.0
    total = tl.where(empty, 1.0, total)
    norm = output_scale / total

    acc = tl.zeros([BLOCK_D], tl.float32)
    for first in range(0, num_splits, CHUNK):
        chunk = first + tl.arange(0, CHUNK)
        chunk_lse = tl.load(partial_lse + row * num_splits + chunk, mask=chunk < num_splits, other=float("-inf"))
        written = chunk_lse != float("-inf")
        pointers = partial + (row * num_splits + chunk)[:, None] * DIM + column[None, :]
        values = tl.load(pointers, mask=written[:, None] & column_live[None, :], other=0.0)
        acc += tl.sum(values * tl.exp2(chunk_lse - shift)[:, None], axis=0)
    tl.store(out + row * DIM + column, (acc * norm).to(out.dtype.element_ty), mask=column_live)
    if HAS_LSE:
        if column_tile == 0:
            tl.store(lse + row, tl.where(empty, float("-inf"), peak + tl.log2(total)) * LN_2)


def combine_splits(
    partial: Tensor, partial_lse: Tensor, out: Tensor, lse: Tensor | None, splits: int, output_scale: float
) -> None:
    """Merge `partial` [rows, splits, D] and `partial_lse` [rows, splits] (flat, base 2) into `out` and `lse`."""
    dim = out.shape[-1]
    rows = out.numel() // dim
    block_d = min(128, max(16, triton.next_power_of_2(dim)))
    splits_pad = triton.next_power_of_2(splits)
    _combine_kernel.launch(
        (rows * triton.cdiv(dim, block_d),),
        partial, partial_lse, out, lse, splits, output_scale,
        DIM=dim, BLOCK_D=block_d, SPLITS_PAD=splits_pad, CHUNK=min(32, splits_pad), HAS_LSE=lse is not None,
        num_warps=4, **OPTIONS,
    )  # fmt: skip
