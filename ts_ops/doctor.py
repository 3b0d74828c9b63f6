"""Print versions, devices, settings, and which backend serves each operator, with the reasons.

Launches nothing and allocates no GPU memory: the backends are asked about calls of DeepSeek-R1's sizes made of meta
tensors. Whatever raises on the way (a driver, a backend) becomes a line of the report. The exit status is 0 only if
every one of these calls has a backend on every device considered: the visible GPUs, or the CPU if there is none.

`--json` prints one object, to which later releases may add keys:

    format    1
    ok        the exit status is 0
    versions  {package: version, or null where it is absent}; "cuda" is the one that torch was built for
    missing   [{package, installed (null if absent), needs, install}], packages absent or of a wrong version; `install`
              is a command line
    settings  {environment variable: {value, effect}}, those that are set
    problems  [what went wrong while looking]
    devices   {device: {error, name, capability [major, minor], multiprocessors, memory, workspace_bound, operators}};
              `error` is null, or why nothing else is known of the device; the last two numbers are bytes;
              operators is {operator: {call: {served_by, reasons: {each other backend: why it does not serve}}}},
              where a call is named by its dtype (for caches, theirs) and `served_by` is null if no backend serves
"""

import argparse
import contextlib
import importlib.metadata
import json
import os
import platform
import re
import shutil
import sys
import textwrap
import warnings
from collections.abc import Iterator, Sequence
from operator import eq, ge, gt, le, lt, ne

import torch
from torch.torch_version import TorchVersion

import ts_ops

from . import dispatch
from .meta.call import PROBLEMS
from .meta.contract import FP8
from .workspace import workspace_bound

PACKAGES = ("triton", "tokenspeed-mla", "nvidia-cutlass-dsl", "apache-tvm-ffi", "tokenspeed-triton")
REQUIRING = ("ts-ops", "tokenspeed-mla")  # the distributions whose requirements are looked for
COMPARE = {">=": ge, "<=": le, "==": eq, "!=": ne, ">": gt, "<": lt}

SETTINGS = {
    "TOKENSPEED_MLA_FP16_PARTIALS": "if 1, keeps split-KV partial results of TokenSpeed's decode in fp16: less precise",
    "TS_OPS_BACKEND": "forces this backend; a call that it cannot serve raises",
    "TS_OPS_CHECK": "if 1, checks lengths, page ids, slots and scales before each call: slow, refused under capture",
    "TS_OPS_FP8_WEIGHTS": "if 1, lets decode of an fp8 query keep its softmax weights in fp8: faster, less precise",
    "TRITON_INTERPRET": "if 1, runs Triton kernels in Triton's interpreter: slow, and wrong in bf16 and fp8",
}

BF16, FP16 = torch.bfloat16, torch.float16
LABELS = {BF16: "bf16", FP16: "fp16", FP8: "fp8"}
DTYPES = {
    "mla_decode": (BF16, FP16, FP8),
    "mla_decode_lse": (BF16, FP16, FP8),
    "mla_prefill": (BF16, FP8),
    "mla_prefill_lse": (BF16, FP8),
    "merge_attn_states": (BF16,),
    "merge_attn_states_n": (BF16,),
    "mla_kv_cache_write": (BF16, FP8),
    "mla_kv_cache_gather": (BF16,),
    "mla_kv_pack_quantize_fp8": (BF16,),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--device", type=_device, metavar="DEVICE",
        help="cpu, cuda (every visible GPU) or cuda:N; default: every visible GPU, or the CPU if there is none",
    )  # fmt: skip
    parser.add_argument("--json", action="store_true", help="print one JSON object, which ts_ops/doctor.py documents")


def run(arguments: argparse.Namespace) -> int:
    with contextlib.redirect_stdout(sys.stderr):  # what an import prints is no part of the report
        report = examine(arguments.device)
    width = min(max(shutil.get_terminal_size().columns, 80), 120)
    print(json.dumps(report, indent=2) if arguments.json else "\n".join(render(report, width)))
    return 0 if report["ok"] else 1


def _device(text: str) -> torch.device:
    try:
        device = torch.device(text)
    except RuntimeError:
        device = None
    if device is None or device.type not in dispatch.PREFERENCE:
        raise argparse.ArgumentTypeError(f"must be cpu, cuda or cuda:N, got {text!r}")
    return torch.device("cpu") if device.type == "cpu" else device


def examine(selected: torch.device | None = None) -> dict:
    """The report that `--json` prints."""
    problems: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        missing = _missing(problems)
        gpus = _gpus(problems)
        every_gpu = selected is None or selected == torch.device("cuda")
        devices = (gpus if every_gpu else []) or [selected or torch.device("cpu")]
        records = {str(device): _examine_device(device, gpus, problems) for device in devices}
    problems += [_sentence(warning.message) for warning in caught]
    return {
        "format": 1,
        "ok": not _failures(records),
        "versions": _versions(),
        "missing": missing,
        "settings": {
            name: dict(value=os.environ[name], effect=SETTINGS[name]) for name in SETTINGS if name in os.environ
        },
        "problems": list(dict.fromkeys(problems)),
        "devices": records,
    }


def _versions() -> dict[str, str | None]:
    own = {"python": platform.python_version(), "torch": str(torch.__version__), "cuda": torch.version.cuda}
    return own | {name: _installed(name) for name in PACKAGES} | {"ts_ops": ts_ops.__version__}


def _installed(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _missing(problems: list[str]) -> list[dict]:
    """What the metadata of `REQUIRING` asks for and is not there.

    Heeds the two markers that `pyproject.toml` uses, `extra` and `sys_platform`; any other counts as met.
    """
    missing = {}
    for distribution in filter(_installed, REQUIRING):
        for requirement in importlib.metadata.requires(distribution) or ():
            wanted, _, marker = requirement.partition(";")
            system = re.search(r"sys_platform == ['\"](\w+)", marker)
            if "extra" in marker or (system and system[1] != sys.platform):
                continue
            name, specifiers = re.match(r"([\w.-]+)(.*)", wanted).groups()
            bounds = re.findall(r"(>=|<=|==|!=|>|<)\s*([\w.+!]+)", specifiers)
            version = _installed(name)
            if version is None or not all(COMPARE[sign](TorchVersion(version), bound) for sign, bound in bounds):
                needs = ",".join(sorted(map("".join, bounds), reverse=True))  # `>=` before `<`
                install = f"pip install '{name}{needs}'"
                missing[name] = dict(package=name, installed=version, needs=needs, install=install)
    if _installed(REQUIRING[0]) is None:
        problems.append(f"{REQUIRING[0]} is not installed, so what it requires is not known: pip install -e .")
    return list(missing.values())


def _gpus(problems: list[str]) -> list[torch.device]:
    try:
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    except Exception as error:
        problems.append(f"torch.cuda cannot be used: {_sentence(error)}")
        count = 0
    return [torch.device("cuda", index) for index in range(count)]


def _examine_device(device: torch.device, gpus: Sequence[torch.device], problems: list[str]) -> dict:
    record = dict.fromkeys(("error", "name", "capability", "multiprocessors", "memory", "workspace_bound"))
    record["operators"] = {name: {} for name in DTYPES}
    if device.type == "cuda" and device not in gpus:
        return record | {"error": f"torch sees no such GPU ({len(gpus)} visible)"}
    try:
        record |= _properties(device)
    except Exception as error:
        return record | {"error": _sentence(error)}
    for operator, label, problem in calls_on(device):
        record["operators"][operator][label] = _ask(operator, problem, problems)
    return record


def _properties(device: torch.device) -> dict:
    bound = workspace_bound(device)
    if device.type == "cpu":
        return dict(name=platform.processor() or platform.machine(), workspace_bound=bound)
    properties = torch.cuda.get_device_properties(device)
    return dict(
        name=properties.name,
        capability=list(torch.cuda.get_device_capability(device)),
        multiprocessors=properties.multi_processor_count,
        memory=properties.total_memory,
        workspace_bound=bound,
    )


def calls_on(device: torch.device) -> Iterator[tuple]:
    """(operator, label, checked problem) of each call that the backends are asked about.

    The tensors are meta tensors, and only the problem names `device`: torch allocates GPU memory for a fake tensor.
    """
    for operator, dtypes in DTYPES.items():
        for dtype in dtypes:
            problem = PROBLEMS[operator](**_arguments(dtype)[operator])
            problem.device = device
            yield operator, LABELS[dtype], problem


def _arguments(dtype: torch.dtype) -> dict[str, dict]:
    """Arguments of each operator at DeepSeek-R1's sizes: 128 heads, pages of 64 tokens of 512 + 64 numbers."""

    def tensor(*shape: int, dtype: torch.dtype = dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    cache, tables = tensor(129, 64, 576), tensor(8, 16, dtype=torch.int32)
    lengths, bounds = tensor(8, dtype=torch.int32), tensor(9, dtype=torch.int32)
    keys, values, rope = tensor(256, 128, 192), tensor(256, 128, 128), tensor(256, 64)
    lse, slots = tensor(256, 128, dtype=torch.float32), tensor(256, dtype=torch.int64)
    latent, latent_rope = tensor(256, 512, dtype=BF16), tensor(256, 64, dtype=BF16)
    k_scale = tensor(1, dtype=torch.float32) if dtype == FP8 else None

    decode = dict(query=tensor(8, 1, 128, 576), kv_cache=cache, block_tables=tables, seq_lens=lengths)
    decode["softmax_scale"] = 192**-0.5
    prefill = dict(query=keys, key=keys, value=values, cum_seq_lens_q=bounds, cum_seq_lens_kv=bounds)
    prefill["softmax_scale"] = 192**-0.5
    return {
        "mla_decode": decode,
        "mla_decode_lse": decode,
        "mla_prefill": prefill,
        "mla_prefill_lse": prefill,
        "merge_attn_states": dict(prefix_output=values, prefix_lse=lse, suffix_output=values, suffix_lse=lse),
        "merge_attn_states_n": dict(outputs=tensor(4, 256, 128, 512), lses=tensor(4, 256, 128, dtype=torch.float32)),
        "mla_kv_cache_write": dict(kv_cache=cache, kv_c=latent, k_pe=latent_rope, slot_mapping=slots, k_scale=k_scale),
        "mla_kv_cache_gather": dict(kv_cache=cache, block_tables=tables, cum_seq_lens=bounds, total_tokens=256),
        "mla_kv_pack_quantize_fp8": dict(k_nope=values, k_pe=rope, v=values),
    }


def _ask(operator: str, problem, problems: list[str]) -> dict:
    try:
        served_by = dispatch.choice(operator, problem)
    except Exception as error:
        served_by = None
        problems.append(f"calls on {problem.device} fail: {_sentence(error)}")
    others = [name for name in dispatch.BACKENDS if name != served_by]
    return dict(served_by=served_by, reasons={name: _reason(name, operator, problem, served_by) for name in others})


def _reason(name: str, operator: str, problem, served_by: str | None) -> str:
    """Why `name` does not serve: its objection or, if it has none, what comes before it."""
    try:
        objection = dispatch.objection(name, operator, problem)
    except Exception as error:
        return f"asked, it raises {_sentence(error)}"
    if objection:
        return objection
    if forced := dispatch.forced():
        return f"could serve, but {forced} is forced"
    if name not in dispatch.PREFERENCE[problem.device.type]:
        return "serves only when forced, with ts_ops.use_backend or TS_OPS_BACKEND"
    return f"could serve, but {served_by or 'a failure'} comes first"


def _sentence(error: Exception) -> str:
    return textwrap.shorten(f"{type(error).__name__}: {error}", 400, placeholder=" ...")


def _failures(records: dict[str, dict]) -> list[str]:
    """The devices of which nothing is known, and the calls that no backend serves."""
    failures = [device for device, record in records.items() if record["error"]]
    for device, record in records.items():
        for operator, answers in record["operators"].items():
            if refused := [label for label, answer in answers.items() if answer["served_by"] is None]:
                failures.append(f"{operator} ({' '.join(refused)}) on {device}")
    return failures


def render(report: dict, width: int) -> list[str]:
    """The report as lines of at most `width` characters."""
    lines = ["versions", *_columns([(name, version or "none") for name, version in report["versions"].items()], width)]
    if report["missing"]:
        lines += ["", "missing, or of a wrong version"]
        for entry in report["missing"]:
            lines += _wrap(f"{entry['package']}{entry['needs']}: {entry['installed'] or 'none'} is installed", width)
            lines += _wrap(entry["install"], width, indent="    ")
    if report["settings"]:
        lines += ["", "settings that change results or choices"]
        for name, setting in report["settings"].items():
            lines += _wrap(f"{name}={setting['value']}: {setting['effect']}", width)
    if report["problems"]:
        lines += ["", "problems", *(line for problem in report["problems"] for line in _wrap(problem, width))]
    for device, record in report["devices"].items():
        lines += ["", *_wrap(f"{device}: {record['error'] or _describe(record)}", width, indent="")]
        lines += [] if record["error"] else _table(record["operators"], width)
    failures = ", ".join(_failures(report["devices"]))
    return lines + ["", *_wrap(f"no backend: {failures}" if failures else "every call has a backend", width, indent="")]


def _describe(record: dict) -> str:
    parts = [record["name"]]
    if record["capability"]:
        capability = ".".join(map(str, record["capability"]))
        parts += [f"compute capability {capability}", f"{record['multiprocessors']} SMs"]
        parts += [f"{record['memory'] / 2**30:.1f} GiB"]
    return ", ".join([*parts, f"workspace_bound {record['workspace_bound']:,} bytes"])


def _table(operators: dict, width: int) -> list[str]:
    """A row for the calls of an operator that are served alike, with the numbers of the notes that stand below."""
    notes: dict[str, str] = {}
    rows: dict[tuple[str, ...], list[str]] = {}
    for operator, answers in operators.items():
        for label, answer in answers.items():
            reasons = [f"{name}: {why}" for name, why in answer["reasons"].items()]
            numbers = " ".join(notes.setdefault(reason, f"[{len(notes) + 1}]") for reason in reasons)
            rows.setdefault((operator, answer["served_by"] or "NONE", numbers), []).append(label)
    table = [("operator", "call", "served by", "not by")]
    table += [(operator, " ".join(labels), *rest) for (operator, *rest), labels in rows.items()]
    return _columns(table, width) + _columns([(number, reason) for reason, number in notes.items()], width)


def _columns(rows: Sequence[tuple[str, ...]], width: int) -> list[str]:
    """Aligned columns, the last one wrapped."""
    sizes = [max(map(len, column)) for column in zip(*rows)]
    lines = []
    for *cells, last in rows:
        start = "  " + "".join(f"{cell:<{size}}  " for cell, size in zip(cells, sizes))
        lines += _wrap(last, width, start, " " * len(start)) or [start.rstrip()]
    return lines


def _wrap(text: str, width: int, indent: str = "  ", hanging: str = "    ") -> list[str]:
    return textwrap.wrap(text, width, initial_indent=indent, subsequent_indent=hanging, break_on_hyphens=False)
