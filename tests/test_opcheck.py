"""Promise: every overload passes `torch.library.opcheck`, so that torch's own machinery may rely on it.

All four utilities: the schema is honest about what is written and aliased, autograd is registered, the fake agrees with
the kernel, and AOTAutograd traces it with dynamic shapes. Sizes are odd and above 1, so that no stride is degenerate.
`test_schema` compares tensors with operations that torch lacks for fp8 on the CPU; fp8 arguments go through the other
three, and `test_fake.py::test_only_what_is_declared_is_written` compares bytes in its place.
"""

import pytest
import torch

import calls
from calls import BF16, FP8, NAMES, OVERLOADS

THREE = ("test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
FOUR = ("test_schema", *THREE)


def check(operator: str, overload: str, arguments: dict) -> None:
    if overload == "out":
        arguments = arguments | calls.buffers(operator, arguments)
    op = calls.overload_of(operator, overload)
    args, kwargs = calls.split(op, arguments)
    tensors = [value for value in arguments.values() if isinstance(value, torch.Tensor)]
    utilities = THREE if any(tensor.dtype == FP8 for tensor in tensors) else FOUR
    result = torch.library.opcheck(op, args, kwargs, test_utils=utilities)
    assert result == dict.fromkeys(utilities, "SUCCESS")


@pytest.mark.parametrize("operator, overload", OVERLOADS)
def test_contiguous(operator, overload):
    check(operator, overload, calls.example(operator))


@pytest.mark.parametrize("layout", [calls.padded, calls.permuted], ids=lambda layout: layout.__name__)
@pytest.mark.parametrize("operator", NAMES)
def test_layouts(operator, layout):
    check(operator, "default", calls.relaid(layout, calls.example(operator)))


@pytest.mark.parametrize("operator", [name for name in NAMES if FP8 in calls.DTYPES[name]])
def test_fp8(operator):
    check(operator, "default", calls.example(operator, FP8))


def test_every_optional_tensor():
    """The optional arguments that the examples leave out."""
    lens = torch.ones(calls.B, calls.Q_LEN, dtype=torch.int32)
    check("mla_decode_lse", "default", calls.example("mla_decode_lse") | dict(local_visible_lens=lens))
    parallel = dict(causal_seqs=calls.int32([20, 11, 5]), cp_world=2, cp_rank=1, cp_interleave_size=4)
    check("mla_decode_lse", "default", calls.example("mla_decode_lse") | parallel)
    check("mla_decode", "default", calls.example("mla_decode") | dict(window_left=4, max_seq_len=11))
    scaled = dict(k_scale=torch.tensor([0.5]), dtype=BF16)
    check("mla_kv_cache_gather", "default", calls.example("mla_kv_cache_gather", FP8) | scaled)
    check("mla_prefill", "default", calls.example("mla_prefill") | dict(max_seq_len_q=6, max_seq_len_kv=7))
