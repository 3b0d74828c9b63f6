"""The operators in float64, request by request and row by row, as the laws state them.

Written independently of the reference backend and with loops where loops are plainest, so that the two can only agree
by both being right. Inputs may be on any device and of any dtype; results are float64 CPU tensors.
"""

import math

import torch
from torch import Tensor


def attend(query: Tensor, keys: Tensor, values: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """One row [D] over [n, D] keys and [n, Dv] values: output [Dv] and natural-log LSE []."""
    if keys.shape[0] == 0:
        return torch.zeros(values.shape[-1], dtype=torch.float64), torch.tensor(-math.inf, dtype=torch.float64)
    scores = keys @ query * scale
    return torch.softmax(scores, dim=0) @ values, torch.logsumexp(scores, dim=0)


def request_keys(kv_cache: Tensor, table: Tensor, length: int) -> Tensor:
    """The first `length` cache rows of a request, [length, D] float64."""
    pages = kv_cache.squeeze(1) if kv_cache.ndim == 4 else kv_cache
    page_size = pages.shape[1]
    used = table[: math.ceil(length / page_size)].long()
    rows = pages[used].reshape(-1, pages.shape[-1])[:length]
    return rows.cpu().double()


def visible(position: int, row: int, length: int, q_len: int, options: dict) -> bool:
    """Law 3 for one key position of one query row."""
    lens, window = options.get("visible"), options.get("window_left", -1)
    if lens is not None:
        return position < lens[row]
    world, rank = options.get("cp_world", 1), options.get("cp_rank", 0)
    if world > 1 and options.get("is_causal", True):
        interleave = options.get("cp_interleave_size", 1)
        held = position // interleave * interleave * world + rank * interleave + position % interleave
        return held < options["global_length"] - (q_len - 1) + row
    last = length - (q_len - 1) + row if options.get("is_causal", True) else length
    first = max(0, length - q_len - window + row) if window >= 0 else 0
    return first <= position < last


def decode(
    query, kv_cache, block_tables, seq_lens, softmax_scale, *, output_scale=1.0, kv_lora_rank=512,
    local_visible_lens=None, causal_seqs=None, max_seq_len=None, **options,
):  # fmt: skip
    batch, q_len, heads, _ = query.shape
    out = torch.zeros(batch, q_len, heads, kv_lora_rank, dtype=torch.float64)
    lse = torch.full((batch, q_len, heads), -math.inf, dtype=torch.float64)
    queries = query.cpu().double()
    for b in range(batch):
        length = int(seq_lens[b])
        keys = request_keys(kv_cache, block_tables[b], length)
        facts = dict(options)
        if local_visible_lens is not None:
            facts["visible"] = local_visible_lens[b].tolist()
        if causal_seqs is not None:
            facts["global_length"] = int(causal_seqs[b])
        for i in range(q_len):
            seen = [p for p in range(length) if visible(p, i, length, q_len, facts)]
            rows = keys[seen]
            for h in range(heads):
                out[b, i, h], lse[b, i, h] = attend(queries[b, i, h], rows, rows[:, :kv_lora_rank], softmax_scale)
    return out * output_scale, lse


def prefill(
    query, key, value, cum_q, cum_kv, softmax_scale, *, output_scale=1.0, is_causal=True, max_seq_len_q=None,
    max_seq_len_kv=None,
):  # fmt: skip
    tokens, heads, _ = query.shape
    out = torch.zeros(tokens, heads, value.shape[-1], dtype=torch.float64)
    lse = torch.full((tokens, heads), -math.inf, dtype=torch.float64)
    query, key, value = query.cpu().double(), key.cpu().double(), value.cpu().double()
    group = heads // key.shape[1]
    cum_q, cum_kv = cum_q.tolist(), cum_kv.tolist()
    for (q0, q1), (k0, k1) in zip(zip(cum_q, cum_q[1:]), zip(cum_kv, cum_kv[1:])):
        for i in range(q1 - q0):
            end = max(0, (k1 - k0) - (q1 - q0) + i + 1) if is_causal else k1 - k0
            for h in range(heads):
                keys, values = key[k0 : k0 + end, h // group], value[k0 : k0 + end, h // group]
                out[q0 + i, h], lse[q0 + i, h] = attend(query[q0 + i, h], keys, values, softmax_scale)
    return out * output_scale, lse


def merge(outputs: Tensor, lses: Tensor) -> tuple[Tensor, Tensor]:
    """States [N, T, H, D] and [N, T, H]; those with an infinite LSE do not count."""
    states, tokens, heads, dim = outputs.shape
    outputs, lses = outputs.cpu().double(), lses.cpu().double()
    out = torch.zeros(tokens, heads, dim, dtype=torch.float64)
    lse = torch.full((tokens, heads), -math.inf, dtype=torch.float64)
    for t in range(tokens):
        for h in range(heads):
            used = [n for n in range(states) if not math.isinf(lses[n, t, h])]
            if used:
                lse[t, h] = torch.logsumexp(lses[used, t, h], dim=0)
                out[t, h] = torch.softmax(lses[used, t, h], dim=0) @ outputs[used, t, h]
    return out, lse


def cache_rows(kv_cache, kv_c, k_pe, slot_mapping, k_scale=None) -> dict[tuple[int, int], Tensor]:
    """What a cache write leaves at each (page, offset) that it names: [D] float64, before rounding to the cache."""
    page_size = kv_cache.shape[-2]
    rows = {}
    for token, slot in enumerate(slot_mapping.tolist()):
        if slot >= 0:
            row = torch.cat((kv_c[token].cpu().double(), k_pe[token].cpu().double().flatten()))
            if k_scale is not None:
                row = fp32(row / k_scale.cpu().double().reshape(()))
            rows[divmod(slot, page_size)] = row
    return rows


def gather(kv_cache, block_tables, cum_seq_lens, total_tokens, seq_starts=None, k_scale=None) -> Tensor:
    """Rows of all requests, packed into [total_tokens, D] float64; zeros past the last."""
    packed = torch.zeros(total_tokens, kv_cache.shape[-1], dtype=torch.float64)
    cum = cum_seq_lens.tolist()
    for b, (first, end) in enumerate(zip(cum, cum[1:])):
        start = int(seq_starts[b]) if seq_starts is not None else 0
        rows = request_keys(kv_cache, block_tables[b], start + end - first)[start:]
        if k_scale is not None:
            rows = fp32(rows * k_scale.cpu().double().reshape(()))
        end = min(end, total_tokens)
        packed[first:end] = rows[: max(0, end - first)]
    return packed


def pack(k_nope, k_pe, v, k_scale_inv=1.0, v_scale_inv=1.0) -> tuple[Tensor, Tensor]:
    """Keys and values before rounding to FP8, float64."""
    rope = k_pe.reshape(k_pe.shape[0], 1, k_pe.shape[-1]).expand(-1, k_nope.shape[1], -1)
    key_scale, value_scale = fp32(torch.tensor([k_scale_inv, v_scale_inv], dtype=torch.float64))
    key = torch.cat((k_nope, rope), dim=-1).cpu().double() * key_scale
    return fp32(key), fp32(v.cpu().double() * value_scale)


def fp32(values: Tensor) -> Tensor:
    """Float64 products and quotients of fp32 numbers as fp32 arithmetic, which the scales are defined in, rounds."""
    return values.float().double()


def to_fp8(values: Tensor) -> Tensor:
    """Law 11: the nearest e4m3 number, ties to the even code, saturating; NaN kept. By search, not by a cast."""
    finite = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).double()  # codes 0..126 are 0..448
    magnitude = values.abs().nan_to_num(0.0, posinf=448.0).clamp(max=448.0)
    above = torch.searchsorted(finite, magnitude.contiguous()).clamp(min=1)
    below = above - 1
    up, down = finite[above] - magnitude, magnitude - finite[below]
    code = torch.where((up < down) | ((up == down) & (above % 2 == 0)), above, below)
    code = code + 128 * values.signbit()
    return torch.where(values.isnan(), 127, code).to(torch.uint8).view(torch.float8_e4m3fn)


def assert_same(actual: Tensor, expected: Tensor) -> None:
    """The same bits, -0 and 0 apart; any NaN code where NaN is expected."""
    actual, expected = actual.detach().cpu(), expected.cpu()
    assert actual.dtype == expected.dtype and actual.shape == expected.shape
    torch.testing.assert_close(actual.double(), expected.double(), rtol=0, atol=0, equal_nan=True)


def row_error(actual: Tensor, expected: Tensor) -> float:
    """Largest ||actual - expected|| / ||expected|| over the rows (last dimension); rows of zeros must be exact."""
    actual, expected = actual.detach().cpu().double(), expected.double()
    norm = expected.norm(dim=-1)
    difference = (actual - expected).norm(dim=-1)
    assert not difference.isnan().any(), "NaN in the result"
    assert (difference[norm == 0] == 0).all(), "an empty row is not zero"
    return (difference[norm > 0] / norm[norm > 0]).max().item() if (norm > 0).any() else 0.0


def assert_lse_close(actual: Tensor, expected: Tensor, tolerance: float) -> None:
    """-inf exactly where expected, else within `tolerance`, absolute: the error of an LSE is that of a score."""
    actual, expected = actual.cpu().double(), expected.double()
    empty = expected == -math.inf
    assert (actual[empty] == -math.inf).all(), "an empty row's LSE is not -inf"
    error = (actual[~empty] - expected[~empty]).abs()
    assert error.numel() == 0 or error.max() <= tolerance, f"LSE error {error.max():.2e} above {tolerance:.0e}"
