"""Bits per byte on held-out text: what transformers gets, and what every path here gets from the same weights.

    python examples/quality.py
    python examples/quality.py --device cuda --model DIR --text FILE --tokens 4000 --only "decode, 64"

Teacher-forced: every token but the first is predicted from the text's own tokens before it in its piece. The text is
cut into pieces for one request at a time, or for 64 at once, and transformers gets the same pieces. The status is 1 if
a figure is further from that of transformers than its bound. Bounds are for the whole sample: in bf16 a near tie
between two experts may go either way, and the token's prediction with it, which a mean over few tokens shows.
"""

import argparse
import math
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM
from transformers.utils import logging

from checkpoint import load_model
from chunked_prefill import extend
from deepseek import DeepSeek
from generation import prefill
from paged_cache import FP8, PagedCache

MODEL = Path(__file__).parent / "checkpoints" / "kjv"
LONGEST, PAGE_SIZE = 1024, 64  # tokens of a piece, of a page
PIECE, CHUNK = 96, 1000  # of chunked prefill: new tokens of a request at a time, context tokens of all at a time
REQUESTS = 64
# Of the text, at most so many tokens are decoded by one request at a time, a step for each, and by 64 together.
DECODED = {"cpu": {1: 1024, REQUESTS: 8192}, "cuda": {1: 4096, REQUESTS: 10**9}}
HEADER = f"{'':<52} {'bits/byte':>9} {'perplexity':>10} {'transformers':>14} {'its fp32':>10} {'seconds':>8}"
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
# The share of transformers' bits per byte that a figure may differ by. fp32 runs are of the same sums in another order.
BOUNDS = {"fp32": 1e-4, "bf16": 1e-3, "fp8": 1e-2, "fp8 and query": 1e-2}


class Run(NamedTuple):
    path: str  # prefill, chunked or decode
    requests: int
    cache: str  # a key of BOUNDS; weights are fp32 if it is, else bf16
    mode: str = "eager"  # or compiled or captured, of a decode

    @property
    def name(self) -> str:
        mode = f", {self.mode}" * (self.path == "decode")
        return f"{self.path}, {self.requests} request(s), cache {self.cache}{mode}"


class Row(NamedTuple):
    name: str
    bits: float  # per byte
    perplexity: float  # per token
    seconds: float
    difference: float | None = None  # from transformers in the same dtype, as a share
    from_fp32: float | None = None  # from transformers in fp32
    bound: float | None = None

    @property
    def passes(self) -> bool:
        return self.bound is None or abs(self.difference) <= self.bound  # NaN is beyond every bound


class Text(NamedTuple):
    tokens: list[int]
    ends: list[int]  # the byte after each token

    def first(self, count: int) -> "Text":
        """Up to the first `count` tokens after the one that nothing predicts."""
        return Text(self.tokens[: count + 1], self.ends[: count + 1])


def read_text(path: Path, tokenizer: Tokenizer) -> Text:
    text = path.read_text()
    encoding = tokenizer.encode(text, add_special_tokens=False)
    sizes = torch.tensor([0, *(len(character.encode()) for character in text)]).cumsum(0)
    return Text(encoding.ids, sizes[[end for _, end in encoding.offsets]].tolist())


def runs(device: torch.device) -> list[Run]:
    modes = ("eager", "compiled", "captured") if device.type == "cuda" else ("eager", "compiled")
    both = (1, REQUESTS)
    prefills = [Run(path, n, c) for path in ("prefill", "chunked") for n in both for c in ("fp32", "bf16", "fp8")]
    decodes = [Run("decode", n, c, mode) for n in both for c in list(BOUNDS)[1:] for mode in modes]
    return [*prefills, *(Run("decode", n, "fp32") for n in both), *decodes]


def batches(tokens: list[int], requests: int) -> list[list[list[int]]]:
    """Batches of pieces, which overlap by one token: predicted at the end of one, given at the start of the next."""
    scored = len(tokens) - 1
    size = min(LONGEST, -(-scored // requests))
    pieces = [tokens[start : start + size + 1] for start in range(0, scored, size)]
    return [pieces[start : start + requests] for start in range(0, len(pieces), requests)]


def nats(logits: Tensor, targets: list[int]) -> Tensor:
    """Of all targets together: logits [T, vocab] -> [] float64."""
    losses = F.cross_entropy(logits.float(), torch.tensor(targets, device=logits.device), reduction="none")
    return losses.double().sum()


def score_transformers(model, batch: list[list[int]]) -> Tensor:
    return sum(nats(model(torch.tensor([p[:-1]], device=model.device)).logits[0], p[1:]) for p in batch)


def score(model: DeepSeek, batch: list[list[int]], run: Run) -> Tensor:
    device, config = model.embed_tokens.weight.device, model.config
    dtype = DTYPES.get(run.cache, FP8)
    # Of one size for all batches, so that a compiled step serves them all.
    capacities = [min(LONGEST, len(batch[0]) - 1)] * len(batch)
    dim = config.attention.cache_dim
    cache = PagedCache(config.num_layers, capacities, PAGE_SIZE, dim, dtype=dtype, device=device)
    if dtype == FP8:
        calibrate(model, cache)
    inputs, targets = [piece[:-1] for piece in batch], [piece[1:] for piece in batch]
    if run.path == "prefill":
        return nats(prefill(model, inputs, cache, every_token=True), sum(targets, []))
    return (chunked if run.path == "chunked" else decode)(model, inputs, targets, cache, run)


def calibrate(model: DeepSeek, cache: PagedCache) -> None:
    """FP8 scales from tokens drawn at random, as in the engine: the text is not seen before its time."""
    device, count = cache.block_tables.device, 256
    tokens = torch.randint(model.config.vocab_size, (count,), generator=torch.Generator().manual_seed(0)).to(device)
    nowhere, cum_seq_lens = torch.full((count,), -1, device=device), torch.tensor([0, count], device=device).int()
    model.prefill(tokens, torch.arange(count, device=device), nowhere, cum_seq_lens, count, cache.layers)


def chunked(model: DeepSeek, inputs: list, targets: list, cache: PagedCache, run: Run) -> Tensor:
    total, tables = 0, cache.block_tables.cpu()
    for start in range(0, len(inputs[0]), PIECE):
        rows = [row for row, tokens in enumerate(inputs) if len(tokens) > start]
        pieces = [inputs[row][start : start + PIECE] for row in rows]
        hidden, _ = extend(model, pieces, [start] * len(rows), tables[rows], cache.layers, chunk_tokens=CHUNK)
        total += nats(model.logits(hidden), [token for row in rows for token in targets[row][start : start + PIECE]])
    return total


def decode(model: DeepSeek, inputs: list, targets: list, cache: PagedCache, run: Run) -> Tensor:
    """One step a token. Rows whose piece has ended are empty: length 0."""
    device = cache.block_tables.device
    lengths = torch.tensor([len(tokens) for tokens in inputs], device=device)
    inputs, targets = (pad_sequence([torch.tensor(row) for row in rows]).to(device) for rows in (inputs, targets))
    tokens, total = torch.zeros_like(inputs[0]), 0  # inputs and targets are [S, B]
    step = torch.compile(model.decode, fullgraph=True) if run.mode == "compiled" else model.decode
    arguments = tokens, cache.seq_lens, cache.block_tables, cache.layers, run.cache == "fp8 and query"
    forward = captured(step, arguments) if run.mode == "captured" else lambda: step(*arguments)
    for index, (given, expected) in enumerate(zip(inputs, targets)):
        tokens.copy_(given)
        live = lengths > index
        cache.seq_lens.copy_(live * (index + 1))
        losses = F.cross_entropy(forward(), expected, reduction="none")
        total += torch.where(live, losses, 0).double().sum()
    return total


def captured(step: Callable[..., Tensor], arguments: tuple) -> Callable[[], Tensor]:
    """The step in a CUDA graph. All rows are empty until the first replay, so that no call before it stores a thing."""
    step(*arguments)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        logits = step(*arguments)

    def replay() -> Tensor:
        graph.replay()
        return logits

    return replay


@torch.inference_mode()
def measure(name: str, text: Text, requests: int, score_batch: Callable[[list], Tensor]) -> Row:
    start = time.perf_counter()
    total = float(sum(score_batch(batch) for batch in batches(text.tokens, requests)))
    bits = total / math.log(2) / (text.ends[-1] - text.ends[0])
    return Row(name, bits, math.exp(total / (len(text.tokens) - 1)), time.perf_counter() - start)


def evaluate(folder: Path, text: Text, device: torch.device, chosen: list[Run], report=lambda row: None) -> list[Row]:
    """A row for each run, after one for each way to run transformers that a run is compared with."""
    references, rows = {}, []
    ours = {name: load_model(folder, dtype=dtype, device=device) for name, dtype in DTYPES.items()}
    theirs = {
        name: AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).to(device).eval()
        for name, dtype in DTYPES.items()
    }

    def keep(row: Row) -> Row:
        rows.append(row)
        report(row)
        return row

    for run in chosen:
        weights = "fp32" if run.cache == "fp32" else "bf16"
        part = text.first(DECODED[device.type][run.requests]) if run.path == "decode" else text
        shape = run.requests, len(part.tokens) - 1
        if shape not in references:
            name = f"transformers, {shape[0]} request(s), {{}}, {shape[1]:,} tokens"
            wide, narrow = (
                measure(name.format(dtype), part, shape[0], lambda batch: score_transformers(theirs[dtype], batch))
                for dtype in ("fp32", "bf16")
            )
            narrow = narrow._replace(from_fp32=narrow.bits / wide.bits - 1)
            references[shape] = {"fp32": keep(wide), "bf16": keep(narrow)}
        if run.mode == "compiled":
            torch._dynamo.reset()
        row = measure(run.name, part, run.requests, lambda batch: score(ours[weights], batch, run))
        against = [row.bits / references[shape][dtype].bits - 1 for dtype in (weights, "fp32")]
        keep(row._replace(difference=against[0], from_fp32=against[1], bound=BOUNDS[run.cache]))
    return rows


def line(row: Row) -> str:
    percents = ["" if share is None else f"{share:+.4%}" for share in (row.difference, row.from_fp32)]
    verdict = "" if row.passes else f"  beyond {row.bound:.2%}"
    figures = f"{row.bits:9.5f} {row.perplexity:10.4f} {percents[0]:>14} {percents[1]:>10} {row.seconds:8.1f}"
    return f"{row.name:<52} {figures}{verdict}"


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="quality.py", description=__doc__.split("\n")[0])
    parser.add_argument("--model", type=Path, default=MODEL, metavar="DIR", help="Hugging Face folder")
    parser.add_argument("--text", type=Path, metavar="FILE", help="UTF-8 (default: heldout.txt in the folder)")
    parser.add_argument("--tokens", type=int, help="only so many (default: all)")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--only", default="", metavar="WORDS", help="only paths whose name holds them (default: all)")
    arguments = parser.parse_args(argv)
    device = torch.device(arguments.device)
    chosen = [run for run in runs(device) if arguments.only in run.name]
    if not chosen:
        parser.error(f"argument --only: no path has a name with {arguments.only!r}")
    logging.disable_progress_bar()
    tokenizer = Tokenizer.from_file(str(arguments.model / "tokenizer.json"))
    text = read_text(arguments.text or arguments.model / "heldout.txt", tokenizer)
    text = text.first(arguments.tokens or len(text.tokens))
    print(HEADER, flush=True)
    rows = evaluate(arguments.model, text, device, chosen, lambda row: print(line(row), flush=True))
    beyond = [row for row in rows if not row.passes]
    print(f"{len(beyond)} figure(s) beyond their bounds" if beyond else "all figures are within their bounds")
    return 1 if beyond else 0


if __name__ == "__main__":
    sys.exit(main())
