"""Promise: FP8 softmax weights are allowed only where the caller says so, and allowing them obliges no backend.

Off by default; the environment variable sets the default of every thread. `allow_fp8_weights` holds for the current
thread, nests, and ends with its block. Compiled code refuses it; around a compiled function it is heeded at each call.
The reference backend has no such kernel: its bits do not change.
"""

import os
import subprocess
import sys
import threading
from types import SimpleNamespace

import pytest
import torch

import calls
import ts_ops
from ts_ops import dispatch
from ts_ops.precision import fp8_weights_allowed


def test_it_nests_and_ends():
    default, seen = fp8_weights_allowed(), []
    with ts_ops.allow_fp8_weights():
        seen.append(fp8_weights_allowed())
        with ts_ops.allow_fp8_weights(False):
            seen.append(fp8_weights_allowed())
            with ts_ops.allow_fp8_weights(True):
                seen.append(fp8_weights_allowed())
            seen.append(fp8_weights_allowed())
        seen.append(fp8_weights_allowed())
    assert seen == [True, False, True, False, True]
    assert fp8_weights_allowed() == default


@pytest.mark.parametrize("outer", [False, True])
def test_an_exception_ends_it(outer):
    with ts_ops.allow_fp8_weights(outer):
        with pytest.raises(KeyError), ts_ops.allow_fp8_weights(not outer):
            raise KeyError
        assert fp8_weights_allowed() == outer


def test_it_is_for_the_current_thread():
    default, seen = fp8_weights_allowed(), []
    entered, leave = threading.Event(), threading.Event()

    def other_thread():
        seen.append(fp8_weights_allowed())
        with ts_ops.allow_fp8_weights(default):
            entered.set()
            leave.wait(10)
            seen.append(fp8_weights_allowed())

    with ts_ops.allow_fp8_weights(not default):
        thread = threading.Thread(target=other_thread)
        thread.start()
        assert entered.wait(10)
        assert fp8_weights_allowed() != default
    leave.set()
    thread.join()
    assert seen == [default, default]


@pytest.mark.parametrize("value", [1, None, "0", torch.tensor(True)], ids=repr)
def test_only_a_bool_is_taken(value):
    """At the call, before a block is entered; "0" would otherwise be taken for True."""
    with pytest.raises(TypeError, match="^allow_fp8_weights: allow must be True or False, got "):
        ts_ops.allow_fp8_weights(value)


def in_a_process(value: str | None) -> subprocess.CompletedProcess:
    """The default of the main thread and of another, where the environment variable is `value` or, with None, unset."""
    program = """
import threading
import ts_ops
from ts_ops.precision import fp8_weights_allowed
print(fp8_weights_allowed())
thread = threading.Thread(target=lambda: print(fp8_weights_allowed()))
thread.start()
thread.join()
"""
    environment = {name: setting for name, setting in os.environ.items() if name != "TS_OPS_FP8_WEIGHTS"}
    environment |= {} if value is None else {"TS_OPS_FP8_WEIGHTS": value}
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment, timeout=300)


@pytest.mark.parametrize("value, default", [(None, "False"), ("", "False"), ("0", "False"), ("1", "True")])
def test_environment_sets_the_default_of_every_thread(value, default):
    result = in_a_process(value)
    assert result.stdout.split() == [default, default], result.stderr


@pytest.mark.parametrize("value", ["true", "2"])
def test_another_value_is_refused(value):
    """By name, at import."""
    result = in_a_process(value)
    assert result.returncode != 0
    assert f"ValueError: TS_OPS_FP8_WEIGHTS must be 1 (allow) or 0 (the default), got {value!r}" in result.stderr


@pytest.mark.parametrize("fullgraph", [True, False])
def test_it_is_refused_inside_compiled_code(fullgraph):
    """A graph would not carry the permission; falling back to eager silently is no refusal."""

    def call(x):
        with ts_ops.allow_fp8_weights():
            return x + 1

    torch._dynamo.reset()
    with pytest.raises(AssertionError, match="forbidden callable .*allow_fp8_weights"):
        torch.compile(call, backend="eager", fullgraph=fullgraph)(torch.ones(2))


@pytest.mark.parametrize("operator", ["mla_decode", "mla_decode_lse"])
def test_a_compiled_graph_heeds_it_when_it_runs(operator, monkeypatch):
    """Compiled outside a block, run inside and outside: the backend sees what holds at the call, and no recompile."""
    seen = []

    def serve(problem, *outputs):
        seen.append(fp8_weights_allowed())
        for output in outputs:
            output.zero_()

    observer = SimpleNamespace(why_not=lambda operator, problem: None, **{operator: serve})
    monkeypatch.setattr(dispatch, "_candidates", lambda device, forced: (("reference", observer),))
    call = calls.example(operator, calls.FP8)
    torch._dynamo.reset()
    compiled = torch.compile(getattr(ts_ops, operator), fullgraph=True)
    with ts_ops.allow_fp8_weights(False):
        compiled(**call)
        with torch._dynamo.config.patch(error_on_recompile=True):
            with ts_ops.allow_fp8_weights():
                compiled(**call)
            compiled(**call)
    assert seen == [False, True, False]


@pytest.mark.parametrize("dtype", calls.DTYPES["mla_decode"], ids=str)
@pytest.mark.parametrize("operator", ["mla_decode", "mla_decode_lse"])
def test_the_reference_ignores_it(operator, dtype):
    call, results = calls.example(operator, dtype), []
    for allow in (False, True):
        with ts_ops.use_backend("reference"), ts_ops.allow_fp8_weights(allow):
            results.append(calls.results_of(operator, call))
    without, permitted = results
    for name in without:
        assert torch.equal(without[name], permitted[name]), name
