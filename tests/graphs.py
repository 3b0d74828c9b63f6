"""What the tests of CUDA graphs share: backends, recorded calls, calls of every operator at a given size, comparisons.

`Recording` is a CUDA graph on a GPU. On a CPU it runs the same calls again at every replay, into the results of the
first run: that shows that a test's inputs and expectations are right, and nothing about graphs.
"""

import contextlib
import functools
import gc
import math
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

import calls
import ts_ops
from conftest import BLACKWELL, GPU, REFERENCE, Target
from ts_ops import dispatch

BF16, FP8 = torch.bfloat16, torch.float8_e4m3fn
WRITE = "mla_kv_cache_write"
PAGE_SIZE = 64
KNOWN = {target.backend: target for target in (GPU, BLACKWELL)}
LENGTHS = ("seq_lens", "cum_seq_lens", "cum_seq_lens_q", "cum_seq_lens_kv", "slot_mapping")
PATTERN = 0xAB
GATE_CYCLES = 15_000_000  # 8 to 10 ms: longer than the host takes to queue a step on two streams


def _serving() -> list[Target]:
    """The backends that this machine's GPU has, in order of preference; Triton, to be skipped, where there is none."""
    names = ["triton"]
    if torch.cuda.is_available():
        names = [name for name, _ in dispatch._candidates(torch.device("cuda:0"), None)]
    return [KNOWN.get(name) or Target(f"gpu-{name}", name, "cuda") for name in names]


def _params(targets: list[Target]) -> list:
    return [
        pytest.param(place, id=f"{place.backend}-{place.device}", marks=[pytest.mark.gpu] * (place.device == "cuda"))
        for place in targets
    ]


SERVING = _serving()
ON_GPU = [*SERVING, Target("gpu-reference", "reference", "cuda")]
on_every_backend = pytest.mark.parametrize("place", _params([REFERENCE, *ON_GPU]))
on_the_gpu = pytest.mark.parametrize("place", _params(ON_GPU))
on_serving_backends = pytest.mark.parametrize("place", _params(SERVING))


class Recording:
    """The work of `step`, to be done again by `replay` on what its inputs hold then; `results` is what it returned.

    On a GPU nothing else is kept: not `step`, and no tensor that it closes over.
    """

    def __init__(self, step: Callable[[], tuple | None], device: str, pool=None, stream=None):
        self.graph = None
        if device == "cpu":
            self.results = step()
            self.replay = lambda: self._rerun(step)
            return
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph, pool=pool, stream=stream):
            self.results = step()
        self.replay = self.graph.replay

    def _rerun(self, step) -> None:
        for held, new in zip(self.results or (), step() or ()):
            held.copy_(new)


@dataclass(frozen=True)
class Size:
    batch: int
    q_len: int = 1
    heads: int = 16
    capacity: int = 512  # keys that a request's block table can name


def arguments(operator: str, size: Size, device: str, seed: int) -> dict:
    """A call with DeepSeek's dims in bf16, random but for its shapes: lengths, tables, slots and data."""
    host, there = torch.Generator().manual_seed(seed), torch.Generator(device).manual_seed(seed)
    batch, q_len, heads, capacity = size.batch, size.q_len, size.heads, size.capacity
    tokens = batch * q_len * 4
    pages = 40 if device == "cuda" else 6

    def floats(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
        return torch.randn(shape, generator=there, device=device).to(dtype)

    def integers(low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, high, shape, generator=host)

    def int32(values: Tensor) -> Tensor:
        return values.to(torch.int32).to(device)

    def cuts(total: int) -> Tensor:
        end = integers(total // 2 + 1, total + 1, 1)
        inner = integers(0, int(end) + 1, batch - 1).sort().values
        return int32(torch.cat((torch.tensor([0]), inner, end)))

    def lses(*shape: int) -> Tensor:
        values = floats(*shape, dtype=torch.float32)
        return values.masked_fill_(torch.rand(shape, generator=there, device=device) < 0.2, -math.inf)

    lengths = integers(0, capacity + 1, batch)
    lengths[batch // 2] = 0
    lengths[0] = integers(capacity // 2 + 1, capacity + 1, 1)
    if operator.startswith("mla_decode"):
        return dict(
            query=floats(batch, q_len, heads, 576), kv_cache=floats(pages, PAGE_SIZE, 576),
            block_tables=int32(integers(0, pages, batch, capacity // PAGE_SIZE)), seq_lens=int32(lengths),
            softmax_scale=0.05,
        )  # fmt: skip
    if operator.startswith("mla_prefill"):
        return dict(
            query=floats(tokens, heads, 192), key=floats(capacity, heads, 192), value=floats(capacity, heads, 128),
            cum_seq_lens_q=cuts(tokens), cum_seq_lens_kv=cuts(capacity), softmax_scale=0.07,
        )  # fmt: skip
    if operator == "merge_attn_states":
        return dict(
            prefix_output=floats(tokens, heads, 128), prefix_lse=lses(tokens, heads),
            suffix_output=floats(tokens, heads, 128), suffix_lse=lses(tokens, heads),
        )  # fmt: skip
    if operator == "merge_attn_states_n":
        return dict(outputs=floats(3, tokens, heads, 128), lses=lses(3, tokens, heads))
    if operator == WRITE:
        slots = torch.randperm(pages * PAGE_SIZE, generator=host)[: min(tokens, 1000)]
        slots[len(slots) // 2] = -1
        return dict(
            kv_cache=floats(pages, PAGE_SIZE, 576), kv_c=floats(len(slots), 512), k_pe=floats(len(slots), 64),
            slot_mapping=slots.to(device),
        )  # fmt: skip
    if operator == "mla_kv_cache_gather":
        return dict(
            kv_cache=floats(pages, PAGE_SIZE, 576),
            block_tables=int32(integers(0, pages, batch, capacity // PAGE_SIZE)),
            cum_seq_lens=int32(torch.cat((torch.tensor([0]), lengths.cumsum(0)))),
            total_tokens=batch * capacity // 2 + 1,
        )
    assert operator == "mla_kv_pack_quantize_fp8", operator
    return dict(
        k_nope=floats(tokens, heads, 128), k_pe=floats(tokens, 64), v=floats(tokens, heads, 128), k_scale_inv=2.0
    )


def other_example(operator: str) -> dict:
    """Another call of the same shapes."""
    call = calls.example(operator)
    for name in LENGTHS:
        if name in call:
            call[name] = call[name] - call[name] // 4  # other lengths, still monotone
    if "block_tables" in call:
        call["block_tables"] = call["block_tables"].flip(1)
    return call


def refill(static: dict, fresh: dict) -> None:
    """Give the tensors of `static` the contents of `fresh`, in place."""
    for name, value in fresh.items():
        if isinstance(value, Tensor):
            static[name].copy_(value)


def copy_of(call: dict) -> dict:
    return {name: value.clone() if isinstance(value, Tensor) else value for name, value in call.items()}


def backend_of(place: Target, operator: str, call: dict) -> str:
    """The place's backend or, for a call that it leaves to another, Triton."""
    if place.backend == "reference":
        return "reference"
    args, kwargs = calls.split(calls.overload_of(operator), call)
    objection = dispatch.objection(place.backend, operator, calls.PROBLEMS[operator](*args, **kwargs))
    return "triton" if objection else place.backend


def outputs(place: Target, operator: str, call: dict) -> tuple[Tensor, ...]:
    """Results of the functional overload; of a write the cache, which it changes."""
    with ts_ops.use_backend(backend_of(place, operator, call)):
        results = calls.invoke(operator, call)
    if operator == WRITE:
        return (call["kv_cache"],)
    return results if isinstance(results, tuple) else (results,)


def outputs_into(place: Target, operator: str, call: dict, buffers: dict[str, Tensor]) -> tuple[Tensor, ...]:
    """`outputs` through the `.out` overload."""
    with ts_ops.use_backend(backend_of(place, operator, call)):
        calls.invoke(operator, call | buffers, "out")
    return tuple(buffers.values())


def poison(tensors) -> None:
    """NaN in every dtype that an operator writes."""
    for tensor in tensors:
        tensor.view(torch.uint8).fill_(0xFF)


def bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(torch.uint8)


def same_bits(some, others) -> bool:
    return len(some) == len(others) and all(torch.equal(bits(a), bits(b)) for a, b in zip(some, others))


def churn(device: str) -> list[Tensor]:
    """Allocate blocks of many sizes, free most and return memory to the driver; the rest holds PATTERN and is kept."""
    most = 25 if device == "cuda" else 14
    sizes = (2 ** (9 + (most - 9) * torch.rand(48))).int().tolist()
    blocks = [torch.full((size,), PATTERN, dtype=torch.uint8, device=device) for size in sizes]
    kept = blocks[::4]
    del blocks
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()
    return kept


class Checked:
    """Calls of every operator, each compared on the device with its results when it was alone.

    `step` poisons a buffer, calls and compares, `repeats` times for each operator; it never waits for the device, so it
    may be queued on any stream, or captured. `wrong` counts the results that differed.
    """

    def __init__(self, place: Target, size: Size, seed: int, repeats: int):
        self.place, self.repeats = place, repeats
        self.calls = []
        for operator in calls.NAMES:
            call = arguments(operator, size, place.device, seed)
            before = call["kv_cache"].clone() if operator == WRITE else None
            self.calls.append((operator, call, before, [r.clone() for r in outputs(place, operator, call)]))
        self.wrong = torch.zeros((), dtype=torch.int64, device=place.device)

    @property
    def comparisons(self) -> int:
        return self.repeats * sum(len(alone) for *_, alone in self.calls)

    def step(self) -> None:
        with torch.device(self.place.device):
            for operator, call, before, alone in self.calls * self.repeats:
                if operator == WRITE:
                    call["kv_cache"].copy_(before)
                    results = outputs(self.place, operator, call)
                else:
                    results = outputs_into(self.place, operator, call, calls.buffers(operator, call))
                for result, expected in zip(results, alone):
                    self.wrong += (bits(result) != bits(expected)).any()

    def spoil(self) -> None:
        """Change one bit of every expectation: a step must then find each of its comparisons wrong."""
        for *_, alone in self.calls:
            for expected in alone:
                bits(expected).view(-1)[:1].bitwise_xor_(1)


def on_stream(stream):
    """Nothing to enter on a CPU, which has no streams."""
    return torch.cuda.stream(stream) if stream is not None else contextlib.nullcontext()


def wait(device: str) -> None:
    """For all streams."""
    if device == "cuda":
        torch.cuda.synchronize()


@functools.cache
def _gate():
    return torch.cuda.Stream()


def hold(streams) -> None:
    """Keep the streams waiting for a few milliseconds, so that what is queued on them next runs at the same time."""
    if streams[0] is None:
        return
    gate = _gate()
    with torch.cuda.stream(gate):
        torch.cuda._sleep(GATE_CYCLES)
    event = gate.record_event()
    for stream in streams:
        stream.wait_event(event)


def fastest(recordings: list[Recording], samples: int = 30, replays: int = 5) -> list[float]:
    """Milliseconds of a replay of each, the least of many samples.

    The samples are taken in turns, and whatever else the GPU is doing can only add to one: so the ratio of two holds on
    a machine that runs other tests at the same time.
    """
    best = [math.inf] * len(recordings)
    for _ in range(samples):
        for number, recording in enumerate(recordings):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            for _ in range(replays):
                recording.replay()
            end.record()
            end.synchronize()
            best[number] = min(best[number], begin.elapsed_time(end) / replays)
    return best


def pool_bytes(pool) -> tuple[int, int]:
    """Bytes that a graph's memory pool has reserved, and those of tensors in it that are alive."""
    segments = [s for s in torch.cuda.memory_snapshot() if tuple(s["segment_pool_id"]) == tuple(pool)]
    alive = [b["requested_size"] for s in segments for b in s["blocks"] if b["state"] == "active_allocated"]
    return sum(s["total_size"] for s in segments), sum(alive)
