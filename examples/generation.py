"""Generation for a ragged batch: one prefill of all prompts, then compiled decode steps of one token a sequence."""

import time
from dataclasses import dataclass

import torch
from torch import Tensor
from tqdm import tqdm

from deepseek import DeepSeek
from paged_cache import PagedCache, slots_of


@dataclass(frozen=True, kw_only=True)
class Settings:
    max_new_tokens: int
    page_size: int = 64
    kv_dtype: torch.dtype | None = None  # None: the model's
    fp8_query: bool = False  # over an FP8 cache: pack the query too, instead of keeping it 16 bits wide
    compile: bool = True
    temperature: float = 0.0  # 0: the likeliest token
    seed: int = 0
    progress: bool = False


@dataclass(frozen=True, kw_only=True)
class Generation:
    tokens: list[list[int]]  # new tokens of each prompt, the end-of-sequence token included if it came
    prefill_seconds: float
    first_step_seconds: float  # the first decode step, which compiles
    later_steps_seconds: float
    steps: int  # decode steps, the first included


@torch.inference_mode()
def generate(model: DeepSeek, prompts: list[list[int]], settings: Settings) -> Generation:
    weight = model.embed_tokens.weight
    device = weight.device
    cache = PagedCache(
        model.config.num_layers,
        [len(prompt) + settings.max_new_tokens for prompt in prompts],
        settings.page_size,
        model.config.attention.cache_dim,
        dtype=settings.kv_dtype or weight.dtype,
        device=device,
    )
    sample = _sampler(settings, device)
    decode = torch.compile(model.decode, fullgraph=True) if settings.compile else model.decode
    ends = torch.tensor(model.config.eos_token_ids, dtype=torch.int64, device=device)

    clock = _Clock(device)
    tokens = sample(prefill(model, prompts, cache))
    prefill_seconds = clock.lap()

    finished = torch.isin(tokens, ends)
    generated, first_step_seconds, later_steps_seconds = [tokens], 0.0, 0.0
    steps = range(1, settings.max_new_tokens)
    for step in tqdm(steps, desc="decoding", unit="step", disable=not settings.progress):
        # Asking whether all are finished waits for the device, so it is asked only where a sequence can end.
        if len(ends) and finished.all():
            break
        cache.seq_lens += 1
        logits = decode(tokens, cache.seq_lens, cache.block_tables, cache.layers, settings.fp8_query)
        tokens = sample(logits)
        finished |= torch.isin(tokens, ends)
        generated.append(tokens)
        if step == 1:
            first_step_seconds = clock.lap()
    if len(generated) > 2:
        later_steps_seconds = clock.lap()

    return Generation(
        tokens=[_until_end(row, model.config.eos_token_ids) for row in torch.stack(generated, dim=1).tolist()],
        prefill_seconds=prefill_seconds,
        first_step_seconds=first_step_seconds,
        later_steps_seconds=later_steps_seconds,
        steps=len(generated) - 1,
    )


def prefill(model: DeepSeek, prompts: list[list[int]], cache: PagedCache, *, every_token: bool = False) -> Tensor:
    """Fill an empty cache with the prompts -> logits after the last token of each, [B, vocab], or all, [T, vocab]."""
    device = cache.block_tables.device
    lengths = [len(prompt) for prompt in prompts]
    tokens = torch.tensor([token for prompt in prompts for token in prompt], device=device)
    positions = torch.tensor([position for length in lengths for position in range(length)], device=device)
    owners = torch.tensor([index for index, length in enumerate(lengths) for _ in range(length)], device=device)
    cum_seq_lens = torch.tensor([0, *lengths], device=device).cumsum(0).to(torch.int32)
    slots = slots_of(cache.block_tables[owners], positions.unsqueeze(1), cache.page_size).squeeze(1)
    hidden = model.prefill(tokens, positions, slots, cum_seq_lens, max(lengths), cache.layers)
    cache.seq_lens.copy_(cum_seq_lens.diff())
    return model.logits(hidden if every_token else hidden[cum_seq_lens[1:] - 1])


def _sampler(settings: Settings, device: torch.device):
    """Logits [B, vocab] -> tokens [B] int64."""
    if settings.temperature == 0:
        return lambda logits: logits.argmax(dim=-1)
    generator = torch.Generator(device).manual_seed(settings.seed)

    def sample(logits: Tensor) -> Tensor:
        probabilities = (logits / settings.temperature).softmax(dim=-1)
        return torch.multinomial(probabilities, 1, generator=generator).squeeze(1)

    return sample


def _until_end(tokens: list[int], ends: tuple[int, ...]) -> list[int]:
    stop = next((index for index, token in enumerate(tokens) if token in ends), len(tokens))
    return tokens[: stop + 1]


class _Clock:
    """Seconds between laps, with the device's work finished at each."""

    def __init__(self, device: torch.device):
        self.device = device
        self.start = self._now()

    def lap(self) -> float:
        now = self._now()
        seconds, self.start = now - self.start, now
        return seconds

    def _now(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()
