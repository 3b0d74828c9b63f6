"""Packing keys [k_nope | k_pe of the token] * k_scale_inv and values v * v_scale_inv, saturating, to e4m3 (law 11).

Right to the bit, against a search for the nearest e4m3 number; for any head count, any strides, and past 2^31 elements.
"""

import math
from dataclasses import dataclass

import pytest
import torch

import oracle

ops = torch.ops.tokenspeed
FP8 = torch.float8_e4m3fn
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


@dataclass(frozen=True)
class Case:
    tokens: int
    heads: int
    nope: int = 128
    rope: int = 64
    value: int = 128

    def __str__(self):
        return f"T{self.tokens}-H{self.heads}-{self.nope}+{self.rope}-{self.value}"


CASES = [
    Case(1, 1), Case(3, 128), Case(37, 1), Case(5, 16), Case(4, 20), Case(2, 7, 96, 24, 64), Case(3, 4, 65, 1, 100),
    Case(9, 2, 64, 0, 192),
]  # fmt: skip


def pack(k_nope, k_pe, v, **scales):
    """Into buffers filled with NaN."""
    tokens, heads, nope = k_nope.shape
    shapes = ((tokens, heads, nope + k_pe.shape[-1]), (tokens, heads, v.shape[-1]))
    key, value = (torch.full(shape, math.nan).to(FP8).to(k_nope.device) for shape in shapes)
    ops.mla_kv_pack_quantize_fp8.out(k_nope, k_pe, v, **scales, key=key, value=value)
    return key, value


def check(target, k_nope, k_pe, v, **scales):
    if reason := target.refusal("mla_kv_pack_quantize_fp8", k_nope, k_pe, v, **scales):
        pytest.skip(reason)
    for result, expected in zip(pack(k_nope, k_pe, v, **scales), oracle.pack(k_nope, k_pe, v, **scales)):
        oracle.assert_same(result, oracle.to_fp8(expected))


def exact_fp8(*shape):
    """Values of e4m3: converting them is right even in the interpreter, which rounds others wrongly."""
    return torch.randint(0, 127, shape).to(torch.uint8).view(FP8).float() * torch.randn(shape).sign()


@pytest.mark.parametrize("dtype", [FP16, FP32, BF16], ids=str)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_any_shape(target, case, dtype):
    if not target.supports(dtype):
        pytest.skip("bf16 is wrong in the interpreter")
    k_nope, v = exact_fp8(case.tokens, case.heads, case.nope) / 2, exact_fp8(case.tokens, case.heads, case.value) * 4
    k_pe = exact_fp8(case.tokens, case.rope) / 2
    k_nope, k_pe, v = (tensor.to(target.device, dtype) for tensor in (k_nope, k_pe, v))
    check(target, k_nope, k_pe, v, k_scale_inv=2.0, v_scale_inv=0.25)


LAYOUTS = {
    "halves_of_one_projection": lambda k, r, v: (*torch.cat((k, v), dim=-1).split((128, 128), dim=-1), r),
    "heads_first": lambda k, r, v: (*(x.transpose(0, 1).contiguous().transpose(0, 1) for x in (k, v)), r),
    "rope_of_a_fused_row": lambda k, r, v: (k, v, torch.cat((r, r, r), dim=-1)[:, None, 64:128]),
    "one_token_for_all": lambda k, r, v: (k[:1].expand_as(k), v[:1].expand_as(v), r[:1].expand_as(r)),
    "one_head_for_all": lambda k, r, v: (k[:, :1].expand_as(k), v[:, :1].expand_as(v), r),
    "odd_strides": lambda k, r, v: (*(torch.cat((x, x[..., :1]), dim=-1)[..., 1:] for x in (k, v, r)),),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_any_strides(target, layout):
    tensors = exact_fp8(5, 6, 128), exact_fp8(5, 64), exact_fp8(5, 6, 128)
    k_nope, v, k_pe = LAYOUTS[layout](*(tensor.to(target.device, FP16) for tensor in tensors))
    check(target, k_nope, k_pe, v)


@pytest.mark.parametrize("scale", [0.037, 1.0, 7.3, -2.0])
@pytest.mark.parametrize("dtype", [BF16, FP16, FP32], ids=str)
def test_rounds_and_saturates(target, dtype, scale):
    """Small and large values, ties, NaN and infinities."""
    if target.device == "cpu" and target.backend != "reference":
        pytest.skip("the interpreter rounds fp8 wrongly")
    spread = torch.logspace(-5, 4, 64)[:, None, None]
    k_nope, v = torch.randn(64, 4, 128) * spread, torch.randn(64, 4, 128) * spread
    k_pe = torch.randn(64, 64) * spread[:, 0]
    ties = exact_fp8(4, 128)
    k_nope[5], v[5] = ties * 1.0625, ties * 1.03125
    for tensor in (k_nope, v, k_pe):
        tensor[0, ..., :5] = torch.tensor([math.nan, math.inf, -math.inf, 6e4, -6e4])
    k_nope, k_pe, v = (tensor.to(target.device, dtype) for tensor in (k_nope, k_pe, v))
    check(target, k_nope, k_pe, v, k_scale_inv=scale, v_scale_inv=1 / scale)


def test_no_tokens(target):
    empty = torch.empty(0, 16, 128, dtype=FP16, device=target.device)
    key, value = ops.mla_kv_pack_quantize_fp8(empty, empty[:, 0, :64], empty)
    assert key.shape == (0, 16, 192) and value.shape == (0, 16, 128) and key.dtype == value.dtype == FP8


@pytest.mark.gpu
def test_past_2_31_elements_on_gpu():
    """A million tokens of 16 heads, as halves of one projection of over 2^32 elements; both ends and the middle."""
    tokens, heads = 2**20 + 5, 16
    projected = torch.empty(tokens, heads, 256, dtype=BF16, device="cuda").normal_()
    k_nope, v = projected.split((128, 128), dim=-1)
    k_pe = torch.empty(tokens, 1, 64, dtype=BF16, device="cuda").normal_()
    assert tokens * heads * 192 > 2**31
    key, value = pack(k_nope, k_pe, v, k_scale_inv=3.0, v_scale_inv=0.5)
    edges = (0, 2**31 // (heads * 256), 2**31 // (heads * 192), tokens)
    for part in (slice(max(0, edge - 4), edge + 4) for edge in edges):
        expected = oracle.pack(k_nope[part], k_pe[part], v[part], 3.0, 0.5)
        for result, rows in zip((key[part], value[part]), expected):
            oracle.assert_same(result, oracle.to_fp8(rows))
