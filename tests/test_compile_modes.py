"""Promise: however a model compiles its MLA layers, a decode step is whole, compiled once, and copies no cache.

For each mode of `torch.compile`: no graph break, no recompile, no missed in-place rewrite; on a GPU no step that falls
back from CUDA graphs, and nothing copied into a graph but the step's own small inputs. The counters of torch say so;
`launches.py` lists what a step runs. `test_compile.py` has the operators one by one, export and ahead-of-time packages.

The layer is the examples' (`examples/deepseek.py`): norms, rope, absorbed weights, a cache write and a decode. Caches,
scales and block tables come in as arguments, as there; an attribute of a module would be static whatever marks it.
"""

from contextlib import contextmanager, nullcontext
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import ReinplaceCounters, counters

import launches
import ts_ops
from deepseek import Attention, DecodeStep, RMSNorm
from deepseek_config import AttentionConfig, RopeConfig
from deepseek_rope import Rope
from paged_cache import LayerCache, slots_of

FP8, BF16 = torch.float8_e4m3fn, torch.bfloat16
PAGE_SIZE, MAX_PAGES = 16, 4
LAYERS = 61  # of DeepSeek-V3
GPU = pytest.param("cuda", marks=pytest.mark.gpu)
DEVICES = ["cpu", GPU]

# The most launches of one decode step of the layer at DeepSeek-R1's dimensions, compiled without a CUDA graph, by cache
# and query, on an H200. `pytest -m gpu -k launches -s tests/test_compile_modes.py` lists them: norms 3, projections 4,
# absorbed products 2, rope of the key, query, write, decode, combine, the layout of the last projection's operand, the
# residual's copy for its sum in cuBLAS, and of an FP8 cache the product with k_scale. Not counted are the reductions
# behind products for which cuBLAS chooses split-K.
LAUNCHES = {"bf16": 16, "fp8": 17, "fp8-query": 17}

on_every_device = pytest.mark.parametrize(
    ("device", "options"),
    [("cpu", {}), pytest.param("cuda", {}, marks=pytest.mark.gpu),
     pytest.param("cuda", {"mode": "reduce-overhead"}, marks=pytest.mark.gpu)],
    ids=["cpu-default", "cuda-default", "cuda-reduce-overhead"],
)  # fmt: skip

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(autouse=True)
def _fresh_dynamo():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def config_of(heads: int, q_lora_rank: int, rank: int, head_dim: int, rope: int) -> AttentionConfig:
    return AttentionConfig(
        num_heads=heads, q_lora_rank=q_lora_rank, kv_lora_rank=rank, qk_nope_head_dim=head_dim, v_head_dim=head_dim,
        bias=False, rope=RopeConfig(dim=rope, theta=10000.0, interleave=True, yarn=None),
    )  # fmt: skip


SMALL, SMALL_HIDDEN = config_of(heads=4, q_lora_rank=32, rank=32, head_dim=16, rope=16), 64
R1, R1_HIDDEN = config_of(heads=16, q_lora_rank=1536, rank=512, head_dim=128, rope=64), 7168  # of 128 heads on 8 GPUs


class Layer(nn.Module):
    def __init__(self, config: AttentionConfig = SMALL, hidden: int = SMALL_HIDDEN):
        super().__init__()
        self.norm, self.attention, self.rope = RMSNorm(hidden), Attention(hidden, config), Rope(config.rope)
        for module in self.modules():
            if isinstance(module, RMSNorm):
                nn.init.ones_(module.weight)
        self.to(torch.get_default_device()).requires_grad_(False)  # rope makes its frequencies on the CPU
        self.norm.to(BF16)
        self.attention.to(BF16)

    def forward(self, x: Tensor, step: DecodeStep, cache: LayerCache) -> Tensor:
        return x + self.attention(self.norm(x), step, cache)


def cache_of(dtype: torch.dtype, k_scale: float = 0.25, pages: int = 64) -> LayerCache:
    scale = torch.tensor([k_scale]) if dtype == FP8 else None
    return LayerCache(ts_ops.allocate_kv_cache(pages, PAGE_SIZE, SMALL.cache_dim, dtype=dtype), scale)


def step_inputs(layer: Layer, batch: int, length: int) -> tuple[Tensor, DecodeStep]:
    """The hidden state of `batch` requests of `length` tokens, in pages of their own; the last token is new."""
    tables = torch.arange(1, MAX_PAGES * batch + 1, dtype=torch.int32).view(batch, MAX_PAGES)
    lengths = torch.full((batch,), length, dtype=torch.int32)
    cos, sin = layer.rope(lengths - 1)
    slots = slots_of(tables, (lengths - 1)[:, None], PAGE_SIZE).flatten()
    return torch.randn(batch, SMALL_HIDDEN).to(BF16), DecodeStep(cos, sin, slots, tables, lengths, 1, False)


def small_inputs(x: Tensor, step: DecodeStep, cache: LayerCache) -> list[Tensor]:
    """What changes from step to step, and the scale: all that a CUDA graph may copy."""
    return [value for value in (x, *step, cache.k_scale) if isinstance(value, Tensor)]


@contextmanager
def compiled_whole(device: str, graphs: int = 1, cuda_graphs: bool = True):
    """What is compiled inside makes up to `graphs` graphs and loses nothing of what can be had.

    The caches of whole graphs are off: one that comes from them reports no missed rewrites.
    """
    counters.clear()
    ReinplaceCounters.clear()
    with torch._inductor.config.patch(fx_graph_cache=False), torch._functorch.config.patch(enable_autograd_cache=False):
        yield
    assert not counters["graph_break"]
    assert 1 <= counters["stats"]["unique_graphs"] <= graphs
    assert ReinplaceCounters.get_total_missed() == ReinplaceCounters.get_total_missed_bytes() == 0
    if device == "cuda" and cuda_graphs:
        assert counters["inductor"]["cudagraph_skips"] == 0
        assert recorded() > 0, "nothing was captured"


def recorded() -> int:
    """Inputs copied at each replay, summed over all recordings so far."""
    return counters["inductor"]["cudagraph_recorded_non_static_inputs"]


def no_recompile():
    return torch._dynamo.config.patch(error_on_recompile=True)


def assert_close(actual: Tensor, expected: Tensor) -> None:
    """bf16 results of the same operations, of which Inductor may fuse some and round less, or add in another order."""
    torch.testing.assert_close(actual, expected, rtol=2**-5, atol=2**-5)


def assert_same_rows(actual: LayerCache, expected: LayerCache) -> None:
    """The same rows are written, and no other; a rounding apart, which in e4m3 is 2^-3."""
    actual, expected = actual.pages.float(), expected.pages.float()
    assert torch.equal(actual.any(dim=-1), expected.any(dim=-1)) and expected.any()
    torch.testing.assert_close(actual, expected, rtol=2**-3, atol=2**-4)


@dataclass(frozen=True)
class Mode:
    id: str
    options: dict
    cache: torch.dtype = FP8
    context: type = torch.no_grad
    cuda_graphs: bool = True
    partitions: int | None = 0  # of a graph that is cut; 0: not cut; None: Inductor may cut it, where sizes are dynamic
    devices: tuple = tuple(DEVICES)


def partitioned(**options) -> dict:
    return {"options": {"triton.cudagraphs": True, **options}}


MODES = [
    Mode("default", {}, cuda_graphs=False),
    Mode("default-inference_mode", {}, BF16, torch.inference_mode, cuda_graphs=False),
    Mode("dynamic", {"dynamic": True}, BF16, cuda_graphs=False),
    Mode("reduce-overhead", {"mode": "reduce-overhead"}),
    Mode("reduce-overhead-inference_mode", {"mode": "reduce-overhead"}, BF16, torch.inference_mode, devices=(GPU,)),
    Mode("reduce-overhead-dynamic", {"mode": "reduce-overhead", "dynamic": True}, partitions=None, devices=(GPU,)),
    Mode("max-autotune", {"mode": "max-autotune"}, devices=(GPU,)),
    Mode("whole", partitioned(graph_partition=False), BF16, devices=(GPU,)),
    Mode("cut-at-decode", partitioned(graph_partition=True, custom_should_partition_ops=["tokenspeed::mla_decode"]),
         partitions=3),
]  # fmt: skip


@pytest.mark.parametrize(
    ("mode", "device"),
    [
        pytest.param(mode, device, id=f"{mode.id}-{name}", marks=marks)
        for mode in MODES
        for place in mode.devices
        for device, name, marks in [(place, place, ()) if place == "cpu" else ("cuda", "cuda", place.marks)]
    ],
)
def test_a_mode_compiles_once_and_whole(mode, device):
    """Six steps: a CUDA graph is warmed up in the first, recorded in the second and replayed in the others."""
    with torch.device(device):
        layer, cache, eager_cache = Layer(), cache_of(mode.cache), cache_of(mode.cache)
    address = cache.pages.data_ptr()
    compiled = torch.compile(layer, fullgraph=True, **mode.options)
    with mode.context(), compiled_whole(device, cuda_graphs=mode.cuda_graphs):
        for number in range(6):
            with torch.device(device):
                x, step = step_inputs(layer, 3, 14 + number)
            expected = layer(x, step, eager_cache)
            with no_recompile() if number else nullcontext():
                assert_close(compiled(x, step, cache), expected)
            if number == 1:
                recordings = recorded()
        assert recorded() == (recordings if device == "cuda" else 0), "a later step was recorded again"
    assert_same_rows(cache, eager_cache)
    assert cache.pages.data_ptr() == address
    if device == "cuda" and mode.cuda_graphs:
        if mode.partitions is not None:
            assert counters["inductor"]["cudagraph_partitions"] == mode.partitions
        if mode.partitions == 0:
            assert recordings == len(small_inputs(x, step, cache))


def marked(mark, x: Tensor, step: DecodeStep) -> None:
    for tensor in small_inputs(x, step, LayerCache(x, None)):
        mark(tensor, 0)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("options", "mark", "first", "graphs"),
    [
        pytest.param({}, None, 1, 3, id="default"),
        pytest.param({"dynamic": True}, None, 1, 3, id="dynamic"),
        pytest.param({}, torch._dynamo.mark_dynamic, 2, 1, id="mark_dynamic"),
        # Inductor's lowering of bmm for CPUs asks for the value of a size that has none (torch 2.13, not 2.11).
        pytest.param({"backend": "aot_eager"}, torch._dynamo.decorators.mark_unbacked, 1, 1, id="mark_unbacked"),
    ],
)
def test_graphs_over_batch_sizes(options, mark, first, graphs, device):
    """Up and down again; on a GPU into CUDA graphs, one recording a size."""
    cuda_graphs = "backend" not in options
    if cuda_graphs:
        # On a CPU the C++ of eight sizes would take half a minute, and the mode "dynamic" above compiles one of them.
        options = {"mode": "reduce-overhead", **options} if device == "cuda" else {"backend": "aot_eager", **options}
    with torch.device(device):
        layer, cache, eager_cache = Layer(), cache_of(FP8), cache_of(FP8)
    compiled = torch.compile(layer, fullgraph=True, **options)
    with torch.no_grad(), compiled_whole(device, graphs, cuda_graphs):
        for batch in (*range(first, 9), *reversed(range(first, 9))):
            with torch.device(device):
                x, step = step_inputs(layer, batch, 19)
            expected = layer(x, step, eager_cache)
            if mark:
                marked(mark, x, step)
            with no_recompile() if graphs == 1 and batch != first else nullcontext():
                assert_close(compiled(x, step, cache), expected)
    assert_same_rows(cache, eager_cache)


@on_every_device
def test_one_compiled_block_serves_61_layers(device, options):
    """Weights, caches and scales differ, and all are tensors. With CUDA graphs: recorded once each, then replayed."""
    with torch.device(device):
        layers = [Layer() for _ in range(LAYERS)]
        scales = [2.0 ** (index % 9 - 6) for index in range(LAYERS)]
        caches, eager_caches = ([cache_of(FP8, scale) for scale in scales] for _ in range(2))
    blocks = [torch.compile(layer, fullgraph=True, **options) for layer in layers]
    with torch.no_grad(), compiled_whole(device, cuda_graphs=bool(options)):
        for number in range(4):
            with torch.device(device):
                x, step = step_inputs(layers[0], 3, 9 + number)
            # Without it, each of the 61 calls would begin a step of its own, and end the life of the last one's result.
            torch.compiler.cudagraph_mark_step_begin()
            with no_recompile() if number else nullcontext():
                for layer, block, cache, eager_cache in zip(layers, blocks, caches, eager_caches):
                    actual = block(x, step, cache)
                    x = layer(x, step, eager_cache)  # the next block's too, so that an error is one layer's
                    assert_close(actual, x)
            if number == 1:
                recordings = recorded()
        assert recorded() == recordings, "a later step was recorded again"
    for cache, eager_cache in zip(caches, eager_caches):
        assert_same_rows(cache, eager_cache)


@pytest.mark.gpu
def test_61_recorded_layers_run_as_a_chain():
    """As a model calls them: each takes the last one's result out of the graphs' own memory."""
    with torch.device("cuda"):
        layers = [Layer() for _ in range(LAYERS)]
        caches, eager_caches = ([cache_of(FP8) for _ in layers] for _ in range(2))
    blocks = [torch.compile(layer, fullgraph=True, mode="reduce-overhead") for layer in layers]
    with torch.no_grad(), compiled_whole("cuda"):
        for number in range(4):
            with torch.device("cuda"):
                x, step = step_inputs(layers[0], 3, 9 + number)
            expected = x
            torch.compiler.cudagraph_mark_step_begin()
            for layer, block, cache, eager_cache in zip(layers, blocks, caches, eager_caches):
                expected, x = layer(expected, step, eager_cache), block(x, step, cache)
            # 61 residual sums in bf16, whose roundings add up; a wrong cache or scale is an error of the result's size.
            error = (x.float() - expected.float()).norm() / expected.float().norm()
            assert error < 0.05, f"step {number}"
            if number == 1:
                recordings = recorded()
        assert recorded() == recordings, "a later step was recorded again"
        # Of the later layers only the step and the scale are copied: their x lies where the graph before left it.
        inputs = len(small_inputs(x, step, caches[0]))
        assert recordings == LAYERS * inputs - (LAYERS - 1)


@pytest.mark.parametrize("device", DEVICES)
def test_functional_call(device):
    """Weights as arguments, through Inductor."""
    with torch.device(device):
        layer, cache, eager_cache = Layer(), cache_of(BF16), cache_of(BF16)
        x, step = step_inputs(layer, 3, 5)
    state = {name: value * 0.5 for name, value in layer.state_dict().items()}

    @torch.compile(fullgraph=True)
    def call(state, *inputs):
        return torch.func.functional_call(layer, state, inputs)

    with torch.no_grad(), compiled_whole(device, cuda_graphs=False):
        expected = torch.func.functional_call(layer, state, (x, step, eager_cache))
        assert_close(call(state, x, step, cache), expected)
        assert not torch.equal(expected, layer(x, step, eager_cache)), "the state was not used"
    assert_close(cache.pages[1, 4], call_free_row(layer, state, x, step))


def call_free_row(layer: Layer, state: dict, x: Tensor, step: DecodeStep) -> Tensor:
    """The row that the first request's new token leaves in a cache of its own."""
    with torch.device(x.device):
        cache = cache_of(BF16)
    torch.func.functional_call(layer, state, (x, step, cache))
    return cache.pages[1, 4]


def large_cache(device: str, dtype: torch.dtype) -> LayerCache:
    """So large that nothing else in a step of the small layer compares: 50M elements on a GPU, 3M on a CPU."""
    with torch.device(device):
        return cache_of(dtype, pages=65536 if device == "cuda" else 4096)


@pytest.mark.parametrize("dtype", [BF16, FP8], ids=["bf16", "fp8"])
@on_every_device
def test_no_step_moves_the_cache(device, options, dtype):
    """Nothing of the cache's size is allocated, copied or filled, and the rows arrive in the caller's own tensor."""
    launches.start_profiler(device)
    layer, cache = Layer().to(device), large_cache(device, dtype)
    compiled = torch.compile(layer, fullgraph=True, **options)
    address, size = cache.pages.data_ptr(), cache.pages.nbytes
    with torch.no_grad(), compiled_whole(device, cuda_graphs=bool(options)):
        for length in range(3, 7):
            with torch.device(device):
                x, step = step_inputs(layer, 3, length)
            rows = cache.pages.view(torch.uint8).flatten(0, 1)
            assert not rows[step.slots].any()
            if length < 6:  # compiled, warmed up, recorded
                compiled(x, step, cache)
            else:
                traced = launches.trace(lambda: compiled(x, step, cache), device)
            assert rows[step.slots].any(dim=-1).all(), "the new rows are not in the caller's cache"
    assert max(traced.allocations, default=0) < size / 4
    moved = [str(launch) for launch in traced.launches if launch.moves(cache.pages.numel(), cache.pages.itemsize)]
    assert not moved, f"launches as large as the cache of {size} bytes"
    assert cache.pages.data_ptr() == address
    if device == "cuda":
        names = " ".join(launch.name for launch in traced.launches)
        assert "_write_kernel" in names and "decode" in names, traced.listed()


@pytest.mark.parametrize("device", DEVICES)
def test_the_trace_sees_a_copy(device):
    """The check above can fail: a clone, a kernel over the whole cache, and both in a replayed graph."""
    launches.start_profiler(device)
    pages = large_cache(device, BF16).pages
    assert max(launches.trace(lambda: pages.clone(), device).allocations) >= pages.nbytes
    if device == "cpu":
        return
    copy, graph = torch.empty_like(pages), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        copy.copy_(pages)
    for call in (lambda: copy.copy_(pages), lambda: pages.add_(1), graph.replay):
        traced = launches.trace(call, device)
        assert any(launch.moves(pages.numel(), pages.itemsize) for launch in traced.launches), traced.listed()


@pytest.mark.gpu
def test_a_cache_that_is_not_marked_loses_its_graph():
    """`allocate_kv_cache` marks its tensor static. The counters above can fail: this one is not, and is written."""
    counters.clear()
    with torch.device("cuda"):
        layer = Layer()
        cache = LayerCache(torch.zeros(64, PAGE_SIZE, SMALL.cache_dim, dtype=BF16), None)
    compiled = torch.compile(layer, fullgraph=True, mode="reduce-overhead")
    with torch.no_grad():
        for length in range(3, 7):
            with torch.device("cuda"):
                x, step = step_inputs(layer, 3, length)
            compiled(x, step, cache)
    assert counters["inductor"]["cudagraph_skips"] > 0


@pytest.mark.gpu
@pytest.mark.parametrize("kind", LAUNCHES)
def test_launches_of_a_layer(kind):
    """What one layer's decode step runs, at DeepSeek-R1's dimensions; in a CUDA graph, its inputs' copies beside."""
    launches.start_profiler("cuda")
    batch, pages, page_size, length = 4, 64, 64, 4000  # long enough that the decode is split
    with torch.device("cuda"):
        layer = Layer(R1, R1_HIDDEN)
        dtype = BF16 if kind == "bf16" else FP8
        scale = None if kind == "bf16" else torch.tensor([0.25])
        cache = LayerCache(ts_ops.allocate_kv_cache(1 + batch * pages, page_size, R1.cache_dim, dtype=dtype), scale)
        tables = torch.arange(1, 1 + batch * pages, dtype=torch.int32).view(batch, pages)
        lengths = torch.full((batch,), length, dtype=torch.int32)
        slots = slots_of(tables, (lengths - 1)[:, None], page_size).flatten()
        x = torch.randn(batch, R1_HIDDEN).to(BF16)
        step = DecodeStep(*layer.rope(lengths - 1), slots, tables, lengths, 1, kind == "fp8-query")
    counts, lists = {}, ""
    for mode in ("default", "reduce-overhead"):
        torch._dynamo.reset()
        compiled = torch.compile(layer, fullgraph=True, mode=mode)
        # Inductor would pad the batch of 4 for products that it times as faster so: a launch that comes and goes.
        with torch.no_grad(), torch._inductor.config.patch(shape_padding=False):
            for _ in range(3):
                compiled(x, step, cache)
            traced = launches.trace(lambda: compiled(x, step, cache), "cuda")
        counts[mode] = sum("splitKreduce" not in launch.name for launch in traced.launches)
        lists += f"\n{kind}, {mode}: {counts[mode]} launches{traced.listed()}"
    print(lists)
    copies = len(small_inputs(x, step, cache))
    assert 0 < counts["default"] <= LAUNCHES[kind], lists
    assert counts["reduce-overhead"] <= counts["default"] + copies, lists
