"""TS_OPS_CHECK=1: before a backend runs, check the values that only a device read can show.

The contract (`meta/contract.py`) checks shapes and dtypes. Lengths, page ids, slots and scales are values on the
device, which no operator reads (law 7), and a wrong one gives an undefined result. With TS_OPS_CHECK=1 in the
environment when ts_ops is imported, each call first copies them to the host. ValueError names the operator, the
argument, the first request at fault and its value; nothing has been written then. Reading waits for the device, so this
is for finding a bug, not for serving, and under CUDA graph capture a call raises RuntimeError.

`dispatch._candidates` takes its backends from `guarded`. While checks are off that gives the modules themselves: a call
then does nothing that it would not do without this file.
"""

import os
from collections.abc import Callable
from types import ModuleType

import torch
from torch import Tensor
from torch.nn.functional import pad

from .backends.reference import positions_below
from .cache import TABLE_TOKENS
from .meta.contract import CacheGather, CacheWrite, Decode, Prefill
from .meta.schema import NAMESPACE, OPERATORS

TOKENSPEED = "tokenspeed"
CHUNK_ELEMENTS = 2**24  # cache elements looked at at once, as fp32: 64 MiB
_NAMES = frozenset(operator.name for operator in OPERATORS)


def _switched_on(setting: str) -> bool:
    if setting not in ("", "0", "1"):
        raise ValueError(f"TS_OPS_CHECK must be 1 (check) or 0 (the default), got {setting!r}")
    return setting == "1"


ENABLED = _switched_on(os.environ.get("TS_OPS_CHECK", ""))


def guarded(name: str, backend: ModuleType) -> "ModuleType | Guard":
    """`backend` as the dispatcher is to call it: with the checks before each operator if they are on, else itself."""
    return Guard(name, backend) if ENABLED else backend


class Guard:
    """A backend whose operators check the values of a problem before they serve it."""

    def __init__(self, name: str, backend: ModuleType):
        self.name, self.backend = name, backend

    def __getattr__(self, attribute: str):
        member = getattr(self.backend, attribute)
        if attribute not in _NAMES:
            return member

        def run(problem, *outputs: Tensor) -> None:
            check(attribute, problem, self.name)
            member(problem, *outputs)

        return run


def check(operator: str, problem, backend: str) -> None:
    """Raise for the first value of `problem` that breaks its contract, or a precondition of `backend` alone."""
    checks = _CHECKS.get(type(problem))
    if checks is None:  # merging and packing have no value that could be wrong
        return
    if capturing(problem.device):
        raise RuntimeError(
            f"{NAMESPACE}::{operator}: TS_OPS_CHECK=1 reads device values, which a CUDA graph capture forbids. "
            "Unset TS_OPS_CHECK, or run the same calls without capturing them."
        )
    checks(_Require(operator), problem, backend == TOKENSPEED)


def capturing(device: torch.device) -> bool:
    """Whether the current stream of `device` is being captured into a CUDA graph, when no device value can be read."""
    if device.type != "cuda":
        return False
    with torch.cuda.device(device):
        return torch.cuda.is_current_stream_capturing()


class _Require:
    """`require(fine, describe)`: ValueError from `describe(*index)` at the first element of `fine` that is False."""

    def __init__(self, operator: str):
        self.operator = operator

    def __call__(self, fine: Tensor, describe: Callable[..., str]) -> None:
        if not fine.all():
            index = (~fine).nonzero()[0].tolist()
            raise ValueError(f"{NAMESPACE}::{self.operator}: {describe(*index)} (found by TS_OPS_CHECK=1)")


def _check_decode(require: _Require, problem: Decode, on_tokenspeed: bool) -> None:
    """`max_seq_len` is a hint: law 6 lets it be anything."""
    lengths, capacity = problem.seq_lens.cpu().long(), problem.capacity
    require(
        (lengths >= 0) & (lengths <= capacity),
        lambda b: (
            f"seq_lens of request {b} must be in [0, {capacity}], the {problem.max_pages} pages of "
            f"{problem.page_size} tokens in its row of block_tables; got {lengths[b]}"
        ),
    )
    if problem.local_visible_lens is not None:
        visible = problem.local_visible_lens.cpu()
        require(
            (visible >= 0) & (visible <= lengths[:, None]),
            lambda b, i: (
                f"local_visible_lens of request {b}, row {i}, must be in [0, {lengths[b]}], within its "
                f"seq_lens; got {visible[b, i]}"
            ),
        )
    if problem.causal_seqs is not None:
        _check_rank(require, problem, lengths)

    read_to = _divide_up(lengths, TABLE_TOKENS) * TABLE_TOKENS if on_tokenspeed else lengths
    tables, used = _check_pages(require, problem, torch.zeros_like(lengths), lengths, read_to)
    if on_tokenspeed:
        _check_cache_finite(require, problem, tables, used)


def _check_rank(require: _Require, problem: Decode, lengths: Tensor) -> None:
    """Context parallelism: this rank's lengths follow from the global ones."""
    whole = problem.causal_seqs.cpu().long()
    require(whole >= 0, lambda b: f"causal_seqs of request {b} must not be negative; got {whole[b]}")
    world, rank, interleave = problem.cp_world, problem.cp_rank, problem.cp_interleave_size
    held = positions_below(whole, world, rank, interleave)
    require(
        lengths == held,
        lambda b: (
            f"seq_lens of request {b} must be {held[b]}, what rank {rank} of {world} (cp_interleave_size "
            f"{interleave}) holds of the {whole[b]} positions in causal_seqs; got {lengths[b]}"
        ),
    )


def _check_pages(
    require: _Require, problem: Decode | CacheGather, starts: Tensor, ends: Tensor, read_to: Tensor
) -> tuple[Tensor, Tensor]:
    """The table entries for tokens [starts, read_to) are page ids; those entries, and which of them are meant.

    `ends` [B] is where each request ends: only TokenSpeed's kernels read entries past it. Its adapter pads rows too
    short for that with page 0, and so does this.
    """
    size, num_pages = problem.page_size, problem.num_pages
    first, end, last = starts // size, _divide_up(ends, size), _divide_up(read_to, size)
    width = max(last.tolist(), default=0)
    tables = problem.block_tables[:, :width].cpu()
    tables = pad(tables, (0, width - tables.shape[1]))
    entry = torch.arange(width, device="cpu")
    used = (entry >= first[:, None]) & (entry < last[:, None])

    def describe(b: int, j: int) -> str:
        why = ""
        if j >= end[b]:
            why = f", for TokenSpeed's kernels read the entries up to the next multiple of {TABLE_TOKENS} tokens: "
            why += "fill a row past its request with 0"
        return f"block_tables[{b}, {j}] of request {b} must be a page id in [0, {num_pages}){why}; got {tables[b, j]}"

    require(~used | (tables >= 0) & (tables < num_pages), describe)
    return tables, used


def _check_cache_finite(require: _Require, problem: Decode, tables: Tensor, used: Tensor) -> None:
    pages = tables[used].unique()
    infected = pages[~_finite_rows(problem.kv_cache, pages)]

    def describe(b: int, j: int) -> str:
        found = _first_not_finite(problem.kv_cache[int(tables[b, j])])
        return (
            f"kv_cache must be finite in every page that a request names, for TokenSpeed's kernels multiply what they "
            f"mask by 0: zero-fill a new cache, as ts_ops.allocate_kv_cache does; page {tables[b, j]} of request {b} "
            f"(block_tables[{b}, {j}]) has {found}"
        )

    require(~(used & torch.isin(tables, infected)), describe)


def _finite_rows(tensor: Tensor, rows: Tensor) -> Tensor:
    """Which of `tensor[rows]` hold neither infinity nor NaN, [len(rows)]; in chunks, but read from the device once."""
    chunks = rows.to(tensor.device).split(max(1, CHUNK_ELEMENTS // tensor[0].numel()) if len(rows) else 1)
    return torch.cat([tensor[chunk].float().isfinite().flatten(1).all(dim=1) for chunk in chunks]).cpu()


def _first_not_finite(row: Tensor) -> str:
    row = row.float().cpu()
    index = (~row.isfinite()).nonzero()[0].tolist()
    return f"{row[tuple(index)]} at {index}"


def _check_prefill(require: _Require, problem: Prefill, on_tokenspeed: bool) -> None:
    """`max_seq_len_q` and `max_seq_len_kv` are documented as bounds: TokenSpeed drops the rows past the first."""
    q, kv = (problem.cum_seq_lens_q, problem.tokens_q), (problem.cum_seq_lens_kv, problem.tokens_kv)
    lengths_q = _check_cumulative(require, "cum_seq_lens_q", *q, "query (Tq)")
    lengths_kv = _check_cumulative(require, "cum_seq_lens_kv", *kv, "key and value (Tkv)")
    for name, bound, lengths, what in (
        ("max_seq_len_q", problem.max_seq_len_q, lengths_q, "query rows"),
        ("max_seq_len_kv", problem.max_seq_len_kv, lengths_kv, "keys"),
    ):
        if bound is not None:
            require(
                lengths <= bound,
                lambda b: f"{name} must be at least the {lengths[b]} {what} of request {b}; got {bound}",
            )
    if on_tokenspeed:
        _check_keys_finite(require, problem, lengths_kv.cumsum(0))


def _check_keys_finite(require: _Require, problem: Prefill, ends: Tensor) -> None:
    """Past the last request too: the kernels load whole tiles."""
    tokens = torch.arange(problem.tokens_kv, device=problem.device)
    for name, tensor in (("key", problem.key), ("value", problem.value)):

        def describe(t: int) -> str:
            owner = int((ends <= t).sum())
            of = f"of request {owner}" if owner < problem.batch else "of no request"
            return (
                f"{name} must be finite, for TokenSpeed's kernels multiply what they mask by 0; token {t}, {of}, has "
                f"{_first_not_finite(tensor[t])}"
            )

        require(_finite_rows(tensor, tokens), describe)


def _check_write(require: _Require, problem: CacheWrite, on_tokenspeed: bool) -> None:
    """Of two tokens for one slot, chance would say which stays. A skipped token must say so with -1.

    Backends skip any negative slot, but another one tends to be a page id of -1 times the page size: a token lost.
    """
    slots = problem.slot_mapping.cpu()
    num_slots = problem.kv_cache.shape[0] * problem.page_size
    require(
        (slots >= -1) & (slots < num_slots),
        lambda t: f"slot_mapping[{t}] must be -1 (skip the token) or a slot in [0, {num_slots}); got {slots[t]}",
    )
    ordered, token = slots.sort(stable=True)
    repeats = torch.zeros_like(slots, dtype=torch.bool)
    repeats[token[1:]] = (ordered[1:] == ordered[:-1]) & (ordered[1:] >= 0)
    require(
        ~repeats,
        lambda t: (
            f"slot_mapping[{t}] must not repeat a slot; got {slots[t]}, which "
            f"slot_mapping[{slots.tolist().index(int(slots[t]))}] names already"
        ),
    )
    _check_scale(require, problem.k_scale)


def _check_gather(require: _Require, problem: CacheGather, on_tokenspeed: bool) -> None:
    """More tokens than `total_tokens` would be dropped silently. A request that copies none may start anywhere."""
    lengths = _check_cumulative(
        require, "cum_seq_lens", problem.cum_seq_lens, problem.total_tokens, "the result (total_tokens)"
    )
    starts = torch.zeros_like(lengths) if problem.seq_starts is None else problem.seq_starts.cpu().long()
    starts = torch.where(lengths > 0, starts, 0)
    capacity = problem.max_pages * problem.page_size
    require(starts >= 0, lambda b: f"seq_starts of request {b} must not be negative; got {starts[b]}")
    require(
        starts + lengths <= capacity,
        lambda b: (
            f"seq_starts of request {b} and its length by cum_seq_lens must together be at most {capacity}, the "
            f"{problem.max_pages} pages of {problem.page_size} tokens in its row of block_tables; got {starts[b]} + "
            f"{lengths[b]}"
        ),
    )
    _check_pages(require, problem, starts, starts + lengths, starts + lengths)
    _check_scale(require, problem.k_scale)


def _check_cumulative(require: _Require, name: str, cumulative: Tensor, limit: int, holder: str) -> Tensor:
    """Cumulative lengths [B + 1] start at 0, never fall, and end within `limit` tokens of `holder`; the lengths [B]."""
    cumulative = cumulative.cpu().long()
    first, ends = cumulative[:1], cumulative[1:]
    lengths = cumulative.diff()
    require(first == 0, lambda _: f"{name}[0], where request 0 begins, must be 0; got {first[0]}")
    require(
        lengths >= 0,
        lambda b: (
            f"{name}[{b + 1}], where request {b} ends, must be at least {cumulative[b]}, where it begins; got {ends[b]}"
        ),
    )
    require(
        ends <= limit,
        lambda b: (
            f"{name}[{b + 1}], where request {b} ends, must be at most {limit}, the tokens of {holder}; got {ends[b]}"
        ),
    )
    return lengths


def _check_scale(require: _Require, k_scale: Tensor | None) -> None:
    if k_scale is not None:
        scale = k_scale.cpu().flatten()
        require(scale.isfinite() & (scale > 0), lambda _: f"k_scale must be finite and above 0; got {scale[0]}")


def _divide_up(tokens: Tensor, size: int) -> Tensor:
    return -(-tokens // size)


_CHECKS = {Decode: _check_decode, Prefill: _check_prefill, CacheWrite: _check_write, CacheGather: _check_gather}
