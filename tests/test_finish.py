"""The launches around the TokenSpeed kernels do what the adapter relies on: their own test, for they run on any GPU.

Empty rows by law 3 become (0, -inf) and other rows keep their output; base-2 LSEs become natural; rows of a causal
prefill that see no key become sequences of their own, without keys.
"""

import math

import pytest
import torch
from ts_ops.meta.contract import Decode, Prefill

import oracle

INT = torch.int32


@pytest.fixture
def finish(target):
    if target.backend != "triton":
        pytest.skip("these are Triton kernels")
    from ts_ops.backends.triton import finish

    return finish


OPTIONS = {
    "causal": {}, "not causal": {"is_causal": False}, "window": {"window_left": 7},
    "parallel": {"cp_world": 3, "cp_rank": 1, "cp_interleave_size": 2},
    "parallel, not causal": {"cp_world": 3, "cp_rank": 1, "is_causal": False},
}  # fmt: skip


def decode_problem(device, q_len, heads, options):
    whole = [0, 1, 2, 3, 5, 40, 200]
    world, rank, interleave = (
        options.get(k, d) for k, d in (("cp_world", 1), ("cp_rank", 0), ("cp_interleave_size", 1))
    )
    held = [sum(g // interleave % world == rank for g in range(n)) for n in whole]
    if world > 1:
        options = dict(options, causal_seqs=torch.tensor(whole, dtype=INT, device=device))
    lengths = torch.tensor([held, [9] * len(held)], dtype=INT, device=device).T[:, 0]  # a strided column
    query = torch.zeros(len(whole), q_len, heads, 576, dtype=torch.bfloat16, device=device)
    cache = torch.zeros(1, 64, 576, dtype=torch.bfloat16, device=device)
    table = torch.zeros(len(whole), 4, dtype=INT, device=device)
    return Decode(query, cache, table, lengths, 0.1, with_lse=True, **options), whole, held


def bounds(whole, held, q_len, options):
    """[B, q_len] number of keys seen, by the oracle's law 3."""
    seen = [
        [
            sum(oracle.visible(p, i, n, q_len, dict(options, global_length=g)) for p in range(n)) for i in range(q_len)
        ]
        for g, n in zip(whole, held)
    ]  # fmt: skip
    return torch.tensor(seen)


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("q_len, heads", [(1, 128), (4, 3)])
def test_decode(q_len, heads, options, finish, target):
    problem, whole, held = decode_problem(target.device, q_len, heads, options)
    empty = bounds(whole, held, q_len, options) == 0
    assert empty.any() and not empty.all()
    out, lse = problem.allocate()
    out.fill_(3.0)
    log2 = torch.randn(out.shape[:3], device=target.device)
    for buffer in (lse, None):
        finish.finish_decode(problem, out, buffer, None if buffer is None else log2)
    assert (out.cpu()[empty] == 0).all() and (out.cpu()[~empty] == 3.0).all()
    assert (lse.cpu()[empty] == -math.inf).all()
    torch.testing.assert_close(lse.cpu()[~empty], log2.cpu()[~empty] * math.log(2))


@pytest.mark.parametrize("options", [o for o in OPTIONS.values() if "window_left" not in o], ids=str)
def test_visible_lens(options, finish, target):
    problem, whole, held = decode_problem(target.device, 4, 2, options)
    assert torch.equal(finish.visible_lens(problem).cpu().long(), bounds(whole, held, 4, options))


def prefill_problem(device, q_lens, kv_lens, padding, heads=3):
    cum_q, cum_kv = (torch.tensor([0, *lens], dtype=INT).cumsum(0).int() for lens in (q_lens, kv_lens))
    wide = [torch.stack((cum, cum + 77), dim=1).to(device)[:, 0] for cum in (cum_q, cum_kv)]
    tokens, tokens_kv = sum(q_lens) + padding, sum(kv_lens)
    query, key = (torch.zeros(n, heads, 192, dtype=torch.bfloat16, device=device) for n in (tokens, tokens_kv))
    return Prefill(query, key, key[..., :128], *wide, 0.1, with_lse=True)


@pytest.mark.parametrize("sequences", [4, 2000])
def test_separate_empty_rows(sequences, finish, target):
    q_lens, kv_lens = [5, 0, 300, 7] * (sequences // 4), [9, 4, 20, 0] * (sequences // 4)
    cum_q, cum_kv = finish.separate_empty_rows(prefill_problem(target.device, q_lens, kv_lens, padding=2, heads=1))
    expected_q = [n for q, kv in zip(q_lens, kv_lens) for n in (max(0, q - kv), min(q, kv))]
    expected_kv = [n for kv in kv_lens for n in (0, kv)]
    assert cum_q[0] == cum_kv[0] == 0
    assert cum_q.diff().tolist() == expected_q and cum_kv.diff().tolist() == expected_kv


@pytest.mark.parametrize("padding", [0, 1, 50])
def test_prefill(padding, finish, target):
    problem = prefill_problem(target.device, (30, 0, 11), (30, 5, 11), padding)
    out, lse = problem.allocate()
    kernel_lse = torch.randn(lse.shape, device=target.device)
    for buffer in (lse, None):
        out.fill_(3.0)
        finish.finish_prefill(problem, out, buffer, None if buffer is None else kernel_lse)
        assert (out[:41] == 3.0).all() and (out[41:] == 0).all()
    assert torch.equal(lse[:41], kernel_lse[:41]) and (lse[41:] == -math.inf).all()
