"""Merging attention states is exact, and ignores empty sides (law 4).

- The states of any split of the keys, empty parts included, merge into the state of all keys.
- A side whose LSE is -inf or +inf does not count, whatever its output holds; all sides empty gives (0, -inf).
- A NaN LSE is an error upstream and stays visible, in its own row only.
- Any token count, head count and head dim, any strides, and tensors past 2^31 elements.
"""

import math
from dataclasses import dataclass

import pytest
import torch

import oracle

ops = torch.ops.tokenspeed

# The kernels compute in fp32: a few roundings in the weights, then one in the output dtype. Error norms are per row, so
# the unit roundoff of the dtype bounds what the last rounding adds.
ARITHMETIC = 2e-6
TOLERANCE = {torch.float32: ARITHMETIC, torch.float16: 2**-11 + ARITHMETIC, torch.bfloat16: 2**-8 + ARITHMETIC}
LSE_TOLERANCE = 4e-6  # LSEs reach 16, where an fp32 ulp is 1e-6
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@dataclass(frozen=True)
class Case:
    tokens: int
    heads: int
    dim: int
    states: int = 2

    def __str__(self):
        return f"T{self.tokens}-H{self.heads}-D{self.dim}-N{self.states}"


SHAPES = [
    Case(1, 1, 64),
    Case(2, 128, 128),
    Case(1, 130, 72, states=3),
    Case(3, 20, 192, states=3),
    Case(5, 96, 65),
    Case(5, 8, 512, states=8),
    Case(4, 16, 576),
    Case(33, 3, 320, states=1),
    Case(70, 1, 1, states=4),
    Case(2, 5, 100, states=9),
]


def random_states(case: Case, dtype, device, empty=0.3):
    """States whose empty rows (LSE -inf or +inf) hold NaN and infinity."""
    outputs = torch.randn(case.states, case.tokens, case.heads, case.dim)
    lses = torch.randn(case.states, case.tokens, case.heads) * 4
    lot = torch.rand_like(lses)
    lses[lot < empty] = -math.inf
    lses[lot < empty / 2] = math.inf
    outputs[lot < empty] = math.inf
    outputs[lot < empty * 0.8] = math.nan
    return outputs.to(device, dtype), lses.to(device)


def poisoned(like):
    """NaN buffers for the two results of a merge of `like` [N, T, H, D]."""
    out = torch.full(like.shape[1:], math.nan, dtype=like.dtype, device=like.device)
    return out, torch.full(like.shape[1:-1], math.nan, dtype=torch.float32, device=like.device)


def merge(outputs, lses):
    """Into poisoned buffers, by each operator that takes these states: merge_n, and the pair form for two."""
    results = [poisoned(outputs)]
    ops.merge_attn_states_n.out(outputs, lses, out=results[0][0], lse=results[0][1])
    if outputs.shape[0] == 2:
        results.append(poisoned(outputs))
        ops.merge_attn_states.out(outputs[0], lses[0], outputs[1], lses[1], out=results[1][0], lse=results[1][1])
    return results


def check(outputs, lses):
    expected, expected_lse = oracle.merge(outputs, lses)
    for out, lse in merge(outputs, lses):
        assert oracle.row_error(out, expected) <= TOLERANCE[out.dtype]
        oracle.assert_lse_close(lse, expected_lse, LSE_TOLERANCE)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", SHAPES, ids=str)
def test_any_shape(target, case, dtype):
    if not target.supports(dtype):
        pytest.skip("bf16 is wrong in the interpreter")
    check(*random_states(case, dtype, target.device))


LAYOUTS = {
    "lse_of_heads_first": lambda o, s: (o, s.transpose(1, 2).contiguous().transpose(1, 2)),
    "output_of_heads_first": lambda o, s: (o.transpose(1, 2).contiguous().transpose(1, 2), s),
    "states_innermost": lambda o, s: (
        o.permute(1, 2, 0, 3).contiguous().permute(2, 0, 1, 3),
        s.permute(1, 2, 0).contiguous().permute(2, 0, 1),
    ),
    "columns_of_a_wider_tensor": lambda o, s: (torch.cat((o, o), dim=-1)[..., : o.shape[-1]], s),
    "odd_row_stride": lambda o, s: (torch.cat((o, o[..., :1]), dim=-1)[..., 1:], s),
    "every_other_head": lambda o, s: (o[:, :, ::2], s[:, :, ::2]),
    "one_token_for_all": lambda o, s: (o[:, :1].expand_as(o), s[:, :1].expand_as(s)),
    "one_head_for_all": lambda o, s: (o[:, :, :1].expand_as(o), s[:, :, :1].expand_as(s)),
    "one_state_for_all": lambda o, s: (o[:1].expand_as(o), s[:1].expand_as(s)),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_any_strides(target, layout):
    check(*LAYOUTS[layout](*random_states(Case(5, 12, 96), torch.float16, target.device)))


def test_lse_may_be_nan_only_in_its_row(target):
    for states in (2, 3):
        outputs, lses = random_states(Case(4, 6, 64, states), torch.float32, target.device, empty=0.0)
        lses[1, 2, 3] = math.nan
        lses[0, 2, 4], lses[1, 2, 4] = -math.inf, math.nan
        rest = torch.ones(4, 6, dtype=torch.bool)
        rest[2, 3:5] = False
        expected, expected_lse = oracle.merge(outputs, lses)
        for out, lse in merge(outputs, lses):
            assert out.cpu()[~rest].isnan().all() and lse.cpu()[~rest].isnan().all()
            assert oracle.row_error(out.cpu()[rest], expected[rest]) <= ARITHMETIC
            oracle.assert_lse_close(lse.cpu()[rest], expected_lse[rest], LSE_TOLERANCE)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("empty", [-math.inf, math.inf])
@pytest.mark.parametrize("states", [2, 5])
def test_empty_sides_are_the_identity(target, dtype, empty, states):
    """One live side passes through with its bits."""
    if not target.supports(dtype):
        pytest.skip("bf16 is wrong in the interpreter")
    for live in range(states):
        outputs = torch.full((states, 3, 4, 96), math.nan, dtype=dtype, device=target.device)
        lses = torch.full((states, 3, 4), empty, device=target.device)
        outputs[live] = torch.randn(3, 4, 96).to(outputs)
        lses[live] = torch.randn(3, 4).to(lses) * 50
        for out, lse in merge(outputs, lses):
            torch.testing.assert_close(out, outputs[live], rtol=0, atol=0)
            torch.testing.assert_close(lse, lses[live], rtol=0, atol=0)


@pytest.mark.parametrize("states", [1, 2, 3, 6])
def test_all_sides_empty(target, states):
    outputs = torch.full((states, 3, 2, 72), math.nan, device=target.device)
    for marks in (-math.inf, math.inf):
        lses = torch.full((states, 3, 2), marks, device=target.device)
        lses[0] = -math.inf
        for out, lse in merge(outputs, lses):
            assert (out == 0).all() and (lse == -math.inf).all()


def test_far_apart_lses_do_not_overflow(target):
    outputs, _ = random_states(Case(2, 2, 64), torch.float32, target.device, empty=0.0)
    lses = torch.tensor([[[3e38, -3e38], [0.0, -900.0]], [[1e38, -3e38], [1000.0, -901.0]]], device=target.device)
    expected, expected_lse = oracle.merge(outputs, lses)
    for out, lse in merge(outputs, lses):
        assert oracle.row_error(out, expected) <= ARITHMETIC
        torch.testing.assert_close(lse.cpu().double(), expected_lse, rtol=1e-7, atol=0)


SPLITS = [(40,), (0, 40), (40, 0), (1, 39), (13, 27), (0, 0, 40), (5, 0, 20, 15), (0, 0), (8,) * 5, (1,) * 10]


@pytest.mark.parametrize("split", SPLITS, ids=str)
def test_exact_over_any_split_of_the_keys(target, split):
    """States of the parts, from the float64 oracle, merge at once and one by one into the state of all keys."""
    tokens, heads, dim = 2, 3, 64
    query = torch.randn(tokens, heads, dim, dtype=torch.float64)
    keys = torch.randn(sum(split), dim, dtype=torch.float64)

    def state(part):
        rows = [[oracle.attend(query[t, h], part, part, 0.3) for h in range(heads)] for t in range(tokens)]
        out = torch.stack([torch.stack([o for o, _ in row]) for row in rows])
        return out, torch.stack([torch.stack([lse for _, lse in row]) for row in rows])

    whole, whole_lse = state(keys)
    parts = [state(part) for part in keys.split(list(split))]
    outputs = torch.stack([out for out, _ in parts]).float().to(target.device)
    lses = torch.stack([lse for _, lse in parts]).float().to(target.device)

    at_once = ops.merge_attn_states_n(outputs, lses)
    one_by_one = outputs[0], lses[0]
    for other in zip(outputs[1:], lses[1:]):
        one_by_one = ops.merge_attn_states(*one_by_one, *other)
    for out, lse in (at_once, one_by_one):
        # Rounding the parts to fp32, and that of a merge for each further part.
        assert oracle.row_error(out, whole) <= 1e-6 + len(split) * 5e-7
        oracle.assert_lse_close(lse, whole_lse, LSE_TOLERANCE)


def test_no_tokens(target):
    outputs, lses = torch.empty(2, 0, 16, 128, device=target.device), torch.empty(2, 0, 16, device=target.device)
    pair = ops.merge_attn_states(outputs[0], lses[0], outputs[1], lses[1])
    for out, lse in (ops.merge_attn_states_n(outputs, lses), pair):
        assert out.shape == (0, 16, 128) and lse.shape == (0, 16)


def test_same_bits_again(target):
    outputs, lses = random_states(Case(3, 8, 64, states=5), torch.float16, target.device)
    first, second = ops.merge_attn_states_n(outputs, lses), ops.merge_attn_states_n(outputs, lses)
    assert all(torch.equal(a, b) for a, b in zip(first, second))


LARGE = [
    Case(1, 128, 128),
    Case(1024, 16, 512),
    Case(65536, 8, 128),
    Case(65537, 128, 64, states=3),
    Case(4096, 128, 576, states=4),
    Case(131080, 128, 128),  # past 2^31 elements a state
]


@pytest.mark.gpu
@pytest.mark.parametrize("case", LARGE, ids=str)
def test_large_on_gpu(case):
    """All LSEs against torch; tokens at both ends and at the 2^31st element against the oracle."""
    generator = torch.Generator("cuda").manual_seed(0)
    outputs = torch.empty(case.states, case.tokens, case.heads, case.dim, dtype=torch.bfloat16, device="cuda")
    for state in outputs:
        state.normal_(generator=generator)
    lses = torch.randn(case.states, case.tokens, case.heads, device="cuda", generator=generator) * 4
    lses.masked_fill_(torch.rand(lses.shape, device="cuda", generator=generator) < 0.1, -math.inf)
    edge = 2**31 // (case.heads * case.dim)
    tokens = sorted({t for at in (0, edge, case.tokens) for t in range(at - 3, at + 3) if 0 <= t < case.tokens})
    expected, expected_lse = oracle.merge(outputs[:, tokens], lses[:, tokens])
    for out, lse in merge(outputs, lses):
        assert not any(part.isnan().any() for part in out.split(4096))
        assert oracle.row_error(out[tokens], expected) <= TOLERANCE[torch.bfloat16]
        oracle.assert_lse_close(lse[tokens], expected_lse, LSE_TOLERANCE)
        torch.testing.assert_close(lse, lses.logsumexp(dim=0), rtol=0, atol=LSE_TOLERANCE)
