"""Promise: split-KV scratch stays within `workspace_bound`, whatever the batch, head count, q_len or length.

A captured graph keeps the scratch of its own capture; what goes wrong elsewhere is a bound that some smaller batch or
longer draft exceeds. So the split planner of the Triton decode is asked over all of them.
"""

import pytest
import torch

pytest.importorskip("triton")

from ts_ops.meta.contract import Decode  # noqa: E402

from ts_ops.backends.triton import decode  # noqa: E402
from ts_ops.workspace import BYTES_PER_SM  # noqa: E402


def meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def tile_config(rows: int) -> tuple[int, int, int, int]:
    return decode.tile_config(rows, 64, 576, torch.bfloat16, torch.bfloat16, False, (9, 0))


@pytest.mark.parametrize("sms", [1, 46, 132, 148])
@pytest.mark.parametrize("rank", [32, 512])
def test_splits_of_a_decode_stay_within_the_bound(sms, rank, monkeypatch):
    monkeypatch.setattr(decode, "INTERPRETER_SMS", sms)
    most = 0
    for heads in (1, 3, 8, 16, 20, 64, 128):
        for q_len in (1, 2, 5, 16):
            for batch in (1, 2, 3, 17, 64, 1000):
                for pages in (0, 1, 16, 4096):
                    problem = Decode(
                        meta(batch, q_len, heads, rank + 64), meta(pages, 64, rank + 64),
                        meta(batch, pages, dtype=torch.int32), meta(batch, dtype=torch.int32), 0.1, kv_lora_rank=rank,
                    )  # fmt: skip
                    block_m, block_n, _, _ = tile_config(q_len * heads)
                    splits = decode.num_splits(problem, batch * -(-q_len * heads // block_m), block_m, block_n)
                    scratch = problem.rows * splits * (rank + 1) * 4
                    assert splits == 1 or (splits > 1 and scratch <= BYTES_PER_SM * sms)
                    most = max(most, splits)
    assert most > 1, "no case was split: the test would show nothing"
