"""Promise: what a fake says is what the operator does (law 9), and torch's bookkeeping sees every write.

Shape, dtype, strides and device of each result are the same on real, fake and meta tensors, for every dtype and for
inputs of any layout. What an operator writes in place has its version bumped, so that a backward pass through a tensor
saved before raises instead of using the new values. A write survives compilation although nothing reads its result.
"""

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

import calls
from calls import BF16, DIM, FP8, NAMES, RANK, WITH_OUT, floats
from ts_ops import dispatch

LAYOUTS = {"contiguous": lambda t: t, "padded": calls.padded, "permuted": calls.permuted, "broadcast": calls.broadcast}


def description(results: dict[str, Tensor]) -> dict:
    return {name: (tuple(t.shape), t.dtype, t.stride(), t.storage_offset()) for name, t in results.items()}


def assert_alike(make, operator: str) -> None:
    real = calls.results_of(operator, make())
    assert all(t.device.type == "cpu" and type(t) is Tensor for t in real.values())
    with FakeTensorMode():
        fake = calls.results_of(operator, make())
    assert all(t.device.type == "cpu" and isinstance(t, FakeTensor) for t in fake.values())
    with torch.device("meta"):
        meta = calls.results_of(operator, make())
    assert all(t.device.type == "meta" for t in meta.values())
    assert description(real) == description(fake) == description(meta)
    assert all(t.is_contiguous() for t in real.values())


@pytest.mark.parametrize("operator, dtype", [(name, dtype) for name in WITH_OUT for dtype in calls.DTYPES[name]])
def test_dtypes(operator, dtype):
    assert_alike(lambda: calls.example(operator, dtype), operator)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("operator", WITH_OUT)
def test_layouts(operator, layout):
    assert_alike(lambda: calls.relaid(LAYOUTS[layout], calls.example(operator)), operator)


@pytest.mark.parametrize("operator", ["mla_decode", "mla_kv_cache_gather"])
@pytest.mark.parametrize("layout", ["contiguous", "padded", "permuted"])
def test_cache_with_a_head_dimension(operator, layout):
    def make():
        call = calls.example(operator)
        return call | dict(kv_cache=LAYOUTS[layout](call["kv_cache"][:, None]))

    assert_alike(make, operator)


@pytest.mark.parametrize("dtype", [None, BF16, torch.float16, torch.float32])
def test_gather_dtype(dtype):
    for of_cache in calls.DTYPES["mla_kv_cache_gather"]:
        assert_alike(lambda: calls.example("mla_kv_cache_gather", of_cache) | dict(dtype=dtype, k_scale=None),
                     "mla_kv_cache_gather")  # fmt: skip


def test_half_query_over_fp8_cache():
    for dtype in (BF16, torch.float16):

        def make(dtype=dtype):
            call = calls.example("mla_decode_lse", dtype)
            return call | dict(kv_cache=call["kv_cache"].to(FP8))

        assert_alike(make, "mla_decode_lse")
        assert calls.results_of("mla_decode_lse", make())["out"].dtype == dtype


@pytest.mark.parametrize("operator", WITH_OUT)
def test_out_writes_what_the_functional_overload_returns(operator):
    call = calls.example(operator)
    expected = calls.results_of(operator, call)
    buffers = calls.buffers(operator, call)
    assert calls.invoke(operator, call | buffers, "out") is None
    for name, buffer in buffers.items():
        assert torch.equal(buffer.view(torch.uint8), expected[name].view(torch.uint8)), name


@pytest.mark.parametrize("operator", NAMES)
def test_only_what_is_declared_is_written(operator):
    """Bytes and version of every argument but the written one stay; so it is also for fp8, which opcheck cannot see."""
    for dtype in calls.DTYPES[operator]:
        call = calls.example(operator, dtype)
        written = {"kv_cache"} if operator == "mla_kv_cache_write" else set()
        before = {name: (value.clone(), value._version) for name, value in call.items() if isinstance(value, Tensor)}
        calls.invoke(operator, call)
        for name, (value, version) in before.items():
            same = torch.equal(call[name].view(-1).view(torch.uint8), value.view(-1).view(torch.uint8))
            assert same == (name not in written), name
            assert (call[name]._version == version) == (name not in written), name


class Kernel:
    """Writes as a kernel does, behind torch's back: `.data` has a version of its own."""

    why_not = staticmethod(lambda operator, problem: None)

    def __getattr__(self, operator):
        return lambda problem, *outputs: [written.data.zero_() for written in outputs or (problem.kv_cache,)]


@pytest.fixture
def kernel(monkeypatch):
    monkeypatch.setattr(dispatch, "_candidates", lambda device, forced: (("reference", Kernel()),))


@pytest.mark.parametrize("operator", WITH_OUT)
def test_buffers_have_their_version_bumped(operator, kernel):
    call = calls.example(operator)
    buffers = calls.buffers(operator, call)
    versions = {name: buffer._version for name, buffer in buffers.items()}
    with torch.no_grad():
        calls.invoke(operator, call | buffers, "out")
    assert all(buffer._version > versions[name] for name, buffer in buffers.items())


def test_backward_through_an_overwritten_cache_raises(kernel):
    weight = torch.ones(DIM, requires_grad=True)
    call = calls.example("mla_kv_cache_write", torch.float32)
    loss = (weight * call["kv_cache"]).sum()
    with torch.no_grad():
        calls.invoke("mla_kv_cache_write", call)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_backward_through_an_overwritten_buffer_raises(kernel):
    call = calls.example("mla_decode", torch.float32)
    buffers = calls.buffers("mla_decode", call)
    weight = torch.ones(RANK, requires_grad=True)
    loss = (weight * buffers["out"]).sum()
    calls.invoke("mla_decode", call | buffers, "out")
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("made_in_inference_mode", [False, True])
@pytest.mark.parametrize("operator", NAMES)
def test_inference_mode(operator, made_in_inference_mode):
    """Inference tensors have no version; ordinary tensors are accepted in inference mode too."""
    with torch.inference_mode(made_in_inference_mode):
        call = calls.example(operator)
        buffers = calls.buffers(operator, call) if operator in WITH_OUT else {}
    with torch.inference_mode():
        results = calls.results_of(operator, call) if buffers else calls.invoke(operator, call)
        if buffers:
            calls.invoke(operator, call | buffers, "out")
            assert all(buffers[name].isnan().sum() == 0 for name in results if buffers[name].dtype != FP8)
        else:
            assert call["kv_cache"].any()


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_an_unread_write_survives_compilation(backend):
    call = calls.example("mla_kv_cache_write")
    expected = call["kv_cache"].clone()
    calls.invoke("mla_kv_cache_write", call | dict(kv_cache=expected))
    written, read, slots = call["kv_cache"], call["kv_c"], call["slot_mapping"]

    @torch.compile(backend=backend, fullgraph=True)
    def step(kv_cache, kv_c, k_pe, slot_mapping):
        torch.ops.tokenspeed.mla_kv_cache_write(kv_cache, kv_c, k_pe, slot_mapping)
        return kv_c + 1

    torch._dynamo.reset()
    assert torch.equal(step(written, read, call["k_pe"], slots), read + 1)
    assert torch.equal(written, expected) and expected.any()


def test_an_unread_out_survives_compilation():
    call = calls.example("merge_attn_states")
    expected = calls.results_of("merge_attn_states", call)
    buffers = calls.buffers("merge_attn_states", call)

    @torch.compile(fullgraph=True)
    def step(x, call, buffers):
        torch.ops.tokenspeed.merge_attn_states.out(**call, **buffers)
        return x + 1

    torch._dynamo.reset()
    step(floats(3), call, buffers)
    assert all(torch.equal(buffers[name], expected[name]) for name in expected)
