"""Launch the decode kernels of SM90: what they take, the grid, descriptors of query and cache, scratch."""

import functools
import math

import torch
import triton
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from ...meta.contract import FP8, HALVES, Decode
from ...precision import fp8_weights_allowed
from ...workspace import sm_count
from ..triton.launch import LOG2_E, SMALLEST_NORMAL, device_index, on_device, variants_of
from . import partials, plan
from .combine import combine_kernel
from .decode_16bit import decode_16bit_kernel
from .decode_fp8 import decode_fp8_kernel

TILE, RANK, ROPE, WORDS = plan.TILE.value, plan.RANK.value, plan.ROPE.value, partials.WORDS.value
SLACK = plan.SLACK.value
PAGES = (32, 64, 128)
ALIGNMENT = 16  # bytes, of what TMA reads and of what is written
LEAST_COMBINES = 512  # programs of combine.py that fill a GPU
MOST_TOKENS = plan.UNLIMITED.value  # of a request
SWIZZLES = {  # by bytes an element: shared-memory layouts of boxes of latent and of rope columns
    1: (gl.NVMMASharedLayout(128, 8, 2), gl.NVMMASharedLayout(64, 8, 2)),
    2: (gl.NVMMASharedLayout(128, 16, 2),) * 2,
}
KERNELS = decode_fp8_kernel, decode_16bit_kernel, combine_kernel


def why_not(problem: Decode) -> str | None:
    query, cache = problem.query, problem.kv_cache
    rope = problem.head_dim - problem.kv_lora_rank
    page_stride, token_stride = cache.stride(0), cache.stride(1)
    if query.dtype != cache.dtype or query.dtype not in (FP8, *HALVES):
        return f"takes FP8, BF16 or FP16, the same for query and cache, got {query.dtype} and {cache.dtype}"
    if (problem.kv_lora_rank, rope) != (RANK, ROPE):
        return f"takes a kv_lora_rank of {RANK} and {ROPE} rope columns, got {problem.kv_lora_rank} and {rope}"
    if problem.page_size not in PAGES:
        return f"takes pages of {', '.join(map(str, PAGES))} tokens, got {problem.page_size}"
    if problem.local_visible_lens is not None or problem.causal_seqs is not None:
        return "takes neither local_visible_lens nor context parallelism"
    if problem.softmax_scale * LOG2_E < SMALLEST_NORMAL:
        return f"takes a softmax_scale that is a normal positive number, got {problem.softmax_scale}"
    if problem.q_len * problem.heads > TILE * sm_count(problem.device):
        return f"takes at most {TILE} rows of q_len * H for each multiprocessor, got {problem.q_len} * {problem.heads}"
    if problem.num_pages == 0 or token_stride < problem.head_dim:
        return (
            f"takes a kv_cache whose tokens do not overlap, got {problem.num_pages} pages of strides {cache.stride()}"
        )
    if problem.num_pages > 1 and page_stride % token_stride:
        return f"takes a page stride that is a multiple of the token stride, got {page_stride} and {token_stride}"
    if problem.rows >= 2**31 or problem.num_pages * _page_rows(problem) >= 2**31 or problem.capacity >= MOST_TOKENS:
        return "takes fewer than 2**31 rows of the query and of the cache, and 2**30 tokens a request"
    if problem.max_pages > 1 and problem.block_tables.stride(1) != 1:
        return f"takes block_tables with dense rows, got strides {problem.block_tables.stride()}"
    row_stride = _row_stride(query)
    if row_stride < problem.head_dim:
        return f"takes a query whose B * q_len * H rows have one stride, got strides {query.stride()}"
    for name, tensor, stride in (("query", query, row_stride), ("kv_cache", cache, token_stride)):
        if (tensor.data_ptr() | stride * tensor.dtype.itemsize) % ALIGNMENT:
            return f"takes a {name} aligned to {ALIGNMENT} bytes, got strides {tensor.stride()}"
    return None


def compiled(device: torch.device) -> dict[str, int]:
    return {kernel.__name__: variants_of(kernel, device_index(device)) for kernel in KERNELS}


@functools.cache
def tiles(rows: int, sms: int) -> tuple[int, int, int]:
    """(rows of a block, row tiles, workers) for `rows` = q_len * H query rows a request."""
    block_rows = min(TILE, max(16, triton.next_power_of_2(rows)))
    row_tiles = triton.cdiv(rows, block_rows)
    return block_rows, row_tiles, sms // row_tiles


@functools.cache
def combine_grid(block_rows: int, row_tiles: int, batch: int, workers: int) -> tuple[tuple, dict]:
    """The grid of combine.py, and constants that follow from it."""
    pairs, records = row_tiles * block_rows // 2, min(batch, workers)
    # As many pieces of a request at once as an even plan makes of it, if they are not too many, and 8192 words.
    pieces = min(max(triton.next_power_of_2(workers // records), 2), 32)
    parts = 2 * WORDS // min(2 * WORDS, 8192 // pieces)
    while pairs * records * parts < LEAST_COMBINES and parts < 2 * WORDS // 64:
        parts *= 2
    # The even plan leaves a batch whole that nearly fills the workers: its programs only cost their launch.
    fills = -batch % workers * SLACK <= batch
    per_program = 4 if fills and pairs * records * parts >= 4 * LEAST_COMBINES else 1
    constants = {"ROWS": block_rows, "PART": 2 * WORDS // parts, "PER_PROGRAM": per_program, "CHUNK": pieces}
    return (triton.cdiv(pairs, per_program) * parts, records), constants


@functools.cache
def scratch_sizes(batch: int, rows: int, sms: int) -> tuple[int, int, int]:
    """4-byte words of partial results, two of a block each (see plan.py), of their LSEs, and of records."""
    block_rows, row_tiles, workers = tiles(rows, sms)
    states = 2 * workers * row_tiles * block_rows
    return states * WORDS, states, 3 * min(batch, workers)


def mla_decode(problem: Decode, out: Tensor, lse: Tensor | None = None) -> None:
    if out.data_ptr() % ALIGNMENT:
        aligned = torch.empty_like(out)
        mla_decode(problem, aligned, lse)
        out.copy_(aligned)
        return
    rows, tables = problem.q_len * problem.heads, problem.block_tables
    sms = sm_count(problem.device)
    block_rows, row_tiles, workers = tiles(rows, sms)
    dtype = problem.query.dtype
    sizes = scratch_sizes(problem.batch, rows, sms)
    scratch = torch.empty(sum(sizes), dtype=torch.int32, device=problem.device)
    partial, partial_lse, records = scratch.split(sizes)
    partial_lse = partial_lse.view(torch.float32)
    words = out.view(torch.int32)
    lse, wants_lse = (partial_lse, 0) if lse is None else (lse, 1)
    arguments = (
        tables, problem.seq_lens, words if dtype == FP8 else out, lse, wants_lse, partial, partial_lse, records,
        problem.softmax_scale * LOG2_E, problem.output_scale, problem.batch, problem.q_len, problem.heads,
        _page_rows(problem), problem.capacity, min(problem.window_left, problem.capacity + problem.q_len),
        int(problem.is_causal), tables.stride(0), problem.seq_lens.stride(0),
    )  # fmt: skip
    grid, constants = combine_grid(block_rows, row_tiles, problem.batch, workers)
    with on_device(problem.device):
        LAUNCH[dtype](problem, (row_tiles, workers), block_rows, arguments)
        combine_kernel[grid](
            records, partial, partial_lse, words, lse, wants_lse, problem.output_scale, rows, row_tiles,
            TRANSPOSED=dtype == FP8, FROM_BF16=dtype == torch.bfloat16, TO_BF16=dtype != torch.float16, **constants,
            num_warps=2, launch_pdl=True,
        )  # fmt: skip


mla_decode_lse = mla_decode


def _fp8(problem: Decode, grid: tuple[int, int], block_rows: int, arguments: tuple) -> None:
    weights, pairs = (gl.float8e4nv, 128) if fp8_weights_allowed() else (gl.float16, 256)
    two_pairs, four_pairs = _transposed(pairs, block_rows)
    decode_fp8_kernel[grid](
        *_cache_boxes(problem, 128, 64), *_query_boxes(problem, 128, 64), *arguments, ROWS=block_rows,
        PAGE=problem.page_size, FULL=problem.q_len * problem.heads % block_rows == 0, WEIGHTS=weights,
        TWO_PAIRS=two_pairs, FOUR_PAIRS=four_pairs, num_warps=8, maxnreg=128,
    )  # fmt: skip


def _16bit(problem: Decode, grid: tuple[int, int], block_rows: int, arguments: tuple) -> None:
    decode_16bit_kernel[grid](
        *_cache_boxes(problem, 64), *_query_boxes(problem, 64), *arguments, ROWS=block_rows, PAGE=problem.page_size,
        FULL=problem.q_len * problem.heads % TILE == 0, FOUR_COLUMNS=FOUR_COLUMNS, EIGHT_COLUMNS=EIGHT_COLUMNS,
        num_warps=8, maxnreg=128,
    )  # fmt: skip


LAUNCH = {FP8: _fp8} | dict.fromkeys(HALVES, _16bit)

# Layouts in which a thread holds 16 bytes of a row to store, of the part of the accumulators that its warp holds: a
# change of layout that swaps one bit of the lane for one of the register at a time needs no shared memory. Of 64 rows
# and 256 columns in fp32, and from there on in 16 bits:
FOUR_COLUMNS = gl.DistributedLinearLayout(
    reg_bases=[[0, 1], [0, 2], [0, 8], [0, 16], [0, 32], [0, 64]],
    lane_bases=[[8, 0], [0, 4], [1, 0], [2, 0], [4, 0]],
    warp_bases=[[16, 0], [32, 0], [0, 128]], block_bases=[], shape=[TILE, 256],
)  # fmt: skip
EIGHT_COLUMNS = gl.DistributedLinearLayout(
    reg_bases=[[0, 1], [0, 2], [0, 4], [0, 16], [0, 32], [0, 64]],
    lane_bases=[[8, 0], [0, 8], [1, 0], [2, 0], [4, 0]],
    warp_bases=[[16, 0], [32, 0], [0, 128]], block_bases=[], shape=[TILE, 256],
)  # fmt: skip


@functools.cache
def _transposed(pairs: int, rows: int) -> tuple[gl.DistributedLinearLayout, gl.DistributedLinearLayout]:
    """The same for `pairs` of columns and `rows`: two pairs of fp32, and from there on four pairs of bf16."""
    others = [[0, 1 << bit] for bit in range(3, rows.bit_length() - 1)] + [[128, 0]] * (pairs == 256)
    warps = [[16, 0], [32, 0], [64, 0]]
    two = gl.DistributedLinearLayout(
        reg_bases=[[1, 0], [8, 0], *others], lane_bases=[[0, 2], [0, 4], [0, 1], [2, 0], [4, 0]],
        warp_bases=warps, block_bases=[], shape=[pairs, rows],
    )  # fmt: skip
    four = gl.DistributedLinearLayout(
        reg_bases=[[1, 0], [2, 0], *others], lane_bases=[[0, 2], [0, 4], [0, 1], [8, 0], [4, 0]],
        warp_bases=warps, block_bases=[], shape=[pairs, rows],
    )  # fmt: skip
    return two, four


def _page_rows(problem: Decode) -> int:
    """Rows from one page to the next, where the cache is seen as rows of one stride."""
    cache = problem.kv_cache
    return cache.stride(0) // cache.stride(1) if problem.num_pages > 1 else problem.page_size


def _row_stride(query: Tensor) -> int:
    """The stride of the rows [B * q_len * H]; 0 if they have no one stride."""
    if query.is_contiguous() or math.prod(query.shape[:3]) == 1:
        return query.shape[3]
    try:
        return query.view(-1, query.shape[3]).stride(0)
    except RuntimeError:
        return 0


def _query_boxes(problem: Decode, *columns: int) -> list[TensorDescriptor]:
    return _boxes(problem.query, problem.rows, _row_stride(problem.query), TILE, columns)


def _cache_boxes(problem: Decode, *columns: int) -> list[TensorDescriptor]:
    rows = (problem.num_pages - 1) * _page_rows(problem) + problem.page_size
    return _boxes(problem.kv_cache, rows, problem.kv_cache.stride(1), min(problem.page_size, TILE), columns)


def _boxes(tensor: Tensor, rows: int, stride: int, box_rows: int, columns: tuple[int, ...]) -> list[TensorDescriptor]:
    """The tensor as [rows, 576], to be copied in boxes of `box_rows` rows and so many columns."""
    layouts = SWIZZLES[tensor.dtype.itemsize]
    return [
        TensorDescriptor(tensor, [rows, RANK + ROPE], [stride, 1], [box_rows, width], layout)
        for width, layout in zip(columns, layouts)
    ]
