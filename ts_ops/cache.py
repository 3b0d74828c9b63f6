"""The latent KV cache, and the FP8 query that goes with an FP8 cache."""

import torch
from torch import Tensor

from .meta.contract import FP8, MATRIX, MAX_PAGE_SIZE, PAGE_SIZES

# Block tables best cover whole multiples of so many tokens: TokenSpeed's decode kernels read pages, those past a
# request's end included, up to the next multiple.
TABLE_TOKENS = MAX_PAGE_SIZE
# A scale_product for `pack_query_fp8`. With k_scale from `fit_k_scale` an element of the query saturates only where its
# product with the largest element of the cache passes 448 * 224 / 64 = 1568, an attention logit of about 200 from one
# dimension alone.
SCALE_PRODUCT = 1 / 64


def allocate_kv_cache(
    num_pages: int,
    page_size: int = 64,
    head_dim: int = 576,
    *,
    dtype: torch.dtype = torch.bfloat16,
    device: torch.device | str | None = None,
) -> Tensor:
    """A zero-filled paged latent cache for one layer, [num_pages, page_size, head_dim], marked static.

    Zeros, because the TokenSpeed kernels multiply masked values by 0, so that NaN in fresh memory would spread. Static,
    so that cudagraph trees use the cache in place instead of copying it whole at every replay. Allocate one tensor a
    layer and write it at most once a graph; a cache that holds several layers in one buffer makes Inductor clone it.
    Page 0 is best kept as the null page, to which padded block-table entries point.

    Args:
        num_pages: pages, the null page included.
        page_size: tokens a page; a power of two up to 128.
        head_dim: kv_lora_rank + rope head dim, 512 + 64 for DeepSeek-V2, V3 and R1.
        dtype: bfloat16, float16, float32 or float8_e4m3fn.
        device: default: the current default device.

    Raises:
        ValueError: a size out of range.
        TypeError: another dtype.
    """
    if num_pages < 1:
        raise ValueError(f"num_pages must be at least 1, got {num_pages}")
    if page_size not in PAGE_SIZES:
        raise ValueError(f"page_size must be a power of two up to {MAX_PAGE_SIZE}, got {page_size}")
    if head_dim < 1:
        raise ValueError(f"head_dim must be at least 1, got {head_dim}")
    if dtype not in MATRIX:
        raise TypeError(f"dtype must be one of {[str(d) for d in MATRIX]}, got {dtype}")
    # A tensor made in inference mode could not be written outside it.
    with torch.inference_mode(False):
        kv_cache = torch.zeros(num_pages, page_size, head_dim, dtype=dtype, device=device)
    # Guarded, a static address makes Dynamo compile one graph a cache.
    torch._dynamo.mark_static_address(kv_cache, guard=False)
    return kv_cache


def fit_k_scale(latent: Tensor, k_pe: Tensor) -> Tensor:
    """A k_scale, [] fp32, for an FP8 cache of tokens like these, [..., kv_lora_rank] and [..., rope].

    A power of two, so that multiplying by it is exact in every dtype, and with room for later tokens twice as large as
    the largest of these: e4m3 is a floating-point format, so that room costs no precision.
    """
    largest = torch.maximum(latent.abs().amax(), k_pe.abs().amax()).float().clamp(min=1e-6)
    return torch.exp2(torch.ceil(torch.log2(2 * largest / torch.finfo(FP8).max)))


def pack_query_fp8(q_latent: Tensor, q_pe: Tensor, k_scale: Tensor, *, scale_product: float = 1.0) -> Tensor:
    """Quantise an absorbed query so that `q_scale * k_scale` is the same number for every layer.

    The kernels take scales as host floats, so a scale per layer would be a graph per layer. Instead the query is
    quantised with `q_scale = scale_product / k_scale`; the product of the scales is then `scale_product` whatever the
    layer, and `softmax_scale * scale_product` is one constant. Plain tensor operations, which Inductor fuses.

    Args:
        q_latent: [..., H, kv_lora_rank], the query times W_UK; bf16, fp16 or fp32.
        q_pe: [..., H, rope], the rotated part.
        k_scale: one element, fp32: real key = stored key * k_scale.
        scale_product: q_scale * k_scale. Choose it so that `|query| * k_scale / scale_product` stays within 448, the
            largest e4m3 number; what exceeds it saturates.

    Returns:
        [..., H, kv_lora_rank + rope], float8_e4m3fn. Pass `softmax_scale * scale_product` to `mla_decode`, and apply
        k_scale to its output (`output_scale`, or folded into the up-projection).
    """
    query = torch.cat((q_latent, q_pe), dim=-1).float() * (k_scale / scale_product)
    limit = torch.finfo(FP8).max
    return query.clamp(-limit, limit).to(FP8)
