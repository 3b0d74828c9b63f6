"""Compile the kernels that a deployment will need, before its first request and before capture.

Compiling takes a Triton kernel about a second and a TokenSpeed kernel seconds to minutes, at the first call that needs
it; under CUDA graph capture TokenSpeed's would fail. `warmup` calls every operator once for each shape that may select
another kernel, on empty requests, through the same dispatch as real calls: so it is the backends' own choices,
and the TokenSpeed planner's, that decide what is compiled, and nothing else is.
"""

import argparse
import dataclasses
import functools
import itertools
import json
import math
import threading
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from . import dispatch
from .check import capturing
from .meta.call import PROBLEMS
from .meta.contract import FP8
from .meta.schema import NAMESPACE, OPERATORS
from .precision import fp8_weights_allowed

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, "fp8": FP8}
BUFFERS = {operator.name: operator.outs for operator in OPERATORS}
OPERATOR_NAMES = tuple(BUFFERS)

_lock = threading.Lock()
_done: set[tuple] = set()


@dataclass(frozen=True, kw_only=True)
class Deployment:
    """What calls will be made: the arguments of `warmup`."""

    heads: int
    max_seq_len: int
    batch_sizes: tuple[int, ...]
    q_lens: tuple[int, ...]
    page_size: int
    dtype: torch.dtype
    query_dtype: torch.dtype
    cache_dtype: torch.dtype
    kv_lora_rank: int
    rope_dim: int
    nope_dim: int
    value_dim: int
    is_causal: bool
    window_left: int
    local_visible_lens: bool
    cp_world: int
    cp_rank: int
    cp_interleave_size: int
    operators: tuple[str, ...]

    def __post_init__(self):
        for name in ("heads", "max_seq_len", "batch_sizes", "q_lens"):
            value = getattr(self, name)
            if not value or min(value if isinstance(value, tuple) else (value,)) < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        if unknown := set(self.operators) - set(OPERATOR_NAMES):
            raise ValueError(f"operators: unknown {sorted(unknown)}; choose from {', '.join(OPERATOR_NAMES)}")


@dataclass(frozen=True)
class Compilation:
    operator: str
    call: str  # the shape that needed it
    kernels: dict[str, int]  # how many variants of each kernel were compiled, by "backend:kernel"
    seconds: float


@dataclass(frozen=True)
class Report:
    """What a warm-up compiled. `str()` is a table."""

    compilations: tuple[Compilation, ...]
    calls: int
    seconds: float

    def __str__(self) -> str:
        lines = [
            f"{c.seconds:8.2f} s  {c.operator:<24}  {c.call}: "
            + ", ".join(f"{name} x {count}" if count > 1 else name for name, count in c.kernels.items())
            for c in self.compilations
        ]
        kernels = sum(sum(c.kernels.values()) for c in self.compilations)
        return "\n".join([*lines, f"{self.seconds:8.2f} s  {kernels} kernels compiled by {self.calls} calls"])


def warmup(
    heads: int,
    *,
    max_seq_len: int,
    batch_sizes: Iterable[int] = (1,),
    q_lens: Iterable[int] = (1,),
    page_size: int = 64,
    dtype: torch.dtype = torch.bfloat16,
    query_dtype: torch.dtype | None = None,
    cache_dtype: torch.dtype | None = None,
    kv_lora_rank: int = 512,
    rope_dim: int = 64,
    nope_dim: int = 128,
    value_dim: int = 128,
    is_causal: bool = True,
    window_left: int = -1,
    local_visible_lens: bool = False,
    cp_world: int = 1,
    cp_rank: int = 0,
    cp_interleave_size: int = 1,
    operators: Iterable[str] | None = None,
    device: torch.device | str | int | None = None,
    progress: bool = True,
) -> Report:
    """Compile every kernel that calls within these limits need, so that none is compiled later or under capture.

    After it nothing is compiled for a call with these heads, dims and dtypes, any listed batch size and q_len, any
    lengths, and a `max_seq_len` hint or table capacity up to the one given; whatever the strides and alignment of its
    tensors, and with or without LSE. For merges, cache operators, pack and prefill any number of tokens is in range.
    Strides and alignments that a forced backend refuses are left out. Call it under the backend and permissions
    (`use_backend`, `allow_fp8_weights`) that the calls will have.

    Calling it again with the same arguments costs nothing; threads that call it at once wait for each other.

    Args:
        heads: query heads on this device.
        max_seq_len: largest `max_seq_len` hint, or capacity (max_pages * page_size) where no hint is passed, in tokens.
        batch_sizes, q_lens: those of the decode calls to come; the ladder of captured sizes, as a rule.
        page_size: tokens a page.
        dtype: of the model's activations: bfloat16, float16 or float32.
        query_dtype, cache_dtype: of decode; default `dtype`, and the query's. An FP8 query also warms FP8 prefill.
        kv_lora_rank, rope_dim, nope_dim, value_dim: head dims; the defaults are DeepSeek's.
        is_causal, window_left, cp_world, cp_rank, cp_interleave_size: as decode calls pass them.
        local_visible_lens: decode calls pass this tensor.
        operators: names; default: all.
        device: default: the current CUDA device, or the CPU, which compiles nothing.
        progress: show a progress bar.

    Returns:
        a `Report`: what was compiled, by which call, and the seconds it took.

    Raises:
        ValueError: a size below 1, an unknown operator, or what the operators themselves refuse.
        RuntimeError: called under CUDA graph capture, or no backend serves such a call.
    """
    query_dtype = dtype if query_dtype is None else query_dtype
    deployment = Deployment(
        heads=heads, max_seq_len=max_seq_len, batch_sizes=tuple(batch_sizes), q_lens=tuple(q_lens),
        page_size=page_size, dtype=dtype, query_dtype=query_dtype,
        cache_dtype=query_dtype if cache_dtype is None else cache_dtype,
        kv_lora_rank=kv_lora_rank, rope_dim=rope_dim, nope_dim=nope_dim, value_dim=value_dim,
        is_causal=is_causal, window_left=window_left, local_visible_lens=local_visible_lens,
        cp_world=cp_world, cp_rank=cp_rank, cp_interleave_size=cp_interleave_size,
        operators=OPERATOR_NAMES if operators is None else tuple(operators),
    )  # fmt: skip
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.empty(0, device=device).device  # with its index
    if capturing(device):
        raise RuntimeError("ts_ops.warmup was called under CUDA graph capture: call it before")
    request = (deployment, device, dispatch.forced(), fp8_weights_allowed())
    with _lock:
        if request in _done:
            return Report((), 0, 0.0)
        report = _run(deployment, device, progress)
        _done.add(request)
    return report


def _run(deployment: Deployment, device: torch.device, progress: bool) -> Report:
    from tqdm import tqdm  # not when ts_ops is imported: it takes 10 ms

    compiled: list[Compilation] = []
    begin = time.perf_counter()
    before = dispatch.compiled(device)
    calls, made = list(_calls(deployment)), 0
    with torch.inference_mode(), torch.device(device):
        for operator, aligned, label, arguments in tqdm(calls, desc="warm-up", unit="call", disable=not progress):
            start = time.perf_counter()
            args, kwargs = arguments()
            problem = PROBLEMS[operator](*args, **kwargs)
            plain = aligned and all(value.is_contiguous() for value in args if isinstance(value, Tensor))
            if not plain and dispatch.choice(operator, problem) is None:
                continue  # the plain call came before, and would have raised
            kwargs |= _odd_buffers(operator, problem) if not aligned else {}
            made += 1
            getattr(getattr(torch.ops, NAMESPACE), operator)(*args, **kwargs)
            seconds = time.perf_counter() - start
            after = dispatch.compiled(device)
            if after != before:
                new = {name: count - before.get(name, 0) for name, count in after.items() if count != before.get(name)}
                compiled.append(Compilation(operator, label, new, seconds))
                before = after
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return Report(tuple(compiled), made, time.perf_counter() - begin)


def _calls(deployment: Deployment) -> Iterator[tuple]:
    """(operator, aligned, label, what builds its arguments): one for each shape that may select another kernel."""
    builders = {
        "mla_decode": _decode_calls, "mla_decode_lse": _decode_calls,
        "mla_prefill": _prefill_calls, "mla_prefill_lse": _prefill_calls,
        "merge_attn_states": _merge_calls, "merge_attn_states_n": _merge_n_calls,
        "mla_kv_cache_write": _write_calls, "mla_kv_cache_gather": _gather_calls,
        "mla_kv_pack_quantize_fp8": _pack_calls,
    }  # fmt: skip
    for operator in deployment.operators:
        for aligned in (True, False):
            for label, build in builders[operator](deployment, aligned):
                yield operator, aligned, label if aligned else f"{label}, unaligned", build


def _odd_buffers(operator: str, problem) -> dict[str, Tensor]:
    """For the `.out` overload, if there is one: buffers that start at odd addresses."""
    buffers = (torch.empty(math.prod(shape) + 1, dtype=dtype)[1:].view(shape) for shape, dtype in problem.results)
    return dict(zip(BUFFERS[operator], buffers))


def _decode_calls(d: Deployment, aligned: bool) -> Iterator[tuple]:
    def build(batch, q_len, keys, dense):
        options = {}
        if d.local_visible_lens:
            options["local_visible_lens"] = _no_keys(batch, q_len)
        if d.cp_world > 1:
            options["causal_seqs"] = _no_keys(batch)
        dim = d.kv_lora_rank + d.rope_dim
        query = _zeros(batch, q_len, d.heads, dim, dtype=d.query_dtype, aligned=aligned)
        cache = _zeros(1, d.page_size, dim, dtype=d.cache_dtype, aligned=aligned)
        if not dense:
            cache = torch.zeros(d.page_size, 2, dim, dtype=d.cache_dtype).transpose(0, 1)
        table = torch.zeros(batch, -(-keys // d.page_size), dtype=torch.int32)
        return (query, cache, table, _no_keys(batch), 1.0), dict(
            kv_lora_rank=d.kv_lora_rank, is_causal=d.is_causal, window_left=d.window_left, cp_world=d.cp_world,
            cp_rank=d.cp_rank, cp_interleave_size=d.cp_interleave_size, max_seq_len=keys, **options,
        )  # fmt: skip

    # Some backends take dense pages alone. What serves the others in their place is compiled for aligned pages too.
    lengths = powers_of_two(d.max_seq_len)
    for batch, q_len, keys, dense in itertools.product(d.batch_sizes, d.q_lens, lengths, (True, False)[: 1 + aligned]):
        label = f"batch {batch}, q_len {q_len}, up to {keys} keys" + ", pages not dense" * (not dense)
        yield label, functools.partial(build, batch, q_len, keys, dense)


def _prefill_calls(d: Deployment, aligned: bool) -> Iterator[tuple]:
    def build(dtype, is_causal):
        query, key = (_zeros(1, d.heads, d.nope_dim + d.rope_dim, dtype=dtype, aligned=aligned) for _ in range(2))
        value = _zeros(1, d.heads, d.value_dim, dtype=dtype, aligned=aligned)
        cum = torch.arange(2, dtype=torch.int32)
        return (query, key, value, cum, cum, 1.0), dict(is_causal=is_causal)

    dtypes = (d.dtype, FP8) if d.query_dtype == FP8 else (d.dtype,)
    for dtype, is_causal in itertools.product(dtypes, (True, False)):
        label = f"{str(dtype)[6:]}, {'causal' if is_causal else 'not causal'}"
        yield label, lambda dtype=dtype, is_causal=is_causal: build(dtype, is_causal)


def _merge_calls(d: Deployment, aligned: bool) -> Iterator[tuple]:
    def build(dim):
        output = _zeros(1, d.heads, dim, dtype=d.dtype, aligned=aligned)
        lse = torch.zeros(1, d.heads)
        return (output, lse, output, lse), {}

    for dim in _merged_dims(d):
        yield f"two states of {dim}", lambda dim=dim: build(dim)


def _merge_n_calls(d: Deployment, aligned: bool) -> Iterator[tuple]:
    def build(states, dim):
        outputs = _zeros(states, 1, d.heads, dim, dtype=d.dtype, aligned=aligned)
        return (outputs, torch.zeros(states, 1, d.heads)), {}

    for states, dim in itertools.product((1, 2, 3), _merged_dims(d)):
        yield f"{states} states of {dim}", lambda states=states, dim=dim: build(states, dim)


def _merged_dims(d: Deployment) -> tuple[int, ...]:
    """Of prefill's results and, from context-parallel ranks, of decode's."""
    return tuple(dict.fromkeys((d.value_dim, d.kv_lora_rank)))


def _write_calls(d: Deployment, aligned: bool) -> Iterator[tuple]:
    def build(scaled):
        cache = _zeros(1, d.page_size, d.kv_lora_rank + d.rope_dim, dtype=d.cache_dtype, aligned=aligned)
        kv_c, k_pe = (_zeros(1, dim, dtype=d.dtype, aligned=aligned) for dim in (d.kv_lora_rank, d.rope_dim))
        return (cache, kv_c, k_pe, torch.zeros(1, dtype=torch.int64)), dict(k_scale=torch.ones(1) if scaled else None)

    for scaled in (False, True) if d.cache_dtype == FP8 else (False,):
        yield "k_scale" if scaled else "no k_scale", lambda scaled=scaled: build(scaled)


def _gather_calls(d: Deployment, aligned: bool) -> Iterator[tuple]:
    def build(dtype, scaled, starts):
        cache = _zeros(1, d.page_size, d.kv_lora_rank + d.rope_dim, dtype=d.cache_dtype, aligned=aligned)
        table, cum = torch.zeros(1, 1, dtype=torch.int32), torch.arange(2, dtype=torch.int32)
        return (cache, table, cum, 1), dict(
            dtype=dtype,
            k_scale=torch.ones(1) if scaled else None,
            seq_starts=torch.zeros(1, dtype=torch.int32) if starts else None,
        )

    forms = [(None, False)] + ([(d.dtype, False), (d.dtype, True)] if d.cache_dtype == FP8 else [])
    for (dtype, scaled), starts in itertools.product(forms, (False, True)):
        label = f"to {str(dtype or d.cache_dtype)[6:]}" + ", k_scale" * scaled + ", seq_starts" * starts
        yield label, lambda dtype=dtype, scaled=scaled, starts=starts: build(dtype, scaled, starts)


def _pack_calls(d: Deployment, aligned: bool) -> Iterator[tuple]:
    def build():
        k_nope, v = (_zeros(1, d.heads, dim, dtype=d.dtype, aligned=aligned) for dim in (d.nope_dim, d.value_dim))
        return (k_nope, _zeros(1, d.rope_dim, dtype=d.dtype, aligned=aligned), v), {}

    yield "keys and values", build


def powers_of_two(most: int) -> list[int]:
    """1, 2, 4 ... up to the first that is at least `most`: where the number of splits may pass a power of two."""
    return [1 << exponent for exponent in range((most - 1).bit_length() + 1)]


def _zeros(*shape: int, dtype: torch.dtype, aligned: bool) -> Tensor:
    """Zeros or, not aligned, a view that starts and steps at odd addresses."""
    if aligned:
        return torch.zeros(shape, dtype=dtype)
    return torch.zeros(*shape[:-1], shape[-1] + 1, dtype=dtype)[..., 1:]


def _no_keys(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.int32)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--heads", type=int, required=True, help="query heads on the device")
    parser.add_argument("--max-seq-len", type=int, required=True, metavar="TOKENS", help="longest request")
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[1], metavar="B", help="default: 1")
    parser.add_argument("--q-lens", type=int, nargs="+", default=[1], metavar="Q", help="default: 1")
    parser.add_argument("--page-size", type=int, default=64, help="default: 64")
    parser.add_argument("--dtype", choices=list(DTYPES)[:3], default="bf16", help="of activations; default: bf16")
    parser.add_argument("--query-dtype", choices=DTYPES, help="default: as --dtype")
    parser.add_argument("--cache-dtype", choices=DTYPES, help="default: as --query-dtype")
    parser.add_argument("--window-left", type=int, default=-1, help="sliding window of decode; default: none")
    parser.add_argument("--operators", nargs="+", choices=OPERATOR_NAMES, metavar="NAME", help="default: all")
    parser.add_argument("--device", help="default: the current CUDA device, else the CPU")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")


def run(arguments: argparse.Namespace) -> int:
    options = {name: value for name, value in vars(arguments).items() if name not in ("run", "json")}
    for name in ("dtype", "query_dtype", "cache_dtype"):
        options[name] = DTYPES.get(options[name])
    report = warmup(**options, progress=not arguments.json)
    print(json.dumps(dataclasses.asdict(report)) if arguments.json else report)
    return 0
