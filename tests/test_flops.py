"""Promise: FlopCounterMode counts the attention operators, with numbers that one can check by hand."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import calls


def flops(operator: str, overload: str = "default", **changes) -> int:
    call = calls.example(operator) | changes
    if overload == "out":
        call |= calls.buffers(operator, call)
    counter = FlopCounterMode(display=False)
    with counter:
        calls.invoke(operator, call, overload)
    return counter.get_total_flops()


# B 3, q_len 2, H 5; 3 pages of 4 tokens are 12 keys; 24 columns of scores and 16 of values; 2 operations each.
DECODE = 3 * 2 * 5 * 12 * (24 + 16) * 2


@pytest.mark.parametrize("overload", ["default", "out"])
@pytest.mark.parametrize("operator", ["mla_decode", "mla_decode_lse"])
def test_decode(operator, overload):
    assert flops(operator, overload) == DECODE == 28800
    assert flops(operator, overload, max_seq_len=6) == DECODE // 2
    assert flops(operator, overload, max_seq_len=100) == DECODE


def test_decode_with_a_head_dimension():
    assert flops("mla_decode", kv_cache=calls.example("mla_decode")["kv_cache"][:, None]) == DECODE


def ragged(tokens_q: int, tokens_kv: int, batch: int) -> dict:
    return dict(
        query=calls.floats(tokens_q, 5, 12), key=calls.floats(tokens_kv, 5, 12), value=calls.floats(tokens_kv, 5, 9),
        cum_seq_lens_q=torch.arange(0, tokens_q + 1, tokens_q // batch, dtype=torch.int32),
        cum_seq_lens_kv=torch.arange(0, tokens_kv + 1, tokens_kv // batch, dtype=torch.int32),
    )  # fmt: skip


@pytest.mark.parametrize("overload", ["default", "out"])
@pytest.mark.parametrize("operator", ["mla_prefill", "mla_prefill_lse"])
@pytest.mark.parametrize(
    "tokens_q, tokens_kv, batch, pairs",
    [
        (4, 4, 1, 1 + 2 + 3 + 4),
        (4, 6, 1, 3 + 4 + 5 + 6),  # bottom-right: the last row sees all six
        (4, 2, 1, 0 + 0 + 1 + 2),  # the first rows see nothing
        (8, 12, 2, 2 * (3 + 4 + 5 + 6)),
    ],
)
def test_prefill(operator, overload, tokens_q, tokens_kv, batch, pairs):
    call = ragged(tokens_q, tokens_kv, batch)
    assert flops(operator, overload, **call) == pairs * 5 * (12 + 9) * 2
    assert flops(operator, overload, **call, is_causal=False) == tokens_q * tokens_kv // batch * 5 * (12 + 9) * 2
