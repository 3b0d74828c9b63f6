"""mla_decode and mla_decode_lse compute what the laws say, on every backend.

Each case is compared with the float64 oracle on the same (already quantised) inputs. Everything that lies outside a
request is filled with NaN, and every table entry past a request with a wild page id, before the call; outputs are
poisoned with NaN through the `.out` overload.
"""

import math
from dataclasses import dataclass, field

import pytest
import torch

import oracle
import ts_ops

FP8 = torch.float8_e4m3fn
# Largest row error ||o - ref|| / ||ref||. fp32: sums of 576 products. fp16 and bf16: one rounding of the result
# (2^-11 and 2^-8 relative at most) plus that of the softmax weights. FP8: inputs count as exact, weights are fp16, and
# the result is bf16.
TOLERANCE = {torch.float32: 2e-5, torch.float16: 1e-3, torch.bfloat16: 6e-3, FP8: 5e-3}
# An LSE is as exact as its scores, sums in fp32 but for Hopper's FP8 units: each of three instructions (80 dims) drops
# what is below 2^-13 of its largest addend, which is up to 60 here, and the scale is 0.145: 3.2e-3 in all.
LSE_TOLERANCE = {torch.float32: 2e-5, torch.float16: 1e-4, torch.bfloat16: 1e-4, FP8: 3.5e-3}
# Hopper's own kernel sums 576 dims, in two sums of 10 and 8 instructions, each up to 106, under a scale of 0.054:
# 12e-3, and weights that are off by as much; half of it in a sum over keys, of errors of either sign.
LONG_SUM_LSE_TOLERANCE, LONG_SUM_TOLERANCE = 12e-3, 6e-3
# With weights in FP8 it is one sum of all 18, up to 212; each weight is off by at most 2^-4.
ONE_SUM_LSE_TOLERANCE, FP8_WEIGHTS_TOLERANCE = 25e-3, 2**-4
# TokenSpeed's FP8 kernel rounds the softmax weights to e4m3, by up to 2^-4 each and 2.6 % in the mean square.
E4M3_WEIGHTS_TOLERANCE = 4e-2
# The interpreter truncates where it should round to bf16, which doubles that error.
TRUNCATED_TOLERANCE = 8e-3


@dataclass(frozen=True)
class Case:
    lengths: tuple[int, ...]
    heads: int = 4
    q_len: int = 1
    page_size: int = 16
    rank: int = 64
    rope: int = 16
    query: torch.dtype = torch.float16
    cache: torch.dtype | None = None
    options: dict = field(default_factory=dict)
    spare_pages: int = 3
    cache_layout: str = "plain"

    @property
    def id(self):
        dtype = str(self.query)[6:] + (f"-over-{str(self.cache)[6:]}" if self.cache else "")
        options = "-".join(f"{k}={v}" for k, v in self.options.items())
        shape = f"H{self.heads}-q{self.q_len}-p{self.page_size}-r{self.rank}+{self.rope}"
        return "-".join(filter(None, (shape, dtype, self.cache_layout, options, f"n{max(self.lengths, default=0)}")))


def build(case: Case, device: str, seed: int = 0, outside: float = math.nan):
    """Tensors of a case. Only what a request names holds its numbers; all else holds `outside` or wild ids.

    If `outside` is finite, TokenSpeed's other precondition holds too: page ids up to the next multiple of 128 tokens.
    """
    generator = torch.Generator().manual_seed(seed)
    batch, dim = len(case.lengths), case.rank + case.rope
    cache_dtype = case.cache or case.query
    pages = [math.ceil(n / case.page_size) for n in case.lengths]
    total = sum(pages) + case.spare_pages
    values = torch.full((total, case.page_size, dim), outside)
    order = torch.randperm(total, generator=generator).tolist()
    table = torch.tensor([-1, 2**30, total, -(2**31)], dtype=torch.int32).repeat(batch, max(pages, default=0) // 4 + 2)
    for b, length in enumerate(case.lengths):
        if math.isfinite(outside):
            table[b, : math.ceil(length / 128) * 128 // case.page_size] = 0
        for p in range(pages[b]):
            page = order.pop()
            table[b, p] = page
            filled = min(case.page_size, length - p * case.page_size)
            values[page, :filled] = torch.randn(filled, dim, generator=generator)
    query = torch.randn(batch, case.q_len, case.heads, dim, generator=generator) * 2
    query, cache = query.to(case.query).to(device), values.to(cache_dtype).to(device)
    if case.cache_layout == "4d":
        cache = cache[:, None]
    elif case.cache_layout == "strided":  # wider tokens and a gap behind each page
        wide = torch.full((total, case.page_size + 2, dim + 16), outside).to(cache_dtype).to(device)
        wide[:, : case.page_size, :dim] = cache
        cache = wide[:, : case.page_size, :dim]
    elif case.cache_layout == "token-major":
        cache = cache.transpose(0, 1).contiguous().transpose(0, 1)
    lengths = torch.tensor(case.lengths, dtype=torch.int32, device=device)
    return query, cache, table.to(device), lengths, 1.3 / math.sqrt(dim)


def tolerance(case: Case, target) -> float:
    if case.query != FP8:
        return TOLERANCE[case.query]
    special = {
        "blackwell": E4M3_WEIGHTS_TOLERANCE, "hopper": LONG_SUM_TOLERANCE,
        "hopper-fp8-weights": FP8_WEIGHTS_TOLERANCE, "interpreter": TRUNCATED_TOLERANCE,
    }  # fmt: skip
    return special.get(target.name, TOLERANCE[FP8])


def lse_tolerance(case: Case, target) -> float:
    special = {"hopper": LONG_SUM_LSE_TOLERANCE, "hopper-fp8-weights": ONE_SUM_LSE_TOLERANCE}
    return special.get(target.name, LSE_TOLERANCE[FP8]) if case.query == FP8 else LSE_TOLERANCE[case.query]


def skip_unless_served(case: Case, target, *args, **kwargs) -> None:
    if not target.supports(case.query):
        pytest.skip("the interpreter's bf16 arithmetic is wrong")
    if reason := target.refusal("mla_decode_lse", *args, **kwargs):
        pytest.skip(reason)


def check(case: Case, target, **tensors):
    case = target.fit(case)
    arguments = build(case, target.device, outside=target.outside)
    options = dict(case.options, kv_lora_rank=case.rank, output_scale=1.7)
    tensors = {name: torch.tensor(value, dtype=torch.int32, device=target.device) for name, value in tensors.items()}
    skip_unless_served(case, target, *arguments, **options, **tensors)
    expected, expected_lse = oracle.decode(*arguments, **options, **tensors)
    shape = (len(case.lengths), case.q_len, case.heads)
    out_dtype = torch.bfloat16 if case.query == FP8 else case.query
    out = torch.full((*shape, case.rank), math.nan, dtype=out_dtype, device=target.device)
    lse = torch.full(shape, math.nan, device=target.device)
    torch.ops.tokenspeed.mla_decode_lse.out(*arguments, **options, **tensors, out=out, lse=lse)
    assert oracle.row_error(out, expected) <= tolerance(case, target)
    oracle.assert_lse_close(lse, expected_lse, lse_tolerance(case, target))
    again = ts_ops.mla_decode(*arguments, **options, **tensors)
    assert torch.equal(again.view(torch.uint8), out.view(torch.uint8)), "a second call, without LSE, gave other bits"
    return out, lse


DTYPES = [
    Case((0, 1, 37, 150), query=torch.float32),
    Case((0, 1, 37, 150), query=torch.float16),
    Case((0, 1, 37, 150), query=torch.bfloat16),
    Case((0, 1, 37, 150), query=FP8),
    Case((0, 1, 37, 150), query=torch.float16, cache=FP8),
    Case((0, 1, 37, 150), query=torch.bfloat16, cache=FP8),
]
HEADS = [Case((5, 70), heads=h, rank=32) for h in (1, 3, 8, 16, 20, 32, 64, 96, 128)]
PAGES = [Case((3, 130, 257), page_size=p, heads=2) for p in (1, 2, 4, 8, 16, 32, 64, 128)]
PAGES += [Case((3, 130, 257), page_size=p, heads=2, query=FP8) for p in (2, 64)]
DIMS = [
    Case((9, 80), rank=512, rope=64, page_size=64, heads=2),
    Case((9, 80), rank=256, rope=32),
    Case((9, 80), rank=24, rope=8),
    Case((9, 80), rank=40, rope=0),
    Case((9, 80), rank=100, rope=20, query=torch.float32),
    Case((9, 80), rank=100, rope=64, query=FP8),
    Case((9, 180), rank=257, rope=63, heads=33, query=FP8),
    Case((9, 80), rank=512, rope=63, page_size=64, query=FP8),
]
LAYOUTS = [Case((0, 40, 100), cache_layout=layout) for layout in ("4d", "strided", "token-major")]


@pytest.mark.parametrize("case", DTYPES + HEADS + PAGES + DIMS + LAYOUTS, ids=lambda c: c.id)
def test_plain(case, target):
    check(case, target)


@pytest.mark.parametrize("query", [torch.float16, FP8], ids=["fp16", "fp8"])
@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize("q_len", [1, 2, 3, 5, 8, 16])
def test_rows_of_a_block_at_short_lengths(q_len, is_causal, query, target):
    """q_len up to 16 over seq_len 0 to 9: the first rows of a causal block see nothing where seq_len < q_len."""
    options = {"is_causal": is_causal}
    check(Case(tuple(range(10)), q_len=q_len, heads=3, rank=16, query=query, options=options), target)


@pytest.mark.parametrize("q_len, window", [(1, 0), (1, 5), (1, 100), (3, 2), (3, 40), (4, 2**31 - 1)])
@pytest.mark.parametrize("is_causal", [True, False])
def test_window(q_len, window, is_causal, target):
    options = {"window_left": window, "is_causal": is_causal}
    for query in (torch.float16, FP8):
        check(Case((0, 1, 3, 50, 200), q_len=q_len, heads=3, query=query, options=options), target)


@pytest.mark.parametrize("query", [torch.float16, torch.bfloat16, FP8], ids=["fp16", "bf16", "fp8"])
def test_local_visible_lens(query, target):
    lens = [[0, 0, 0], [0, 1, 1], [64, 0, 30], [10, 200, 199]]
    for is_causal in (True, False):
        options = {"is_causal": is_causal}
        check(Case((0, 1, 64, 200), q_len=3, query=query, options=options), target, local_visible_lens=lens)


@pytest.mark.parametrize("world, interleave", [(2, 1), (3, 4), (4, 16)])
@pytest.mark.parametrize("q_len", [1, 4])
@pytest.mark.parametrize("dtype", [torch.float32, FP8], ids=["fp32", "fp8"])
def test_context_parallel_ranks_merge_to_the_whole(world, interleave, q_len, dtype, target):
    """Each rank's state is right, and merging them gives the attention over all keys."""
    lengths = (2, 5, 33, 150)
    states = []
    for rank in range(world):
        held = [[g for g in range(n) if g // interleave % world == rank] for n in lengths]
        options = {"cp_world": world, "cp_rank": rank, "cp_interleave_size": interleave}
        case = Case(tuple(map(len, held)), q_len=q_len, heads=3, query=dtype, options=options)
        check(case, target, causal_seqs=lengths)
        states.append(held)
    # One cache for all ranks: the global keys of the whole problem, dealt out to caches of their own.
    whole = target.fit(Case(lengths, q_len=q_len, heads=3, query=dtype))
    query, cache, table, seq_lens, scale = build(whole, target.device, outside=target.outside)
    outputs, lses = [], []
    for rank, held in enumerate(states):
        rows = [oracle.request_keys(cache, table[b], n)[held[b]] for b, n in enumerate(lengths)]
        width = max(1, max(len(r) for r in rows))
        rank_cache = cache.new_zeros(len(lengths), 128, cache.shape[-1])
        assert width <= 128
        for b, keys in enumerate(rows):
            rank_cache[b, : len(keys)] = keys.to(rank_cache)
        rank_table = torch.arange(len(lengths), dtype=torch.int32, device=target.device)[:, None]
        counts = torch.tensor([len(r) for r in rows], dtype=torch.int32, device=target.device)
        out, lse = ts_ops.mla_decode_lse(
            query, rank_cache, rank_table, counts, scale, kv_lora_rank=whole.rank, causal_seqs=seq_lens,
            cp_world=world, cp_rank=rank, cp_interleave_size=interleave,
        )  # fmt: skip
        outputs.append(out.flatten(0, 1))
        lses.append(lse.flatten(0, 1))
    merged, merged_lse = oracle.merge(torch.stack(outputs), torch.stack(lses))
    expected, expected_lse = oracle.decode(query, cache, table, seq_lens, scale, kv_lora_rank=whole.rank)
    assert oracle.row_error(merged.view_as(expected), expected) <= tolerance(whole, target)
    oracle.assert_lse_close(merged_lse.view_as(expected_lse), expected_lse, lse_tolerance(whole, target))


def test_hint_changes_a_result_within_rounding(target):
    case = target.fit(Case((0, 17, 90, 700), query=torch.float32))
    arguments = build(case, target.device, outside=target.outside)
    expected, _ = oracle.decode(*arguments, kv_lora_rank=case.rank)
    for hint in (None, 0, 1, 100, 700, 2**31 - 1):
        out = ts_ops.mla_decode(*arguments, kv_lora_rank=case.rank, max_seq_len=hint)
        assert oracle.row_error(out, expected) <= tolerance(case, target)


def test_bits_do_not_depend_on_what_lies_outside_the_request(target):
    case = target.fit(Case((1, 16, 37), heads=3, q_len=2))
    query, cache, table, lengths, scale = build(case, target.device, outside=target.outside)
    clean = torch.where(cache.isnan() | (cache == target.outside), 0.0, cache)
    zeroed = torch.where((table < 0) | (table >= cache.shape[0]), 0, table)
    first = ts_ops.mla_decode_lse(query, cache, table, lengths, scale, kv_lora_rank=case.rank)
    second = ts_ops.mla_decode_lse(query, clean, zeroed, lengths, scale, kv_lora_rank=case.rank)
    assert torch.equal(first[0], second[0]) and torch.equal(first[1], second[1])


def test_strided_arguments_are_read_as_they_lie(target):
    """Queries permuted or sliced, tables and lengths that are columns of wider tensors, an expanded visible bound."""
    case = target.fit(Case((3, 40, 100), heads=6, q_len=2, query=torch.float32))
    query, cache, table, lengths, scale = build(case, target.device, outside=target.outside)
    expected, _ = oracle.decode(query, cache, table, lengths, scale, kv_lora_rank=case.rank)
    permuted = query.permute(2, 0, 1, 3).contiguous().permute(1, 2, 0, 3)
    sliced = torch.cat((query, query), dim=-1)[..., : query.shape[-1]]
    wide_table = table.repeat_interleave(2, dim=1)[:, ::2]
    wide_lengths = torch.stack((lengths, lengths * 0 + 7), dim=1)[:, 0]
    skip_unless_served(case, target, permuted, cache, wide_table, wide_lengths, scale, kv_lora_rank=case.rank)
    for q in (permuted, sliced):
        assert not q.is_contiguous() and not wide_table.is_contiguous() and not wide_lengths.is_contiguous()
        out = ts_ops.mla_decode(q, cache, wide_table, wide_lengths, scale, kv_lora_rank=case.rank)
        assert oracle.row_error(out, expected) <= tolerance(case, target)
    bound = lengths[:, None].expand(-1, 2)
    out = ts_ops.mla_decode(query, cache, table, lengths, scale, kv_lora_rank=case.rank, local_visible_lens=bound)
    expected, _ = oracle.decode(query, cache, table, lengths, scale, kv_lora_rank=case.rank, local_visible_lens=bound)
    assert oracle.row_error(out, expected) <= tolerance(case, target)


def test_strided_causal_seqs(target):
    """The global lengths are a column of a wider tensor."""
    options = {"cp_world": 2, "cp_rank": 1}
    case = target.fit(Case((5, 40), heads=3, q_len=2, query=FP8, options=options))
    arguments = build(case, target.device, outside=target.outside)
    wide = torch.tensor([[10, 7], [81, 7]], dtype=torch.int32, device=target.device)[:, 0]
    options = dict(options, causal_seqs=wide, kv_lora_rank=case.rank)
    skip_unless_served(case, target, *arguments, **options)
    expected, _ = oracle.decode(*arguments, **options)
    assert oracle.row_error(ts_ops.mla_decode(*arguments, **options), expected) <= tolerance(case, target)


@pytest.mark.parametrize("k_scale", [0.037, 7.3])
@pytest.mark.parametrize("query_dtype", [FP8, torch.float16, torch.bfloat16])
def test_scales(k_scale, query_dtype, target):
    """`real = stored * scale`: k_scale enters through softmax_scale and output_scale, whatever the query's dtype."""
    case = target.fit(Case((30, 100), query=query_dtype, cache=None if query_dtype == FP8 else FP8))
    query, cache, table, lengths, scale = build(case, target.device, outside=target.outside)
    skip_unless_served(case, target, query, cache, table, lengths, scale, kv_lora_rank=case.rank)
    real = cache.float() * k_scale
    scale = scale / k_scale  # keeps the real scores in range
    expected, _ = oracle.decode(query, real, table, lengths, scale, kv_lora_rank=case.rank)
    out = ts_ops.mla_decode(query, cache, table, lengths, scale * k_scale, output_scale=k_scale, kv_lora_rank=case.rank)
    assert oracle.row_error(out, expected) <= tolerance(case, target)


@pytest.mark.parametrize("scale", [0.0, -0.2, 1e-6])
def test_any_finite_softmax_scale(scale, target):
    case = target.fit(Case((0, 5, 60), query=torch.float32))
    query, cache, table, lengths, _ = build(case, target.device, outside=target.outside)
    skip_unless_served(case, target, query, cache, table, lengths, scale, kv_lora_rank=case.rank)
    expected, expected_lse = oracle.decode(query, cache, table, lengths, scale, kv_lora_rank=case.rank)
    out, lse = ts_ops.mla_decode_lse(query, cache, table, lengths, scale, kv_lora_rank=case.rank)
    assert oracle.row_error(out, expected) <= tolerance(case, target)
    oracle.assert_lse_close(lse, expected_lse, lse_tolerance(case, target))


def test_no_pages_at_all(target):
    """max_pages 0, and a cache of no pages: every row is empty."""
    query = torch.randn(2, 1, 3, 576, dtype=torch.float16, device=target.device)
    lengths = torch.zeros(2, dtype=torch.int32, device=target.device)
    for pages, max_pages in ((4, 0), (0, 3), (0, 0)):
        cache = torch.randn(pages, 64, 576, dtype=torch.float16, device=target.device)
        table = torch.zeros(2, max_pages, dtype=torch.int32, device=target.device)
        if target.refusal("mla_decode_lse", query, cache, table, lengths, 0.1):
            continue
        out, lse = ts_ops.mla_decode_lse(query, cache, table, lengths, 0.1)
        assert (out == 0).all() and (lse == -math.inf).all()


def test_prefill_and_decode_agree_on_the_lse(target):
    """Both natural logs: a decode in base 2 would be off by a factor of 1.44."""
    target.skip_unless_it_has("mla_prefill_lse")
    case = target.fit(Case((50,), heads=2, q_len=4, query=torch.float32))
    query, cache, table, lengths, scale = build(case, target.device, outside=target.outside)
    nope = min(128, case.rank)  # as many columns as the keys of a prefill have, the query's others being 0
    query[..., nope : case.rank] = 0
    _, decode_lse = ts_ops.mla_decode_lse(query, cache, table, lengths, scale, kv_lora_rank=case.rank)
    keys = oracle.request_keys(cache, table[0], 50).to(query)[:, None]
    new, old = (torch.cat((rows[..., :nope], rows[..., case.rank :]), dim=-1) for rows in (query[0], keys))
    cum_q, cum_kv = (torch.tensor([0, n], dtype=torch.int32, device=target.device) for n in (4, 50))
    values = keys[..., :nope].repeat(1, case.heads, 1)
    _, prefill_lse = ts_ops.mla_prefill_lse(new, old.repeat(1, case.heads, 1), values, cum_q, cum_kv, scale)
    torch.testing.assert_close(decode_lse[0], prefill_lse, rtol=0, atol=LSE_TOLERANCE[case.query])


@pytest.mark.gpu
@pytest.mark.parametrize("layout", ["page-major", "token-major"])
@pytest.mark.parametrize("page_size", [16, 64])
def test_cache_past_2_31_elements(layout, page_size):
    """Pages at the end of a cache of more than 2^31 elements, whose page or token strides overflow 32 bits."""
    pages = 2**31 // (576 * page_size) + 1000
    cache = torch.zeros(pages * page_size * 576, dtype=FP8, device="cuda")
    shape = (pages, page_size, 576)
    cache = cache.view(shape) if layout == "page-major" else cache.view(page_size, pages, 576).transpose(0, 1)
    used = [[pages - 1, 0, pages - 2], [pages - 3, pages // 2, pages - 4]]
    used = torch.tensor(used, dtype=torch.int32, device="cuda")
    cache[used.flatten().long()] = torch.randn(6, page_size, 576, device="cuda").to(FP8)
    lengths = torch.tensor([3 * page_size - 1, 2 * page_size + 5], dtype=torch.int32, device="cuda")
    query = torch.randn(2, 1, 4, 576, dtype=torch.float16, device="cuda")
    expected, _ = oracle.decode(query, cache, used, lengths, 0.04)
    assert oracle.row_error(ts_ops.mla_decode(query, cache, used, lengths, 0.04), expected) <= TOLERANCE[torch.float16]
