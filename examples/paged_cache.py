"""A paged latent KV cache for a ragged batch: one tensor a layer, block tables, lengths.

Page 0 is the null page: no sequence owns it, and table entries past a sequence's pages point to it.
"""

from typing import NamedTuple

import torch
from torch import Tensor

import ts_ops
from ts_ops.cache import TABLE_TOKENS, fit_k_scale

FP8 = torch.float8_e4m3fn


class LayerCache(NamedTuple):
    """What one layer reads and writes: pages [num_pages, page_size, D], and its k_scale [1] fp32 if they are fp8."""

    pages: Tensor
    k_scale: Tensor | None


class PagedCache:
    """Room for `capacities[b]` tokens of sequence b in every layer; `seq_lens` says how many are there."""

    def __init__(
        self, num_layers: int, capacities: list[int], page_size: int, dim: int, *, dtype: torch.dtype, device: str
    ):
        counts = [-(-capacity // page_size) for capacity in capacities]
        table_tokens = -(-max(capacities) // TABLE_TOKENS) * TABLE_TOKENS
        tables = torch.zeros(len(counts), max(table_tokens // page_size, *counts), dtype=torch.int32)
        first = 1
        for row, count in zip(tables, counts):
            row[:count] = torch.arange(first, first + count)
            first += count
        self.page_size, self.device = page_size, device
        self.block_tables = tables.to(device)  # [B, max_pages]
        self.seq_lens = torch.zeros(len(counts), dtype=torch.int32, device=device)  # [B]
        self.layers = allocate_layers(num_layers, first, page_size, dim, dtype=dtype, device=device)


class PageAllocator:
    """Which pages are free; never the null page."""

    def __init__(self, num_pages: int):
        self._free = list(range(num_pages - 1, 0, -1))

    @property
    def free(self) -> int:
        return len(self._free)

    def take(self, count: int) -> list[int]:
        if count > self.free:
            raise ValueError(f"{count} pages were asked for and {self.free} are free")
        return [self._free.pop() for _ in range(count)]

    def give(self, pages: list[int]) -> None:
        self._free.extend(reversed(pages))


def allocate_layers(
    num_layers: int, num_pages: int, page_size: int, dim: int, *, dtype: torch.dtype, device: str
) -> list[LayerCache]:
    return [
        LayerCache(
            ts_ops.allocate_kv_cache(num_pages, page_size, dim, dtype=dtype, device=device),
            torch.zeros(1, dtype=torch.float32, device=device) if dtype == FP8 else None,
        )
        for _ in range(num_layers)
    ]


def slots_of(block_tables: Tensor, positions: Tensor, page_size: int) -> Tensor:
    """Where each row's tokens go: block_tables [B, max_pages], positions [B, q] -> [B, q] int64.

    -1, which is not stored, where the page is the null page: for an empty row, whose positions are negative, and for a
    draft past the end of a sequence's pages.
    """
    pages = block_tables.gather(1, (positions // page_size).clamp(min=0).long()).long()
    return torch.where(pages > 0, pages * page_size + positions % page_size, -1)


def calibrate(k_scale: Tensor, latent: Tensor, k_pe: Tensor) -> None:
    """Set k_scale [1] from the first tokens that a layer sees; a scale that is set stays, for the cache holds by it."""
    k_scale.copy_(torch.where(k_scale == 0, fit_k_scale(latent, k_pe), k_scale))
