"""Promise: `python -m ts_ops doctor` says who serves each operator, why nobody else does, and never dies of the cause.

It answers as the dispatcher does, for every visible GPU or, without one, the CPU, or for the device that is named. The
exit status is 0 only if every call it asks about has a backend on each of them. A package that is absent or of a wrong
version comes with the command that installs it, a setting that is in force with what it does. What breaks on the way (a
driver, an import, a backend) becomes a line. It launches nothing and allocates nothing on a GPU. `--json` is one object
of documented keys; the text fits terminals of 80 and 120 columns. `import ts_ops` does not import it.
"""

import importlib
import importlib.metadata
import json
import os
import re
import subprocess
import sys
import warnings
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import calls
import ts_ops
from ts_ops import dispatch, doctor
from ts_ops.__main__ import main

PYPROJECT = (Path(__file__).resolve().parent.parent / "pyproject.toml").read_text()
DEVICE_KEYS = {"error", "name", "capability", "multiprocessors", "memory", "workspace_bound", "operators"}


class Backend:
    """Serves whatever `objects(operator, problem)` finds nothing against; notes the operators it was run for."""

    def __init__(self, objects=lambda operator, problem: None):
        self.why_not, self.ran = objects, []

    def unavailable(self, device):
        return None

    def mla_decode(self, problem, out):
        self.ran.append("mla_decode")


def forget() -> None:
    """Empty the caches of ts_ops, which hold what the devices and backends were before they were replaced."""
    for name, module in list(sys.modules.items()):
        if name.split(".")[0] == "ts_ops":
            for value in vars(module).values():
                if callable(getattr(value, "cache_clear", None)):
                    value.cache_clear()


@pytest.fixture
def machine(monkeypatch):
    """`machine((9, 0), ...)`: as if torch saw these GPUs, by compute capability; none means a CPU alone."""
    for name in ("tokenspeed_mla", *(f"ts_ops.backends.{name}" for name in dispatch.BACKENDS)):
        try:
            importlib.import_module(name)  # before any GPU is invented
        except ImportError:
            pass
    for name in doctor.SETTINGS:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(dispatch, "_environment", None)

    def install(*capabilities):
        def properties(device):
            major, minor = capabilities[torch.device(device).index]
            return SimpleNamespace(
                name="NVIDIA Example", major=major, minor=minor, multi_processor_count=132, total_memory=80 * 2**30
            )

        def capability(device):
            return properties(device).major, properties(device).minor

        monkeypatch.setattr(torch.cuda, "is_available", lambda: bool(capabilities))
        monkeypatch.setattr(torch.cuda, "device_count", lambda: len(capabilities))
        monkeypatch.setattr(torch.cuda, "get_device_properties", properties)
        monkeypatch.setattr(torch.cuda, "get_device_capability", capability)
        forget()

    install()
    yield install
    monkeypatch.undo()
    forget()


@pytest.fixture
def backends(machine, monkeypatch):
    """Replaces the backends: `{name: Backend}`, and those preferred on every device, in order."""

    def replace(table, preferred):
        monkeypatch.setattr(dispatch, "BACKENDS", tuple(table))
        monkeypatch.setattr(dispatch, "PREFERENCE", {"cpu": preferred, "cuda": preferred})
        monkeypatch.setattr(dispatch, "_backend", table.__getitem__)
        monkeypatch.setattr(dispatch, "_announced", set())
        forget()

    return replace


@pytest.fixture
def report(capsys):
    """Runs `doctor --json` with more arguments; (exit status, object)."""

    def run(*arguments):
        status = main(["doctor", "--json", *arguments])
        return status, json.loads(capsys.readouterr().out)

    return run


@pytest.fixture
def text(capsys):
    """Runs `doctor` with more arguments; (exit status, text with its line breaks and indents made single spaces)."""

    def run(*arguments):
        status = main(["doctor", *arguments])
        return status, " ".join(capsys.readouterr().out.split())

    return run


def answers(device: dict) -> list[tuple[str, str, dict]]:
    return [(name, label, answer) for name, labels in device["operators"].items() for label, answer in labels.items()]


def test_a_cpu_is_served_by_the_reference(machine, report):
    status, found = report()
    assert status == 0 and found["ok"] is True
    assert list(found["devices"]) == ["cpu"]
    assert {name for name, _, _ in answers(found["devices"]["cpu"])} == set(calls.NAMES)
    for name, label, answer in answers(found["devices"]["cpu"]):
        assert answer["served_by"] == "reference", (name, label)
        assert set(answer["reasons"]) == set(dispatch.BACKENDS) - {"reference"}
        assert "TRITON_INTERPRET=1" in answer["reasons"]["triton"]


def test_calls_asked_about(machine, report):
    _, found = report()
    labels = {name: list(answers) for name, answers in found["devices"]["cpu"]["operators"].items()}
    decode, prefill = ["bf16", "fp16", "fp8"], ["bf16", "fp8"]
    assert labels["mla_decode"] == labels["mla_decode_lse"] == decode
    assert labels["mla_prefill"] == labels["mla_prefill_lse"] == labels["mla_kv_cache_write"] == prefill
    for operator, label, problem in doctor.calls_on(torch.device("cuda", 7)):
        assert problem.device == torch.device("cuda", 7), (operator, label)
        assert all(tensor.device.type == "meta" for tensor in problem._inputs().values()), (operator, label)
        if operator.startswith("mla_decode"):
            assert (problem.heads, problem.page_size, problem.kv_lora_rank, problem.head_dim) == (128, 64, 512, 576)


def test_json_keys(machine, report, text):
    """The keys that the module documents; a caller may rely on them."""
    machine((9, 0), (10, 0))
    _, found = report()
    assert set(found) == {"format", "ok", "versions", "missing", "settings", "problems", "devices"}
    assert found["format"] == 1
    assert list(found["versions"]) == [
        "python", "torch", "cuda", "triton", "tokenspeed-mla", "nvidia-cutlass-dsl", "apache-tvm-ffi",
        "tokenspeed-triton", "ts_ops",
    ]  # fmt: skip
    assert found["versions"]["torch"] == torch.__version__ and found["versions"]["ts_ops"] == ts_ops.__version__
    assert found["versions"]["cuda"] == torch.version.cuda
    assert list(found["devices"]) == ["cuda:0", "cuda:1"]
    for device in found["devices"].values():
        assert set(device) == DEVICE_KEYS
        for _, _, answer in answers(device):
            assert set(answer) == {"served_by", "reasons"}
    first = found["devices"]["cuda:0"]
    assert (first["error"], first["name"], first["capability"]) == (None, "NVIDIA Example", [9, 0])
    assert (first["multiprocessors"], first["memory"]) == (132, 80 * 2**30)
    assert found["devices"]["cuda:1"]["capability"] == [10, 0]
    assert "cuda:1: NVIDIA Example, compute capability 10.0, 132 SMs, 80.0 GiB, workspace_bound 17,335," in text()[1]
    assert first["workspace_bound"] == ts_ops.workspace_bound("cuda:0") == 132 * (131_584 + 12)
    assert found["devices"]["cuda:1"]["workspace_bound"] == 132 * 131_328
    for key in (*found, *found["versions"].keys() & {"cuda"}, *DEVICE_KEYS, "served_by", "reasons"):
        assert re.search(rf"\b{key}\b", doctor.__doc__), f"{key} is not documented"


def test_hopper_and_blackwell(machine, report):
    """With the backends as they are. A GPU of this kind serves everything, or what it lacks is named."""
    pytest.importorskip("tokenspeed_mla")
    machine((9, 0), (10, 0), (8, 0))
    status, found = report()
    hopper, blackwell, ampere = found["devices"].values()
    assert status == 1  # for Ampere's sake
    for name, label, answer in answers(hopper):
        assert answer["served_by"] in ("hopper", "triton"), (name, label)
        assert "compute capability 10.0" in answer["reasons"]["tokenspeed"]
        assert "only when forced" in answer["reasons"]["reference"]
    for name, label, answer in answers(blackwell):
        tokenspeeds = name.startswith(("mla_decode", "mla_prefill", "mla_kv_pack"))
        assert answer["served_by"] == ("tokenspeed" if tokenspeeds else "triton"), (name, label)
        if tokenspeeds:
            assert answer["reasons"]["triton"] == "could serve, but tokenspeed comes first"
        else:
            assert "no kernel" in answer["reasons"]["tokenspeed"]
    for name, label, answer in answers(ampere):
        if label == "fp8" or name == "mla_kv_pack_quantize_fp8":
            assert answer["served_by"] is None and "8.9" in answer["reasons"]["triton"], (name, label)
        else:
            assert answer["served_by"] == "triton", (name, label)


def test_device_can_be_named(machine, report):
    machine((9, 0), (8, 0))
    assert list(report()[1]["devices"]) == list(report("--device", "cuda")[1]["devices"]) == ["cuda:0", "cuda:1"]
    status, found = report("--device", "cuda:0")
    assert status == 0 and list(found["devices"]) == ["cuda:0"]
    assert report("--device", "cuda:1")[0] == 1
    assert list(report("--device", "cpu")[1]["devices"]) == ["cpu"]
    machine()
    for name in ("cuda", "cuda:0"):
        status, found = report("--device", name)
        assert status == 1 and "no such GPU" in found["devices"][name]["error"]


@pytest.mark.parametrize("name", ["tpu", "meta", "cuda:x"])
def test_device_that_is_none(machine, capsys, name):
    with pytest.raises(SystemExit) as caught:
        main(["doctor", "--device", name])
    assert caught.value.code == 2
    assert f"must be cpu, cuda or cuda:N, got {name!r}" in capsys.readouterr().err


def test_nobody_serves_one_operator(backends, text, report):
    """Every reason is printed, and the other operators do not make up for it."""

    def without_merge(reason):
        return Backend(lambda operator, problem: reason if operator == "merge_attn_states" else None)

    table = {"a": without_merge("a cannot merge"), "b": without_merge("b is out of order"), "c": Backend()}
    backends(table, ("a", "b"))
    status, found = text()
    assert status == 1
    assert "merge_attn_states bf16 NONE [" in found and "no backend: merge_attn_states (bf16) on cpu" in found
    for reason in ("a: a cannot merge", "b: b is out of order", "c: serves only when forced"):
        assert reason in found
    _, found = report()
    reasons = found["devices"]["cpu"]["operators"]["merge_attn_states"]["bf16"]["reasons"]
    assert list(reasons) == ["a", "b", "c"]
    assert found["devices"]["cpu"]["operators"]["mla_decode"]["bf16"]["served_by"] == "a"


def no(operator, problem):
    return "not today"


def fails(operator, problem):
    raise AttributeError("no such kernel")


@pytest.mark.parametrize("preferred, forced", [
    ("ab", None), ("ba", None), ("nab", None), ("n", None), ("xa", None), ("ax", None), ("ab", "b"), ("a", "n"),
])  # fmt: skip
def test_answers_as_the_dispatcher_does(backends, report, preferred, forced):
    """`n` objects, `x` raises when asked; a call then serves from the backend that the report names, or raises."""
    table = {"a": Backend(), "b": Backend(), "n": Backend(no), "x": Backend(fails)}
    backends(table, tuple(preferred))
    if forced:
        with ts_ops.use_backend(forced):
            status, found = report()
    else:
        status, found = report()
    served_by = found["devices"]["cpu"]["operators"]["mla_decode"]["bf16"]["served_by"]
    assert (status == 0) == (served_by is not None)
    call = calls.example("mla_decode")
    with ts_ops.use_backend(forced) if forced else warnings.catch_warnings():
        if served_by is None:
            with pytest.raises((RuntimeError, AttributeError)):
                calls.invoke("mla_decode", call)
        else:
            calls.invoke("mla_decode", call)
    assert [name for name, backend in table.items() if backend.ran] == ([served_by] if served_by else [])


def test_backend_that_cannot_be_imported(machine, monkeypatch, text, report):
    monkeypatch.setattr(dispatch, "BACKENDS", ("absent", *dispatch.BACKENDS))
    status, found = text()
    assert status == 0
    assert "absent: asked, it raises ModuleNotFoundError: No module named 'ts_ops.backends.absent'" in found
    # Preferred, it breaks every call: so says the report, and so it is.
    monkeypatch.setattr(dispatch, "PREFERENCE", {"cpu": ("absent", "reference")})
    forget()
    status, found = report()
    assert status == 1
    assert found["problems"] == ["calls on cpu fail: ModuleNotFoundError: No module named 'ts_ops.backends.absent'"]
    with pytest.raises(ModuleNotFoundError):
        calls.invoke("mla_decode", calls.example("mla_decode"))


def test_backend_that_raises_when_asked(backends, text):
    backends({"x": Backend(fails), "a": Backend()}, ("x", "a"))
    status, found = text()
    assert status == 1
    assert "problems calls on cpu fail: AttributeError: no such kernel" in found
    assert "x: asked, it raises AttributeError: no such kernel" in found
    assert "a: could serve, but a failure comes first" in found


def test_forced_backend(machine, monkeypatch, report):
    with ts_ops.use_backend("triton"):
        status, found = report()
    assert status == 1
    for _, _, answer in answers(found["devices"]["cpu"]):
        assert answer["served_by"] is None
        assert answer["reasons"]["reference"] == "could serve, but triton is forced"
    monkeypatch.setattr(dispatch, "_environment", "cuda")
    status, found = report()
    assert status == 1 and "unknown backend 'cuda'" in found["problems"][0]


def test_driver_that_raises(machine, monkeypatch, text):
    def broken(*_):
        raise RuntimeError("CUDA driver initialization failed,\n you might not have a CUDA gpu.")

    monkeypatch.setattr(torch.cuda, "is_available", broken)
    status, found = text()
    assert status == 0 and " cpu: " in found
    assert "torch.cuda cannot be used: RuntimeError: CUDA driver initialization failed, you might" in found
    machine((9, 0), (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_properties", broken)
    status, found = text()
    assert status == 1
    assert "cuda:1: RuntimeError: CUDA driver initialization failed" in found and "no backend: cuda:0, cuda:1" in found


def test_driver_that_warns(machine, monkeypatch, report):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: warnings.warn("The NVIDIA driver is too old", stacklevel=2))
    status, found = report()
    assert status == 0 and found["problems"] == ["UserWarning: The NVIDIA driver is too old"]


def test_what_a_backend_prints_is_no_part_of_the_report(backends, report):
    backends({"loud": Backend(lambda operator, problem: print("compiling"))}, ("loud",))
    assert report()[0] == 0


@pytest.fixture
def packages(machine, monkeypatch):
    """`packages(name=version)`: as if these versions were installed; None means absent. Dashes are underscores."""
    version, requires = importlib.metadata.version, importlib.metadata.requires

    def install(**versions):
        versions = {name.replace("_", "-"): value for name, value in versions.items()}

        def other(function, name):
            if name in versions and versions[name] is None:
                raise importlib.metadata.PackageNotFoundError(name)
            return function(name)

        monkeypatch.setattr(importlib.metadata, "version", lambda name: versions.get(name) or other(version, name))
        monkeypatch.setattr(importlib.metadata, "requires", lambda name: other(requires, name))

    return install


@pytest.mark.skipif(sys.platform != "linux", reason="required on Linux only")
@pytest.mark.parametrize(
    "version, listed", [(None, True), ("2.0.3", True), ("3.0", True), ("2.0.4", False), ("2.10", False)]
)
def test_package_absent_or_of_a_wrong_version(packages, capsys, report, version, listed):
    (requirement,) = re.findall(r'"(tokenspeed-mla\S*);', PYPROJECT)
    command = f"pip install '{requirement}'"
    packages(tokenspeed_mla=version)
    assert main(["doctor"]) == 0  # a CPU does without
    lines = [line.strip() for line in capsys.readouterr().out.splitlines()]
    assert (command in lines) == listed
    _, found = report()
    entries = {entry["package"]: entry for entry in found["missing"]}
    assert found["versions"]["tokenspeed-mla"] == version
    if listed:
        needs = requirement.removeprefix("tokenspeed-mla")
        expected = dict(package="tokenspeed-mla", installed=version, needs=needs, install=command)
        assert entries["tokenspeed-mla"] == expected
    else:
        assert "tokenspeed-mla" not in entries


@pytest.mark.skipif(sys.platform != "linux", reason="required on Linux only")
def test_packages_that_tokenspeed_needs(packages, report):
    pytest.importorskip("tokenspeed_mla")
    packages(apache_tvm_ffi=None)
    _, found = report()
    (install,) = [entry["install"] for entry in found["missing"] if entry["package"] == "apache-tvm-ffi"]
    assert re.fullmatch(r"pip install 'apache-tvm-ffi>=[\d.]+,<[\d.]+'", install)


def test_requirements_of_other_systems_and_extras_are_not_missing(machine, monkeypatch, report):
    requirements = [
        "none-such-a<2,>=1.5", "none-such-b (>=1)", 'none-such-c; sys_platform == "plan9"', 'none-such-d; extra == "x"',
        f'none-such-e; sys_platform == "{sys.platform}"', "torch>=2.0",
    ]  # fmt: skip
    monkeypatch.setattr(importlib.metadata, "requires", lambda name: requirements)
    _, found = report()
    assert [entry["install"] for entry in found["missing"]] == [
        "pip install 'none-such-a>=1.5,<2'", "pip install 'none-such-b>=1'", "pip install 'none-such-e'",
    ]  # fmt: skip


def test_no_metadata(packages, report):
    packages(ts_ops=None)
    status, found = report()
    assert status == 0 and "ts-ops is not installed" in found["problems"][0]


@pytest.mark.parametrize("name", doctor.SETTINGS)
def test_setting(machine, monkeypatch, text, report, name):
    assert name + "=" not in text()[1].replace("set TRITON_INTERPRET=1", "")
    monkeypatch.setenv(name, "some-value")
    assert f"{name}=some-value: {doctor.SETTINGS[name]}" in text()[1]
    assert report()[1]["settings"] == {name: dict(value="some-value", effect=doctor.SETTINGS[name])}


@pytest.mark.parametrize("columns", [80, 120])
def test_lines_fit_the_terminal(backends, machine, packages, monkeypatch, capsys, columns):
    """A report with everything in it, long names and sentences included; none of their words is lost."""
    reason = "it takes no such call: " + "this sentence goes on and on, " * 9 + "and ends"
    table = {f"backend-of-a-long-name-{i}": Backend(lambda operator, problem, i=i: f"{i}: {reason}") for i in range(5)}
    backends(table | {"x": Backend(fails)}, (*table, "x"))
    machine((9, 0), (10, 0))
    packages(tokenspeed_mla=None)
    for name in doctor.SETTINGS:
        monkeypatch.setenv(name, "v" * 150)
    monkeypatch.setenv("COLUMNS", str(columns))
    assert main(["doctor"]) == 1
    out = capsys.readouterr().out
    longest = max(map(len, out.splitlines()))
    assert columns - 10 < longest <= columns
    words = " ".join(out.split())
    assert all(f"{i}: {reason}" in words for i in range(5))
    assert all(name in out for name in table)


def test_columns_line_up(machine, capsys):
    main(["doctor"])
    lines = capsys.readouterr().out.splitlines()
    (header,) = [line for line in lines if "served by" in line]
    rows = [line for line in lines if line.split()[:1] and line.split()[0] in calls.NAMES]
    assert len(rows) == len(calls.NAMES)
    for row in rows:
        assert row[header.index("served by") :].startswith("reference  ")
        assert row[header.index("call") :].startswith("bf16")


def test_no_command(capsys):
    assert main([]) == 2
    assert "doctor" in capsys.readouterr().err


def python(*arguments: str, **environment: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, env=os.environ | environment, timeout=300
    )


def test_as_a_command():
    settings = dict(TS_OPS_BACKEND="reference", TS_OPS_FP8_WEIGHTS="1")
    result = python("-m", "ts_ops", "doctor", "--json", "--device", "cpu", **settings)
    assert result.returncode == 0, result.stderr
    found = json.loads(result.stdout)
    for name, value in settings.items():
        assert found["settings"][name]["value"] == value
    assert {answer["served_by"] for _, _, answer in answers(found["devices"]["cpu"])} == {"reference"}


def test_not_imported_with_the_package():
    result = python("-c", "import sys, ts_ops; print('ts_ops.doctor' in sys.modules, 'ts_ops.dispatch' in sys.modules)")
    assert result.stdout.split() == ["False", "True"], result.stderr


@pytest.mark.gpu
def test_no_gpu_memory():
    program = """
import torch
from ts_ops.__main__ import main
status = main(["doctor", "--device", "cuda"])
assert torch.cuda.max_memory_reserved() == 0, torch.cuda.max_memory_reserved()
"""
    result = python("-c", program)
    assert result.returncode == 0, result.stderr
    assert "cuda:0: NVIDIA" in result.stdout
