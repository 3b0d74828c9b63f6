"""After `ts_ops.warmup` nothing compiles for a call in range, and it compiled nothing that such a call cannot reach.

On a CPU for the TokenSpeed kernels, whose compile function is counted (`tokenspeed_model.py`); on a GPU for the Triton
kernels, by the size of Triton's JIT caches. Warming up twice costs nothing, and threads may do it at once.
"""

import contextlib
import itertools
import json
import sys
import threading

import pytest
import torch

import calls
import tokenspeed_model
import ts_ops
from ts_ops import dispatch
from ts_ops.__main__ import main
from ts_ops.warmup import powers_of_two

FP8, BF16 = torch.float8_e4m3fn, torch.bfloat16
ATTENTION = ("mla_decode", "mla_decode_lse", "mla_prefill", "mla_prefill_lse")


@pytest.fixture
def blackwell(monkeypatch):
    """A Blackwell machine for CPU tensors, as far as compiling goes; what it refuses the reference serves."""
    pytest.importorskip("tokenspeed_mla")
    machine = tokenspeed_model.install(monkeypatch)
    machine.launches = False
    tokenspeed_model.without_finish()
    monkeypatch.setitem(dispatch.PREFERENCE, "cpu", ("tokenspeed", "reference"))
    monkeypatch.setattr(sys.modules["ts_ops.warmup"], "_done", set())
    yield machine
    monkeypatch.undo()
    tokenspeed_model.forget()


def warm(**options):
    return ts_ops.warmup(**dict(dict(device="cpu", progress=False, operators=ATTENTION), **options))


def decode(batch, q_len, heads, dtype, page_size, keys, hint=None, op="mla_decode", **options):
    query = torch.zeros(batch, q_len, heads, 576, dtype=dtype)
    cache = torch.zeros(2, page_size, 576, dtype=dtype)
    table = torch.zeros(batch, -(-keys // page_size), dtype=torch.int32)
    lengths = torch.ones(batch, dtype=torch.int32)
    return getattr(ts_ops, op)(query, cache, table, lengths, 0.1, max_seq_len=hint, **options)


DEPLOYMENTS = [
    dict(heads=16, query_dtype=FP8, q_lens=(1, 4), batch_sizes=(1, 2, 3, 8, 40, 150), max_seq_len=5000),
    dict(heads=128, query_dtype=BF16, q_lens=(1, 2), batch_sizes=(1, 7, 80), max_seq_len=2048),
    dict(heads=128, query_dtype=FP8, q_lens=(1,), batch_sizes=(1, 16), max_seq_len=1000, page_size=32, window_left=300),
    dict(heads=96, query_dtype=FP8, q_lens=(3,), batch_sizes=(4,), max_seq_len=999, cp_world=4, cp_rank=2),
]


@pytest.mark.parametrize("deployment", DEPLOYMENTS, ids=str)
def test_nothing_compiles_after_and_nothing_more_before(blackwell, deployment):
    report = warm(**deployment)
    compiled = len(blackwell.decode_variants)
    assert sum(sum(c.kernels.values()) for c in report.compilations) == compiled + len(blackwell.prefill_variants)
    assert compiled > 1

    page_size = deployment.get("page_size", 64)
    options = {k: deployment[k] for k in ("window_left", "cp_world", "cp_rank") if k in deployment}
    reached = set()
    capacities = {page_size, 128, 129, 1000, deployment["max_seq_len"] // 2, deployment["max_seq_len"]}
    for batch, q_len in itertools.product(deployment["batch_sizes"], deployment["q_lens"]):
        if "cp_world" in options:
            options["causal_seqs"] = torch.ones(batch, dtype=torch.int32)
        for keys, hint, op in itertools.product(capacities, (None, 1, 500), ("mla_decode", "mla_decode_lse")):
            decode(batch, q_len, deployment["heads"], deployment["query_dtype"], page_size, keys, hint, op, **options)
            assert len(blackwell.decode_variants) == compiled, (batch, q_len, keys, hint, op)
    # No more than the calls in range can reach.
    everything = {str(sorted(variant.items(), key=str)) for variant in blackwell.decode_variants}
    for batch, q_len in itertools.product(deployment["batch_sizes"], deployment["q_lens"]):
        for keys in range(1, deployment["max_seq_len"] + 1, 37):
            for op in ("mla_decode", "mla_decode_lse"):
                if "causal_seqs" in options:
                    options["causal_seqs"] = torch.ones(batch, dtype=torch.int32)
                decode(batch, q_len, deployment["heads"], deployment["query_dtype"], page_size, keys, op=op, **options)
                reached.add(str(sorted(blackwell.last_variant.items(), key=str)))
    assert reached == everything


@pytest.mark.parametrize("dtype", [BF16, FP8], ids=str)
def test_prefill(blackwell, dtype):
    warm(heads=8, query_dtype=dtype, max_seq_len=128, operators=("mla_prefill", "mla_prefill_lse"))
    assert len(blackwell.prefill_variants) == (8 if dtype == FP8 else 4)
    rows, cum = torch.zeros(300, 8, 192, dtype=dtype), torch.tensor([0, 300], dtype=torch.int32)
    for is_causal, op in itertools.product((True, False), (ts_ops.mla_prefill, ts_ops.mla_prefill_lse)):
        op(rows, rows, rows[..., :128], cum, cum, 0.1, is_causal=is_causal)
    assert len(blackwell.prefill_variants) == (8 if dtype == FP8 else 4)


def test_twice_costs_nothing(blackwell):
    first = warm(heads=16, max_seq_len=512)
    assert first.compilations and first.calls and first.seconds > 0
    again = warm(heads=16, max_seq_len=512)
    assert (again.compilations, again.calls, again.seconds) == ((), 0, 0.0)
    larger = warm(heads=16, max_seq_len=500, batch_sizes=(1,))
    assert larger.calls and not larger.compilations, "all that these calls need was compiled before"


def test_threads(blackwell):
    """Eight threads at once: every kernel is compiled once."""
    reports, failures = [], []

    def work():
        try:
            reports.append(warm(heads=16, query_dtype=FP8, max_seq_len=2048, batch_sizes=(1, 2)))
        except Exception as error:
            failures.append(error)

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures and len(reports) == 8
    assert sum(bool(report.compilations) for report in reports) == 1
    keys = [str(variant) for variant in blackwell.decode_variants]
    assert len(keys) == len(set(keys)) > 1


def test_under_capture_what_was_warmed_runs(blackwell):
    warm(heads=16, max_seq_len=512, batch_sizes=(2,))
    blackwell.capturing = True
    decode(2, 1, 16, BF16, 64, 512)
    with pytest.raises(RuntimeError, match=r"would have to compile.*ts_ops\.warmup"):
        decode(2, 1, 32, BF16, 64, 512)


def test_a_permission_is_another_warm_up():
    """With it a backend may compile other kernels."""
    first = warm(heads=2, max_seq_len=64)
    with ts_ops.allow_fp8_weights():
        second, third = warm(heads=2, max_seq_len=64), warm(heads=2, max_seq_len=64)
    assert first.calls == second.calls > 0 == third.calls


def test_layouts_that_a_forced_backend_refuses_are_left_out(blackwell):
    """TokenSpeed decodes aligned caches alone; without force another backend serves the rest. Any other refusal is an
    error."""
    both = warm(heads=16, max_seq_len=512, batch_sizes=(1, 2))
    with ts_ops.use_backend("tokenspeed"):
        forced = warm(heads=16, max_seq_len=512, batch_sizes=(1, 2))
        assert 0 < forced.calls < both.calls and not forced.compilations, "the same kernels"
        with pytest.raises(RuntimeError, match="the forced backend cannot serve this call. tokenspeed: .* pages of"):
            warm(heads=16, max_seq_len=512, page_size=1)


def test_report(blackwell):
    report = warm(heads=16, max_seq_len=300, query_dtype=FP8)
    table = str(report)
    assert len(table.splitlines()) == len(report.compilations) + 1
    assert "mla_decode_lse" in table and "tokenspeed:mla_decode" in table
    for compilation in report.compilations:
        assert compilation.seconds > 0 and sum(compilation.kernels.values()) >= 1


BAD = {
    "heads": dict(heads=0), "max_seq_len": dict(max_seq_len=0), "batch_sizes": dict(batch_sizes=(4, 0)),
    "q_lens": dict(q_lens=()), "operators": dict(operators=("mla_encode",)), "page_size": dict(page_size=48),
    "window_left": dict(q_lens=(4,), window_left=1),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_bad_requests(name):
    with pytest.raises(ValueError, match=name):
        warm(**dict(dict(heads=2, max_seq_len=64), **BAD[name]))


def test_a_cpu_compiles_nothing():
    report = ts_ops.warmup(heads=2, max_seq_len=100, device="cpu", progress=False)
    assert report.calls > 50 and report.compilations == ()


def test_powers_of_two():
    for most in (1, 2, 3, 127, 128, 129):
        lengths = powers_of_two(most)
        assert lengths[0] == 1 and lengths[-1] >= most > lengths[-1] // 2


@pytest.mark.parametrize("as_json", [True, False])
def test_command(capsys, as_json):
    command = "warmup --heads 3 --max-seq-len 64 --batch-sizes 1 2 --query-dtype fp8 --device cpu".split()
    assert main([*command, *(["--json"] if as_json else [])]) == 0
    output = capsys.readouterr().out
    if as_json:
        assert json.loads(output)["compilations"] == []
    else:
        assert "0 kernels compiled" in output


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["triton", None], ids=["triton", "whatever-serves"])
@pytest.mark.parametrize("query, cache", [(BF16, BF16), (FP8, FP8), (BF16, FP8)], ids=str)
def test_nothing_compiles_after(query, cache, backend):
    """Batch 1, one token, odd strides, offset pointers, odd lengths: everything in range."""
    device = torch.device("cuda", torch.cuda.current_device())
    heads, page_size, batches, q_lens, most = 6, 64, (1, 2, 5, 33), (1, 2, 3), 3000
    with ts_ops.use_backend(backend) if backend else contextlib.nullcontext():
        report = ts_ops.warmup(
            heads, max_seq_len=most, batch_sizes=batches, q_lens=q_lens, page_size=page_size, query_dtype=query,
            cache_dtype=cache, progress=False,
        )  # fmt: skip
        before = dispatch.compiled(device)
        print(report)
        assert before and sum(before.values()) > 10
        with torch.device(device):
            for arguments in calls_in_range(heads, page_size, batches, q_lens, most, query, cache):
                for layout in (lambda tensor: tensor, calls.padded, calls.permuted, shifted):
                    operator, call = arguments[0], calls.relaid(layout, arguments[1])
                    calls.invoke(operator, call)
                    if calls.BY_NAME[operator].outs:
                        odd = {name: shifted(buffer) for name, buffer in calls.buffers(operator, call).items()}
                        calls.invoke(operator, call | odd, "out")
                    assert dispatch.compiled(device) == before, (operator, layout, {
                        name: (value.shape, value.stride()) if isinstance(value, torch.Tensor) else value
                        for name, value in call.items()
                    })  # fmt: skip


def shifted(tensor: torch.Tensor) -> torch.Tensor:
    """Contiguous, from an odd address."""
    return torch.empty(tensor.numel() + 1, dtype=tensor.dtype)[1:].view(tensor.shape).copy_(tensor)


def calls_in_range(heads, page_size, batches, q_lens, most, query, cache):
    def floats(*shape, dtype=BF16):
        return torch.randn(shape).to(dtype)

    for batch, q_len, keys in itertools.product(batches, q_lens, (1, 63, 64, 65, 1000, most)):
        pages = -(-keys // page_size)
        decode = dict(
            query=floats(batch, q_len, heads, 576, dtype=query), kv_cache=floats(3, page_size, 576, dtype=cache),
            block_tables=torch.ones(batch, pages, dtype=torch.int32),
            seq_lens=torch.full((batch,), keys, dtype=torch.int32), softmax_scale=0.04, max_seq_len=keys,
        )  # fmt: skip
        yield "mla_decode", decode
        yield "mla_decode_lse", decode
    for tokens, dtype in itertools.product((1, 17, 200), {BF16, query}):
        cum = torch.tensor([0, tokens], dtype=torch.int32)
        prefill = dict(
            query=floats(tokens, heads, 192, dtype=dtype), key=floats(tokens, heads, 192, dtype=dtype),
            value=floats(tokens, heads, 128, dtype=dtype), cum_seq_lens_q=cum, cum_seq_lens_kv=cum, softmax_scale=0.1,
        )  # fmt: skip
        for is_causal in (True, False):
            yield "mla_prefill", dict(prefill, is_causal=is_causal)
            yield "mla_prefill_lse", dict(prefill, is_causal=is_causal)
        if dtype == BF16:
            for dim in (128, 512):
                output, lse = floats(tokens, heads, dim), torch.randn(tokens, heads)
                yield (
                    "merge_attn_states",
                    dict(prefix_output=output, prefix_lse=lse, suffix_output=output, suffix_lse=lse),
                )
            for states in (1, 2, 3, 7):
                yield (
                    "merge_attn_states_n",
                    dict(outputs=floats(states, tokens, heads, 128), lses=torch.randn(states, tokens, heads)),
                )
            scale = dict(k_scale=torch.tensor(0.5)) if cache == FP8 else {}
            pool = floats(5, page_size, 576, dtype=cache)
            yield (
                "mla_kv_cache_write",
                dict(
                    kv_cache=pool,
                    kv_c=floats(tokens, 512),
                    k_pe=floats(tokens, 64),
                    slot_mapping=torch.arange(tokens),
                    **scale,
                ),
            )
            gather = dict(
                kv_cache=pool, block_tables=torch.ones(1, 4, dtype=torch.int32), cum_seq_lens=cum, total_tokens=tokens
            )
            yield "mla_kv_cache_gather", gather
            yield "mla_kv_cache_gather", dict(gather, seq_starts=torch.zeros(1, dtype=torch.int32))
            if cache == FP8:
                yield "mla_kv_cache_gather", dict(gather, dtype=BF16, **scale)
            yield (
                "mla_kv_pack_quantize_fp8",
                dict(k_nope=floats(tokens, heads, 128), k_pe=floats(tokens, 64), v=floats(tokens, heads, 128)),
            )
