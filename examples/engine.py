"""A serving engine over the paged cache: continuous batching, prefill in pieces, decode in CUDA graphs.

A step decodes all requests that lack one token in the cache, then prefills those that lack more, oldest first, up to a
budget of tokens. If pages run out, the youngest running request gives up its own and waits; its tokens are kept, and
prefilling them again later continues its output where it stopped. A request's output does not depend on what else runs:
token i is sampled with a number drawn from (seed, i) alone. (Within rounding: sums of another batch size may be taken
in another order, which in 16 bits may turn a near tie.) `python examples/generate.py --engine` runs it.
"""

from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor
from tqdm import tqdm

import ts_ops
from chunked_prefill import extend
from decoder import Decoder
from deepseek import DeepSeek
from paged_cache import FP8, PageAllocator, allocate_layers
from speculative import PromptLookup, sample, uniform
from ts_ops.cache import TABLE_TOKENS

OPERATORS = (
    "mla_decode", "mla_prefill", "mla_prefill_lse", "merge_attn_states", "mla_kv_cache_write", "mla_kv_cache_gather",
)  # fmt: skip


class Refused(ValueError):
    """The engine cannot serve this request; the message says which argument is wrong and what is needed."""


@dataclass(frozen=True, kw_only=True)
class EngineSettings:
    num_pages: int  # of each layer's cache, the null page included
    page_size: int = 64
    kv_dtype: torch.dtype | None = None  # None: the model's
    fp8_query: bool = False
    batch_sizes: tuple[int, ...] = (1, 2, 4, 8, 16, 32)  # decode pads its batch to one of these
    prefill_tokens: int = 2048  # of all requests in one step
    chunk_tokens: int = 4096  # of context, expanded at once
    draft_tokens: int = 0  # per request and decode call, see speculative.py
    compile: bool = False
    cuda_graphs: bool = True  # on a GPU
    progress: bool = False  # of warming up

    def __post_init__(self):
        lowest = {"num_pages": 2, "prefill_tokens": 1, "chunk_tokens": 1, "draft_tokens": 0}
        for name, least in lowest.items():
            if getattr(self, name) < least:
                raise ValueError(f"{name} must be at least {least}, got {getattr(self, name)}")
        if min(self.batch_sizes, default=0) < 1:
            raise ValueError(f"batch_sizes must be one or more sizes of at least 1, got {self.batch_sizes}")


@dataclass(frozen=True, kw_only=True)
class Sampling:
    max_new_tokens: int = 64
    temperature: float = 0.0  # 0: the likeliest token
    top_p: float = 1.0  # sample from the likeliest tokens that together have this probability
    seed: int = 0
    stop_token_ids: tuple[int, ...] = ()  # beside the model's end-of-sequence tokens


@dataclass(eq=False)
class Request:
    """What `submit` returns: `generated` grows while the engine runs, until `finish_reason` is "stop" or "length"."""

    id: int
    sampling: Sampling
    prompt_tokens: int
    tokens: list[int]  # the prompt, then what was generated
    table: Tensor  # [max_pages] int32 on the CPU
    finish_reason: str | None = None
    cached: int = 0  # tokens in the cache
    pages: list[int] = field(default_factory=list)
    lookup: PromptLookup = field(default_factory=PromptLookup)

    @property
    def generated(self) -> list[int]:
        return self.tokens[self.prompt_tokens :]

    @property
    def missing(self) -> int:
        return len(self.tokens) - self.cached

    @property
    def most_tokens(self) -> int:
        return self.prompt_tokens + self.sampling.max_new_tokens


class Engine:
    def __init__(self, model: DeepSeek, settings: EngineSettings):
        self.model, self.settings, self.config = model, settings, model.config
        weight, attention = model.embed_tokens.weight, model.config.attention
        dtype = settings.kv_dtype or weight.dtype
        self.pages = PageAllocator(settings.num_pages)
        self.capacity = min((settings.num_pages - 1) * settings.page_size, self.config.max_position_embeddings)
        table_tokens = -(-(self.capacity + settings.draft_tokens) // TABLE_TOKENS) * TABLE_TOKENS
        self._table_width = table_tokens // settings.page_size
        self.caches = allocate_layers(
            self.config.num_layers, settings.num_pages, settings.page_size, attention.cache_dim, dtype=dtype,
            device=weight.device,
        )  # fmt: skip
        self.waiting: deque[Request] = deque()  # both oldest first
        self.running: list[Request] = []
        self.counts = Counter()  # of steps, tokens, drafts and preemptions
        self._submitted = 0
        self.decoder = Decoder(
            model, self.caches, self._table_width, batch_sizes=settings.batch_sizes,
            q_lens={1, 1 + settings.draft_tokens}, fp8_query=settings.fp8_query, compile=settings.compile,
        )  # fmt: skip
        if weight.is_cuda:
            narrow = torch.bfloat16 if weight.dtype == torch.float32 else weight.dtype
            ts_ops.warmup(
                attention.num_heads, max_seq_len=table_tokens, batch_sizes=self.decoder.batch_sizes,
                q_lens=self.decoder.q_lens, page_size=settings.page_size, dtype=weight.dtype, cache_dtype=dtype,
                query_dtype=dtype if dtype != FP8 or settings.fp8_query else narrow,
                kv_lora_rank=attention.kv_lora_rank, rope_dim=attention.rope.dim,
                nope_dim=attention.qk_nope_head_dim, value_dim=attention.v_head_dim, operators=OPERATORS,
                device=weight.device, progress=settings.progress,
            )  # fmt: skip
        with torch.inference_mode():
            if dtype == FP8:
                self._calibrate()
            if weight.is_cuda and settings.cuda_graphs:
                with torch.cuda.device(weight.device):
                    self.decoder.capture(settings.progress)

    def submit(self, prompt: list[int], sampling: Sampling) -> Request:
        """Queue a request; Refused, with nothing changed, if it can never be served."""
        self._check(prompt, sampling)
        table = torch.zeros(self._table_width, dtype=torch.int32)
        request = Request(self._submitted, sampling, len(prompt), list(prompt), table)
        self._submitted += 1
        self.waiting.append(request)
        return request

    def generate(self, prompts: list[list[int]], sampling: Sampling, progress: bool = False) -> list[list[int]]:
        requests = [self.submit(prompt, sampling) for prompt in prompts]
        for _ in self.stream(progress):
            pass
        return [request.generated for request in requests]

    def stream(self, progress: bool = False) -> Iterator[tuple[int, int]]:
        """(request id, token) as they come, until no request is left; more may be submitted meanwhile."""
        with tqdm(desc="generating", unit="token", disable=not progress) as bar:
            while self.waiting or self.running:
                for event in self.step():
                    bar.update()
                    yield event

    @torch.inference_mode()
    def step(self) -> list[tuple[int, int]]:
        """One decode call and one prefill -> the new tokens of each request, (request id, token)."""
        self.counts["steps"] += 1
        self._grow()
        events = self._decode([request for request in self.running if request.missing == 1])
        self._admit()
        return events + self._prefill()

    def _check(self, prompt: list[int], sampling: Sampling) -> None:
        vocab, most = self.config.vocab_size, self.config.max_position_embeddings
        if not prompt:
            raise Refused("prompt is empty; it must have at least one token")
        for name, tokens in (("prompt", prompt), ("stop_token_ids", sampling.stop_token_ids)):
            for token in tokens:
                if not isinstance(token, int) or not 0 <= token < vocab:
                    raise Refused(f"{name} has the id {token}, outside the vocabulary [0, {vocab})")
        if sampling.max_new_tokens < 1:
            raise Refused(f"max_new_tokens must be at least 1, got {sampling.max_new_tokens}")
        if not 0 <= sampling.temperature < float("inf"):
            raise Refused(f"temperature must be at least 0, got {sampling.temperature}")
        if not 0 < sampling.top_p <= 1:
            raise Refused(f"top_p must be above 0 and at most 1, got {sampling.top_p}")
        total, page_size = len(prompt) + sampling.max_new_tokens, self.settings.page_size
        request = f"prompt has {len(prompt)} tokens, which with {sampling.max_new_tokens} new ones"
        if total > most:
            raise Refused(f"{request} exceeds the model's {most} positions")
        if total > self.capacity:
            needed, there = self._pages_for(total), self.settings.num_pages - 1
            raise Refused(f"{request} needs {needed} pages of {page_size} tokens; there are {there}: raise num_pages")

    def _pages_for(self, tokens: int) -> int:
        return -(-tokens // self.settings.page_size)

    def _grow(self) -> None:
        """Pages for the tokens to be decoded, oldest request first; the youngest gives up its own if none are left."""
        for request in list(self.running):
            if request.missing > 1:  # a prefill, which got its pages when it was admitted
                continue
            # Drafts past a request's last token are not stored.
            wanted = self._pages_for(min(len(request.tokens) + self.settings.draft_tokens, request.most_tokens))
            while request in self.running and wanted - len(request.pages) > self.pages.free:
                self._preempt(self.running[-1])
            if request in self.running:
                self._give_pages(request, wanted)

    def _give_pages(self, request: Request, total: int) -> None:
        request.pages += self.pages.take(max(0, total - len(request.pages)))
        request.table[: len(request.pages)] = torch.tensor(request.pages, dtype=torch.int32)

    def _release(self, request: Request) -> None:
        self.running.remove(request)
        self.pages.give(request.pages)
        request.pages, request.cached = [], 0
        request.table.zero_()

    def _preempt(self, request: Request) -> None:
        self.counts["preemptions"] += 1
        self._release(request)
        self.waiting.appendleft(request)  # older than all that wait: requests are admitted in order

    def _admit(self) -> None:
        while self.waiting and len(self.running) < self.decoder.batch_sizes[-1]:
            request = self.waiting[0]
            wanted = self._pages_for(len(request.tokens))
            # Beyond its own, a page for each that then runs: else the next step might preempt what this one prefills.
            spare = len(self.running) + 1 if self.running else 0
            if wanted + spare > self.pages.free:
                return
            self.waiting.popleft()
            self.running.append(request)
            self._give_pages(request, wanted)

    def _prefill(self) -> list[tuple[int, int]]:
        budget, requests, pieces = self.settings.prefill_tokens, [], []
        for request in self.running:
            # The last token alone, if no more is missing, is for the next decode.
            if budget and request.missing > 1:
                pieces.append(request.tokens[request.cached : request.cached + budget])
                requests.append(request)
                budget -= len(pieces[-1])
        if not requests:
            return []
        tables = torch.stack([request.table for request in requests])
        hidden, last = extend(
            self.model, pieces, [request.cached for request in requests], tables, self.caches,
            chunk_tokens=self.settings.chunk_tokens,
        )  # fmt: skip
        for request, piece in zip(requests, pieces):
            request.cached += len(piece)
            self.counts["prefill_tokens"] += len(piece)
        done = [index for index, request in enumerate(requests) if not request.missing]
        if not done:
            return []
        requests = [requests[index] for index in done]
        rows = self._sample(requests, self.model.logits(hidden[last[done]]).unsqueeze(1))
        return [event for request, row in zip(requests, rows) for event in self._accept(request, [], row)]

    def _decode(self, requests: list[Request]) -> list[tuple[int, int]]:
        if not requests:
            return []
        most = self.settings.draft_tokens
        drafts = [request.lookup.propose(request.tokens, most) if most else [] for request in requests]
        q_len = 1 + most if any(drafts) else 1
        # Each request has q_len rows; those past its draft are scored and ignored, and overwritten by the next call.
        rows = [[request.tokens[-1], *draft, *[0] * most][:q_len] for request, draft in zip(requests, drafts)]
        seq_lens = torch.tensor([len(request.tokens) + q_len - 1 for request in requests], dtype=torch.int32)
        logits = self.decoder(torch.tensor(rows), seq_lens, torch.stack([request.table for request in requests]))
        sampled = self._sample(requests, logits)
        self.counts["decode_calls"] += 1
        events = []
        for request, draft, row in zip(requests, drafts, sampled):
            new = self._accept(request, draft, row)
            self.counts["drafted"] += len(draft)
            self.counts["accepted"] += len(new) - 1
            self.counts["decode_tokens"] += len(new)
            events += new
        return events

    def _accept(self, request: Request, draft: list[int], sampled: list[int]) -> list[tuple[int, int]]:
        """Append sampled tokens as long as the draft, which each next one saw, is what was sampled."""
        events = []
        for index, token in enumerate(sampled[: len(draft) + 1]):
            request.tokens.append(token)
            events.append((request.id, token))
            if token in self.config.eos_token_ids or token in request.sampling.stop_token_ids:
                request.finish_reason = "stop"
            elif len(request.tokens) == request.most_tokens:
                request.finish_reason = "length"
            if request.finish_reason:
                self._release(request)
                return events
            if index < len(draft) and draft[index] != token:
                break
        request.cached = len(request.tokens) - 1
        return events

    def _sample(self, requests: list[Request], logits: Tensor) -> list[list[int]]:
        """Logits [B, q_len, vocab] -> tokens of each request and row."""
        counts = [len(request.tokens) - request.prompt_tokens for request in requests]
        options = [
            (request.sampling.temperature, request.sampling.top_p, uniform(request.sampling.seed, count + row))
            for request, count in zip(requests, counts)
            for row in range(logits.shape[1])
        ]
        return sample(logits.flatten(0, 1), options).view(logits.shape[:2]).tolist()

    def _calibrate(self) -> None:
        """Set the FP8 scales from tokens that are always the same: those of a request would bind all later ones."""
        device = self.caches[0].pages.device
        length = min(256, self.config.max_position_embeddings)
        tokens = torch.randint(self.config.vocab_size, (length,), generator=torch.Generator().manual_seed(0))
        slots = torch.full((length,), -1, device=device)  # nothing is stored
        cum_seq_lens = torch.tensor([0, length], dtype=torch.int32, device=device)
        positions = torch.arange(length, device=device)
        self.model.prefill(tokens.to(device), positions, slots, cum_seq_lens, length, self.caches)
