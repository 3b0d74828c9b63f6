"""The cache that a prepared transformers model fills: paged latents, one tensor a layer, and lengths for all layers.

A row of the batch owns a run of pages, and its tokens lie in them without gaps: padding is not stored. So the place of
a token follows from the number of real tokens before it, and the block tables never change.

    slot = row * capacity + position,    columns = all tokens seen, padding included, as transformers counts them
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedConfig, StaticCache
from transformers.cache_utils import Cache, StaticLayer

from ..cache import TABLE_TOKENS, allocate_kv_cache, fit_k_scale
from ..check import capturing
from ..meta.contract import FP8


class Lengths:
    """What all layers share: [B] real tokens, the columns seen, and the tables. All static, for CUDA graphs."""

    def __init__(self, batch_size: int, max_length: int, page_size: int, device: torch.device):
        self.batch_size, self.capacity = batch_size, -(-max_length // TABLE_TOKENS) * TABLE_TOKENS
        pages = self.capacity // page_size
        with torch.inference_mode(False), torch.device(device):  # made in inference mode, they would be stuck in it
            self.seq_lens = torch.zeros(batch_size, dtype=torch.int32)
            self.columns = torch.zeros((), dtype=torch.int64)
            self.block_tables = torch.arange(batch_size * pages, dtype=torch.int32).view(batch_size, pages)
            self.first_slots = torch.arange(batch_size).unsqueeze(1) * self.capacity  # [B, 1]
        for tensor in (self.seq_lens, self.columns, self.block_tables, self.first_slots):
            torch._dynamo.mark_static_address(tensor, guard=False)

    def advance(self, q_len: int, mask: Tensor | None) -> None:
        """Count q_len more columns a row, of which mask [B, q_len] tells the real tokens (None: all)."""
        counts = q_len if mask is None else mask.sum(dim=1, dtype=torch.int32)
        if self._may_ask_the_device():
            fullest = int((self.seq_lens + counts).max())
            if fullest > self.capacity:
                raise ValueError(
                    f"the cache holds {self.capacity} tokens a row and {fullest} were asked for: make it with a larger "
                    "max_length"
                )
        self.seq_lens.add_(counts)
        self.columns.add_(q_len)

    def positions(self, q_len: int, mask: Tensor | None) -> Tensor:
        """Of the tokens that `advance` counted last, [B, q_len] int64; padding has that of the token before it."""
        if mask is None:
            return self.seq_lens.unsqueeze(1) + torch.arange(-q_len, 0, device=self.seq_lens.device)
        later = mask.sum(dim=1, keepdim=True) - mask.cumsum(dim=1)
        return self.seq_lens.unsqueeze(1) - later - 1

    def slots(self, positions: Tensor, mask: Tensor | None) -> Tensor:
        """Where those tokens go, [B, q_len] int64; -1, which is not stored, for padding and past the capacity."""
        stored = positions < self.capacity
        return torch.where(stored if mask is None else stored & mask, self.first_slots + positions, -1)

    def _may_ask_the_device(self) -> bool:
        """Not while compiled or captured: a full cache then drops what exceeds it, and touches nothing else."""
        return not torch.compiler.is_compiling() and not capturing(self.seq_lens.device)


class NewTokens(NamedTuple):
    """What `update` hands to the attention function of a prepared model, in place of keys and values."""

    layer: "LatentLayer"
    latent: Tensor  # [B, 1, q_len, kv_lora_rank], normed
    k_pe: Tensor  # [B, 1, q_len, rope], rotated

    @property
    def shape(self):  # the first thing that a model which was not prepared asks for
        raise RuntimeError("cache is a LatentCache, which only a model prepared by ts_ops.integrations can fill")


class LatentLayer(StaticLayer):
    """One layer's pages [B * pages, page_size, kv_lora_rank + rope], and k_scale [1] fp32 if they are FP8."""

    supports_early_init = False
    is_croppable = True

    def __init__(
        self, owner: object, lengths: Lengths, leads: bool, page_size: int, dim: int, dtype: torch.dtype, k_scale: float
    ):
        super().__init__(max_cache_len=lengths.capacity)
        self.owner, self.lengths = owner, lengths
        self.leads = leads  # the first layer keeps the count for all
        self.device, self.batch_size = lengths.seq_lens.device, lengths.batch_size
        self.cumulative_length = lengths.columns
        self.pages = allocate_kv_cache(lengths.block_tables.numel(), page_size, dim, dtype=dtype, device=self.device)
        self.k_scale = None
        if dtype == FP8:
            with torch.inference_mode(False):
                self.k_scale = torch.full((1,), k_scale, dtype=torch.float32, device=self.device)
            torch._dynamo.mark_static_address(self.k_scale, guard=False)
        self.calibrates = dtype == FP8 and k_scale == 0
        self.is_empty = self.is_initialized = True

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing is lazy here: the layer is whole from the start."""

    def update(self, latent: Tensor, k_pe: Tensor, *args, **kwargs) -> tuple[NewTokens, None]:
        return NewTokens(self, latent, k_pe), None

    def get_seq_length(self) -> int | Tensor:
        return 0 if self.is_empty else self.cumulative_length

    def reset(self) -> None:
        self.is_empty = True
        if self.calibrates:
            self.k_scale.zero_()
        if self.leads:
            self.lengths.seq_lens.zero_()
            self.lengths.columns.zero_()

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last -tokens_to_remove tokens of each row, none of them padding."""
        if tokens_to_remove > 0:
            raise ValueError(f"crop takes the number of tokens to remove as a negative number, got {tokens_to_remove}")
        if self.leads and tokens_to_remove:
            self.lengths.seq_lens.add_(tokens_to_remove).clamp_(min=0)
            self.lengths.columns.add_(tokens_to_remove).clamp_(min=0)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Row i becomes what row beam_idx[i] was, in place: the tensors keep their addresses."""
        rows = beam_idx.to(self.device)
        for tensor in (self.pages, self.lengths.seq_lens) if self.leads else (self.pages,):
            stored = tensor.view(self.batch_size, -1).view(torch.uint8)  # not every device indexes FP8
            stored.copy_(stored[rows])

    def calibrate(self, latent: Tensor, k_pe: Tensor) -> None:
        """Set k_scale from a prompt."""
        self.k_scale.copy_(fit_k_scale(latent, k_pe))


class LatentCache(Cache):
    """A transformers Cache of `batch_size` rows of `max_length` tokens, rounded up to 128; made by `Prepared.cache`.

    Layers without MLA (linear attention, in hybrid models) have transformers' own static layers.
    """

    def __init__(
        self, owner: object, config: PreTrainedConfig, layers: Sequence[int], *, batch_size: int, max_length: int,
        page_size: int, dim: int, dtype: torch.dtype, k_scales: Sequence[float], device: torch.device,
    ):  # fmt: skip
        for name, value in (("batch_size", batch_size), ("max_length", max_length)):
            if value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        lengths = Lengths(batch_size, max_length, page_size, device)
        all_layers = StaticCache(config=config, max_cache_len=lengths.capacity).layers
        for index, k_scale in zip(layers, k_scales):
            all_layers[index] = LatentLayer(owner, lengths, index == layers[0], page_size, dim, dtype, k_scale)
        super().__init__(layers=all_layers)
        self.owner, self.lengths = owner, lengths

    @property
    def nbytes(self) -> int:
        """Bytes of latents, of all layers."""
        return sum(layer.pages.nbytes for layer in self.layers if isinstance(layer, LatentLayer))
