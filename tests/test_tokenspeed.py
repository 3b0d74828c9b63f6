"""The TokenSpeed adapter keeps the laws over the real package, and each of its fixes is needed.

The law tests run on it (targets `tokenspeed` and `tokenspeed-unsplit`). Here: what it refuses, that it knows which
kernel the package will compile before it does, that nothing compiles under capture, what it does about alignment and
devices, and that the model of the kernels (`tokenspeed_model.py`) was read from the functions that are installed.
"""

import ast
import contextlib
import functools
import hashlib
import importlib.metadata
import importlib.util
import itertools
import sys
import types
from pathlib import Path

import pytest
import torch
from ts_ops.meta.contract import Decode, PackQuantize, Prefill

import oracle
import test_laws_decode
import tokenspeed_model
import ts_ops
from ts_ops.workspace import BYTES_PER_SM

FP8, BF16, FP16, FP32 = torch.float8_e4m3fn, torch.bfloat16, torch.float16, torch.float32


def decode_problem(
    batch=2, q_len=1, heads=16, dtype=BF16, cache=None, page_size=64, max_pages=4, rank=512, rope=64, scale=0.1,
    kv_cache=None, device="meta", **options,
):  # fmt: skip
    """Shapes only, unless `device` says otherwise."""
    with torch.device(device):
        lengths = {"local_visible_lens": (batch, q_len), "causal_seqs": (batch,)}
        options = {k: torch.empty(lengths[k], dtype=torch.int32) if k in lengths else v for k, v in options.items()}
        if kv_cache is None:
            kv_cache = torch.empty(8, page_size, rank + rope, dtype=cache or dtype)
        return Decode(
            torch.empty(batch, q_len, heads, rank + rope, dtype=dtype), kv_cache,
            torch.empty(batch, max_pages, dtype=torch.int32), torch.empty(batch, dtype=torch.int32), scale,
            kv_lora_rank=rank, with_lse=True, **options,
        )  # fmt: skip


def prefill_problem(tokens=64, heads=4, dim_qk=192, dim_v=128, dtype=BF16, scale=0.1):
    with torch.device("meta"):
        query = torch.empty(tokens, heads, dim_qk, dtype=dtype)
        cum = torch.empty(3, dtype=torch.int32)
        return Prefill(query, query, torch.empty(tokens, heads, dim_v, dtype=dtype), cum, cum, scale)


def pack_problem(tokens=64, heads=4, nope=128, rope=64, value=128, dtype=BF16):
    with torch.device("meta"):
        k_nope, v = (torch.empty(tokens, heads, dim, dtype=dtype) for dim in (nope, value))
        return PackQuantize(k_nope, torch.empty(tokens, rope, dtype=dtype), v)


def meta_cache(page_size, row, dtype, start=0):
    memory = torch.empty(8 * page_size * row + start, dtype=dtype, device="meta")
    return memory.as_strided((8, page_size, 576), (page_size * row, row, 1), start)


REFUSED = {
    "another rank": (lambda: decode_problem(rank=256), "kv_lora_rank of 512 and 64 rope dims, got 256 and 64"),
    "another rope": (lambda: decode_problem(rope=32), "512 and 64 rope dims, got 512 and 32"),
    "fp32": (lambda: decode_problem(dtype=FP32), "FP8, BF16 or FP16"),
    "fp8 cache under bf16": (lambda: decode_problem(cache=FP8), "the same for both, got torch.bfloat16 over torch.fl"),
    "page of 1": (lambda: decode_problem(page_size=1), "pages of at least 2 tokens, got 1"),
    "scale 0": (lambda: decode_problem(scale=0.0), "positive softmax_scale, got 0.0"),
    "negative scale": (lambda: decode_problem(scale=-1.0), "positive softmax_scale, got -1.0"),
    "tiny scale, fp16": (lambda: decode_problem(scale=1e-5, dtype=FP16), "softmax_scale of 1e-05 only without"),
    "tiny scale, window": (lambda: decode_problem(scale=1e-5, window_left=9), "softmax_scale of 1e-05 only without"),
    "fp16 context parallel": (
        lambda: decode_problem(dtype=FP16, causal_seqs=True, cp_world=2), "context-parallel call only without a window",
    ),
    "fp16 visible lens": (lambda: decode_problem(dtype=FP16, local_visible_lens=True), "no local_visible_lens in FP16"),
    "unaligned cache": (
        lambda: decode_problem(kv_cache=meta_cache(64, 577, BF16)), "start and strides are multiples of 16",
    ),
    "unaligned start": (
        lambda: decode_problem(kv_cache=meta_cache(64, 576, BF16, start=4)), "start and strides are multiples of 16",
    ),
    "huge output": (lambda: decode_problem(batch=2**16, heads=64), "indexes its output with 32 bits, got 4194304 rows"),
    "prefill dims": (lambda: prefill_problem(dim_qk=128), "head dims of 192 and 128, got 128 and 128"),
    "prefill fp16": (lambda: prefill_problem(dtype=FP16), "FP8 or BF16 (its result is BF16), got torch.float16"),
    "prefill scale": (lambda: prefill_problem(scale=0.0), "positive softmax_scale, got 0.0"),
    "huge prefill": (lambda: prefill_problem(tokens=2**17, heads=128), "32 bits, got a tensor of 3221225472 elements"),
    "pack fp32": (lambda: pack_problem(dtype=FP32), "BF16 and FP16, got torch.float32"),
    "pack dims": (lambda: pack_problem(nope=96), "powers of two, got 96, 64 and 128"),
    "huge pack": (lambda: pack_problem(tokens=2**17, heads=128), "32 bits, got 131072 tokens of 128 heads"),
}  # fmt: skip
NAMES = {Decode: "mla_decode", Prefill: "mla_prefill", PackQuantize: "mla_kv_pack_quantize_fp8"}


@pytest.mark.parametrize("case", REFUSED)
def test_refusals(case):
    from ts_ops.backends import tokenspeed

    build, expected = REFUSED[case]
    problem = build()
    reason = tokenspeed.why_not(NAMES[type(problem)], problem)
    assert reason and expected in reason and "\n" not in reason


SERVED = {
    "bf16": lambda: decode_problem(),
    "fp8": lambda: decode_problem(dtype=FP8, heads=128, q_len=3),
    "fp16 window": lambda: decode_problem(dtype=FP16, window_left=100),
    "bf16 context parallel": lambda: decode_problem(causal_seqs=True, cp_world=2),
    "fp16 context parallel, not causal": lambda: decode_problem(
        dtype=FP16, causal_seqs=True, cp_world=2, is_causal=False
    ),
    "bf16 visible lens": lambda: decode_problem(local_visible_lens=True),
    "tiny scale": lambda: decode_problem(scale=1e-5),
    "wide rows": lambda: decode_problem(kv_cache=meta_cache(64, 584, BF16)),
    "prefill bf16": prefill_problem,
    "prefill fp8": lambda: prefill_problem(dtype=FP8),
    "pack": pack_problem,
}


@pytest.mark.parametrize("case", SERVED)
def test_serves(case):
    from ts_ops.backends import tokenspeed

    problem = SERVED[case]()
    assert tokenspeed.why_not(NAMES[type(problem)], problem) is None


@pytest.mark.parametrize("operator", ["merge_attn_states", "mla_kv_cache_write", "mla_kv_cache_gather"])
def test_operators_that_the_package_lacks(operator):
    from ts_ops.backends import tokenspeed

    assert operator in tokenspeed.why_not(operator, object())


class _Installed:
    """A stand-in for the package, as other versions and broken installations present themselves."""

    def __init__(self, decode, prefill, error=None):
        self.tokenspeed_mla_decode, self.tokenspeed_mla_prefill = decode, prefill
        if error:
            self._IMPORT_ERROR = error


def _decode_of_0_1_1(query, kv_cache, workspace_buffer, kv_lora_rank, qk_rope_head_dim, block_tables, seq_lens): ...


def _decode_of_2_0(return_lse, window_left, causal_seqs, local_visible_lens): ...


def _prefill_of_2_0(return_lse, out): ...


PACKAGES = {
    "too old": (_Installed(_decode_of_0_1_1, _prefill_of_2_0), (), "too old: its _decode_of_0_1_1 has no causal_seqs"),
    "old prefill": (_Installed(_decode_of_2_0, lambda return_lse: None), (), "too old: its <lambda> has no out"),
    "broken": (
        _Installed(_decode_of_2_0, _prefill_of_2_0, ImportError("no cutlass")), (), "lacks a dependency (no cutlass)"
    ),
    "without tvm": (_Installed(_decode_of_2_0, _prefill_of_2_0), ("tvm_ffi",), "pip install 'apache-tvm-ffi'"),
    "not installed": (None, ("tokenspeed_mla",), "not installed"),
    "usable": (_Installed(_decode_of_2_0, _prefill_of_2_0), (), None),
}  # fmt: skip


@pytest.mark.parametrize("case", PACKAGES)
def test_package(case, monkeypatch):
    """A package that cannot serve is named, with the command that installs one that can."""
    from ts_ops.backends import tokenspeed

    installed, missing, expected = PACKAGES[case]
    monkeypatch.setitem(sys.modules, "tokenspeed_mla", installed)
    found = types.SimpleNamespace(loader=None)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *_: None if name in missing else found)
    reason = tokenspeed.package_problem.__wrapped__()
    if expected is None:
        assert reason is None
    else:
        assert expected in reason and "pip install '" in reason and "\n" not in reason


def test_devices(monkeypatch):
    from ts_ops.backends import tokenspeed

    assert "Blackwell" in tokenspeed.unavailable(torch.device("cpu"))
    monkeypatch.setattr(tokenspeed, "package_problem", lambda: None)
    for capability, served in (((9, 0), False), ((10, 0), True), ((10, 3), True), ((10, 7), True), ((12, 0), False)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, capability=capability: capability)
        reason = tokenspeed.unavailable(torch.device("cuda:0"))
        assert (reason is None) == served
        assert served or "{}.{}".format(*capability) in reason


def decode_call(batch=2, q_len=1, heads=4, dtype=BF16, page_size=64, length=100, capacity=256, **options):
    """A real call, and the float64 result."""
    lengths = tuple(length + b for b in range(batch))
    case = test_laws_decode.Case(lengths, heads, q_len, page_size, 512, 64, dtype)
    query, cache, table, seq_lens, scale = test_laws_decode.build(case, "cpu", outside=300.0)
    table = torch.nn.functional.pad(table, (0, capacity // page_size))[:, : capacity // page_size].contiguous()
    return (query, cache, table, seq_lens, scale), options


GRID = [
    dict(batch=batch, q_len=q_len, heads=heads, dtype=dtype, page_size=page_size)
    for dtype, page_size in ((BF16, 64), (FP16, 128), (FP8, 32), (FP8, 64))
    for batch, q_len, heads in itertools.product((1, 3, 40), (1, 3, 4), (1, 16, 96, 128))
    if batch * heads * q_len <= 1600
]


@pytest.mark.parametrize("capability", [(10, 0), (10, 3)])
def test_variants_are_the_package_s_own(install_tokenspeed, tokenspeed_machine, capability):
    """Two calls have one variant exactly where the package compiles one kernel, and the workspace is what it uses."""
    from ts_ops.backends import tokenspeed

    machine = install_tokenspeed(capability=capability, sms=148)
    machine.launches = False
    tokenspeed_model.without_finish()
    ours, theirs, splits = set(), set(), set()
    for shape in GRID:
        for max_pages, options in ((2, {}), (64, {}), (2, {"window_left": 40}), (2, {"is_causal": False})):
            problem = decode_problem(**shape, max_pages=max_pages, device="cpu", **options)
            plan = tokenspeed.decode_plan(problem, True)
            compiled_before = len(machine.decode_variants)
            tokenspeed.mla_decode(problem, *problem.allocate())
            if len(machine.decode_variants) > compiled_before:
                assert plan.variant not in ours, "the package compiled a kernel that counts as compiled"
                ours.add(plan.variant)
                theirs.add(str(machine.decode_variants[-1]))
            assert plan.variant in ours, "a kernel counts as new that the package has compiled"
            assert machine.workspaces[-1] == plan.workspace <= BYTES_PER_SM * 148
            splits.add(min(machine.splits[-1], 2))
    assert len(ours) == len(theirs) > 30
    assert splits == {1, 2}, "the planner must have been seen to split and not to"


def test_workspace_stays_within_the_bound(tokenspeed_machine):
    from ts_ops.backends import tokenspeed

    largest = 0
    for sms, dtype, capability in itertools.product((132, 148, 160), (FP8, BF16), ((10, 0), (10, 3))):
        for batch, q_len, heads in itertools.product((1, 2, 3, 5, 9, 18, 37, 74, 200), (1, 2, 5, 8, 16), (1, 20, 128)):
            for keys in (128, 4096, 2**17):
                workspace, _ = tokenspeed._split_plan(dtype, batch, q_len, heads, keys, -1, capability, sms)
                assert workspace <= BYTES_PER_SM * sms
                largest = max(largest, workspace / (BYTES_PER_SM * sms))
    assert largest > 0.9


def test_hints_share_plans(tokenspeed_machine):
    """Hints are rounded up to powers of two: the package remembers every length that it has planned for."""
    from tokenspeed_mla import mla_decode

    planned = mla_decode._get_split_kv_and_workspace_size
    arguments, _ = decode_call(dtype=FP8, capacity=8192)
    before = planned.cache_info().misses
    for hint in range(1, 8193, 61):
        ts_ops.mla_decode(*arguments, max_seq_len=hint)
    assert planned.cache_info().misses - before <= 7


@pytest.mark.parametrize("operator", ["decode", "prefill"])
def test_capture(tokenspeed_machine, operator):
    """Under capture, what was not compiled before is refused by name, before any work; what was, runs."""
    if operator == "decode":
        arguments, _ = decode_call()
        call, other = (functools.partial(f, *arguments) for f in (ts_ops.mla_decode, ts_ops.mla_decode_lse))
    else:
        rows, cum = torch.randn(8, 2, 192).to(BF16), torch.tensor([0, 8], dtype=torch.int32)
        arguments = rows, rows, rows[..., :128], cum, cum, 0.1
        call, other = (functools.partial(f, *arguments) for f in (ts_ops.mla_prefill, ts_ops.mla_prefill_lse))
    machine = tokenspeed_machine
    machine.capturing = True
    with pytest.raises(RuntimeError, match=rf"tokenspeed::mla_{operator} would have to compile.*ts_ops\.warmup"):
        call()
    assert not machine.decode_variants and not machine.prefill_variants
    machine.capturing = False
    expected = call()
    machine.capturing = True
    assert torch.equal(call(), expected)
    with pytest.raises(RuntimeError, match=r"ts_ops\.warmup"):
        other()


def test_unaligned_buffers(tokenspeed_machine):
    """`.out` buffers, queries and values that start or step at odd addresses."""
    arguments, _ = decode_call(q_len=2, heads=3)
    expected, _ = oracle.decode(*arguments)
    out = torch.empty(expected.numel() + 1, dtype=BF16)[1:].view(expected.shape)
    query = arguments[0]
    wide = torch.empty(*query.shape[:-1], 577, dtype=BF16)[..., 1:]
    wide.copy_(query)
    torch.ops.tokenspeed.mla_decode.out(wide, *arguments[1:], out=out)
    assert oracle.row_error(out, expected) <= test_laws_decode.TOLERANCE[BF16]

    rows, cum = torch.randn(8, 2, 192).to(BF16), torch.tensor([0, 8], dtype=torch.int32)
    shifted = torch.empty(rows.numel() + 1, dtype=BF16)[1:].view(rows.shape).copy_(rows)
    arguments = shifted, shifted, shifted[..., :128].contiguous(), cum, cum, 0.1
    expected, _ = oracle.prefill(*arguments)
    out = torch.empty(expected.numel() + 1, dtype=BF16)[1:].view(expected.shape)
    torch.ops.tokenspeed.mla_prefill.out(*arguments, out=out)
    assert oracle.row_error(out, expected) <= test_laws_decode.TOLERANCE[BF16]


def test_strides_of_single_rows(tokenspeed_machine):
    """The stride of a dimension of size 1 means nothing, and may be odd."""
    (query, cache, table, lengths, scale), _ = decode_call(batch=1, length=60, page_size=64, capacity=128)
    page = int(table[0, 0])
    cache = cache[page : page + 1]
    table = torch.zeros_like(table)
    expected, _ = oracle.decode(query, cache, table, lengths, scale)
    odd_cache = cache.as_strided(cache.shape, (7, 576, 1), cache.storage_offset())
    odd_query = query.as_strided(query.shape, (5, 3, 576, 1))
    out = ts_ops.mla_decode(odd_query, odd_cache, table, lengths, scale)
    assert oracle.row_error(out, expected) <= test_laws_decode.TOLERANCE[BF16]


def test_runs_on_the_device_of_its_tensors(tokenspeed_machine, monkeypatch):
    """The package asks the current device for its stream and architecture."""
    from ts_ops.backends import tokenspeed

    entered, package = [], tokenspeed._package()

    @contextlib.contextmanager
    def on_device(device):
        entered.append(device)
        yield
        entered.append(None)

    decode = package.decode
    monkeypatch.setattr(package, "on_device", on_device)
    monkeypatch.setattr(package, "decode", lambda **call: (entered.append("decode"), decode(**call))[1])
    arguments, _ = decode_call()
    ts_ops.mla_decode(*arguments)
    assert entered == [torch.device("cpu"), "decode", None]


def test_masks_leak_below_the_least_scale(tokenspeed_machine, monkeypatch):
    """Why tiny scales take another path: with the kernel's own mask, masked keys weigh in."""
    from ts_ops.backends import tokenspeed

    (*arguments, _), _ = decode_call(dtype=FP8)
    expected, _ = oracle.decode(*arguments, 1e-7)
    assert oracle.row_error(ts_ops.mla_decode(*arguments, 1e-7), expected) <= test_laws_decode.TOLERANCE[FP8]
    monkeypatch.setattr(tokenspeed, "LEAST_SCALE", 0.0)
    assert oracle.row_error(ts_ops.mla_decode(*arguments, 1e-7), expected) > 0.1


def digests() -> dict[str, str]:
    """Of the source of every function that a hazard was read from, in the installed package."""
    folder = Path(importlib.util.find_spec("tokenspeed_mla").submodule_search_locations[0])
    found = {}
    for name in sorted({name for _, names in tokenspeed_model.HAZARDS.values() for name in names}):
        module, function = name.split(".")
        source = (folder / f"{module}.py").read_text()
        definitions = (n for n in ast.walk(ast.parse(source)) if isinstance(n, ast.FunctionDef) and n.name == function)
        text = "".join(ast.get_source_segment(source, next(definitions)).split())
        found[name] = hashlib.sha256(text.encode()).hexdigest()[:12]
    return found


def test_the_functions_that_the_model_was_read_from():
    """Another release says here which functions to read again, and for which hazard."""
    pytest.importorskip("tokenspeed_mla")
    found = digests()
    changed = {name for name in found if found[name] != tokenspeed_model.READ_FROM.get(name)}
    again = [
        f"  {what}: {sorted(changed & set(n))}" for what, n in tokenspeed_model.HAZARDS.values() if changed & set(n)
    ]
    version = importlib.metadata.version("tokenspeed-mla")
    assert not changed, f"tokenspeed_mla {version} is not as it was read. Read again:\n" + "\n".join(again)
