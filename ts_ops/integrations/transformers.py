"""Any transformers model with DeepSeek's MLA through our operators: `model.generate()` decodes from a paged cache.

    prepare(model, cache_dtype=torch.float8_e4m3fn)     # one line; the rest of a script stays as it is
    model.generate(**inputs, max_new_tokens=64)

transformers (5.15 and later) keeps the latents of MLA in its cache and expands them in `expand_kv`, right before the
attention function. A prepared model keeps its code and its weights. What changes is: `expand_kv` of its attention
modules passes latents on unexpanded; the attention function is `attend` below; and `generate` makes a `LatentCache`.

- A first call on a cache, and a call without one, is a prefill: expanded keys and values through `mla_prefill`.
- Every later call reads the cache through `mla_decode` with absorbed weights, which are views of `kv_b_proj`; so does
  a second prompt on a filled cache, of any length: exact, with 3.4 times the multiplications of a prefill.
- `attention_mask` may have padding anywhere. It is neither stored nor attended to.

Shapes: B rows, q new tokens a row, H heads; for all models taken here kv_lora_rank 512, rope 64, nope 128, v 128.
"""

import inspect

import torch
import transformers
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.masking_utils import causal_mask_function

from .. import mla_decode, mla_kv_cache_write, mla_prefill
from ..cache import SCALE_PRODUCT, pack_query_fp8
from ..meta.check import name_dtypes
from ..meta.contract import FP8, MATRIX, MAX_HEADS, PAGE_SIZES
from .latent_cache import LatentCache, NewTokens

OLDEST = (5, 15)
NAME = "tokenspeed_mla"  # of the attention function and its mask, in transformers' tables
DIMS = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128}

if tuple(int(part) for part in transformers.__version__.split(".")[:2]) < OLDEST:
    raise ImportError(f"transformers>=5.15 is needed, got {transformers.__version__}: pip install -U transformers")


def prepare(
    model: PreTrainedModel, *, cache_dtype: torch.dtype | None = None, fp8_query: bool = False, page_size: int = 64,
    k_scales: float | list[float] | None = None,
) -> "Prepared":  # fmt: skip
    """Let `model` attend through our operators, until `.undo()` of the result or the end of `with prepare(model):`.

    Args:
        model: loaded, in eval mode or without attention dropout; all its attention on one device.
        cache_dtype: bfloat16, float16, float32 or float8_e4m3fn; default the model's.
        fp8_query: over an FP8 cache, quantise the query too; the fast path on Hopper and Blackwell. Otherwise it stays
            bf16 or fp16.
        page_size: tokens a cache page, a power of two up to 128.
        k_scales: of an FP8 cache, one for all layers or one a layer: real latent = stored * k_scale, best a power of
            two. Default: each cache calibrates its own from the first tokens that it sees.

    Raises:
        TypeError: a model that keeps no latents in its cache; a dtype that does not fit.
        ValueError: a dimension or feature of the model that does not fit, or a bad option; the model is unchanged.
    """
    attentions = _attentions_of(model)
    weight = attentions[0].kv_b_proj.weight
    cache_dtype = weight.dtype if cache_dtype is None else cache_dtype
    if cache_dtype not in MATRIX:
        raise TypeError(f"cache_dtype must be {name_dtypes(MATRIX)}, got {cache_dtype}")
    if page_size not in PAGE_SIZES:
        raise ValueError(f"page_size must be a power of two up to 128, got {page_size}")
    for name, given in (("fp8_query", fp8_query), ("k_scales", k_scales is not None)):
        if given and cache_dtype != FP8:
            raise ValueError(f"{name} goes with cache_dtype={FP8}, got {cache_dtype}")
    for_all = k_scales is None or isinstance(k_scales, (int, float))
    scales = [k_scales or 0.0] * len(attentions) if for_all else list(k_scales)
    if len(scales) != len(attentions):
        raise ValueError(f"k_scales must be one number or one for each of {len(attentions)} layers, got {len(scales)}")
    if k_scales is not None and not all(0 < scale < float("inf") for scale in scales):
        raise ValueError(f"k_scales must be positive and finite, got {scales}")
    return Prepared(model, attentions, cache_dtype, fp8_query, page_size, scales)


class Prepared:
    """A prepared model, and what it takes to make caches for it and to put it back."""

    def __init__(
        self, model: PreTrainedModel, attentions: list[nn.Module], cache_dtype: torch.dtype, fp8_query: bool,
        page_size: int, k_scales: list[float],
    ):  # fmt: skip
        self.model, self.cache_dtype, self.fp8_query, self.page_size = model, cache_dtype, fp8_query, page_size
        self._attentions, self._k_scales = attentions, k_scales
        # What `generate` and `forward` call the cache: up to 5.20 past_key_values.
        named = inspect.signature(type(model).forward).parameters
        self.cache_name = "cache" if "cache" in named else "past_key_values"
        self._longest = 0
        self._config = attentions[0].config
        self._implementation = self._config._attn_implementation
        self._config._attn_implementation = NAME
        for attention in attentions:
            attention.expand_kv, attention._ts_ops_prepared = _keep_latents, self
        self._stock_cache_for_generation = model._prepare_cache_for_generation
        model._prepare_cache_for_generation = self._prepare_cache_for_generation

    def cache(self, batch_size: int, max_length: int) -> LatentCache:
        """An empty cache, for `model(..., past_key_values=cache)` or `generate(..., past_key_values=cache)`."""
        self._require_active()
        first = self._attentions[0]
        return LatentCache(
            self, self._config, [attention.layer_idx for attention in self._attentions],
            batch_size=batch_size, max_length=max_length, page_size=self.page_size,
            dim=first.kv_lora_rank + first.qk_rope_head_dim, dtype=self.cache_dtype, k_scales=self._k_scales,
            device=first.kv_b_proj.weight.device,
        )  # fmt: skip

    def undo(self) -> None:
        """Put the model back as it was. Caches made for it are of no use afterwards."""
        if self._attentions:
            for attention in self._attentions:
                del attention.expand_kv, attention._ts_ops_prepared
            del self.model._prepare_cache_for_generation
            self._config._attn_implementation = self._implementation
            self._attentions = []

    def __enter__(self) -> "Prepared":
        return self

    def __exit__(self, *raised) -> None:
        self.undo()

    def _require_active(self) -> None:
        if not self._attentions:
            raise RuntimeError("the model was put back by undo(): prepare it again")

    def _prepare_cache_for_generation(
        self, generation_config, model_kwargs: dict, generation_mode, batch_size: int, max_cache_length: int
    ) -> None:
        """`generate` calls this before its first forward pass; the cache it needs goes into `model_kwargs`."""
        rows = batch_size * max(generation_config.num_beams or 1, generation_config.num_return_sequences or 1)
        given, wanted = model_kwargs.get(self.cache_name), generation_config.cache_implementation
        if given is not None:
            self._require_fit(given, rows, max_cache_length)
        if given is not None or generation_config.use_cache is False:
            self._stock_cache_for_generation(
                generation_config, model_kwargs, generation_mode, batch_size, max_cache_length
            )
            return
        if wanted not in (None, "static"):
            raise ValueError(
                f"cache_implementation must be left out or 'static' for a model prepared by ts_ops, got {wanted!r}: "
                "its attention reads a LatentCache"
            )
        # As transformers does: never shorter than before, for another length is another graph to compile.
        self._longest = max(self._longest, max_cache_length, getattr(generation_config, "max_cache_len", None) or 0)
        model_kwargs[self.cache_name] = cache = self.cache(rows, self._longest)
        if getattr(generation_config, "is_assistant", False):
            cache.activate_past_recording()

    def _require_fit(self, cache: object, rows: int, length: int) -> None:
        name = self.cache_name
        if not isinstance(cache, LatentCache) or cache.owner is not self:
            raise ValueError(f"{name} must come from .cache() of this prepared model, got {_describe(cache)}")
        if cache.lengths.batch_size != rows:
            raise ValueError(f"{name} has {cache.lengths.batch_size} rows, and {rows} are generated")
        if cache.lengths.capacity < length:
            raise ValueError(
                f"{name} holds {cache.lengths.capacity} tokens a row and generate may need {length}: make it with "
                "a larger max_length, or lower max_new_tokens"
            )


def attend(
    module: nn.Module, query: Tensor, key: Tensor | NewTokens, value: Tensor | None, attention_mask: Tensor | None,
    scaling: float, dropout: float = 0.0, **kwargs,
) -> tuple[Tensor, None]:  # fmt: skip
    """transformers' attention function: query [B, H, q, 192] over a cache, or over latents -> [B, q, H, 128].

    `key` is what `LatentLayer.update` returned; without a cache, it and `value` are latents and rotated keys.
    """
    prepared = getattr(module, "_ts_ops_prepared", None)
    if prepared is None:
        raise RuntimeError(f"{type(module).__name__} was not prepared by ts_ops, but shares the config of one that was")
    cached = isinstance(key, NewTokens)
    latent, k_pe = (key.latent, key.k_pe) if cached else (key, value)
    _check_call(query, latent, attention_mask, dropout, kwargs)
    if not cached:
        if latent.shape[2] != query.shape[2]:
            raise ValueError(
                f"{prepared.cache_name} must come from .cache() of the prepared model: a cache of transformers holds "
                f"{latent.shape[2]} tokens where {query.shape[2]} are new"
            )
        return _prefill(module, query, latent[:, 0], k_pe[:, 0], attention_mask, scaling), None

    layer, lengths, q_len = key.layer, key.layer.lengths, query.shape[2]
    _check_cache(prepared, layer, query)
    latent, k_pe = latent[:, 0], k_pe[:, 0]
    if layer.leads:
        lengths.advance(q_len, attention_mask)
    positions = lengths.positions(q_len, attention_mask)
    if layer.is_empty and layer.calibrates:
        layer.calibrate(latent, k_pe)
    mla_kv_cache_write(
        layer.pages, latent.reshape(-1, latent.shape[-1]), k_pe.reshape(-1, k_pe.shape[-1]),
        lengths.slots(positions, attention_mask).flatten(), k_scale=layer.k_scale,
    )  # fmt: skip
    if layer.is_empty:
        layer.is_empty = False
        return _prefill(module, query, latent, k_pe, attention_mask, scaling), None
    # The last row of a causal block sees all keys, but for blocks with padding, which may be anywhere in them.
    visible = None if attention_mask is None or q_len == 1 else (positions + 1).to(torch.int32)
    return _decode(module, query, layer, visible, scaling, prepared.fp8_query), None


def new_tokens_mask(
    batch_size: int, q_length: int, mask_function, attention_mask: Tensor | None = None, **kwargs
) -> Tensor | None:
    """transformers' mask function: which of the new tokens are real, [B, q_length] bool; None if all are.

    It sees the mask [B, columns] of all tokens so far. A decode step keeps its column, for looking into it would make
    the host wait; its shape and strides are the same at every step.
    """
    if mask_function is not causal_mask_function:
        raise ValueError(
            "attention_mask must be plain causal attention with padding: several sequences packed in a row (by "
            "position_ids), or overlays, are not supported; pass one sequence a row and its attention_mask"
        )
    if attention_mask is None:
        return None
    mask = attention_mask[:, -q_length:].to(torch.bool)
    if q_length > 1 and not torch.compiler.is_compiling() and mask.all():
        return None
    return mask.clone(memory_format=torch.contiguous_format)


def _prefill(
    module: nn.Module, query: Tensor, latent: Tensor, k_pe: Tensor, mask: Tensor | None, scaling: float
) -> Tensor:
    """Causal attention of whole sequences: query [B, H, S, 192], latent [B, S, 512], k_pe [B, S, 64] -> [B, S, H, 128].

    With padding, real tokens are packed row after row, and padding follows, which then belongs to no sequence.
    """
    batch, _, length, _ = query.shape
    query, latent, k_pe = query.transpose(1, 2).flatten(0, 1), latent.flatten(0, 1), k_pe.flatten(0, 1)
    if mask is None:
        cum_seq_lens = torch.arange(batch + 1, dtype=torch.int32, device=query.device) * length
    else:
        order = mask.flatten().to(torch.uint8).argsort(descending=True, stable=True)
        query, latent, k_pe = query[order], latent[order], k_pe[order]
        cum_seq_lens = nn.functional.pad(mask.sum(dim=1).cumsum(0), (1, 0)).to(torch.int32)
    expanded = module.kv_b_proj(latent).unflatten(-1, (-1, DIMS["qk_nope_head_dim"] + DIMS["v_head_dim"]))
    k_nope, value = expanded.tensor_split([DIMS["qk_nope_head_dim"]], dim=-1)
    key = torch.cat((k_nope, k_pe.unsqueeze(1).expand(-1, k_nope.shape[1], -1)), dim=-1)
    output = mla_prefill(
        query, key, value, cum_seq_lens, cum_seq_lens, scaling, max_seq_len_q=length, max_seq_len_kv=length
    )
    if mask is not None:
        output = torch.empty_like(output).index_copy(0, order, output)
    return output.unflatten(0, (batch, length))


def _decode(module: nn.Module, query: Tensor, layer, visible: Tensor | None, scaling: float, fp8_query: bool) -> Tensor:
    """Absorbed attention over the latents themselves: query [B, H, q, 192] -> [B, q, H, 128].

    q · (W_UK c) = (W_UKᵀ q) · c, and the values' W_UV c may be applied after the weighted sum.
    """
    lengths, k_scale = layer.lengths, layer.k_scale
    up = module.kv_b_proj.weight.unflatten(0, (query.shape[1], -1))
    w_uk, w_uv = up.tensor_split([DIMS["qk_nope_head_dim"]], dim=1)  # [H, 128, 512] each, views
    q_nope, q_pe = query.transpose(1, 2).tensor_split([DIMS["qk_nope_head_dim"]], dim=-1)
    q_latent = torch.einsum("bqhn,hnl->bqhl", q_nope, w_uk)
    if fp8_query:
        packed = pack_query_fp8(q_latent, q_pe, k_scale, scale_product=SCALE_PRODUCT)
        scaling = scaling * SCALE_PRODUCT
    elif k_scale is not None:
        # The operator's scale is a host float, which would make a graph of every layer; and it takes no fp32 query.
        narrow = torch.bfloat16 if query.dtype == torch.float32 else query.dtype
        packed = (torch.cat((q_latent, q_pe), dim=-1) * k_scale).to(narrow)
    else:
        packed = torch.cat((q_latent, q_pe), dim=-1).to(layer.pages.dtype)
    latents = mla_decode(
        packed, layer.pages, lengths.block_tables, lengths.seq_lens.clamp(max=lengths.capacity), scaling,
        local_visible_lens=None if visible is None else visible.clamp(max=lengths.capacity),
    )  # fmt: skip
    if k_scale is not None:
        latents = latents * k_scale
    return torch.einsum("bqhl,hvl->bqhv", latents.to(w_uv.dtype), w_uv)


def _keep_latents(latent, k_pe):
    return latent, k_pe


def _check_call(query: Tensor, latent: Tensor, mask: Tensor | None, dropout: float, kwargs: dict) -> None:
    if dropout:
        raise ValueError(f"attention_dropout must be 0, got {dropout}: call model.eval()")
    if kwargs.get("output_attentions"):
        raise ValueError("output_attentions must be False: the operators keep no attention weights")
    if torch.is_grad_enabled() and (query.requires_grad or latent.requires_grad):
        raise RuntimeError("the operators are inference only: call the model under torch.no_grad()")
    if mask is not None and (mask.dtype != torch.bool or mask.shape != (query.shape[0], query.shape[2])):
        raise ValueError(
            f"attention_mask must be [B, tokens so far] with 1 for real tokens, got one prepared as {list(mask.shape)} "
            f"{mask.dtype}"
        )


def _check_cache(prepared: Prepared, layer, query: Tensor) -> None:
    name = prepared.cache_name
    if layer.owner is not prepared:
        raise ValueError(f"{name} belongs to another model: make it by .cache() of this prepared model")
    if layer.batch_size != query.shape[0]:
        raise ValueError(f"{name} has {layer.batch_size} rows, and the batch has {query.shape[0]}")
    if layer.device != query.device:
        raise ValueError(f"{name} is on {layer.device} and the model on {query.device}: make a new cache")


def _attentions_of(model: PreTrainedModel) -> list[nn.Module]:
    """The model's MLA modules in the order of their layers, checked."""
    if not isinstance(model, PreTrainedModel):
        raise TypeError(f"model must be a transformers PreTrainedModel, got {type(model).__name__}")
    found = [module for module in model.modules() if hasattr(type(module), "expand_kv")]
    if not found:
        raise TypeError(f"model is a {type(model).__name__}, whose attention keeps no latents in its cache (no MLA)")
    if not hasattr(model, "_prepare_cache_for_generation"):
        raise TypeError(f"model is a {type(model).__name__}, which has no generate(): prepare the ...ForCausalLM class")
    for attention in found:
        problem = _misfit(attention)
        if problem:
            raise ValueError(f"model has {type(attention).__name__} layers, which do not fit: {problem}")
    devices = {attention.kv_b_proj.weight.device for attention in found}
    if len(devices) > 1:
        raise ValueError(f"model must have all its attention on one device, got {sorted(map(str, devices))}")
    if devices == {torch.device("meta")}:
        raise ValueError("model must be loaded: its weights are on the meta device")
    return sorted(found, key=lambda attention: attention.layer_idx)


def _misfit(attention: nn.Module) -> str | None:
    """Why one attention module cannot run through the operators."""
    if "_ts_ops_prepared" in attention.__dict__:
        return "they are prepared already; undo() that first"
    if hasattr(attention, "indexer"):
        return "sparse attention over the tokens that an indexer selects is not supported"
    if getattr(attention, "sliding_window", None) is not None:
        return f"sliding_window must be None, got {attention.sliding_window}"
    for name, needed in DIMS.items():
        if getattr(attention, name) != needed:
            return f"{name} must be {needed}, got {getattr(attention, name)}"
    linear, rows = attention.kv_b_proj, attention.num_heads * (DIMS["qk_nope_head_dim"] + DIMS["v_head_dim"])
    if type(linear) is not nn.Linear or linear.bias is not None:
        return f"kv_b_proj must be a plain nn.Linear without bias, got {linear}"
    if linear.weight.shape != (rows, DIMS["kv_lora_rank"]) or linear.weight.dtype not in MATRIX[1:]:
        return f"kv_b_proj must be [{rows}, {DIMS['kv_lora_rank']}] bf16, fp16 or fp32, got {_describe(linear.weight)}"
    if attention.num_heads > MAX_HEADS:
        return f"num_attention_heads must be at most {MAX_HEADS}, got {attention.num_heads}"
    return None


def _describe(value: object) -> str:
    return f"{list(value.shape)} {value.dtype}" if isinstance(value, Tensor) else f"a {type(value).__name__}"


AttentionInterface.register(NAME, attend)
AttentionMaskInterface.register(NAME, new_tokens_mask)
