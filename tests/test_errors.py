"""Promise: a call that wants gradients raises RuntimeError (law 10), and what is only just allowed raises nothing.

For every operator and overload, in eager mode and under `torch.compile`. Malformed calls are in `test_malformed.py`.
"""

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import calls
from calls import BF16, DIM, HEADS, Q_LEN, RANK, TOKENS, B, floats
from ts_ops import dispatch

MERGE, MERGE_N, PACK = "merge_attn_states", "merge_attn_states_n", "mla_kv_pack_quantize_fp8"
WRITE, GATHER = "mla_kv_cache_write", "mla_kv_cache_gather"
PARALLEL = dict(cp_world=4, causal_seqs=lambda _: torch.zeros(B, dtype=torch.int32))


class Recorder:
    """A backend that has no objection and notes who calls it."""

    def __init__(self):
        self.served = []

    def why_not(self, operator, problem):
        return None

    def __getattr__(self, operator):
        return lambda problem, *outputs: self.served.append(operator)


@pytest.fixture(autouse=True)
def recorder(monkeypatch):
    backend = Recorder()
    monkeypatch.setattr(dispatch, "_candidates", lambda device, forced: (("reference", backend),))
    return backend


@pytest.mark.parametrize("operator, overload", calls.OVERLOADS)
def test_requires_grad(operator, overload, recorder):
    """Every floating-point argument, buffers included; harmless without grad mode."""
    arguments = calls.example(operator)
    if overload == "out":
        arguments |= calls.buffers(operator, arguments)
    for name, value in arguments.items():
        if not isinstance(value, Tensor) or not value.is_floating_point():
            continue
        wants_grad = arguments | {name: value.detach().requires_grad_()}
        with pytest.raises(RuntimeError, match=f"tokenspeed::{operator} is inference only"):
            calls.invoke(operator, wants_grad, overload)
        assert recorder.served == []
        for context in (torch.no_grad(), torch.inference_mode()):
            with context:
                calls.invoke(operator, wants_grad, overload)
        assert recorder.served == [operator] * 2
        recorder.served.clear()


@pytest.mark.parametrize("operator, overload", calls.OVERLOADS)
def test_requires_grad_compiled(operator, overload, recorder):
    arguments = calls.example(operator)
    if overload == "out":
        arguments |= calls.buffers(operator, arguments)
    first = next(iter(arguments))
    arguments[first].requires_grad_()
    with pytest.raises(RuntimeError, match="inference only"):
        calls.invoke_compiled(operator, arguments, overload, backend="aot_eager")
    assert recorder.served == []


EDGES = {
    "empty batch": (
        "mla_decode_lse", dict(query=lambda t: t[:0], block_tables=lambda t: t[:0], seq_lens=lambda t: t[:0])),
    "no query rows": ("mla_decode_lse", dict(query=lambda t: t[:, :0])),
    "no query rows, windowed": ("mla_decode", dict(query=lambda t: t[:, :0], window_left=0)),
    "no lengths": ("mla_decode_lse", dict(seq_lens=torch.zeros_like)),
    "no table columns": ("mla_decode_lse", dict(block_tables=lambda t: t[:, :0], seq_lens=torch.zeros_like)),
    "no pages": ("mla_decode_lse", dict(kv_cache=lambda t: t[:0], seq_lens=torch.zeros_like)),
    "max_seq_len 0": ("mla_decode", dict(max_seq_len=0)),
    "rank of the whole row": ("mla_decode", dict(kv_lora_rank=DIM)),
    "128 heads": ("mla_decode", dict(query=lambda t: floats(B, Q_LEN, 128, DIM))),
    "smallest window": ("mla_decode", dict(window_left=Q_LEN - 1)),
    "DCP": ("mla_decode_lse", dict(**PARALLEL, cp_rank=3, cp_interleave_size=16)),
    "a head beside the pages": ("mla_decode", dict(kv_cache=lambda t: t[:, None])),
    "no new tokens": ("mla_prefill_lse", dict(query=lambda t: t[:0], cum_seq_lens_q=torch.zeros_like)),
    "no context": (
        "mla_prefill_lse", dict(key=lambda t: t[:0], value=lambda t: t[:0], cum_seq_lens_kv=torch.zeros_like)),
    "no sequences": ("mla_prefill", dict(cum_seq_lens_q=lambda t: t[:1], cum_seq_lens_kv=lambda t: t[:1])),
    "one KV head": ("mla_prefill", dict(key=lambda t: t[:, :1], value=lambda t: t[:, :1])),
    "no tokens to merge": (MERGE, {
        name: lambda t: t[:0] for name in ("prefix_output", "prefix_lse", "suffix_output", "suffix_lse")}),
    "no heads to merge": (MERGE_N, dict(outputs=lambda t: t[:, :, :0], lses=lambda t: t[:, :, :0])),
    "one state": (MERGE_N, dict(outputs=lambda t: t[:1], lses=lambda t: t[:1])),
    "no slots": (WRITE, dict(slot_mapping=lambda t: t[:0])),
    "only skipped slots": (WRITE, dict(slot_mapping=lambda t: torch.full_like(t, -1))),
    "no rope": (WRITE, dict(kv_c=lambda t: floats(TOKENS, DIM), k_pe=lambda t: t[:, :0])),
    "one page": (WRITE, dict(kv_cache=lambda t: t[:1], slot_mapping=lambda t: t[:1] * 0)),
    "no capacity": (GATHER, dict(total_tokens=0)),
    "no requests": (GATHER, dict(
        block_tables=lambda t: t[:0], cum_seq_lens=lambda t: t[:1], seq_starts=lambda t: t[:0])),
    "no columns in the tables": (GATHER, dict(block_tables=lambda t: t[:, :0], cum_seq_lens=torch.zeros_like)),
    "nothing to pack": (PACK, {name: lambda t: t[:0] for name in ("k_nope", "k_pe", "v")}),
    "a head beside the rope key": (PACK, dict(k_pe=lambda t: t[:, None])),
}  # fmt: skip


@pytest.mark.parametrize(
    "edge, overload", [(e, overload) for e in EDGES for name, overload in calls.OVERLOADS if name == EDGES[e][0]]
)
def test_edge_of_what_is_allowed(edge, overload, monkeypatch):
    """Accepted on real tensors by the real backend, with results as on meta; nothing but real rows reach a backend."""
    monkeypatch.undo()
    operator, changes = EDGES[edge]

    def run():
        call = calls.example(operator)
        call |= {name: change(call.get(name)) if callable(change) else change for name, change in changes.items()}
        if overload == "default":
            return calls.results_of(operator, call)
        outs = calls.buffers(operator, call)
        assert calls.invoke(operator, call | outs, "out") is None
        return outs

    real = run()
    for context in (torch.device("meta"), FakeTensorMode()):
        with context:
            fake = run()
        assert {name: (t.shape, t.dtype, t.stride()) for name, t in fake.items()} == {
            name: (t.shape, t.dtype, t.stride()) for name, t in real.items()
        }
    for name, result in real.items():
        values = result.float()
        assert not values.isnan().any(), name


def test_buffers_beside_the_inputs_are_allowed():
    """One allocation may hold inputs and buffers; only bytes in common are refused."""
    call = calls.example(MERGE)
    memory = torch.zeros(4, TOKENS, HEADS, calls.DIM_V, dtype=BF16)
    lses = torch.zeros(4, TOKENS, HEADS)
    call |= dict(prefix_output=memory[0], suffix_output=memory[2], prefix_lse=lses[3], suffix_lse=lses[1])
    calls.invoke(MERGE, call | dict(out=memory[1], lse=lses[2]), "out")
    cache = torch.zeros(8, 4, DIM, dtype=BF16)
    call = calls.example(WRITE) | dict(kv_cache=cache[:7], kv_c=cache[7, :, :RANK], k_pe=cache[7, :, RANK:])
    calls.invoke(WRITE, call | dict(slot_mapping=torch.tensor([3, 1])))


def test_recorder_records(recorder):
    """The other tests' `served == []` means something."""
    calls.invoke("mla_decode", calls.example("mla_decode"))
    assert recorder.served == ["mla_decode"]
