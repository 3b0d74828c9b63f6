"""The problems that `kernels.py` times: their inputs, our call, the float64 result, the bytes and FLOPs they need."""

from dataclasses import dataclass
from types import SimpleNamespace
from typing import ClassVar

import torch
from peers import BF16, FP8

SCALE = 192**-0.5  # DeepSeek's, of the head dim before absorption: 128 + 64


class Case:
    """One problem of one operator.

    Each kind has a `label` and five methods: `inputs` makes the tensors, `arguments` the call of ours (operator, args,
    kwargs), `sample` picks from a result what `expected` computes in float64, and `work` counts the bytes and FLOPs
    that no implementation can avoid. `tolerance` bounds the relative error of the whole sample.
    """

    operator: ClassVar[str]
    dtypes: ClassVar[tuple[torch.dtype, ...]] = (BF16,)
    tolerance: ClassVar[dict[torch.dtype, float]]


@dataclass(frozen=True)
class Decode(Case):
    """`shortest` > 0: lengths spread evenly in their logarithm from there to `length`. Checked: three requests."""

    batch: int
    length: int
    heads: int
    q_len: int = 1
    shortest: int = 0

    operator = "decode"
    dtypes = (BF16, FP8)
    tolerance = {BF16: 6e-3, FP8: 3e-2}  # some kernels round the softmax weights to e4m3: 2.6 % in the mean square
    page_size = 64

    @property
    def label(self) -> str:
        lengths = f"{self.shortest}-{self.length}" if self.shortest else self.length
        return f"B{self.batch} S{lengths} H{self.heads} q{self.q_len}"

    @property
    def lengths(self) -> list[int]:
        if not self.shortest:
            return [self.length] * self.batch
        spread = torch.rand(self.batch, generator=torch.Generator().manual_seed(0)).tolist()
        return [self.length] + [round(self.shortest * (self.length / self.shortest) ** x) for x in spread[1:]]

    @property
    def checked(self) -> list[int]:
        return sorted({0, self.batch // 2, self.batch - 1})

    def inputs(self, dtype, device):
        pages = -(-self.length // self.page_size)
        cache = torch.randn(self.batch * pages, self.page_size, 576, device=device, dtype=BF16).to(dtype)
        tables = torch.randperm(self.batch * pages, device=device).int().view(self.batch, pages)
        query = torch.randn(self.batch, self.q_len, self.heads, 576, device=device, dtype=BF16).to(dtype)
        lengths = torch.tensor(self.lengths, dtype=torch.int32, device=device)
        return SimpleNamespace(
            query=query, cache=cache, cache_of_peers=cache, tables=tables, lengths=lengths, scale=SCALE
        )

    def arguments(self, inputs):
        return "mla_decode", (inputs.query, inputs.cache, inputs.tables, inputs.lengths, inputs.scale), {}

    def sample(self, inputs, result):
        return result[self.checked]

    def expected(self, inputs):
        outputs = []
        for request in self.checked:
            length = self.lengths[request]
            keys = inputs.cache[inputs.tables[request].long()].flatten(0, 1)[:length].double()
            scores = inputs.query[request].double() @ keys.T * inputs.scale  # [q_len, H, length]
            for row in range(self.q_len - 1):
                scores[row, :, length - (self.q_len - 1) + row :] = -torch.inf
            outputs.append(torch.softmax(scores, dim=-1) @ keys[:, :512])
        return torch.stack(outputs)

    def work(self, inputs):
        tokens = sum(self.lengths)
        pairs = self.q_len * tokens - self.batch * self.q_len * (self.q_len - 1) // 2
        output = self.batch * self.q_len * self.heads * 512 * 2
        size = tokens * 576 * inputs.cache.element_size() + inputs.query.nbytes + output
        return size, 2 * self.heads * pairs * (576 + 512)


@dataclass(frozen=True)
class DecodeOverFP8(Decode):
    """A bf16 query over an FP8 cache. Peers, which have no kernel for it, run over the same numbers in bf16."""

    dtypes = (BF16,)

    @property
    def label(self) -> str:
        return f"{super().label} FP8 cache"

    def inputs(self, dtype, device):
        inputs = super().inputs(dtype, device)
        inputs.cache = inputs.cache.to(FP8)
        inputs.cache_of_peers = inputs.cache.to(dtype)
        return inputs


@dataclass(frozen=True)
class Prefill(Case):
    """Checked: three heads of the first and last sequence, at its start, middle and end."""

    batch: int
    length: int
    causal: bool = True
    heads: int = 128

    operator = "prefill"
    dtypes = (BF16, FP8)
    tolerance = {BF16: 6e-3, FP8: 4e-2}  # as in decode, and some round by blocks with a scale each

    @property
    def label(self) -> str:
        return f"B{self.batch} S{self.length} H{self.heads} {'causal' if self.causal else 'full'}"

    @property
    def checked(self) -> tuple[list[int], list[int], list[int]]:
        """Sequences, rows, heads."""
        few, half = min(32, self.length), self.length // 2
        rows = {*range(few), *range(half, min(half + few, self.length)), *range(self.length - few, self.length)}
        return sorted({0, self.batch - 1}), sorted(rows), sorted({0, self.heads // 2, self.heads - 1})

    def inputs(self, dtype, device):
        tokens = self.batch * self.length
        query, key, value = (
            torch.randn(tokens, self.heads, dim, device=device, dtype=BF16).to(dtype) for dim in (192, 192, 128)
        )
        starts = torch.arange(self.batch + 1, device=device, dtype=torch.int32) * self.length

        def by_sequence():
            return tuple(x.view(self.batch, self.length, self.heads, -1) for x in (query, key, value))

        tensors = {"query": query, "key": key, "value": value, "starts": starts}
        return SimpleNamespace(**tensors, scale=SCALE, by_sequence=by_sequence)

    def arguments(self, inputs):
        tensors = inputs.query, inputs.key, inputs.value, inputs.starts, inputs.starts
        options = {"is_causal": self.causal, "max_seq_len_q": self.length, "max_seq_len_kv": self.length}
        return "mla_prefill", (*tensors, inputs.scale), options

    def sample(self, inputs, result):
        sequences, rows, heads = self.checked
        result = result.reshape(self.batch, self.length, self.heads, 128)
        return result[sequences][:, rows][:, :, heads].transpose(1, 2)

    def expected(self, inputs):
        sequences, rows, heads = self.checked
        query, key, value = (x[sequences][:, :, heads].transpose(1, 2).double() for x in inputs.by_sequence())
        scores = query[:, :, rows] @ key.mT * inputs.scale  # [sequences, heads, rows, length]
        if self.causal:
            position = torch.arange(self.length, device=scores.device)
            scores.masked_fill_(position > position[rows][:, None], -torch.inf)
        return torch.softmax(scores, dim=-1) @ value

    def work(self, inputs):
        pairs = self.batch * self.length * (self.length + 1) // 2 if self.causal else self.batch * self.length**2
        output = self.batch * self.length * self.heads * 128 * 2
        size = inputs.query.nbytes + inputs.key.nbytes + inputs.value.nbytes + output
        return size, 2 * self.heads * pairs * (192 + 128)


def spread(tokens: int) -> slice:
    """At most 512 rows, evenly spread."""
    return slice(None, None, -(-tokens // 512))


@dataclass(frozen=True)
class Merge(Case):
    """Checked: at most 512 tokens, evenly spread."""

    tokens: int
    heads: int = 128

    operator = "merge"
    tolerance = {BF16: 4e-3}

    @property
    def label(self) -> str:
        return f"T{self.tokens} H{self.heads} D128"

    def inputs(self, dtype, device):
        prefix, suffix = (torch.randn(self.tokens, self.heads, 128, device=device, dtype=dtype) for _ in "ps")
        prefix_lse, suffix_lse = (torch.randn(self.tokens, self.heads, device=device) for _ in "ps")
        return SimpleNamespace(prefix=prefix, prefix_lse=prefix_lse, suffix=suffix, suffix_lse=suffix_lse)

    def arguments(self, inputs):
        return "merge_attn_states", (inputs.prefix, inputs.prefix_lse, inputs.suffix, inputs.suffix_lse), {}

    def sample(self, inputs, result):
        return result[0][spread(self.tokens)]

    def expected(self, inputs):
        rows = spread(self.tokens)
        weight = torch.sigmoid(inputs.prefix_lse[rows].double() - inputs.suffix_lse[rows].double())[..., None]
        return weight * inputs.prefix[rows].double() + (1 - weight) * inputs.suffix[rows].double()

    def work(self, inputs):
        return 3 * (inputs.prefix.nbytes + inputs.prefix_lse.nbytes), 0


@dataclass(frozen=True)
class CacheWrite(Case):
    """Fills a cache of `tokens` slots in random order; an FP8 cache with a scale. Its rounding is defined: no error."""

    tokens: int

    operator = "cache"
    dtypes = (BF16, FP8)
    tolerance = {BF16: 0.0, FP8: 0.0}

    @property
    def label(self) -> str:
        return f"write T{self.tokens}"

    def inputs(self, dtype, device):
        latent, rope = (torch.randn(self.tokens, dim, device=device, dtype=BF16) for dim in (512, 64))
        cache = torch.zeros(self.tokens // 64, 64, 576, device=device, dtype=dtype)
        slots = torch.randperm(self.tokens, device=device)
        options = {"k_scale": torch.full((1,), 0.5, device=device)} if dtype == FP8 else {}
        return SimpleNamespace(cache=cache, latent=latent, rope=rope, slots=slots, options=options)

    def arguments(self, inputs):
        return "mla_kv_cache_write", (inputs.cache, inputs.latent, inputs.rope, inputs.slots), inputs.options

    def sample(self, inputs, result):
        return result.flatten(0, 1)[inputs.slots]

    def expected(self, inputs):
        rows = torch.cat((inputs.latent, inputs.rope), dim=-1).float()
        return (rows / inputs.options.get("k_scale", 1.0)).to(inputs.cache.dtype).double()

    def work(self, inputs):
        return inputs.latent.nbytes + inputs.rope.nbytes + inputs.slots.nbytes + inputs.cache.nbytes, 0


@dataclass(frozen=True)
class CacheGather(Case):
    """Equal ranges of `batch` requests; an FP8 cache is dequantised to bf16."""

    batch: int
    length: int

    operator = "cache"
    dtypes = (BF16, FP8)
    tolerance = {BF16: 0.0, FP8: 0.0}

    @property
    def label(self) -> str:
        return f"gather B{self.batch} S{self.length}"

    def inputs(self, dtype, device):
        pages = self.batch * self.length // 64
        cache = torch.randn(pages, 64, 576, device=device, dtype=BF16).to(dtype)
        tables = torch.randperm(pages, device=device).int().view(self.batch, -1)
        starts = torch.arange(self.batch + 1, device=device, dtype=torch.int32) * self.length
        options = {"k_scale": torch.full((1,), 0.5, device=device), "dtype": BF16} if dtype == FP8 else {}
        return SimpleNamespace(cache=cache, tables=tables, starts=starts, options=options)

    def arguments(self, inputs):
        args = inputs.cache, inputs.tables, inputs.starts, self.batch * self.length
        return "mla_kv_cache_gather", args, inputs.options

    def sample(self, inputs, result):
        return result

    def expected(self, inputs):
        rows = inputs.cache[inputs.tables.long().flatten()].flatten(0, 1).double()
        return rows * inputs.options.get("k_scale", 1.0)

    def work(self, inputs):
        return inputs.cache.nbytes + self.batch * self.length * 576 * 2, 0


@dataclass(frozen=True)
class Pack(Case):
    """FP8 keys and values of a prefill. Checked as `Merge` is."""

    tokens: int
    heads: int = 128

    operator = "cache"
    dtypes = (FP8,)
    tolerance = {FP8: 0.0}

    @property
    def label(self) -> str:
        return f"pack T{self.tokens} H{self.heads}"

    def inputs(self, dtype, device):
        nope, value = (torch.randn(self.tokens, self.heads, 128, device=device, dtype=BF16) for _ in "kv")
        return SimpleNamespace(nope=nope, rope=torch.randn(self.tokens, 64, device=device, dtype=BF16), value=value)

    def arguments(self, inputs):
        return "mla_kv_pack_quantize_fp8", (inputs.nope, inputs.rope, inputs.value), {}

    def sample(self, inputs, result):
        rows = spread(self.tokens)
        return torch.cat([x[rows].float() for x in result], dim=-1)

    def expected(self, inputs):
        rows = spread(self.tokens)
        rope = inputs.rope[rows, None].expand(-1, self.heads, -1)
        return torch.cat((inputs.nope[rows], rope, inputs.value[rows]), dim=-1).to(FP8).double()

    def work(self, inputs):
        read = inputs.nope.nbytes + inputs.rope.nbytes + inputs.value.nbytes
        return read + self.tokens * self.heads * (192 + 128), 0


def ragged(heads: int) -> Decode:
    return Decode(64, 32768, heads, shortest=1024)


PRESETS: dict[str, list[Case]] = {
    "tiny": [
        Decode(2, 200, 4), Decode(3, 130, 2, q_len=2, shortest=10), DecodeOverFP8(2, 200, 4), Prefill(2, 40, heads=2),
        Prefill(1, 40, causal=False, heads=2), Merge(16, heads=2), CacheWrite(128), CacheGather(2, 64),
        Pack(16, heads=2),
    ],
    "headline": [
        Decode(64, 8192, 128), Decode(64, 8192, 64), Decode(64, 8192, 16), Decode(64, 8192, 128, q_len=2),
        Decode(1, 4096, 128), Decode(1, 65536, 128), Decode(4, 8192, 128), ragged(128),
        *(DecodeOverFP8(64, 8192, heads) for heads in (128, 64, 16)), DecodeOverFP8(1, 65536, 128),
        Prefill(1, 8192), Prefill(1, 8192, causal=False), Merge(8192), CacheWrite(8192), CacheGather(8, 8192),
        Pack(8192),
    ],
    "full": [
        *(Decode(batch, length, 128, q_len) for q_len in (1, 2) for batch in (64, 128) for length in (8192, 4096)),
        *(Decode(batch, 8192, heads) for heads in (64, 16) for batch in (64, 128)),
        *(Decode(batch, length, heads) for heads in (128, 16) for batch in (1, 4) for length in (4096, 65536)),
        *(ragged(heads) for heads in (128, 64, 16)),
        *(DecodeOverFP8(batch, 8192, heads) for heads in (128, 64, 16) for batch in (1, 4, 64, 128)),
        Prefill(1, 8192), Prefill(1, 8192, causal=False), Prefill(1, 4096), Prefill(4, 2048),
        Prefill(1, 8192, heads=16), Merge(8192), Merge(32768), CacheWrite(64), CacheWrite(8192), CacheWrite(65536),
        CacheGather(8, 8192), CacheGather(64, 8192), Pack(8192), Pack(32768),
    ],
}  # fmt: skip
