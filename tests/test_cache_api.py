"""Promise: caches and FP8 queries made by ts_ops fit every graph, and scratch stays within its stated bound.

A cache is zero-filled, static without a guard (several caches, one graph) and writable in and out of inference mode.
`pack_query_fp8` makes q_scale * k_scale the same for every layer. No call asks for more scratch than `workspace_bound`.
"""

import pytest
import torch
from torch._dynamo.testing import CompileCounter

import ts_ops
from calls import BF16, FP8
from ts_ops.workspace import BYTES_PER_SM, max_splits


@pytest.mark.parametrize("dtype", [BF16, torch.float16, torch.float32, FP8])
def test_cache_is_zero_and_shaped(dtype):
    cache = ts_ops.allocate_kv_cache(5, 16, 24, dtype=dtype, device="cpu")
    assert (cache.shape, cache.dtype, cache.device.type) == ((5, 16, 24), dtype, "cpu")
    assert cache.is_contiguous() and not cache.view(torch.uint8).any()


def test_cache_defaults():
    cache = ts_ops.allocate_kv_cache(2)
    assert (cache.shape, cache.dtype) == ((2, 64, 576), BF16)


@pytest.mark.parametrize(
    "error, arguments",
    [
        (ValueError, dict(num_pages=0)),
        (ValueError, dict(num_pages=2, page_size=0)),
        (ValueError, dict(num_pages=2, page_size=48)),
        (ValueError, dict(num_pages=2, page_size=256)),
        (ValueError, dict(num_pages=2, head_dim=0)),
        (TypeError, dict(num_pages=2, dtype=torch.float64)),
    ],
    ids=str,
)
def test_bad_cache(error, arguments):
    with pytest.raises(error, match=list(arguments)[-1]):
        ts_ops.allocate_kv_cache(**arguments)


def write(cache, latent, rope, slots):
    ts_ops.mla_kv_cache_write(cache, latent, rope, slots)


SOURCES = (torch.ones(2, 16), torch.ones(2, 8), torch.tensor([3, 5]))


def test_several_caches_share_one_graph():
    torch._dynamo.reset()
    counter = CompileCounter()
    compiled = torch.compile(write, backend=counter, fullgraph=True)
    for _ in range(4):
        cache = ts_ops.allocate_kv_cache(3, 4, 24)
        assert cache._dynamo_static_input_type == "unguarded"
        compiled(cache, *SOURCES)
        assert cache.sum() == 2 * 24
    assert counter.frame_count == 1


@pytest.mark.parametrize("made, used", [(True, False), (False, True), (True, True)])
def test_inference_mode(made, used):
    with torch.inference_mode(made):
        cache = ts_ops.allocate_kv_cache(3, 4, 24)
    assert not cache.is_inference()
    with torch.inference_mode(used):
        write(cache, *SOURCES)
        cache.add_(1)
    assert cache.sum() == 2 * 24 + cache.numel()


@pytest.mark.parametrize("k_scale", [0.037, 1.0, 7.3])
@pytest.mark.parametrize("scale_product", [0.01, 0.25])
@pytest.mark.parametrize("dtype", [BF16, torch.float16, torch.float32])
def test_scale_product(k_scale, scale_product, dtype):
    """real = stored * q_scale with q_scale = scale_product / k_scale, within half a step of e4m3 (2^-4 relative)."""
    latent, rope = torch.randn(3, 5, 16).to(dtype), torch.randn(3, 5, 8).to(dtype)
    stored = ts_ops.pack_query_fp8(latent, rope, torch.tensor([k_scale]), scale_product=scale_product)
    assert (stored.shape, stored.dtype) == ((3, 5, 24), FP8)
    real = torch.cat((latent, rope), dim=-1).double()
    quantised = stored.double() * (scale_product / k_scale)
    representable = (real.abs() * k_scale / scale_product <= 448) & (real.abs() * k_scale / scale_product >= 2**-6)
    assert representable.any()
    torch.testing.assert_close(quantised[representable], real[representable], rtol=2**-4 * 1.01, atol=0)


@pytest.mark.parametrize("k_scale", [0.05, 0.5])
def test_scale_product_is_what_the_scores_need(k_scale):
    """softmax_scale * scale_product turns products of stored numbers into real scores, whatever the layer's k_scale."""
    query, key, product = torch.randn(4, 24), torch.randn(24), 0.02
    stored = ts_ops.pack_query_fp8(query[:, :16], query[:, 16:], torch.tensor(k_scale), scale_product=product).double()
    stored_key = (key / k_scale).to(FP8).double()
    scores = stored @ stored_key * product
    # Each of the 24 products is off by at most 2^-4 for either factor; numbers below e4m3's normal range are not here.
    bound = (query.abs().double() @ key.abs().double()) * 2**-3 * 1.05
    assert ((scores - query.double() @ key.double()).abs() <= bound).all()


def test_query_saturates():
    huge = torch.tensor([[[1e6, -1e6, 500.0, 448.0]]])
    stored = ts_ops.pack_query_fp8(huge[..., :2], huge[..., 2:], torch.ones(1)).float()
    assert stored.flatten().tolist() == [448.0, -448.0, 448.0, 448.0]


def test_query_packing_compiles_to_one_graph_for_all_scales():
    torch._dynamo.reset()
    counter = CompileCounter()
    compiled = torch.compile(ts_ops.pack_query_fp8, backend=counter, fullgraph=True)
    latent, rope = torch.randn(3, 5, 16), torch.randn(3, 5, 8)
    for k_scale in (0.037, 0.5, 7.3):
        scale = torch.tensor([k_scale])
        expected = ts_ops.pack_query_fp8(latent, rope, scale, scale_product=0.02)
        actual = compiled(latent, rope, scale, scale_product=0.02)
        assert torch.equal(actual.view(torch.uint8), expected.view(torch.uint8))
    assert counter.frame_count == 1


def test_no_scratch_on_the_cpu():
    assert ts_ops.workspace_bound("cpu") == 0
    assert ts_ops.workspace_bound(torch.device("cpu")) == 0


@pytest.mark.parametrize("sms", [1, 108, 132, 148])
def test_splits_stay_within_the_bound(sms):
    """Every head count, q_len and batch: more than one split only where all of them fit; and no split is wasted."""
    for heads in range(1, 129):
        for q_len in range(1, 17):
            for batch in (1, 2, 3, 7, 64, 1000, 65536):
                rows = batch * q_len * heads
                splits = max_splits(rows, 513, sms)
                used = rows * 513 * 4 * splits
                assert splits >= 1
                assert splits == 1 or used <= BYTES_PER_SM * sms
                assert used + rows * 513 * 4 > BYTES_PER_SM * sms
