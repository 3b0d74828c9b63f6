"""Time whole-model generation against Hugging Face transformers: the same weights, on one GPU, in one process.

    python examples/benchmarks/generation.py [--shape v2-lite] [--batch-sizes 64 8 1] [--contexts 8192 1024 32768]
        [--paths 'ours bf16' 'ours fp8' transformers] [--prompt-tokens 32768] [--chunk-tokens 8192 2048] [--steps 20]
        [--time-limit SECONDS] [--csv FILE]

Weights are random bf16, made by transformers; our model holds the same storage. Before anything is timed, both prefill
a short batch and decode a token of it, and their logits must agree.

Decode. A step is the model, the argmax of its logits and the inputs of the next; its time is the median distance of
events on the GPU's stream, so that a slow host counts. No prompt is prefilled: caches are filled with random latents of
unit variance, as the norm before a cache gives them, the same for all; logits are compared again, of each case's first
step. Ours: `decoder.Decoder`, a CUDA graph of the compiled step, over a paged cache in bf16, or in FP8 with an FP8
query; one cache and one graph serve all contexts. Transformers: the loop of `generate(cache_implementation="static")`
from its own parts, hence with its masks and its choice of MoE, compiled in mode reduce-overhead; logits processors and
stopping are left out, in its favour. Its attention runs over all of a static cache, which is therefore no longer than
the steps need. Each of its cases is compiled afresh, for its exact shapes. Compiling is not timed.

Prefill. One prompt by `generation.prefill`, by `chunked_prefill.extend` in pieces of `--chunk-tokens` (as many tokens
of context are expanded at once), and by transformers as generate() does it, to the logits of the last token: the second
run of each. The peak is GPU memory above what was allocated before, less transformers' cache.

Cases run batch by batch in the order given, but transformers' first context of every batch comes before its others.
"""

import argparse
import csv
import gc
import inspect
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import transformers
from shapes import POSITIONS, SHAPES
from torch import Tensor
from torch._dynamo.utils import counters
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel, StaticCache

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from chunked_prefill import extend  # noqa: E402
from decoder import Decoder  # noqa: E402
from deepseek import DeepSeek  # noqa: E402
from deepseek_config import parse_config  # noqa: E402
from generation import prefill  # noqa: E402
from paged_cache import FP8, PagedCache, calibrate  # noqa: E402
from ts_ops.cache import TABLE_TOKENS  # noqa: E402

PAGE_SIZE = 64
WARMUP = 5  # steps: the first compiles, and reduce-overhead records a graph in the third at the latest
DTYPE, THEIRS = torch.bfloat16, "transformers"
# |ours - theirs| / |theirs| of logits; 1.4 if they are unrelated. Rounding may turn near ties of experts. On a CPU, 27
# layers as V2-Lite's but 768 wide give 0.01 after a prefill, 0.04 over random latents and 0.11 over those in FP8.
CHECK_BOUND, BOUNDS = 0.05, {"ours bf16": 0.1, "ours fp8": 0.25}
PATHS = [*BOUNDS, THEIRS]
# What transformers calls its cache: the second up to 5.20, the first since.
PARAMETERS = inspect.signature(transformers.DeepseekV2Model.forward).parameters
CACHE = "cache" if "cache" in PARAMETERS else "past_key_values"
PIECES = "ours, pieces of "
FIELDS = "kind path batch context milliseconds tokens_per_second peak_gib difference failure".split()


@dataclass
class Row:
    kind: str  # decode or prefill
    path: str
    batch: int
    context: int  # or the prompt
    milliseconds: float | None = None
    logits: Tensor | None = None  # [B, vocab] on the CPU
    peak_gib: float | None = None
    difference: float | None = None  # of the logits from transformers'
    failure: str = ""

    @property
    def tokens_per_second(self) -> float | None:
        tokens = self.batch if self.kind == "decode" else self.context
        return None if self.failure else tokens / self.milliseconds * 1e3

    def __str__(self) -> str:
        figures = self.failure or f"{self.milliseconds:.2f} ms, {self.tokens_per_second:.0f} tokens/s"
        return f"{self.kind}, batch {self.batch}, {self.context} tokens, {self.path}: {figures}"


class Bench:
    """Both models, and the rows so far."""

    def __init__(self, options: argparse.Namespace):
        self.options, self.device, self.rows = options, torch.device(options.device), []
        self.on_gpu, self.start = self.device.type == "cuda", time.monotonic()
        torch.manual_seed(0)
        with self.device:
            config = AutoConfig.for_model(**SHAPES[options.shape])
            self.peer = AutoModelForCausalLM.from_config(config, dtype=DTYPE).eval().requires_grad_(False)
        self.model = share(self.peer)
        self.config = self.model.config
        self.split = [self.config.attention.kv_lora_rank, self.config.attention.rope.dim]

    def room(self, context: int) -> int:
        """Tokens of a cache in which the steps of a case fit."""
        return -(-(context + WARMUP + self.options.steps) // TABLE_TOKENS) * TABLE_TOKENS

    def paged_cache(self, batch: int, tokens: int, dtype: torch.dtype = DTYPE) -> PagedCache:
        layers = self.config.num_layers
        return PagedCache(layers, [tokens] * batch, PAGE_SIZE, sum(self.split), dtype=dtype, device=self.device)

    def latents(self, layer: int, batch: int) -> Tensor:
        """What a layer's cache holds, for both models: [B, room of the longest context, L + R]."""
        shape = batch, self.room(max(self.options.contexts)), sum(self.split)
        generator = torch.Generator(self.device).manual_seed(layer)
        return torch.randn(shape, generator=generator, dtype=DTYPE, device=self.device)

    def run(self, kind: str, path: str, batch: int, contexts: list[int], measure: Callable[..., Iterator]) -> None:
        """A row for each context: what `measure(self, path, batch, contexts)` yields, or why it did not."""
        left, failure = list(contexts), ""
        try:
            if time.monotonic() - self.start > self.options.time_limit:
                failure = "not run"
            else:
                for figures in measure(self, path, batch, contexts):
                    self.add(Row(kind, path, batch, left.pop(0), *figures))
        except Exception as error:  # whatever one case raises, the others are still worth running
            failure = f"{type(error).__name__}: {error}".splitlines()[0]
            if isinstance(error, torch.OutOfMemoryError) or "out of memory" in str(error):
                failure = "out of memory"
        torch.compiler.reset()  # which also frees the memory of reduce-overhead's graphs
        gc.collect()
        if self.on_gpu:
            torch.cuda.empty_cache()
        for context in left:
            self.add(Row(kind, path, batch, context, failure=failure))

    def add(self, row: Row) -> None:
        if row.path == THEIRS and not row.failure:
            for other in self.rows:
                if (other.kind, other.batch, other.context, other.failure) == (row.kind, row.batch, row.context, ""):
                    other.difference = relative_error(other.logits, row.logits)
        self.rows.append(row)
        print(f"{time.monotonic() - self.start:5.0f} s  {row}", flush=True)
        if self.options.csv:
            with open(self.options.csv, "w", newline="") as file:
                csv.writer(file).writerows([FIELDS, *([getattr(row, name) for name in FIELDS] for row in self.rows)])


def share(peer: PreTrainedModel) -> DeepSeek:
    """Our model on the storage of transformers' parameters; only routers narrower than fp32 are copied."""
    with torch.device("meta"):
        model = DeepSeek(parse_config(json.loads(peer.config.to_json_string())))
    weights = {name.removeprefix("model."): weight for name, weight in peer.state_dict().items()}
    model.load_state_dict({n: w.float() if ".mlp.gate." in n else w for n, w in weights.items()}, assign=True)
    return model.to(peer.device).eval().requires_grad_(False)


def relative_error(actual: Tensor, expected: Tensor) -> float:
    return ((actual.double() - expected.double()).norm() / expected.double().norm()).item()


def time_steps(step: Callable[[], Tensor], bench: Bench) -> tuple[float, Tensor]:
    """Median milliseconds of a step, and the logits of the very first."""

    def mark() -> float | torch.cuda.Event:
        if not bench.on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    first = step().to("cpu", torch.float32, copy=True)
    for _ in range(WARMUP - 1):
        step()
    marks = [mark()]
    for _ in range(bench.options.steps):
        step()
        marks.append(mark())
    if bench.on_gpu:
        torch.cuda.synchronize()
    times = [a.elapsed_time(b) if bench.on_gpu else (b - a) * 1e3 for a, b in zip(marks, marks[1:])]
    return statistics.median(times), first


def decode_ours(bench: Bench, path: str, batch: int, contexts: list[int]) -> Iterator[tuple[float, Tensor]]:
    """One cache, whose address is in the graph, serves all contexts, longest first: steps write behind the context."""
    fp8 = "fp8" in path
    cache = bench.paged_cache(batch, bench.room(max(contexts)), FP8 if fp8 else DTYPE)
    for index, (pages, k_scale) in enumerate(cache.layers):
        latents = bench.latents(index, batch)
        if fp8:
            calibrate(k_scale, *latents.split(bench.split, dim=-1))
            latents /= k_scale.to(DTYPE)  # exact, by a power of two
        pages[1:].unflatten(0, (batch, -1)).copy_(latents.unflatten(1, (-1, PAGE_SIZE)))
        del latents
    decoder = Decoder(
        bench.model, cache.layers, cache.block_tables.shape[1], batch_sizes=[batch], q_lens=[1], fp8_query=fp8,
        compile=bench.options.compile,
    )  # fmt: skip
    if bench.on_gpu:
        decoder.capture(progress=False)
    for context in contexts:
        tokens, seq_lens = torch.arange(batch, device=bench.device)[:, None], torch.full_like(cache.seq_lens, context)

        def step() -> Tensor:
            nonlocal tokens
            seq_lens.add_(1)
            logits = decoder(tokens, seq_lens, cache.block_tables)[:, 0]
            tokens = logits.argmax(dim=-1, keepdim=True)
            return logits

        yield time_steps(step, bench)


def decode_theirs(bench: Bench, path: str, batch: int, contexts: list[int]) -> Iterator[tuple[float, Tensor]]:
    (context,), peer = contexts, bench.peer
    cache = StaticCache(config=peer.config, max_cache_len=bench.room(context))
    for index, layer in enumerate(cache.layers):
        latent, k_pe = bench.latents(index, batch)[:, None, : layer.max_cache_len].split(bench.split, dim=-1)
        if peer.config.model_type == "deepseek_v2":  # keeps the pairs of a rotation together; V3 and ours do not
            k_pe = k_pe.unflatten(-1, (2, -1)).mT.flatten(-2)
        layer.lazy_initialization(latent[:, :, :1], k_pe[:, :, :1])
        layer.keys.copy_(latent)
        layer.values.copy_(k_pe)
        layer.cumulative_length.fill_(context)
        del latent, k_pe
    counters.clear()
    forward = peer.get_compiled_call(None) if bench.options.compile else peer
    tokens = torch.arange(batch, device=bench.device)[:, None]
    with peer._optimize_model_for_decode():
        yield time_steps(their_steps(peer, forward, tokens, their_state(bench, cache, batch, context + 1)), bench)
    if bench.on_gpu and (skips := counters["inductor"]["cudagraph_skips"]):
        print(f"  transformers' step was not put into a CUDA graph, {skips} time(s)")


def their_state(bench: Bench, cache: StaticCache, batch: int, length: int) -> dict:
    """What generate() carries from call to call, before one that ends at `length` tokens."""
    mask = torch.ones(batch, length, dtype=torch.int64, device=bench.device)
    state = {"attention_mask": mask, "position_ids": mask.cumsum(-1) - 1, "use_cache": True, "logits_to_keep": 1}
    return state | {CACHE: cache}


def their_steps(peer: PreTrainedModel, forward: Callable, tokens: Tensor, state: dict) -> Callable[[], Tensor]:
    """Tokens [B, T] first, then one at a time -> logits [B, vocab]."""

    def step() -> Tensor:
        nonlocal tokens, state
        inputs = peer.prepare_inputs_for_generation(tokens, next_sequence_length=tokens.shape[1], **state)
        outputs = forward(**inputs, return_dict=True)
        state = peer._update_model_kwargs_for_generation(outputs, state)
        logits = outputs.logits[:, -1].to(torch.float32, copy=True)
        tokens = logits.argmax(dim=-1, keepdim=True)
        return logits

    return step


def prefill_once(bench: Bench, path: str, batch: int, contexts: list[int]) -> Iterator[tuple[float, Tensor, float]]:
    (count,), model, peer = contexts, bench.model, bench.peer
    tokens = torch.randint(bench.config.vocab_size, (batch, count), generator=torch.Generator().manual_seed(0))
    cache = None if path == THEIRS else bench.paged_cache(batch, count)

    def run() -> Tensor:
        if path == THEIRS:
            # A new cache each time, as in generate(): only of an empty one does it know that no mask is needed.
            state = their_state(bench, StaticCache(config=peer.config, max_cache_len=count), batch, count)
            return their_steps(peer, peer, tokens.to(bench.device), state)()
        (prompt,) = tokens.tolist()
        if not path.startswith(PIECES):
            return prefill(model, [prompt], cache)
        size, tables = int(path.removeprefix(PIECES)), cache.block_tables.cpu()
        for start in range(0, count, size):
            piece = prompt[start : start + size]
            hidden, last = extend(model, [piece], [start], tables, cache.layers, chunk_tokens=size)
        return model.logits(hidden[last])

    run()
    gc.collect()
    if bench.on_gpu:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
    start = time.perf_counter()
    logits = run().to("cpu", torch.float32)
    milliseconds, peak = (time.perf_counter() - start) * 1e3, None
    if bench.on_gpu:
        own = count * sum(bench.split) * DTYPE.itemsize * bench.config.num_layers if path == THEIRS else 0
        peak = (torch.cuda.max_memory_allocated() - before - own) / 2**30
    yield milliseconds, logits, peak


def check(bench: Bench) -> None:
    batch, length = 2, 64
    tokens = torch.randint(bench.config.vocab_size, (batch, length + 1), generator=torch.Generator().manual_seed(1))
    cache = bench.paged_cache(batch, length + 1)
    static = StaticCache(config=bench.peer.config, max_cache_len=length + 1)
    prefill(bench.model, tokens[:, :-1].tolist(), cache)
    tokens = tokens.to(bench.device)
    ours = bench.model.decode(tokens[:, -1], cache.seq_lens + 1, cache.block_tables, cache.layers)
    for part, end in ((tokens[:, :-1], length), (tokens[:, -1:], length + 1)):
        theirs = their_steps(bench.peer, bench.peer, part, their_state(bench, static, batch, end))()
    error = relative_error(ours, theirs)
    print(f"logits of a token decoded after {batch} x {length}: {error:.1e} from transformers', bound {CHECK_BOUND}")
    assert error <= CHECK_BOUND, "the two models do not compute the same"


def print_tables(bench: Bench) -> None:
    options, paths = bench.options, bench.options.paths
    decoded = {(row.path, row.batch, row.context): row for row in bench.rows if row.kind == "decode"}
    prefilled = [row for row in bench.rows if row.kind == "prefill"]
    head = "".join(f"{f'{path}, ms':>18}{'tokens/s':>9}" for path in paths)
    print(f"\n{'decode':18}{head}{'theirs / ours':>15}")
    for batch in options.batch_sizes:
        for context in options.contexts:
            rows = [decoded[path, batch, context] for path in paths]
            ours, theirs = rows[0].milliseconds, rows[-1].milliseconds
            ratio = f"{theirs / ours:15.2f}" if ours and theirs and paths[0] != THEIRS == paths[-1] else ""
            print(f"{f'B {batch}, S {context}':18}" + "".join(map(cells, rows)) + ratio)
    if prefilled:
        print(f"\n{f'prefill {options.prompt_tokens}':18}{'ms':>18}{'tokens/s':>9}{'peak GiB':>10}")
    for row in prefilled:
        print(f"{row.path:18}{cells(row)}" + ("" if row.peak_gib is None else f"{row.peak_gib:10.2f}"))
    if failed := [row for row in bench.rows if row.failure not in ("", "out of memory")]:
        print("\nwithout a figure:", *failed, sep="\n  ")


def cells(row: Row) -> str:
    if row.failure:
        return f"{row.failure if len(row.failure) < 20 else 'failed':>27}"
    return f"{row.milliseconds:18.2f}{row.tokens_per_second:9.0f}"


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="v2-lite")
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[64, 8, 1])
    parser.add_argument("--contexts", type=int, nargs="+", default=[8192, 1024, 32768], help="tokens in the cache")
    parser.add_argument("--paths", nargs="+", choices=PATHS, default=PATHS, help="that decode; default: all")
    parser.add_argument("--prompt-tokens", type=int, default=32768, help="of the prefill; 0: none is measured")
    parser.add_argument("--chunk-tokens", type=int, nargs="+", default=[8192, 2048], help="pieces of a chunked prefill")
    parser.add_argument("--steps", type=int, default=20, help="timed decode steps of a case")
    parser.add_argument("--time-limit", type=float, default=float("inf"), help="seconds after which no case is started")
    parser.add_argument("--csv", help="also write every figure to this file, as it comes")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, help="default: on a GPU")
    options = parser.parse_args(argv)
    for name in ("batch_sizes", "contexts", "chunk_tokens", "steps"):
        if min([getattr(options, name)] if name == "steps" else getattr(options, name)) < 1:
            parser.error(f"--{name.replace('_', '-')} must be at least 1, got {getattr(options, name)}")
    longest = max(*options.contexts, options.prompt_tokens) + WARMUP + options.steps
    if options.prompt_tokens < 0 or longest > POSITIONS:
        parser.error(f"--prompt-tokens, and --contexts with their steps, must be within 0 and {POSITIONS} positions")
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda needs an NVIDIA GPU; --device cpu is for trying the script")
    options.compile = options.device == "cuda" if options.compile is None else options.compile
    options.paths = [path for path in PATHS if path in options.paths]
    return options


@torch.no_grad()
def main(argv: list[str] | None = None) -> int:
    options = parse_arguments(argv)
    bench = Bench(options)
    gib = sum(parameter.nbytes for parameter in bench.peer.parameters()) / 2**30
    where = torch.cuda.get_device_name() if bench.on_gpu else "CPU"
    print(
        f"{where}, torch {torch.__version__}, transformers {transformers.__version__}, {options.shape}: {gib:.1f} GiB"
    )
    check(bench)
    first, *others = options.contexts
    ours, theirs = [path for path in options.paths if path != THEIRS], THEIRS in options.paths
    for index, batch in enumerate(options.batch_sizes):
        for path in ours:
            bench.run("decode", path, batch, sorted(options.contexts, reverse=True), decode_ours)
        if theirs:
            bench.run("decode", THEIRS, batch, [first], decode_theirs)
        if index == 0 and options.prompt_tokens:
            for path in ("ours", *(f"{PIECES}{size}" for size in options.chunk_tokens), THEIRS):
                bench.run("prefill", path, 1, [options.prompt_tokens], prefill_once)
    for batch in options.batch_sizes:
        for context in others if theirs else ():
            bench.run("decode", THEIRS, batch, [context], decode_theirs)
    print_tables(bench)
    compared = [row for row in bench.rows if row.difference is not None]
    beyond = [row for row in compared if not row.difference <= BOUNDS.get(row.path, BOUNDS["ours bf16"])]
    for row in beyond:
        print(f"logits are {row.difference:.1e} from transformers': {row}")
    return 1 if beyond else 0


if __name__ == "__main__":
    sys.exit(main())
