"""Plain torch: the CPU backend, and the oracle that the other backends are tested against.

Every function takes `accumulate`, the dtype it computes in: fp32 to serve, fp64 (with fp64 outputs) as the oracle. It
is written for reading: masks are formed in full, and what a mask hides is never multiplied, so NaN outside the request
cannot spread (law 5). On a GPU it serves only when forced, and then reads no device value either.
"""

import math

import torch
from torch import Tensor

from ..meta.contract import FP8, CacheGather, CacheWrite, Decode, Merge, MergeN, PackQuantize, Prefill

FP8_MAX = torch.finfo(FP8).max
QUERY_BLOCK = 128  # prefill rows whose scores exist at once: memory grows with the keys, not with their square


def unavailable(device: torch.device) -> str | None:
    return None


def why_not(operator: str, problem) -> str | None:
    return None


def mla_decode(problem: Decode, out: Tensor, lse: Tensor | None = None, *, accumulate=torch.float32) -> None:
    low, high = visible_range(problem)
    keys = problem.capacity
    if problem.device.type == "cpu":
        # Reading a length costs nothing here, and spares the work on the part of the tables that no row sees.
        keys = min(keys, int(high.max()))
    position = torch.arange(keys, device=problem.device)
    visible = (position >= low[..., None]) & (position < high[..., None])  # [B, q_len, keys]

    live = visible.any(dim=1)  # [B, keys]
    if problem.num_pages and keys:
        page = problem.block_tables[:, position // problem.page_size].long()
        page = torch.where(live, page, 0)  # entries past the request may hold anything
        latent = problem.kv_cache[page, (position % problem.page_size).expand_as(page)].to(accumulate)
        latent = torch.where(live[..., None], latent, 0.0)  # [B, keys, D]
    else:
        latent = torch.zeros(problem.batch, keys, problem.head_dim, dtype=accumulate, device=problem.device)

    scores = torch.einsum("bqhd,bkd->bqhk", problem.query.to(accumulate), latent) * problem.softmax_scale
    weights, row_lse = _softmax(scores, visible[:, :, None])
    values = latent[..., : problem.kv_lora_rank]
    out.copy_(torch.einsum("bqhk,bkd->bqhd", weights, values) * problem.output_scale)
    if lse is not None:
        lse.copy_(row_lse)


mla_decode_lse = mla_decode


def visible_range(problem: Decode) -> tuple[Tensor, Tensor]:
    """Law 3: the keys [low, high) that each row of a q_len block sees; both [B, q_len], within [0, seq_len]."""
    row = torch.arange(problem.q_len, device=problem.device)
    length = problem.seq_lens.long().clamp(0, problem.capacity)[:, None]  # [B, 1]
    high = length.expand(-1, problem.q_len)
    if problem.local_visible_lens is not None:
        high = problem.local_visible_lens.long()
    elif problem.is_causal and problem.causal_seqs is not None:
        bound = problem.causal_seqs.long()[:, None] - (problem.q_len - 1) + row
        high = positions_below(bound, problem.cp_world, problem.cp_rank, problem.cp_interleave_size)
    elif problem.is_causal:
        high = length - (problem.q_len - 1) + row
    high = torch.minimum(high.clamp(min=0), length)
    low = torch.zeros_like(high)
    if problem.window_left >= 0:
        window = min(problem.window_left, problem.capacity + problem.q_len)  # a huge one would overflow
        low = (length - problem.q_len - window + row).clamp(min=0)
    return low, high


def positions_below(bound: Tensor, world: int, rank: int, interleave: int) -> Tensor:
    """How many of a context-parallel rank's global positions lie below `bound`.

    The rank holds the positions g with (g // interleave) % world == rank: one run of `interleave` in each cycle of
    `interleave * world`.
    """
    bound = bound.clamp(min=0)
    cycle = interleave * world
    in_cycle = bound % cycle - rank * interleave
    return bound // cycle * interleave + in_cycle.clamp(0, interleave)


def mla_prefill(problem: Prefill, out: Tensor, lse: Tensor | None = None, *, accumulate=torch.float32) -> None:
    out.zero_()
    if lse is not None:
        lse.fill_(-math.inf)
    # Without reading lengths, each sequence goes over all tokens and keeps its own.
    rows = keys = [slice(None)] * problem.batch
    if problem.device.type == "cpu":
        rows, keys = _slices(problem.cum_seq_lens_q), _slices(problem.cum_seq_lens_kv)
    for sequence in range(problem.batch):
        _prefill_sequence(problem, sequence, rows[sequence], keys[sequence], out, lse, accumulate)


mla_prefill_lse = mla_prefill


def _prefill_sequence(
    problem: Prefill, sequence: int, rows: slice, keys: slice, out: Tensor, lse: Tensor | None, accumulate: torch.dtype
) -> None:
    """Attention of one sequence, whose queries lie within `rows` and whose keys within `keys`."""
    first_q, end_q = problem.cum_seq_lens_q[sequence].long(), problem.cum_seq_lens_q[sequence + 1].long()
    first_kv, end_kv = problem.cum_seq_lens_kv[sequence].long(), problem.cum_seq_lens_kv[sequence + 1].long()
    position = torch.arange(problem.tokens_kv, device=problem.device)[keys]
    own = (position >= first_kv) & (position < end_kv)
    # Other sequences' keys may be NaN: they are left out before they are multiplied.
    groups = problem.heads // problem.heads_kv
    key = torch.where(own[:, None, None], problem.key[keys].to(accumulate), 0.0).repeat_interleave(groups, dim=1)
    value = torch.where(own[:, None, None], problem.value[keys].to(accumulate), 0.0).repeat_interleave(groups, dim=1)
    row = torch.arange(problem.tokens_q, device=problem.device)[rows]
    for block in row.split(QUERY_BLOCK):
        mine = (block >= first_q) & (block < end_q)
        # Causal is bottom-right: the last query sees every key.
        bound = end_kv - (end_q - 1 - block) if problem.is_causal else end_kv.expand(block.shape)
        visible = own & (position < bound[:, None]) & mine[:, None]  # [rows, keys]
        query = torch.where(mine[:, None, None], problem.query[block].to(accumulate), 0.0)
        scores = torch.einsum("qhd,khd->qhk", query, key) * problem.softmax_scale
        weights, block_lse = _softmax(scores, visible[:, None])
        result = (torch.einsum("qhk,khd->qhd", weights, value) * problem.output_scale).to(out.dtype)
        out[block] = torch.where(mine[:, None, None], result, out[block])
        if lse is not None:
            lse[block] = torch.where(mine[:, None], block_lse.to(lse.dtype), lse[block])


def _slices(cum_seq_lens: Tensor) -> list[slice]:
    """The packed tokens of each sequence."""
    cum = cum_seq_lens.tolist()
    return [slice(first, end) for first, end in zip(cum, cum[1:])]


def _ragged(cum_seq_lens: Tensor, tokens: int) -> tuple[Tensor, Tensor]:
    """For each packed token its sequence (-1 past the last) and its index there, both [T]."""
    token = torch.arange(tokens, device=cum_seq_lens.device)
    cum = cum_seq_lens.long()
    owner = torch.searchsorted(cum, token, right=True) - 1
    owner = torch.where(token < cum[-1], owner, -1)
    return owner, token - cum[owner.clamp(min=0)]


def _softmax(scores: Tensor, visible: Tensor) -> tuple[Tensor, Tensor]:
    """Softmax over the visible keys and its natural-log LSE; weights 0 and LSE -inf where a row sees none (law 2)."""
    scores = torch.where(visible, scores, -math.inf)
    if scores.shape[-1] == 0:
        return scores, scores.new_full(scores.shape[:-1], -math.inf)
    peak = scores.amax(dim=-1, keepdim=True)
    weights = torch.exp(scores - torch.where(peak == -math.inf, 0.0, peak))
    total = weights.sum(dim=-1, keepdim=True)
    lse = (torch.log(total) + peak).squeeze(-1)
    return weights / torch.where(total == 0.0, 1.0, total), lse


def merge_attn_states(problem: Merge, out: Tensor, lse: Tensor, *, accumulate=torch.float32) -> None:
    outputs = torch.stack((problem.prefix_output, problem.suffix_output))
    _merge(outputs, torch.stack((problem.prefix_lse, problem.suffix_lse)), out, lse, accumulate)


def merge_attn_states_n(problem: MergeN, out: Tensor, lse: Tensor, *, accumulate=torch.float32) -> None:
    _merge(problem.outputs, problem.lses, out, lse, accumulate)


def _merge(outputs: Tensor, lses: Tensor, out: Tensor, lse: Tensor, accumulate: torch.dtype) -> None:
    """Law 4: weights exp(lse_i - lse), a side whose LSE is infinite left out whatever its output holds."""
    lses = lses.to(accumulate)
    weights, merged = _softmax(lses.movedim(0, -1), ~lses.isinf().movedim(0, -1))
    weights = weights.movedim(-1, 0)[..., None]  # [N, T, H, 1]
    terms = torch.where(lses.isinf()[..., None], 0.0, weights * outputs.to(accumulate))
    out.copy_(terms.sum(dim=0))
    lse.copy_(merged)


def mla_kv_cache_write(problem: CacheWrite, *, accumulate=torch.float32) -> None:
    slots = problem.slot_mapping
    tokens = slots.shape[0]
    rows = torch.cat((problem.kv_c[:tokens].to(accumulate), problem.k_pe[:tokens].to(accumulate)), dim=-1)
    rows = _quantise(rows, problem.k_scale) if problem.kv_cache.dtype == FP8 else rows.to(problem.kv_cache.dtype)
    if problem.device.type == "cpu":
        keep = slots >= 0
        slots, rows = slots[keep], rows[keep]
        problem.kv_cache[slots // problem.page_size, slots % problem.page_size] = rows
        return
    # Without reading a device value the skipped rows cannot be dropped: they rewrite the slot of the first row kept.
    kept = (slots >= 0).to(torch.int8).argmax(keepdim=True)  # [1]: an index without dimensions would be read
    source = torch.where(slots >= 0, torch.arange(tokens, device=slots.device), kept)
    slots = slots[source]
    any_kept = slots[kept] >= 0
    slots = slots.clamp(min=0)
    page, offset = slots // problem.page_size, slots % problem.page_size
    rows = torch.where(any_kept, rows[source], problem.kv_cache[page, offset])
    problem.kv_cache[page, offset] = rows


def _quantise(values: Tensor, scale: Tensor | None) -> Tensor:
    """Law 11: saturating division by `scale`."""
    if scale is not None:
        values = values / scale.to(values.dtype).reshape(())
    return values.clamp(-FP8_MAX, FP8_MAX).to(FP8)


def mla_kv_cache_gather(problem: CacheGather, out: Tensor, *, accumulate=torch.float32) -> None:
    if not (problem.batch and problem.max_pages and problem.num_pages):
        out.zero_()
        return
    owner, index = _ragged(problem.cum_seq_lens, problem.total_tokens)
    live = owner >= 0
    request = owner.clamp(min=0)
    if problem.seq_starts is not None:
        index = index + problem.seq_starts.long()[request]
    index = torch.where(live, index, 0)
    page = problem.block_tables[request, index // problem.page_size].long()
    rows = problem.kv_cache[torch.where(live, page, 0), index % problem.page_size]
    if problem.dtype != problem.kv_cache.dtype:
        rows = rows.to(accumulate)
        if problem.k_scale is not None:
            rows = rows * problem.k_scale.reshape(())
    out.copy_(torch.where(live[:, None], rows, torch.zeros((), dtype=rows.dtype, device=rows.device)))


def mla_kv_pack_quantize_fp8(problem: PackQuantize, key: Tensor, value: Tensor, *, accumulate=torch.float32) -> None:
    rope = problem.k_pe[:, None].expand(-1, problem.heads, -1)
    packed = torch.cat((problem.k_nope, rope), dim=-1).to(accumulate) * problem.k_scale_inv
    key.copy_(_quantise(packed, None))
    value.copy_(_quantise(problem.v.to(accumulate) * problem.v_scale_inv, None))
