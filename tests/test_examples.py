"""Promise: the two short examples do what their first lines say, on a CPU and on a GPU, and agree with eager mode.

Each stays under 60 lines, for a reader to copy. The benchmark of whole models measures what it says, and says what it
could not measure.
"""

import csv
import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch._dynamo.utils import counters

import cuda_graph
import torch_compile

gpu = pytest.mark.gpu


@pytest.mark.parametrize("gpus", [0, pytest.param(1, marks=gpu)])
@pytest.mark.parametrize("arguments", [[], ["--device", "cuda"]], ids=" ".join)
def test_cuda_graph(gpus, arguments):
    """As a user starts it: with a GPU it captures, without one it says so and succeeds all the same."""
    environment = os.environ | {"OMP_NUM_THREADS": "1"} | ({} if gpus else {"CUDA_VISIBLE_DEVICES": ""})
    command = [sys.executable, cuda_graph.__file__, *arguments]
    result = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300)
    assert result.returncode == 0, result.stderr
    first, last = result.stdout.splitlines()
    assert first.startswith("One graph on the GPU" if gpus else "No CUDA device, so no graph to capture")
    assert last == "40 steps, to lengths [40, 37, 34, 31]: the same bits as eager calls"


@pytest.mark.parametrize("device, mode", [
    ("cpu", "default"),
    pytest.param("cuda", "default", marks=gpu),
    pytest.param("cuda", "reduce-overhead", marks=gpu),
])  # fmt: skip
def test_torch_compile(device, mode, capsys, one_thread):
    """One graph for all steps; bf16 results of about 0.3, in which Inductor may round once less."""
    torch._dynamo.reset()
    counters.clear()
    torch_compile.main(["--device", device, "--mode", mode])
    printed = re.fullmatch(r"32 steps, graphs: (\d+), largest difference from eager: (\S+)\n", capsys.readouterr().out)
    assert printed and int(printed[1]) == 1 and float(printed[2]) < 0.02
    assert not counters["graph_break"]
    assert not counters["inductor"]["cudagraph_skips"], "a compiled step without a CUDA graph"


@pytest.mark.parametrize("example", [cuda_graph, torch_compile])
def test_help_and_size(example, capsys):
    with pytest.raises(SystemExit) as ended:
        example.main(["--help"])
    assert ended.value.code == 0 and "--device" in capsys.readouterr().out
    assert len(Path(example.__file__).read_text().splitlines()) < 60


@pytest.fixture(scope="module")
def benchmark():
    pytest.importorskip("transformers")
    path = Path(cuda_graph.__file__).parent / "benchmarks" / "generation.py"
    spec = importlib.util.spec_from_file_location("generation_benchmark", path)  # examples/ has a `generation` too
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


TINY = "--shape tiny --device cpu --batch-sizes 2 1 --contexts 70 40 --prompt-tokens 50 --chunk-tokens 20 --steps 2"


@pytest.mark.parametrize("attention", ["V2", "V3"])
def test_generation_benchmark(benchmark, attention, tmp_path, capsys, monkeypatch, one_thread):
    if attention == "V3":
        small = dict(vocab_size=512, hidden_size=128, num_attention_heads=4, num_key_value_heads=4)
        small |= dict(q_lora_rank=64, intermediate_size=256)
        monkeypatch.setitem(benchmark.SHAPES, "tiny", benchmark.SHAPES["v3-attention"] | small)
    assert benchmark.main([*TINY.split(), "--csv", str(tmp_path / "figures.csv")]) == 0
    with open(tmp_path / "figures.csv") as file:
        rows = list(csv.DictReader(file))
    cases = {(row["kind"], row["path"], row["batch"], row["context"]) for row in rows}
    paths = ("ours bf16", "ours fp8", "transformers")
    assert cases == {
        ("decode", path, batch, context) for path in paths for batch in "21" for context in ("70", "40")
    } | {("prefill", path, "1", "50") for path in ("ours", "ours, pieces of 20", "transformers")}
    for row in rows:
        tokens = int(row["batch"] if row["kind"] == "decode" else row["context"])
        assert float(row["tokens_per_second"]) == pytest.approx(tokens / float(row["milliseconds"]) * 1e3)
        # Two small models in bf16, or over an FP8 cache; of unrelated logits it is about 1.4.
        assert row["path"] == "transformers" or float(row["difference"]) < (0.1 if "fp8" in row["path"] else 0.03)
    table = capsys.readouterr().out.split("\ndecode  ")[1].splitlines()
    assert [line.split()[:4] for line in table[1:5]] == [["B", b, "S", c] for b in ("2,", "1,") for c in ("70", "40")]


def test_generation_benchmark_names_what_it_did_not_measure(benchmark, capsys, monkeypatch, one_thread):
    def fail(*arguments):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 3.00 GiB.\nmore")
        yield

    def refuse(*arguments):
        raise ValueError("no such thing\nmore")
        yield

    monkeypatch.setattr(benchmark, "decode_theirs", fail)
    monkeypatch.setattr(benchmark, "prefill_once", refuse)
    assert benchmark.main(TINY.split()) == 0
    printed = capsys.readouterr().out
    assert printed.count("transformers: out of memory\n") == 4 and "ValueError: no such thing\n" in printed
    assert benchmark.main([*TINY.split(), "--time-limit", "0"]) == 0
    assert capsys.readouterr().out.split("without a figure:")[1].count("not run\n") == 15


def test_generation_benchmark_of_some_paths(benchmark, capsys, one_thread):
    few = [*TINY.split(), "--prompt-tokens", "0", "--contexts", "40", "--batch-sizes", "1"]
    assert benchmark.main([*few, "--paths", "transformers", "ours bf16"]) == 0
    printed = capsys.readouterr().out
    assert "ours fp8" not in printed and len(printed.splitlines()[-1].split()) == 9  # case, two times and rates, ratio
    assert benchmark.main([*few, "--paths", "transformers"]) == 0
    assert len(capsys.readouterr().out.splitlines()[-1].split()) == 6


def test_generation_benchmark_shares_weights(benchmark):
    bench = benchmark.Bench(benchmark.parse_arguments(TINY.split()))
    theirs = {weight.data_ptr() for weight in bench.peer.parameters()}
    copied = {name for name, weight in bench.model.named_parameters() if weight.data_ptr() not in theirs}
    assert all(".mlp.gate." in name for name in copied)


@pytest.mark.parametrize("arguments, message", [
    ("--shape small", "invalid choice: 'small'"),
    ("--batch-sizes 8 0", "--batch-sizes must be at least 1, got [8, 0]"),
    ("--paths theirs", "invalid choice: 'theirs'"),
    ("--steps 0", "--steps must be at least 1, got 0"),
    ("--contexts 163840", "within 0 and 163840 positions"),
    ("--prompt-tokens -1", "within 0 and 163840 positions"),
])  # fmt: skip
def test_generation_benchmark_refuses(benchmark, arguments, message, capsys):
    with pytest.raises(SystemExit) as ended:
        benchmark.main(["--device", "cpu", *arguments.split()])
    assert ended.value.code == 2 and message in capsys.readouterr().err
