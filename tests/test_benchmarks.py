"""Promise: `examples/benchmarks/kernels.py` times only what it has checked, and names whatever it leaves out.

Runs on a CPU: tiny cases, and peers played by torch behind the interfaces that the adapters were written for. Marked
`gpu`: the same tiny cases in CUDA graphs.
"""

import csv
import importlib.util
import re
import sys
import types

import cases
import kernels
import measure
import peers
import pytest
import torch

import ts_ops

CPU = torch.device("cpu")
BF16, FP8 = torch.bfloat16, torch.float8_e4m3fn
UNIFORM, RAGGED = cases.Decode(2, 100, 4), cases.Decode(3, 200, 2, q_len=2, shortest=20)
CASES = cases.PRESETS["tiny"]
CEILINGS = measure.Ceilings(4e12, {BF16: 7e14, FP8: 14e14})


@pytest.fixture
def alone(monkeypatch):
    """No peer is installed."""
    find = importlib.util.find_spec
    modules = {peer.module for group in peers.PEERS.values() for peer in group}
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name in modules else find(name))


def run(*arguments: str) -> int:
    return kernels.main(["--device", "cpu", "--repeats", "2", *arguments])


def run_case(case, contenders=(), dtypes=(BF16, FP8), backends=None) -> list[measure.Row]:
    return measure.run_case(case, list(dtypes), backends, list(contenders), measure.Stopwatch(CPU), CEILINGS, 2)


def test_table_and_csv(alone, tmp_path, capsys):
    """A row for each case and dtype, in both; each missing peer with the command that installs it."""
    path = tmp_path / "rows.csv"
    assert run("--csv", str(path)) == 0
    printed = capsys.readouterr().out
    with path.open() as file:
        rows = list(csv.DictReader(file))
    named = [(row["case"], row["dtype"]) for row in rows]
    assert named == [(c.label, measure.NAME_OF[dtype]) for c in CASES for dtype in (BF16, FP8) if dtype in c.dtypes]
    for row in rows:
        assert f"{row['case']:30}{row['dtype']:6}ts_ops reference" in printed
        assert 0 < float(row["p10_us"]) <= float(row["median_us"]) <= float(row["p90_us"])
        assert float(row["bytes_floor_us"]) > 0 and float(row["error"]) < 4e-3
    for peer in ("tokenspeed-flashmla==", "flashinfer-python==0.6.3 apache-tvm-ffi", "tokenspeed-fa3=="):
        assert f"not installed: pip install {peer}" in printed
    assert "cuDNN: needs an NVIDIA GPU" in printed


def test_plots(alone, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    folder = tmp_path / "new" / "plots"
    assert run("--plots", str(folder)) == 0
    printed = capsys.readouterr().out
    for operator in peers.PEERS:
        path = folder / f"{operator}.png"
        assert path.read_bytes().startswith(b"\x89PNG") and f"wrote {path}" in printed


def test_plots_of_a_comparison(tmp_path):
    pytest.importorskip("matplotlib")
    names = [("ts_ops hopper", True), ("ts_ops triton", True), ("FlashMLA", False), (peers.FORK, False)]
    rows = [
        measure.Row("decode", case, "bf16", name, ours, median_us=9.0, bytes_floor_us=5.0, flops_floor_us=0.0)
        for case in ("one", "two") for name, ours in names
    ]  # fmt: skip
    rows[0].ratio, rows[0].p10_us, rows[0].p90_us = 0.9, 8.0, 10.0
    (path,) = measure.plot(rows, str(tmp_path), "title")
    assert path.stat().st_size > 5000


@pytest.mark.parametrize("arguments, message", [
    (["--operators", "attention"], "argument --operators: invalid choice: 'attention'"),
    (["--dtypes", "fp4"], "argument --dtypes: invalid choice: 'fp4'"),
    (["--backends", "cuda"], "argument --backends: invalid choice: 'cuda'"),
    (["--cases", "all"], "argument --cases: invalid choice: 'all'"),
    (["--cases", "headline"], "argument --cases: headline needs an NVIDIA GPU, got --device cpu"),
    (["--repeats", "0"], "argument --repeats: must be at least 1, got 0"),
    (["--device", "meta"], "argument --device: invalid choice: 'meta'"),
    (["--time-limit", "0"], "argument --time-limit: must be above 0, got 0"),
    (["--csv", "/nowhere/rows.csv"], "argument --csv: no folder /nowhere"),
    (["decode"], "unrecognized arguments: decode"),
])  # fmt: skip
def test_bad_arguments(arguments, message, capsys):
    with pytest.raises(SystemExit) as ended:
        run(*arguments)
    assert ended.value.code == 2 and message in capsys.readouterr().err


def test_no_gpu_and_no_matplotlib(monkeypatch, capsys):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "matplotlib" else find(name))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for arguments, message in (
        (["--plots", "plots"], "pip install matplotlib"),
        (["--device", "cuda"], "--device cpu runs tiny cases"),
    ):
        with pytest.raises(SystemExit):
            run(*arguments)
        assert message in capsys.readouterr().err


def test_time_limit(alone, capsys):
    """What was not run is named, each case of it."""
    assert run("--time-limit", "1e-9", "--operators", "decode", "merge") == 0
    printed = capsys.readouterr().out
    (line,) = [line for line in printed.splitlines() if line.startswith("not run, after the time limit")]
    assert all(f"{c.operator} {c.label}" in line for c in CASES if c.operator in ("decode", "merge"))


def test_dtype_that_an_operator_lacks(alone, capsys):
    assert run("--operators", "merge", "--dtypes", "fp8") == 0
    assert "merge T16 H2 D128: has no fp8" in capsys.readouterr().out


def test_backend_declines(alone, capsys):
    """A forced backend that cannot serve says why, and is no failure."""
    assert run("--operators", "cache", "--backends", "tokenspeed", "reference") == 0
    printed = capsys.readouterr().out
    refused, ran = (re.findall(f"ts_ops {found}", printed) for found in ("tokenspeed +declines: ", "reference +eager"))
    assert len(refused) == len(ran) == 5


def test_fp8_weights_are_of_decode_in_fp8_alone(alone, capsys):
    assert run("--operators", "decode", "merge", "--backends", "hopper-fp8-weights") == 0
    printed = capsys.readouterr().out
    assert printed.count("declines: only decode in FP8") == printed.count(" bf16  ts_ops hopper-fp8-weights ") > 1
    assert " fp8   ts_ops hopper-fp8-weights declines: Hopper's kernels run on a GPU only" in printed


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.label)
def test_wrong_results_are_not_timed(case, monkeypatch):
    """A result that is off by one value in what is checked, or not finite anywhere, fails."""
    operator, _, _ = case.arguments(case.inputs(case.dtypes[-1], CPU))
    right = getattr(ts_ops, operator)
    for value in (100.0, float("nan")):

        def wrong(*args, value=value, **kwargs):
            result = right(*args, **kwargs)
            written = args[0] if result is None else measure.tensors(result)[0]
            written.view(-1, written.shape[-1])[0, 0] = value
            return result

        monkeypatch.setattr(ts_ops, operator, wrong)
        rows = run_case(case)
        assert all(row.failed and row.median_us is None and row.note.startswith("wrong") for row in rows)


def test_a_call_that_raises(alone, monkeypatch, capsys):
    def broken(*args, **kwargs):
        raise RuntimeError("no such kernel\nand more")

    monkeypatch.setattr(ts_ops, "merge_attn_states", broken)
    assert run("--operators", "merge", "cache") == 1
    printed = capsys.readouterr().out
    assert "RuntimeError: no such kernel" in printed and "and more" not in printed and "pack T16" in printed


def attend(query, keys, values, scale, causal):
    """[q, H, D] over [n, D] or [n, H, D]: [q, H, Dv], bf16."""
    keys, values = (x.float() if x.ndim == 3 else x.float()[:, None] for x in (keys, values))
    scores = torch.einsum("qhd,nhd->hqn", query.float(), keys.expand(-1, query.shape[1], -1)) * scale
    if causal:
        seen = torch.ones(scores.shape[-2:]).tril(scores.shape[2] - scores.shape[1]).bool()
        scores.masked_fill_(~seen, -torch.inf)
    return torch.einsum("hqn,nhd->qhd", scores.softmax(-1), values.expand(-1, query.shape[1], -1)).to(BF16)


def flash_mla_with_kvcache(
    q, k_cache, block_table, cache_seqlens, head_dim_v, tile_scheduler_metadata, num_splits=None, softmax_scale=None,
    causal=False,
):  # fmt: skip
    assert k_cache.shape[1:] == (64, 1, 576) and tile_scheduler_metadata == "schedule" and num_splits is None
    out = torch.empty(*q.shape[:3], head_dim_v, dtype=q.dtype)
    for b, length in enumerate(cache_seqlens.tolist()):
        keys = k_cache[block_table[b].long()].flatten(0, 2)[:length]
        out[b] = attend(q[b], keys, keys[:, :head_dim_v], softmax_scale, causal)
    return out, torch.zeros(())


class BatchMLAPagedAttentionWrapper:
    def __init__(self, float_workspace_buffer, use_cuda_graph=False, backend="auto"):
        assert backend == "fa3" and not use_cuda_graph

    def plan(
        self, qo_indptr, kv_indptr, kv_indices, kv_len_arr, num_heads, head_dim_ckv, head_dim_kpe, page_size, causal,
        sm_scale, q_data_type, kv_data_type, use_profiler=False,
    ):  # fmt: skip
        assert qo_indptr.dtype == kv_indptr.dtype == kv_indices.dtype == kv_len_arr.dtype == torch.int32
        assert (head_dim_ckv, head_dim_kpe, page_size) == (512, 64, 64) and q_data_type == kv_data_type == BF16
        self.planned = qo_indptr, kv_indptr, kv_indices, kv_len_arr, causal, sm_scale

    def run(self, q_nope, q_pe, ckv_cache, kpe_cache, out=None):
        rows, starts, indices, lengths, causal, scale = self.planned
        query, cache, out = torch.cat((q_nope, q_pe), -1), torch.cat((ckv_cache, kpe_cache), -1), []
        for b, length in enumerate(lengths.tolist()):
            keys = cache[indices[starts[b] : starts[b + 1]].long()].flatten(0, 1)[:length]
            out.append(attend(query[rows[b] : rows[b + 1]], keys, keys[:, :512], scale, causal))
        return torch.cat(out)


def merge_state(v_a, s_a, v_b, s_b):
    """Its LSEs are to base 2."""
    lse = torch.logaddexp2(s_a, s_b)
    weights = torch.exp2(s_a - lse)[..., None], torch.exp2(s_b - lse)[..., None]
    return (v_a * weights[0] + v_b * weights[1]).to(v_a.dtype), lse


def flash_attn_func(q, k, v, softmax_scale=None, causal=False):
    return torch.stack([attend(*(x[b] for x in (q, k, v)), softmax_scale, causal) for b in range(q.shape[0])])


@pytest.fixture
def installed(monkeypatch):
    def module(name, **contents):
        made = types.ModuleType(name)
        made.__dict__.update(contents)
        monkeypatch.setitem(sys.modules, name, made)
        return made

    module(
        "flash_mla", flash_mla_with_kvcache=flash_mla_with_kvcache, get_mla_metadata=lambda: ("schedule", None)
    )  # fmt: skip
    mla = module("flashinfer.mla", BatchMLAPagedAttentionWrapper=BatchMLAPagedAttentionWrapper)
    module("flashinfer", mla=mla, merge_state=merge_state)
    module("flash_attn_interface", flash_attn_func=flash_attn_func)


@pytest.mark.parametrize("case", [UNIFORM, RAGGED, *CASES[2:6]], ids=lambda case: case.label)
def test_peers(case, installed):
    """Each adapter gives its peer the problem that ours gets: the results pass the same check."""
    contenders = [peer for peer in peers.PEERS[case.operator] if peer.name != "cuDNN"]
    rows = run_case(case, contenders)
    timed = [(row.dtype, row.contender) for row in rows if row.how == "eager" and row.median_us]
    expected = [("bf16", "ts_ops reference")] + [("bf16", peer.name) for peer in contenders]
    if FP8 in case.dtypes:
        expected += [("fp8", "ts_ops reference")] + [("fp8", peer.name) for peer in contenders if FP8 in peer.dtypes]
    assert timed == expected, [row.note for row in rows]
    for row in rows:
        fastest = min((r for r in rows if not r.ours and r.dtype == row.dtype), key=lambda r: r.median_us, default=None)
        if row.ours and fastest:
            assert row.ratio == row.median_us / fastest.median_us
            assert row.against == f"{fastest.contender} {row.dtype}"


def test_peers_without_the_dtype_run_in_bf16(installed):
    rows = run_case(UNIFORM, peers.PEERS["decode"], dtypes=[FP8])
    assert [(row.dtype, row.ours) for row in rows] == [("bf16", False), ("bf16", False), ("fp8", True)]
    assert rows[2].ratio and rows[2].against.endswith(" bf16")


def test_a_peer_that_fails(installed, monkeypatch):
    """Its error stands in its row; the others are timed."""

    def refuse(*args, **kwargs):
        raise ValueError("no kernel for 4 heads\nsee the manual")

    monkeypatch.setattr(BatchMLAPagedAttentionWrapper, "plan", refuse)
    rows = run_case(UNIFORM, peers.PEERS["decode"], dtypes=[BF16])
    notes = {row.contender: row.note for row in rows}
    assert notes == {"ts_ops reference": "", "FlashMLA": "", "FlashInfer": "ValueError: no kernel for 4 heads"}
    assert not any(row.failed for row in rows) and rows[0].ratio == rows[0].median_us / rows[1].median_us


def test_published_figures_are_scaled_by_what_runs_now():
    case = cases.Decode(64, 8192, 128)
    time, note = peers.published_fork(case, {"FlashMLA": 253.0, "FlashInfer": 100.0})
    assert time == pytest.approx(216 * 253 / 230) and note.startswith("published, scaled: 216 x 253.0 / 230 (FlashMLA")
    assert peers.published_fork(case, {"FlashInfer": 258.0})[0] == 216
    for other in (cases.Decode(64, 8192, 64), cases.ragged(128), cases.Decode(2, 8192, 128)):
        assert peers.published_fork(other, {"FlashInfer": 258.0}) is None


def test_published_figures_stand_beside_ours():
    """In fp8 they are the peer, and say what they are."""
    case = cases.Decode(64, 8192, 64)
    rows = [
        measure.Row("decode", case.label, "bf16", "FlashMLA", False, median_us=350.0),
        measure.Row("decode", case.label, "fp8", "ts_ops hopper", True, median_us=128.0),
    ]
    rows += measure.fork_row(case, rows)
    measure.compare(rows[1], rows)
    assert (rows[2].how, rows[2].median_us) == ("published", 256)
    assert (rows[1].ratio, rows[1].against) == (0.5, f"{peers.FORK} fp8")


@pytest.mark.parametrize("preset", ["headline", "full"])
def test_presets(preset):
    """Every operator, no case twice, names that fit the table; lengths within their bounds, the longest among them."""
    chosen = cases.PRESETS[preset]
    assert {case.operator for case in chosen} == set(peers.PEERS)
    labels = [case.label for case in chosen]
    assert len(set(labels)) == len(labels) and max(map(len, labels)) < 30
    for case in chosen:
        if case.operator == "decode":
            assert max(case.lengths) == case.length and min(case.lengths) >= (case.shortest or case.length)


@pytest.mark.gpu
def test_on_a_gpu(alone, tmp_path):
    """Ours are captured; nothing is eager."""
    path = tmp_path / "rows.csv"
    assert kernels.main(["--cases", "tiny", "--repeats", "3", "--csv", str(path)]) == 0
    with path.open() as file:
        rows = [row for row in csv.DictReader(file) if row["ours"] == "True"]
    assert len(rows) == 14 and {row["how"] for row in rows} == {"graph"}
