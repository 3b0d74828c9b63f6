"""DeepSeek V2 and V3, inference only: MLA through `ts_ops`, prefill with expanded keys, decode with absorbed weights.

The model keeps no state. Each call takes the KV cache as one paged tensor a layer, and a layer writes its own once:
that lets `torch.compile` update it in place (layers that share one tensor would cost a copy of all of it).

Shapes: T tokens (of a ragged prefill; B * q in decode), B sequences, H heads, L = kv_lora_rank, R = the
rope head dim, q = tokens of a sequence in one decode step. Modules are named as in Hugging Face checkpoints.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import ts_ops
from chunked_prefill import Context, attend
from deepseek_config import AttentionConfig, DeepSeekConfig
from deepseek_moe import MLP, MoE
from deepseek_rope import Rope, rotate
from paged_cache import LayerCache, calibrate, slots_of
from ts_ops.cache import SCALE_PRODUCT


class PrefillStep(NamedTuple):
    """New sequences from their first token on or, with `context`, the next tokens of sequences that the cache holds."""

    cos: Tensor  # [T, R / 2]
    sin: Tensor
    slots: Tensor  # [T] int64
    cum_seq_lens: Tensor  # [B + 1] int32
    max_seq_len: int
    context: Context | None


class DecodeStep(NamedTuple):
    """q_len new tokens a sequence; `seq_lens` counts them."""

    cos: Tensor
    sin: Tensor
    slots: Tensor
    block_tables: Tensor  # [B, max_pages] int32
    seq_lens: Tensor  # [B] int32
    q_len: int
    fp8_query: bool


class RMSNorm(nn.Module):
    def __init__(self, size: int, eps: float = 1e-6):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        return self.weight * (wide * torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + self.eps)).to(x.dtype)


class Attention(nn.Module):
    """Multi-head latent attention. The cache keeps a token's normed latent [L] and rotated key [R], for all heads."""

    def __init__(self, hidden_size: int, config: AttentionConfig):
        super().__init__()
        self.config = config
        heads, rank = config.num_heads, config.q_lora_rank
        if rank is None:
            self.q_proj = nn.Linear(hidden_size, heads * config.qk_head_dim, bias=False)
        else:
            self.q_a_proj = nn.Linear(hidden_size, rank, bias=config.bias)
            self.q_a_layernorm = RMSNorm(rank)
            self.q_b_proj = nn.Linear(rank, heads * config.qk_head_dim, bias=False)
        self.kv_a_proj_with_mqa = nn.Linear(hidden_size, config.cache_dim, bias=config.bias)
        self.kv_a_layernorm = RMSNorm(config.kv_lora_rank)
        expanded = heads * (config.qk_nope_head_dim + config.v_head_dim)
        self.kv_b_proj = nn.Linear(config.kv_lora_rank, expanded, bias=False)
        self.o_proj = nn.Linear(heads * config.v_head_dim, hidden_size, bias=config.bias)

    def forward(self, x: Tensor, step: PrefillStep | DecodeStep, cache: LayerCache) -> Tensor:
        """[T, hidden] -> [T, hidden]."""
        config = self.config
        q = self.q_proj(x) if config.q_lora_rank is None else self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x)))
        q_nope, q_pe = q.unflatten(-1, (config.num_heads, -1)).split([config.qk_nope_head_dim, config.rope.dim], dim=-1)
        latent, k_pe = self.kv_a_proj_with_mqa(x).split([config.kv_lora_rank, config.rope.dim], dim=-1)
        latent = self.kv_a_layernorm(latent)
        q_pe = rotate(q_pe, step.cos.unsqueeze(1), step.sin.unsqueeze(1), config.rope.interleave)
        k_pe = rotate(k_pe, step.cos, step.sin, config.rope.interleave)

        if isinstance(step, DecodeStep):
            ts_ops.mla_kv_cache_write(cache.pages, latent, k_pe, step.slots, k_scale=cache.k_scale)
            output = self._decode(q_nope, q_pe, step, cache)
        else:
            if cache.k_scale is not None:
                calibrate(cache.k_scale, latent, k_pe)
            ts_ops.mla_kv_cache_write(cache.pages, latent, k_pe, step.slots, k_scale=cache.k_scale)
            query = torch.cat((q_nope, q_pe), dim=-1)
            if step.context is None:
                output = ts_ops.mla_prefill(
                    query, *self._expand(latent, k_pe), step.cum_seq_lens, step.cum_seq_lens, config.softmax_scale,
                    is_causal=True, max_seq_len_q=step.max_seq_len, max_seq_len_kv=step.max_seq_len,
                )  # fmt: skip
            else:
                output = attend(query, cache, step.context, self._expand, config.kv_lora_rank, config.softmax_scale)
        return self.o_proj(output.flatten(1))

    def _expand(self, latent: Tensor, k_pe: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of every head from the latents: [T, L], [T, R] -> [T, H, nope + R], [T, H, v]."""
        config = self.config
        expanded = self.kv_b_proj(latent).unflatten(-1, (config.num_heads, -1))
        k_nope, value = expanded.split([config.qk_nope_head_dim, config.v_head_dim], dim=-1)
        return torch.cat((k_nope, k_pe.unsqueeze(1).expand(-1, config.num_heads, -1)), dim=-1), value

    def _decode(self, q_nope: Tensor, q_pe: Tensor, step: DecodeStep, cache: LayerCache) -> Tensor:
        """Attention over the latents themselves, as if over one key head of L + R: [T, H, ·] -> [T, H, v].

        q · (W_UK c) = (W_UKᵀ q) · c, and the values' W_UV c may be applied after the weighted sum. Both matrices are
        views of kv_b_proj.
        """
        config, k_scale = self.config, cache.k_scale
        up = self.kv_b_proj.weight.unflatten(0, (config.num_heads, -1))
        w_uk, w_uv = up.split([config.qk_nope_head_dim, config.v_head_dim], dim=1)  # [H, nope, L], [H, v, L]
        q_latent = torch.einsum("bhn,hnl->bhl", q_nope, w_uk)

        softmax_scale = config.softmax_scale
        if k_scale is None:
            query = torch.cat((q_latent, q_pe), dim=-1).to(cache.pages.dtype)
        elif step.fp8_query:
            query = ts_ops.pack_query_fp8(q_latent, q_pe, k_scale, scale_product=SCALE_PRODUCT)
            softmax_scale *= SCALE_PRODUCT
        else:
            # The layer's scale goes into the query, exactly, since it is a power of two; the kernel's own scale is a
            # host float, which would make a graph of every layer. There is no fp32 query over an fp8 cache.
            narrow = torch.bfloat16 if q_pe.dtype == torch.float32 else q_pe.dtype
            query = (torch.cat((q_latent, q_pe), dim=-1) * k_scale).to(narrow)
        latents = ts_ops.mla_decode(
            query.unflatten(0, (-1, step.q_len)), cache.pages, step.block_tables, step.seq_lens, softmax_scale,
            kv_lora_rank=config.kv_lora_rank,
        ).flatten(0, 1)  # fmt: skip
        if k_scale is not None:
            latents = latents * k_scale
        return torch.einsum("bhl,hvl->bhv", latents.to(w_uv.dtype), w_uv)


class Layer(nn.Module):
    def __init__(self, config: DeepSeekConfig, dense: bool):
        super().__init__()
        self.self_attn = Attention(config.hidden_size, config.attention)
        self.mlp = MLP(config.hidden_size, config.intermediate_size) if dense else MoE(config.hidden_size, config.moe)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, x: Tensor, step: PrefillStep | DecodeStep, cache: LayerCache) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), step, cache)
        return x + self.mlp(self.post_attention_layernorm(x))


class DeepSeek(nn.Module):
    def __init__(self, config: DeepSeekConfig):
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.rope = Rope(config.attention.rope)
        self.layers = nn.ModuleList(
            Layer(config, dense=config.moe is None or index < config.num_dense_layers)
            for index in range(config.num_layers)
        )
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.lm_head = None
        if not config.tie_word_embeddings:
            self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)

    def prefill(
        self, tokens: Tensor, positions: Tensor, slots: Tensor, cum_seq_lens: Tensor, max_seq_len: int,
        caches: list[LayerCache], context: Context | None = None,
    ) -> Tensor:  # fmt: skip
        """Sequences one after the other: tokens, positions, slots [T], cum_seq_lens [B + 1] -> [T, hidden].

        They are whole, or `context` (see chunked_prefill.py) says which of their tokens are in the cache already.
        """
        step = PrefillStep(*self.rope(positions), slots, cum_seq_lens, max_seq_len, context)
        return self._forward(tokens, step, caches)

    def decode(
        self, tokens: Tensor, seq_lens: Tensor, block_tables: Tensor, caches: list[LayerCache], fp8_query: bool = False
    ) -> Tensor:
        """Tokens [B] or [B, q], which seq_lens [B] counts -> logits of each, [B, vocab] or [B, q, vocab] fp32.

        A row with seq_len 0 is empty: nothing is stored, and its logits are of no use. Compile this one:
        `torch.compile(model.decode, fullgraph=True)`.
        """
        q_len = 1 if tokens.dim() == 1 else tokens.shape[1]
        positions = seq_lens.unsqueeze(1) + torch.arange(-q_len, 0, device=tokens.device)  # [B, q]
        slots = slots_of(block_tables, positions, caches[0].pages.shape[1]).flatten()
        step = DecodeStep(*self.rope(positions.flatten()), slots, block_tables, seq_lens, q_len, fp8_query)
        logits = self.logits(self._forward(tokens.flatten(), step, caches))
        return logits if tokens.dim() == 1 else logits.unflatten(0, tokens.shape)

    def logits(self, hidden: Tensor) -> Tensor:
        """[T, hidden] -> [T, vocab] fp32."""
        weight = self.embed_tokens.weight if self.lm_head is None else self.lm_head.weight
        return F.linear(hidden, weight).float()

    def _forward(self, tokens: Tensor, step: PrefillStep | DecodeStep, caches: list[LayerCache]) -> Tensor:
        x = self.embed_tokens(tokens)
        for layer, cache in zip(self.layers, caches, strict=True):
            x = layer(x, step, cache)
        return self.norm(x)
