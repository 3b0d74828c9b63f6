"""mla_prefill and mla_prefill_lse compute what the laws say, on every backend.

Each case is compared with the float64 oracle on the same (already quantised) inputs. Whatever no row of the batch may
see is NaN: keys past the last sequence, keys of a sequence without queries, query rows past the last sequence, the gaps
of strided tensors. Outputs are poisoned with NaN through the `.out` overload and lie inside guarded memory.
"""

import math
from dataclasses import dataclass, replace

import pytest
import torch

import oracle
import ts_ops

FP8 = torch.float8_e4m3fn
# Largest row error ||o - ref|| / ||ref||. fp32: sums of up to 256 products and of a few hundred keys. fp16 and bf16:
# one rounding of the result and one of each softmax weight, of 2^-12 and 2^-9 on average. FP8: inputs count as exact,
# weights are fp16, the result is bf16.
TOLERANCE = {torch.float32: 1e-5, torch.float16: 6e-4, torch.bfloat16: 4e-3, FP8: 4e-3}
# The interpreter truncates where it should round to bf16, which doubles that error.
TRUNCATED_TOLERANCE = 6e-3
# The scores are fp32 sums of exact products, except on Hopper's FP8 units, which keep about 14 bits of a sum.
LSE_TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-5, torch.bfloat16: 2e-5, FP8: 2e-3}
GUARD = 64  # elements before and after an output, which keep their values


@dataclass(frozen=True)
class Case:
    q_lens: tuple[int, ...]
    kv_lens: tuple[int, ...]
    dtype: torch.dtype = torch.float16
    is_causal: bool = True
    heads: int = 2
    heads_kv: int = 2
    dim_qk: int = 192
    dim_v: int = 128
    softmax_scale: float = 0.09
    output_scale: float = 1.0
    layout: str = "plain"
    padding: int = 3  # rows and keys past the last sequence

    @property
    def id(self):
        shape = f"{self.heads}over{self.heads_kv}-{self.dim_qk}x{self.dim_v}-q{max(self.q_lens, default=0)}"
        scales = f"{self.softmax_scale}-{self.output_scale}"
        return f"{str(self.dtype)[6:]}-{'causal' if self.is_causal else 'full'}-{shape}-{scales}-{self.layout}"


def build(case: Case, device: str, outside: float = math.nan):
    """Positional arguments of the operator, and its options. What no row may see is `outside`."""
    tokens_q, tokens_kv = sum(case.q_lens) + case.padding, sum(case.kv_lens) + case.padding
    query = torch.randn(tokens_q, case.heads, case.dim_qk)
    key = torch.randn(tokens_kv, case.heads_kv, case.dim_qk)
    value = torch.randn(tokens_kv, case.heads_kv, case.dim_v)
    query[sum(case.q_lens) :] = outside
    unseen = [q_len == 0 for q_len, kv_len in zip(case.q_lens, case.kv_lens) for _ in range(kv_len)]
    for rows in (key, value):
        rows[torch.tensor(unseen + [True] * case.padding, dtype=torch.bool)] = outside
    query, key, value = (rows.to(case.dtype).to(device) for rows in (query, key, value))
    query, key, value = LAYOUTS[case.layout](query, key, value)
    cum_q, cum_kv = (cumulative(lens, device) for lens in (case.q_lens, case.kv_lens))
    options = {"output_scale": case.output_scale, "is_causal": case.is_causal}
    return (query, key, value, cum_q, cum_kv, case.softmax_scale), options


def cumulative(lens, device):
    return torch.tensor([0, *lens], dtype=torch.int32).cumsum(0).int().to(device)


def split_view(query, key, value):
    """V as half of a split view: each token of a head is k_nope beside v."""
    beside = poisoned(value, (*value.shape[:2], 2 * value.shape[2]))
    beside[..., value.shape[2] :] = value
    return query, key, beside[..., value.shape[2] :]


def heads_first(query, key, value):
    return tuple(rows.transpose(0, 1).contiguous().transpose(0, 1) for rows in (query, key, value))


def unaligned(query, key, value):
    """Odd strides, rows that start at odd addresses."""
    views = []
    for rows in (query, key, value):
        tokens, heads, dim = rows.shape
        wide = poisoned(rows, (tokens, heads + 1, dim + 3))[:, 1:, 1 : dim + 1]
        views.append(wide.copy_(rows))
    return tuple(views)


def poisoned(like, shape):
    return torch.full(shape, math.nan, device=like.device).to(like.dtype)


LAYOUTS = {"plain": lambda *rows: rows, "split": split_view, "heads_first": heads_first, "unaligned": unaligned}


def guarded(shape, dtype, device):
    """A contiguous buffer of NaN, and the memory around it."""
    memory = torch.full((math.prod(shape) + 2 * GUARD,), math.nan, dtype=dtype, device=device)
    memory[:GUARD] = memory[-GUARD:] = 7.0
    return memory[GUARD:-GUARD].view(shape), memory


def attend(arguments, options):
    """mla_prefill_lse into poisoned buffers; nothing beside them may be written."""
    query, value = arguments[0], arguments[2]
    rows, dtype = query.shape[:2], torch.bfloat16 if query.dtype == FP8 else query.dtype
    out, out_memory = guarded((*rows, value.shape[2]), dtype, query.device)
    lse, lse_memory = guarded(rows, torch.float32, query.device)
    torch.ops.tokenspeed.mla_prefill_lse.out(*arguments, **options, out=out, lse=lse)
    for memory in (out_memory, lse_memory):
        assert (memory[:GUARD] == 7.0).all() and (memory[-GUARD:] == 7.0).all(), "written outside the output"
    return out, lse


def same_bits(a, b):
    return torch.equal(a.view(torch.uint8), b.view(torch.uint8))


def skip_unless_served(case: Case, target, arguments, options) -> None:
    if not target.supports(case.dtype):
        pytest.skip("the interpreter's bf16 arithmetic is wrong")
    if reason := target.refusal("mla_prefill_lse", *arguments, **options):
        pytest.skip(reason)


def check(case: Case, target):
    case = target.fit(case)
    arguments, options = build(case, target.device, target.outside)
    skip_unless_served(case, target, arguments, options)
    expected, expected_lse = oracle.prefill(*arguments, **options)
    out, lse = attend(arguments, options)
    truncates = not target.supports(out.dtype)
    assert oracle.row_error(out, expected) <= (TRUNCATED_TOLERANCE if truncates else TOLERANCE[case.dtype])
    oracle.assert_lse_close(lse, expected_lse, LSE_TOLERANCE[case.dtype])


# Tiles of 16 to 128 rows and keys: lengths below, at and above one, sequences without queries, without keys, and with
# fewer keys than queries (whose first rows see nothing).
RAGGED = Case(q_lens=(3, 200, 0, 64, 7, 90), kv_lens=(65, 257, 9, 128, 0, 40), heads=1, heads_kv=1)
DTYPES = [
    replace(RAGGED, dtype=dtype, is_causal=is_causal)
    for dtype in (torch.float32, torch.float16, torch.bfloat16, FP8)
    for is_causal in (True, False)
]
SMALL = Case(q_lens=(5, 70), kv_lens=(40, 75), heads=1, heads_kv=1)
TINY = Case(q_lens=(3,), kv_lens=(5,), dim_qk=32, dim_v=16)
HEADS = [replace(TINY, heads=h, heads_kv=kv) for h, kv in ((1, 1), (3, 3), (20, 4), (7, 1), (128, 128))]
DIMS = [
    replace(SMALL, dim_qk=qk, dim_v=v, is_causal=is_causal, dtype=dtype)
    for qk, v, is_causal, dtype in (
        (64, 64, True, torch.float16),
        (64, 64, False, torch.bfloat16),
        (80, 48, True, torch.float16),
        (80, 48, False, torch.float32),
        (80, 48, True, torch.bfloat16),
        (80, 48, False, FP8),
        (256, 256, True, torch.float16),
        (256, 256, False, FP8),
        (40, 300, True, torch.float16),
        (112, 96, False, torch.float16),
        (5, 3, True, torch.float32),
    )
]
# A score may be scaled after the maximum is taken only if the scale is a positive number.
SCALES = [replace(SMALL, softmax_scale=s) for s in (0.5, 0.0, -0.09, 1e-42)]
SCALES += [replace(TINY, output_scale=s, dtype=dtype) for s in (0.037, 7.3) for dtype in TOLERANCE]
STRIDED = [
    replace(SMALL, layout=layout, dtype=dtype)
    for layout in ("split", "heads_first", "unaligned")
    for dtype in (torch.float16, torch.bfloat16, FP8)
]
# More rows beyond their keys than a tile of any backend holds.
FEW_KEYS = [
    Case(q_lens=(600, 300), kv_lens=(20, 40), heads=1, heads_kv=1),
    Case(q_lens=(300,), kv_lens=(300,), heads=1, heads_kv=1),
]
FEW_KEYS += [
    Case(q_lens=(n,) * 6, kv_lens=(0, 1, 31, 63, 64, 65), heads=1, heads_kv=1, is_causal=is_causal)
    for n in (1, 65)
    for is_causal in (True, False)
]


@pytest.mark.parametrize("case", DTYPES + HEADS + DIMS + SCALES + STRIDED + FEW_KEYS, ids=lambda case: case.id)
def test_attention(case, target):
    check(case, target)


def test_many_sequences(target):
    """More sequences than a kernel looks through at once, most of them empty."""
    lens = tuple(2 if n % 7 == 3 else 0 for n in range(300))
    check(Case(q_lens=lens, kv_lens=tuple(2 * n for n in lens), heads=1, heads_kv=1, dim_qk=32, dim_v=16), target)


@pytest.mark.parametrize("keys", [0, 4])
def test_no_sequences(keys, target):
    """B = 0, with and without keys: every row is an empty row."""
    case = target.fit(Case(q_lens=(), kv_lens=(), padding=150))
    (query, key, value, *rest), options = build(case, target.device, target.outside)
    out, lse = attend((query, key[:keys], value[:keys], *rest), options)
    assert (out == 0).all() and (lse == -math.inf).all()


@pytest.mark.parametrize("is_causal", [True, False])
def test_padding_rows(is_causal, target):
    """Rows past cum_seq_lens_q[-1], here many tiles of them as in a captured prefill, are empty rows."""
    case = target.fit(replace(SMALL, padding=200, is_causal=is_causal))
    arguments, options = build(case, target.device, target.outside)
    out, lse = attend(arguments, options)
    assert (out[75:] == 0).all() and (lse[75:] == -math.inf).all()
    expected, _ = oracle.prefill(*arguments, **options)
    assert oracle.row_error(out, expected) <= TOLERANCE[case.dtype]


def test_no_rows(target):
    arguments, options = build(target.fit(Case(q_lens=(0, 0), kv_lens=(4, 0), padding=0)), target.device)
    out, lse = ts_ops.mla_prefill_lse(*arguments, **options)
    assert out.shape == (0, 2, 128) and lse.shape == (0, 2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, FP8])
def test_deterministic(dtype, target):
    """The same bits again, without the LSE, and whatever the hints say."""
    arguments, options = build(target.fit(replace(SMALL, dtype=dtype)), target.device, target.outside)
    out, lse = attend(arguments, options)
    again, lse_again = ts_ops.mla_prefill_lse(*arguments, **options)
    assert same_bits(out, again) and same_bits(lse, lse_again)
    assert same_bits(out, ts_ops.mla_prefill(*arguments, **options))
    assert same_bits(out, ts_ops.mla_prefill(*arguments, **options, max_seq_len_q=70, max_seq_len_kv=75))


@pytest.mark.parametrize("is_causal", [True, False])
def test_strided_cumulative_lengths(is_causal, target):
    """Columns of a wider tensor, whose neighbours hold other numbers."""
    case = target.fit(Case((3, 0, 9), (5, 2, 9), is_causal=is_causal))
    arguments, options = build(case, target.device, target.outside)
    expected, _ = oracle.prefill(*arguments, **options)
    wide = [torch.stack((cum, cum * 3 + 1), dim=1)[:, 0] for cum in arguments[3:5]]
    assert all(not cum.is_contiguous() for cum in wide)
    out = ts_ops.mla_prefill(*arguments[:3], *wide, arguments[5], **options)
    assert oracle.row_error(out, expected) <= TOLERANCE[arguments[0].dtype]


def test_sequences_are_apart(target):
    """NaN in one sequence's queries, keys and values does not reach the rows of its neighbours."""
    case = target.fit(Case(q_lens=(5, 10, 7), kv_lens=(40, 20, 30), heads=1, heads_kv=1, dim_qk=32, dim_v=16))
    arguments, options = build(case, target.device, target.outside)
    expected, expected_lse = oracle.prefill(*arguments, **options)
    query, key, value = arguments[:3]
    query[5:15] = math.nan
    key[40:60] = value[40:60] = target.outside
    out, lse = attend(arguments, options)
    others = [*range(5), *range(15, 22)]
    assert oracle.row_error(out[others], expected[others]) <= TOLERANCE[case.dtype]
    oracle.assert_lse_close(lse[others], expected_lse[others], LSE_TOLERANCE[case.dtype])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_chunked_context(dtype, target):
    """Causal attention over the new keys, merged with chunks of the earlier ones, is attention over all of them.

    The chunks cut each request's context at 0 to 50 and 50 to 90 tokens: some are empty, one request has none at all.
    """
    new, context = (6, 40, 1, 33), (90, 30, 60, 0)
    whole = target.fit(Case(q_lens=new, kv_lens=tuple(n + c for n, c in zip(new, context)), dtype=dtype, padding=0))
    arguments, options = build(whole, target.device, target.outside)
    skip_unless_served(whole, target, arguments, options)
    query, key, value, cum_q, cum_kv, scale = arguments
    expected, expected_lse = oracle.prefill(query, key, value, cum_q, cum_kv, scale, **options)

    def part(spans, is_causal):
        """Attention over the keys [low, high) of each request."""
        starts = cum_kv.tolist()
        kept = [torch.arange(start + low, start + high) for start, (low, high) in zip(starts, spans)]
        index = torch.cat(kept).to(target.device)
        cum = cumulative([high - low for low, high in spans], target.device)
        return ts_ops.mla_prefill_lse(query, key[index], value[index], cum_q, cum, scale, is_causal=is_causal)

    out, lse = part([(c, c + n) for n, c in zip(new, context)], True)
    for low, high in ((0, 50), (50, 90)):
        before, lse_before = part([(min(low, c), min(high, c)) for c in context], False)
        empty = torch.tensor([min(high, c) <= low for n, c in zip(new, context) for _ in range(n)]).to(target.device)
        assert (before[empty] == 0).all() and (lse_before[empty] == -math.inf).all()
        merged, lse_merged = merge(target, before, lse_before, out, lse)
        assert same_bits(merged[empty], out[empty]) and same_bits(lse_merged[empty], lse[empty])
        out, lse = merged, lse_merged
    # Three roundings to the dtype, of the parts and of the two merges, where one-shot attention has one.
    assert oracle.row_error(out, expected) <= 2 * TOLERANCE[whole.dtype]
    oracle.assert_lse_close(lse, expected_lse, LSE_TOLERANCE[whole.dtype])


def merge(target, *states):
    """merge_attn_states, by the reference where the backend has none."""
    with ts_ops.use_backend("reference" if target.backend == "tokenspeed" else target.backend):
        return ts_ops.merge_attn_states(*states)


def test_far_tokens(target):
    """Offsets past 2^31 elements: tokens 2^27 elements apart. Only the pages that hold them are ever touched."""
    tokens, stride, dim = 18, 2**27, 64
    memory = torch.empty((tokens - 1) * stride + 4 * dim, dtype=torch.float16, device=target.device)
    query, key, value = (memory.as_strided((tokens, 1, dim), (stride, dim, 1), n * dim) for n in range(3))
    for rows in (query, key, value):
        rows.copy_(torch.randn(tokens, 1, dim))
    cum = cumulative((2, tokens - 2), target.device)
    arguments, options = (query, key, value, cum, cum, 0.125), {"is_causal": True}
    if reason := target.refusal("mla_prefill_lse", *arguments, **options):
        pytest.skip(reason)
    out, lse = attend(arguments, options)
    expected, expected_lse = oracle.prefill(*arguments, **options)
    assert oracle.row_error(out, expected) <= TOLERANCE[torch.float16]
    oracle.assert_lse_close(lse, expected_lse, LSE_TOLERANCE[torch.float16])
