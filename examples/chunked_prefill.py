"""Prefill in pieces: new tokens of each request over the context that the paged cache already holds.

Earlier tokens are read from the cache in chunks of at most so many tokens, of all requests together; each chunk is
expanded to keys and values, attended without a mask, and merged into the state so far. Memory is that of one chunk,
however long the contexts are.

The new tokens are read back from the cache as well. So what a token sees does not depend on where its prompt was cut,
even if the cache is narrower than the model (FP8).
"""

from collections.abc import Callable
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

import ts_ops
from paged_cache import LayerCache


class Chunk(NamedTuple):
    """A range of each request's cached tokens, packed one after the other; a range may be empty."""

    starts: Tensor  # [B] int32, the first token of each request
    cum_seq_lens: Tensor  # [B + 1] int32
    tokens: int  # of all requests
    max_seq_len: int


class Context(NamedTuple):
    """Which tokens of the cache a prefill reads. It is made once a step, and all layers share it."""

    block_tables: Tensor  # [B, max_pages] int32
    new: Chunk  # the tokens of this prefill
    earlier: list[Chunk]  # all tokens before them


def attend(
    query: Tensor, cache: LayerCache, context: Context, expand: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]],
    kv_lora_rank: int, softmax_scale: float,
) -> Tensor:  # fmt: skip
    """Queries [T, H, nope + R] of the new tokens, which are in the cache, over these and all before -> [T, H, v].

    `expand` makes keys and values [Tkv, H, ·] of latents [Tkv, L] and rotated keys [Tkv, R].
    """
    new = context.new

    def state(chunk: Chunk, is_causal: bool) -> tuple[Tensor, Tensor]:
        rows = ts_ops.mla_kv_cache_gather(
            cache.pages, context.block_tables, chunk.cum_seq_lens, chunk.tokens, seq_starts=chunk.starts,
            k_scale=cache.k_scale, dtype=None if cache.k_scale is None else query.dtype,
        ).to(query.dtype)  # fmt: skip
        key, value = expand(*rows.tensor_split([kv_lora_rank], dim=-1))
        return ts_ops.mla_prefill_lse(
            query, key, value, new.cum_seq_lens, chunk.cum_seq_lens, softmax_scale,
            is_causal=is_causal, max_seq_len_q=new.max_seq_len, max_seq_len_kv=chunk.max_seq_len,
        )  # fmt: skip

    output, lse = state(new, is_causal=True)
    for chunk in context.earlier:
        output, lse = ts_ops.merge_attn_states(*state(chunk, is_causal=False), output, lse)
    return output


def extend(
    model, pieces: list[list[int]], starts: list[int], block_tables: Tensor, caches: list[LayerCache],
    *, chunk_tokens: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Prefill the next tokens `pieces[b]` of each request, of which the cache holds the first `starts[b]`.

    Args:
        model: a `deepseek.DeepSeek`.
        pieces: none of them empty.
        block_tables: [B, max_pages] int32 on the CPU, with pages for the new tokens.
        chunk_tokens: context tokens, of all requests together, that are expanded at once.

    Returns:
        hidden states of the new tokens [T, hidden], and the row of each request's last one [B].
    """
    device, page_size = caches[0].pages.device, caches[0].pages.shape[1]
    lengths = [len(piece) for piece in pieces]
    owners = torch.repeat_interleave(torch.tensor(lengths))  # [T], the request of each token
    ends = torch.tensor(lengths).cumsum(0)
    positions = torch.arange(len(owners)) + (torch.tensor(starts) - ends + torch.tensor(lengths))[owners]
    pages = block_tables[owners, positions // page_size].long()
    new = make_chunk(starts, lengths, device)
    earlier = [make_chunk(first, count, device) for first, count in cut(starts, chunk_tokens)]
    hidden = model.prefill(
        torch.tensor([token for piece in pieces for token in piece], device=device),
        positions.to(device),
        (pages * page_size + positions % page_size).to(device),
        new.cum_seq_lens,
        new.max_seq_len,
        caches,
        Context(block_tables.to(device), new, earlier),
    )
    return hidden, (ends - 1).to(device)


def cut(lengths: list[int], chunk_tokens: int) -> list[tuple[list[int], list[int]]]:
    """First token and count of each request in each chunk: contexts laid end to end and cut every `chunk_tokens`."""
    ends = list(accumulate(lengths))
    chunks = []
    for low in range(0, ends[-1], chunk_tokens):
        # `length - end` brings a position in the row of contexts to one in the request's own.
        first, last = (
            [min(max(edge + length - end, 0), length) for length, end in zip(lengths, ends)]
            for edge in (low, low + chunk_tokens)
        )
        chunks.append((first, [b - a for a, b in zip(first, last)]))
    return chunks


def make_chunk(starts: list[int], counts: list[int], device: torch.device) -> Chunk:
    cum = torch.tensor([0, *accumulate(counts)], dtype=torch.int32, device=device)
    return Chunk(torch.tensor(starts, dtype=torch.int32, device=device), cum, sum(counts), max(counts))
