"""Promise: no operator reads a device value on the host (law 7), so each may be captured in a CUDA graph.

A replay reads lengths, tables, slots and data as they are then, and gives the bits of an eager call. Every backend that
serves a GPU is held to it, the reference included.
"""

import pytest
import torch
from torch import Tensor

import calls
import ts_ops

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("backend", ["triton", "reference"])
@pytest.mark.parametrize("operator", calls.NAMES)
def test_replay_sees_the_inputs_as_they_are_then(operator, backend):
    with torch.device("cuda"), ts_ops.use_backend(backend):
        static, later = calls.example(operator), calls.example(operator)
        for name in ("seq_lens", "cum_seq_lens", "cum_seq_lens_q", "cum_seq_lens_kv", "slot_mapping"):
            if name in later:
                later[name] = later[name] - later[name] // 4  # other lengths, still monotone
        if "block_tables" in later:
            later["block_tables"] = later["block_tables"].flip(1)
        calls.invoke(operator, static)  # a kernel may compile on its first call
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = calls.results_of(operator, static)

        for name, value in later.items():
            if isinstance(value, Tensor):
                static[name].copy_(value)
        graph.replay()
        replayed = {name: result.clone() for name, result in captured.items()}
        eager = calls.results_of(operator, later)
        pairs = [(replayed[name], eager[name]) for name in eager if eager[name] is not None]
        if operator == "mla_kv_cache_write":
            pairs = [(static["kv_cache"], later["kv_cache"])]
        assert pairs
        for actual, expected in pairs:
            assert torch.equal(actual.view(torch.uint8), expected.view(torch.uint8))
