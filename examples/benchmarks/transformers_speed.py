"""`generate()` of transformers with our operators and without: tokens a second and peak memory, on the same weights.

    python examples/benchmarks/transformers_speed.py [--batch 1 32] [--context 4096 16384] [--rows stock bf16 fp8]
        [--new-tokens 32] [--layers 27] [--time-limit SECONDS] [--device cpu --tiny]

The model has DeepSeek-V2-Lite's shape and random bf16 weights. stock: transformers' own attention over its StaticCache;
bf16 and fp8: ours over a LatentCache of that dtype, fp8 with FP8 queries. On a GPU `generate` compiles decode steps,
with CUDA graphs, in each row, which takes a minute or two; each row gets one cache, emptied before each call, for with
another cache transformers would compile again. After a call with a short prompt, which compiles, the best of two:

- prefill: seconds to the first new token
- decode: milliseconds a step after that, and tokens a second of the batch
- peak: GPU memory of all calls, with the weights and without
"""

import argparse
import gc
import inspect
import time

import torch
from shapes import SHAPES
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel, StaticCache
from transformers.generation import BaseStreamer

from ts_ops.integrations.transformers import prepare

PROMPT, WARMUP = 64, 6  # tokens of the call that compiles; the graph of a step is recorded in the third at the latest
CACHES = {"bf16": torch.bfloat16, "fp8": torch.float8_e4m3fn}


def make_model(options: argparse.Namespace) -> PreTrainedModel:
    shape = SHAPES["tiny" if options.tiny else "v2-lite"]
    config = AutoConfig.for_model(**shape | {"num_hidden_layers": options.layers, "pad_token_id": 0})
    torch.manual_seed(0)
    with torch.device(options.device):
        return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()


class Times(BaseStreamer):
    """When `generate` hands on the prompt, and then each token."""

    def __init__(self):
        self.times = []

    def put(self, value: torch.Tensor) -> None:
        self.times.append(time.perf_counter())

    def end(self) -> None:
        pass


def seconds(model, ids: torch.Tensor, cache, cache_name: str, new_tokens: int) -> tuple[float, float]:
    """To the first new token, and for each after it, of one call of `generate` from an empty cache."""
    cache.reset()
    if ids.is_cuda:
        torch.cuda.synchronize()
    streamer = Times()
    model.generate(ids, max_new_tokens=new_tokens, do_sample=False, streamer=streamer, **{cache_name: cache})
    begin, first, *_, last = streamer.times
    assert len(streamer.times) == 1 + new_tokens
    return first - begin, (last - first) / (new_tokens - 1)


def measure(model, row: str, batch: int, context: int, options: argparse.Namespace) -> str:
    """The columns after the row's name; the model is as before afterwards."""
    prepared = None if row == "stock" else prepare(model, cache_dtype=CACHES[row], fp8_query=row == "fp8")
    name = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
    try:
        length = context + options.new_tokens
        cache = prepared.cache(batch, length) if prepared else StaticCache(config=model.config, max_cache_len=length)
        ids = torch.randint(1, model.config.vocab_size, (batch, context), device=options.device)
        if ids.is_cuda:
            torch.cuda.reset_peak_memory_stats()
        seconds(model, ids[:, :PROMPT], cache, name, min(WARMUP, options.new_tokens))
        prefill, step = map(min, zip(*(seconds(model, ids, cache, name, options.new_tokens) for _ in range(2))))
    finally:
        if prepared:
            prepared.undo()
    memory = "-"
    if ids.is_cuda:
        peak, weights = torch.cuda.max_memory_allocated(), sum(tensor.nbytes for tensor in model.parameters())
        memory = f"{peak / 2**30:.1f} GiB, {(peak - weights) / 2**30:.2f} without weights"
    return f"prefill {prefill:.3f} s, decode {step * 1e3:.2f} ms, {batch / step:.1f} tokens/s, peak {memory}"


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 32])
    parser.add_argument("--context", type=int, nargs="+", default=[4096, 16384], help="tokens of each prompt")
    parser.add_argument("--rows", nargs="+", choices=("stock", *CACHES), default=["stock", *CACHES])
    parser.add_argument("--new-tokens", type=int, default=32, help="at least 2")
    parser.add_argument("--layers", type=int, default=27, help="fewer compile sooner")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true", help="a tiny shape, to prove the path")
    parser.add_argument("--time-limit", type=float, default=float("inf"), help="seconds after which no row is started")
    options = parser.parse_args(argv)
    if options.new_tokens < 2:
        parser.error(f"argument --new-tokens: must be at least 2, got {options.new_tokens}")
    start, model = time.monotonic(), make_model(options)
    for batch, context in ((batch, context) for context in options.context for batch in options.batch):
        for row in options.rows:
            label = f"batch {batch}, context {context}, {row}"
            if time.monotonic() - start > options.time_limit:
                print(f"{label}: not run, after the time limit of {options.time_limit:g} s")
                continue
            try:
                print(f"{label}: {measure(model, row, batch, context, options)}", flush=True)
            except torch.OutOfMemoryError as error:
                print(f"{label}: out of memory ({str(error).splitlines()[0]})", flush=True)
            torch._dynamo.reset()  # and with it the CUDA graphs, which keep memory
            gc.collect()
            if options.device.startswith("cuda"):
                torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
