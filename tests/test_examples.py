"""Promise: the two short examples do what their first lines say, on a CPU and on a GPU, and agree with eager mode.

Each stays under 60 lines, for a reader to copy.
"""

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
