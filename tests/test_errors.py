"""Promise: a bad call raises before anything runs, names its argument, and says the same everywhere (laws 9 and 10).

Every row of the table is one malformed call. On real CPU tensors, FakeTensors and meta tensors it raises the same type
with the same text, which begins with the argument's name, and no backend is reached. Under `torch.compile` Dynamo
wraps the error; the text is the same. A call with an input that requires grad raises RuntimeError, for every operator,
overload and floating-point argument. The calls at the edge of what is allowed, at the end, raise nothing.
"""

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor
from torch._dynamo.exc import TorchRuntimeError
from torch._subclasses.fake_tensor import FakeTensorMode

import calls
from calls import BF16, BY_NAME, DIM, FP8, HEADS, NAMES, PAGES, Q_LEN, RANK, TOKENS, B, floats
from ts_ops import dispatch

DECODES = ("mla_decode", "mla_decode_lse")
PREFILLS = ("mla_prefill", "mla_prefill_lse")
CACHE = ("mla_kv_cache_write", "mla_kv_cache_gather")
MERGE, MERGE_N, PACK = "merge_attn_states", "merge_attn_states_n", "mla_kv_pack_quantize_fp8"
WRITE, GATHER = CACHE
NAN, INF = float("nan"), float("inf")


@dataclass(frozen=True)
class Row:
    """A valid call of `operator`, spoilt: a value replaces the argument, a function makes it from the valid one."""

    operator: str
    argument: str
    what: str
    changes: dict
    error: type
    base: torch.dtype
    overload: str

    def __str__(self) -> str:
        return f"{self.operator}.{self.overload}-{self.argument}-{self.what.replace(' ', '_')}"

    def arguments(self) -> dict:
        call = calls.example(self.operator, self.base)
        if self.overload == "out":
            call |= calls.buffers(self.operator, call)
        changes = dict(self.changes)
        together = changes.pop("together", lambda call: {})
        made = {name: change(call.get(name)) if callable(change) else change for name, change in changes.items()}
        return call | made | together(call)


TABLE: list[Row] = []


def row(operators, argument, what, error=ValueError, base=BF16, overload="default", **changes) -> None:
    """Add the row for each operator; `together(call)` changes several arguments at once."""
    for operator in (operators,) if isinstance(operators, str) else operators:
        TABLE.append(Row(operator, argument, what, changes, error, base, overload))


def unpacked(tensor: Tensor) -> Tensor:
    """The same shape and values with stride 2 in the last dimension."""
    return torch.stack((tensor, tensor), dim=-1)[..., 0]


def elsewhere(tensor: Tensor) -> Tensor:
    return torch.empty_like(tensor, device="cpu" if tensor.device.type == "meta" else "meta")


def zeros_int32(*shape: int):
    return lambda _: torch.zeros(shape, dtype=torch.int32)


OPTIONAL = {
    "local_visible_lens": (zeros_int32(B, Q_LEN), {}),
    "causal_seqs": (zeros_int32(B), {"cp_world": 2}),
    "k_scale": (lambda _: torch.zeros(1), {}),
    "seq_starts": (zeros_int32(B), {}),
}


def every_tensor_argument() -> None:
    """Wrong dtypes, too few and too many dimensions, another device; optional tensors included."""
    for operator in NAMES:
        tensors = [argument.name for argument in calls.overload_of(operator)._schema.arguments
                   if "Tensor" in str(argument.type)]  # fmt: skip
        for name in tensors:
            make, extra = OPTIONAL.get(name, (lambda given: given, {}))
            base = FP8 if name == "k_scale" else BF16

            def bad(what, of, error=ValueError, operator=operator, name=name, make=make, extra=extra, base=base):
                row(operator, name, what, error, base, **extra, **{name: lambda given: of(make(given))})

            bad("float64", lambda t: t.to(torch.float64), TypeError)
            bad("integers of another width", lambda t: t.to(torch.int16), TypeError)
            if name != "k_scale":
                bad("fewer dimensions", lambda t: t[0, 0] if t.ndim == 4 else t[0])
                bad("more dimensions", lambda t: t[None, None])
            if name != tensors[0]:
                bad("other device", elsewhere)


every_tensor_argument()

PARALLEL = dict(cp_world=4, causal_seqs=zeros_int32(B))

row(DECODES, "query", "no heads", query=lambda t: t[:, :, :0])
row(DECODES, "query", "129 heads", query=lambda t: floats(B, Q_LEN, 129, DIM))
row(DECODES, "query", "stride 2", query=unpacked)
row(DECODES, "query", "e5m2", TypeError, query=lambda t: t.to(torch.float8_e5m2))
row(DECODES, "kv_cache", "other last dimension", kv_cache=lambda t: t[..., :-1])
row(DECODES, "kv_cache", "fp16 under bf16", TypeError, kv_cache=lambda t: t.to(torch.float16))
row(DECODES, "kv_cache", "fp8 under fp32", TypeError, torch.float32, kv_cache=lambda t: t.to(FP8))
row(DECODES, "kv_cache", "bf16 under fp8", TypeError, FP8, kv_cache=lambda t: t.to(BF16))
row((*DECODES, *CACHE), "kv_cache", "two KV heads", kv_cache=lambda t: torch.stack((t, t), dim=1))
row((*DECODES, *CACHE), "kv_cache", "stride 2", kv_cache=unpacked)
for size in (0, 3, 48, 96, 256):
    row((*DECODES, *CACHE), "kv_cache", f"page size {size}", kv_cache=lambda t, size=size: floats(PAGES, size, DIM))
row(DECODES, "kv_cache", "page size 24 beside a head", kv_cache=lambda t: floats(PAGES, 1, 24, DIM))
row(DECODES, "block_tables", "other batch", block_tables=lambda t: t[1:])
row(DECODES, "seq_lens", "other batch", seq_lens=lambda t: t[1:])
row((*DECODES, *PREFILLS), "softmax_scale", "nan", softmax_scale=NAN)
row((*DECODES, *PREFILLS), "softmax_scale", "inf", softmax_scale=INF)
row((*DECODES, *PREFILLS), "output_scale", "nan", output_scale=NAN)
row((*DECODES, *PREFILLS), "output_scale", "minus inf", output_scale=-INF)
row(DECODES, "kv_lora_rank", "zero", kv_lora_rank=0)
row(DECODES, "kv_lora_rank", "negative", kv_lora_rank=-1)
row(DECODES, "kv_lora_rank", "above the head dimension", kv_lora_rank=DIM + 1)
row(DECODES, "window_left", "minus two", window_left=-2)
row(DECODES, "window_left", "below q_len - 1", window_left=Q_LEN - 2)
row(DECODES, "window_left", "with DCP", window_left=4, **PARALLEL)
row(DECODES, "cp_world", "zero", **(PARALLEL | dict(cp_world=0)))
row(DECODES, "cp_world", "negative", **(PARALLEL | dict(cp_world=-4)))
row(DECODES, "cp_rank", "without DCP", cp_rank=1)
row(DECODES, "cp_rank", "negative", cp_rank=-1, **PARALLEL)
row(DECODES, "cp_rank", "cp_world", cp_rank=4, **PARALLEL)
row(DECODES, "cp_interleave_size", "zero", cp_interleave_size=0, **PARALLEL)
row(DECODES, "cp_interleave_size", "zero without DCP", cp_interleave_size=0)
row(DECODES, "causal_seqs", "missing", cp_world=4)
row(DECODES, "causal_seqs", "superfluous", causal_seqs=zeros_int32(B))
row(DECODES, "causal_seqs", "other batch", **(PARALLEL | dict(causal_seqs=zeros_int32(B + 1))))
row(DECODES, "local_visible_lens", "other batch", local_visible_lens=zeros_int32(B + 1, Q_LEN))
row(DECODES, "local_visible_lens", "other q_len", local_visible_lens=zeros_int32(B, Q_LEN + 1))
row(DECODES, "local_visible_lens", "with a window", local_visible_lens=zeros_int32(B, Q_LEN), window_left=4)
row(DECODES, "local_visible_lens", "with DCP", local_visible_lens=zeros_int32(B, Q_LEN), **PARALLEL)
row(DECODES, "max_seq_len", "negative", max_seq_len=-1)

row(PREFILLS, "query", "no heads", query=lambda t: t[:, :0])
row(PREFILLS, "query", "129 heads", query=lambda t: floats(TOKENS, 129, t.shape[-1]))
row(PREFILLS, "query", "no columns", query=lambda t: t[..., :0])
row(PREFILLS, "query", "heads no multiple of the key's", query=lambda t: t[:, 1:])
for name in ("query", "key", "value"):
    row(PREFILLS, name, "stride 2", **{name: unpacked})
row(PREFILLS, "key", "fp16 under bf16", TypeError, key=lambda t: t.to(torch.float16))
row(PREFILLS, "value", "bf16 under fp8", TypeError, FP8, value=lambda t: t.to(BF16))
row(PREFILLS, "key", "fewer tokens than the value", key=lambda t: t[1:])
row(PREFILLS, "key", "fewer heads than the value", key=lambda t: t[:, 1:])
row(PREFILLS, "key", "other last dimension than the query", key=lambda t: t[..., 1:])
row(PREFILLS, "key", "no heads", key=lambda t: t[:, :0], value=lambda t: t[:, :0])
row(PREFILLS, "value", "no columns", value=lambda t: t[..., :0])
row(PREFILLS, "cum_seq_lens_q", "no entries", cum_seq_lens_q=zeros_int32(0), cum_seq_lens_kv=zeros_int32(0))
row(PREFILLS, "cum_seq_lens_kv", "fewer entries", cum_seq_lens_kv=lambda t: t[1:])
row(PREFILLS, "max_seq_len_q", "negative", max_seq_len_q=-1)
row(PREFILLS, "max_seq_len_kv", "negative", max_seq_len_kv=-1)

row(MERGE, "prefix_output", "fp8", TypeError, prefix_output=lambda t: t.to(FP8))
row(MERGE, "suffix_output", "other dtype", TypeError, suffix_output=lambda t: t.to(torch.float16))
row(MERGE, "prefix_lse", "bf16", TypeError, prefix_lse=lambda t: t.to(BF16))
for name in ("prefix_output", "suffix_output"):
    row(MERGE, name, "stride 2", **{name: unpacked})
row(MERGE, "prefix_output", "no columns", prefix_output=lambda t: t[..., :0])
row(MERGE, "suffix_output", "other columns", suffix_output=lambda t: t[..., 1:])
row(MERGE, "suffix_output", "fewer tokens", suffix_output=lambda t: t[1:])
row(MERGE, "suffix_output", "fewer heads", suffix_output=lambda t: t[:, 1:])
for name in ("prefix_lse", "suffix_lse"):
    row(MERGE, name, "fewer tokens", **{name: lambda t: t[1:]})
    row(MERGE, name, "not transposed", **{name: lambda t: t.T})
row(MERGE_N, "outputs", "no states", outputs=lambda t: t[:0], lses=lambda t: t[:0])
row(MERGE_N, "outputs", "no columns", outputs=lambda t: t[..., :0])
row(MERGE_N, "outputs", "stride 2", outputs=unpacked)
row(MERGE_N, "lses", "fewer states", lses=lambda t: t[1:])
row(MERGE_N, "lses", "fewer tokens", lses=lambda t: t[:, 1:])
row(MERGE_N, "lses", "fewer heads", lses=lambda t: t[..., 1:])

row(WRITE, "kv_c", "too few columns", kv_c=lambda t: t[:, 1:])
row(WRITE, "kv_c", "no columns", kv_c=lambda t: t[:, :0], k_pe=lambda t: floats(TOKENS, DIM))
row(WRITE, "kv_c", "fewer rows than slots", kv_c=lambda t: t[:5])
row(WRITE, "k_pe", "fewer rows than slots", k_pe=lambda t: t[:5])
row(WRITE, "k_pe", "two heads", k_pe=lambda t: torch.stack((t, t), dim=1))
row(WRITE, "kv_c", "fp8", TypeError, kv_c=lambda t: t.to(FP8))
for name in ("kv_c", "k_pe"):
    row(WRITE, name, "stride 2", **{name: unpacked})
row(WRITE, "kv_cache", "expanded pages", kv_cache=lambda t: t[:1].expand(PAGES, -1, -1))
row(WRITE, "kv_cache", "expanded tokens", kv_cache=lambda t: t[:, :1].expand(-1, 4, -1))
row(WRITE, "kv_cache", "holds kv_c", together=lambda call: {
    "kv_c": call["kv_cache"].view(-1, DIM)[:, :RANK]})  # fmt: skip
row(WRITE, "kv_cache", "holds k_pe", together=lambda call: {
    "k_pe": call["kv_cache"].view(-1, 1, DIM)[:, :, RANK:]})  # fmt: skip
row(WRITE, "kv_cache", "holds the slots", together=lambda call: {
    "slot_mapping": call["kv_cache"].view(-1).view(torch.int64)[:5]})  # fmt: skip
row(WRITE, "slot_mapping", "int32", TypeError, slot_mapping=lambda t: t.to(torch.int32))
for dtype in (BF16, torch.float16, torch.float32):
    row(CACHE, "k_scale", f"for a {dtype} cache".replace("torch.", ""), base=dtype, k_scale=lambda _: torch.ones(1))
row(CACHE, "k_scale", "two elements", base=FP8, k_scale=lambda _: torch.ones(2))
row(CACHE, "k_scale", "no element", base=FP8, k_scale=lambda _: torch.ones(0))
row(CACHE, "k_scale", "bf16", TypeError, FP8, k_scale=lambda _: torch.ones(1, dtype=BF16))

row(GATHER, "cum_seq_lens", "B entries", cum_seq_lens=lambda t: t[1:])
row(GATHER, "seq_starts", "other batch", seq_starts=zeros_int32(B + 1))
row(GATHER, "total_tokens", "negative", total_tokens=-1)
row(GATHER, "dtype", "float64", TypeError, dtype=torch.float64)
row(GATHER, "dtype", "int32", TypeError, dtype=torch.int32)
row(GATHER, "dtype", "fp8 from bf16", dtype=FP8)
row(GATHER, "dtype", "fp8 with a scale", base=FP8, dtype=FP8)
row(GATHER, "dtype", "left out with a scale", base=FP8, dtype=None)

row(PACK, "k_nope", "fp8", TypeError, k_nope=lambda t: t.to(FP8))
row(PACK, "k_nope", "no columns", k_nope=lambda t: t[..., :0])
row(PACK, "v", "no columns", v=lambda t: t[..., :0])
row(PACK, "v", "fewer tokens", v=lambda t: t[1:])
row(PACK, "v", "fewer heads", v=lambda t: t[:, 1:])
row(PACK, "v", "fp16 beside bf16", TypeError, v=lambda t: t.to(torch.float16))
row(PACK, "k_pe", "fewer tokens", k_pe=lambda t: t[1:])
row(PACK, "k_pe", "two heads", k_pe=lambda t: torch.stack((t, t), dim=1))
row(PACK, "k_pe", "fp32 beside bf16", TypeError, k_pe=lambda t: t.to(torch.float32))
for name in ("k_nope", "k_pe", "v"):
    row(PACK, name, "stride 2", **{name: unpacked})
for name in ("k_scale_inv", "v_scale_inv"):
    row(PACK, name, "nan", **{name: NAN})
    row(PACK, name, "inf", **{name: INF})


def sharing(first: str, second: str):
    """Both arguments over the same bytes; shapes and dtypes as they are."""

    def change(call):
        size = max(call[name].nbytes for name in (first, second))
        memory = torch.zeros(size, dtype=torch.uint8)
        return {
            name: memory[: call[name].nbytes].view(call[name].dtype).view(call[name].shape) for name in (first, second)
        }

    return change


def every_buffer() -> None:
    for operator in calls.WITH_OUT:
        first = next(iter(calls.example(operator)))
        names = BY_NAME[operator].outs
        for name in names:
            row(operator, name, "float64", TypeError, overload="out", **{name: lambda t: t.to(torch.float64)})
            row(operator, name, "fewer dimensions", overload="out", **{name: lambda t: t[0]})
            row(operator, name, "fewer rows", overload="out", **{name: lambda t: t[1:]})
            row(operator, name, "fewer columns", overload="out", **{name: lambda t: t[..., 1:]})
            row(operator, name, "other strides", overload="out", **{name: lambda t: torch.stack((t, t), dim=1)[:, 0]})
            row(operator, name, "other device", overload="out", **{name: elsewhere})
            row(operator, name, "shares the first input", overload="out", together=sharing(first, name))
        if len(names) == 2:
            row(operator, names[1], "shares the other buffer", overload="out", together=sharing(*names))


every_buffer()


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


def failure(row: Row) -> tuple[type, str]:
    arguments = row.arguments()
    with pytest.raises((ValueError, TypeError)) as caught:
        calls.invoke(row.operator, arguments, row.overload)
    return caught.type, str(caught.value)


@pytest.mark.parametrize("row", TABLE, ids=str)
def test_bad_call(row, recorder):
    error, text = failure(row)
    assert error is row.error
    assert text.startswith(row.argument + " "), text
    with FakeTensorMode():
        assert failure(row) == (error, text)
    with torch.device("meta"):
        on_meta = failure(row)
    if row.what == "other device":
        text = text.replace("is on meta, but must be on cpu", "is on cpu, but must be on meta")
    assert on_meta == (error, text)
    assert recorder.served == []


def test_the_table_is_complete():
    """Every argument of every overload is spoilt at least once, except `is_causal`, which cannot be wrong."""
    spoilt = {(row.operator, row.overload, row.argument) for row in TABLE}
    for operator, overload in calls.OVERLOADS:
        for argument in calls.overload_of(operator, overload)._schema.arguments:
            if argument.name != "is_causal":
                assert spoilt & {(operator, "default", argument.name), (operator, overload, argument.name)}, argument


# One row in ten: each is a compilation, and the fakes that Dynamo runs are those of the test above.
@pytest.mark.parametrize("row", TABLE[::10], ids=str)
def test_bad_call_compiled(row, recorder):
    _, text = failure(row)
    arguments = row.arguments()
    with pytest.raises(TorchRuntimeError) as caught:
        calls.invoke_compiled(row.operator, arguments, row.overload, backend="eager")
    assert text in str(caught.value)
    assert recorder.served == []


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
        call = Row(operator, "", "", changes, ValueError, BF16, "default").arguments()
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
