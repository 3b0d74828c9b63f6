"""Promise: one backend serves a call, chosen by stated reasons, and never another one silently.

The first of the device's preferences without an objection serves. If none does, the error gives every backend's reason.
A forced backend that cannot serve raises with its own reason and hands over to nobody. Forcing holds for the current
thread, nests, and ends with its block. A log line says once per operator and device who serves and why.
"""

import logging
import os
import subprocess
import sys
import threading

import pytest
import torch
from ts_ops.meta.call import PROBLEMS

import calls
import ts_ops
from ts_ops import dispatch


class Backend:
    """A backend that serves by filling the output with `value`, or objects."""

    def __init__(self, value: float, objection: str | None = None, missing: str | None = None):
        self.value, self.objection, self.missing, self.served = value, objection, missing, 0

    def unavailable(self, device):
        return self.missing

    def why_not(self, operator, problem):
        return self.objection

    def mla_decode(self, problem, out):
        self.served += 1
        out.fill_(self.value)


@pytest.fixture
def backends(monkeypatch):
    """Replaces the backends; `{name: Backend}` in order of preference on the CPU."""

    def replace(table: dict[str, Backend], preferred: tuple[str, ...]) -> None:
        monkeypatch.setattr(dispatch, "BACKENDS", tuple(table))
        monkeypatch.setattr(dispatch, "PREFERENCE", {"cpu": preferred})
        monkeypatch.setattr(dispatch, "_backend", table.__getitem__)
        monkeypatch.setattr(dispatch, "_announced", set())
        dispatch._candidates.cache_clear()

    yield replace
    monkeypatch.undo()
    dispatch._candidates.cache_clear()


def decode() -> float:
    return calls.invoke("mla_decode", calls.example("mla_decode")).unique().item()


def test_first_without_objection_serves(backends):
    first, second, third = Backend(1.0, objection="too big"), Backend(2.0), Backend(3.0)
    backends({"a": first, "b": second, "c": third}, ("a", "b", "c"))
    assert decode() == 2.0
    assert (first.served, second.served, third.served) == (0, 1, 0)
    first.objection = None
    assert decode() == 1.0


def test_unavailable_backend_is_passed_over(backends):
    backends({"a": Backend(1.0, missing="no such GPU"), "b": Backend(2.0)}, ("a", "b"))
    assert decode() == 2.0


def test_refusal_lists_every_backend(backends):
    table = {
        "a": Backend(1.0, objection="a: page size 4"), "b": Backend(2.0, missing="b: no such GPU"), "c": Backend(3.0)
    }  # fmt: skip
    backends(table, ("a", "b"))
    with pytest.raises(RuntimeError) as caught:
        decode()
    text = str(caught.value)
    for expected in ("tokenspeed::mla_decode", "a: page size 4", "b: no such GPU", "c: serves only when forced"):
        assert expected in text
    assert [backend.served for backend in table.values()] == [0, 0, 0]


@pytest.mark.parametrize("reason", [dict(objection="page size 4"), dict(missing="no such GPU")])
def test_forced_backend_does_not_hand_over(backends, reason):
    forced, other = Backend(1.0, **reason), Backend(2.0)
    backends({"a": forced, "b": other}, ("b",))
    (why,) = reason.values()
    with ts_ops.use_backend("a"), pytest.raises(RuntimeError, match=f"forced backend cannot serve.* a: {why}"):
        decode()
    assert (forced.served, other.served) == (0, 0)


def test_forcing_nests_and_ends(backends):
    backends({"a": Backend(1.0), "b": Backend(2.0), "c": Backend(3.0)}, ("a",))
    seen = []
    with ts_ops.use_backend("b"):
        seen.append(decode())
        with ts_ops.use_backend("c"):
            seen.append(decode())
        seen.append(decode())
        with pytest.raises(KeyError), ts_ops.use_backend("c"):
            raise KeyError
        seen.append(decode())
    seen.append(decode())
    assert seen == [2.0, 3.0, 2.0, 2.0, 1.0]


def test_forcing_is_for_the_current_thread(backends):
    backends({"a": Backend(1.0), "b": Backend(2.0)}, ("a",))
    seen, entered, leave = [], threading.Event(), threading.Event()

    def other_thread():
        with ts_ops.use_backend("b"):
            entered.set()
            leave.wait(10)
            seen.append(decode())

    thread = threading.Thread(target=other_thread)
    thread.start()
    assert entered.wait(10)
    seen.append(decode())
    leave.set()
    thread.join()
    assert seen == [1.0, 2.0]


def test_unknown_name():
    with pytest.raises(ValueError, match="unknown backend 'cuda'.*triton.*reference"):
        ts_ops.use_backend("cuda")


def in_a_process(program: str, **environment: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, env=os.environ | environment, timeout=300
    )


CALL = """
import logging, torch
logging.basicConfig(level=logging.INFO)
import ts_ops
ts_ops.merge_attn_states_n(torch.zeros(2, 3, 4, 8), torch.zeros(2, 3, 4))
"""


def test_environment_forces_a_backend():
    forced = in_a_process(CALL, TS_OPS_BACKEND="reference")
    assert forced.returncode == 0 and "reference (it was forced)" in forced.stderr
    unknown = in_a_process(CALL, TS_OPS_BACKEND="cuda")
    assert "ValueError: TS_OPS_BACKEND: unknown backend 'cuda'" in unknown.stderr


def test_triton_says_what_a_cpu_needs():
    with ts_ops.use_backend("triton"), pytest.raises(RuntimeError, match="triton: .*TRITON_INTERPRET=1"):
        decode()


@pytest.mark.parametrize("operator, larger, named", [
    ("mla_decode", dict(query=(3, 2, 5, 1088), kv_cache=(7, 4, 1088), kv_lora_rank=1024), "kv_lora_rank up to 512"),
    ("mla_decode", dict(query=(3, 2, 5, 700), kv_cache=(7, 4, 700), kv_lora_rank=512), "128 rope columns"),
    ("mla_prefill", dict(query=(11, 5, 600), key=(13, 5, 600)), "head dims up to 576"),
    ("mla_prefill", dict(value=(13, 5, 520)), "512 for values"),
])  # fmt: skip
def test_triton_refuses_dims_beyond_its_tiles(operator, larger, named):
    """By name, before a launch; a smaller call has no objection."""
    triton_backend = pytest.importorskip("ts_ops.backends.triton")
    assert triton_backend.why_not(operator, problem_of(operator, calls.example(operator))) is None
    shapes = {k: torch.zeros(v, dtype=calls.BF16) if isinstance(v, tuple) else v for k, v in larger.items()}
    assert named in triton_backend.why_not(operator, problem_of(operator, calls.example(operator) | shapes))


@pytest.mark.parametrize(
    "old, capability, refused", [(True, (8, 9), True), (True, (9, 0), False), (False, (8, 9), False)]
)
def test_triton_refuses_what_its_compiler_cannot(old, capability, refused, monkeypatch):
    """A BF16 query over an FP8 cache under Triton 3.6, below compute capability 9.0."""
    triton_backend = pytest.importorskip("ts_ops.backends.triton")
    monkeypatch.setattr(triton_backend, "OLD_TRITON", old)
    monkeypatch.setattr(triton_backend, "_has_fp8", lambda device: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(triton_backend, "_lacks_bf16_conversion", triton_backend._lacks_bf16_conversion.__wrapped__)
    call = calls.example("mla_decode", calls.BF16)
    for cache, expected in ((calls.FP8, refused), (calls.BF16, False)):
        problem = problem_of("mla_decode", call | dict(kv_cache=call["kv_cache"].to(cache)))
        problem.device = torch.device("cuda:0")
        assert ("Triton 3.7" in (triton_backend.why_not("mla_decode", problem) or "")) == expected


def problem_of(operator: str, arguments: dict):
    args, kwargs = calls.split(calls.overload_of(operator), arguments)
    return PROBLEMS[operator](*args, **kwargs)


def test_a_log_line_once_per_operator_and_device(backends, caplog):
    backends({"a": Backend(1.0, objection="page size 4"), "b": Backend(2.0)}, ("a", "b"))
    with caplog.at_level(logging.INFO, "ts_ops"):
        for _ in range(3):
            decode()
    assert [record.getMessage() for record in caplog.records] == [
        "tokenspeed.mla_decode on cpu is served by b (not a: page size 4)"
    ]


NOTHING = {
    "mla_decode_lse": dict(query=0, block_tables=0, seq_lens=0),
    "mla_prefill_lse": dict(query=0),
    "merge_attn_states": dict(prefix_output=0, prefix_lse=0, suffix_output=0, suffix_lse=0),
    "merge_attn_states_n": dict(outputs=1, lses=1),
    "mla_kv_cache_write": dict(slot_mapping=0),
    "mla_kv_pack_quantize_fp8": dict(k_nope=0, k_pe=0, v=0),
}


@pytest.mark.parametrize("operator", NOTHING)
def test_zero_rows_reach_no_backend(operator, monkeypatch):
    """Some planners divide by the batch."""
    call = calls.example(operator)
    call |= {name: call[name].narrow(dim, 0, 0) for name, dim in NOTHING[operator].items()}
    monkeypatch.setattr(dispatch, "_candidates", lambda *_: pytest.fail("a backend was asked"))
    calls.invoke(operator, call)
    with pytest.raises(pytest.fail.Exception):
        calls.invoke(operator, calls.example(operator))


@pytest.mark.parametrize("operator", calls.NAMES)
def test_why_not(operator):
    """The reference has no objection to anything; every reason is one sentence."""
    args, kwargs = calls.split(calls.overload_of(operator), calls.example(operator))
    reasons = dispatch.why_not(operator, PROBLEMS[operator](*args, **kwargs))
    assert set(reasons) == set(dispatch.BACKENDS)
    assert reasons["reference"] is None
    for reason in reasons.values():
        assert reason is None or (reason and "\n" not in reason)


def test_every_preferred_backend_is_known():
    for device, names in dispatch.PREFERENCE.items():
        assert set(names) <= set(dispatch.BACKENDS), device
    assert torch.device("cpu").type in dispatch.PREFERENCE
