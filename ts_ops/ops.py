"""The public functions: `torch.ops.tokenspeed.*` with types and docstrings.

Each signature below stands for a call of the operator of that name, and traces to that one operator under
`torch.compile`. `_operator` passes on exactly the arguments that were given: the defaults are the schema's (a test
keeps the two equal), and each keyword that is passed costs half a microsecond. What holds for all of them:

- Inference only: an input that requires grad, while grad mode is on, raises RuntimeError.
- A bad argument raises ValueError, or TypeError for a dtype, before anything is launched, and names the argument; the
  same on real, fake and meta tensors. Values on the device (lengths, page ids, slots) are never read by the host.
- An empty row, one that sees no key, gives output 0 and LSE -inf. LSEs are natural logarithms.
- Memory outside the request (the tail of the last page, other pages, table entries past the request) may hold
  anything, NaN included.
- Results are deterministic and contiguous. `out` (and `lse`, `key`, `value`) name buffers to write instead: of the
  result's shape and dtype, contiguous, overlapping no input. The function then returns those buffers.
"""

from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

import torch
from torch import Tensor

from .meta import NAMESPACE, OPERATORS

P = ParamSpec("P")
R = TypeVar("R")
_OUTS = {operator.name: operator.outs for operator in OPERATORS}


def _operator(signature: Callable[P, R]) -> Callable[P, R]:
    packet = getattr(getattr(torch.ops, NAMESPACE), signature.__name__)
    names, functional = _OUTS[signature.__name__], packet.default
    if not names:
        return wraps(signature)(lambda *args, **kwargs: functional(*args, **kwargs))
    out_variant = packet.out

    @wraps(signature)
    def call(*args, out=None, **kwargs):
        if out is None:
            return functional(*args, **kwargs)
        buffers = (out,) if isinstance(out, Tensor) else out
        if len(buffers) != len(names):
            raise ValueError(f"out must hold {len(names)} tensors ({', '.join(names)}), got {len(buffers)}")
        out_variant(*args, **kwargs, **dict(zip(names, buffers)))
        return out

    return call


@_operator
def mla_decode(
    query: Tensor,
    kv_cache: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    softmax_scale: float,
    *,
    output_scale: float = 1.0,
    kv_lora_rank: int = 512,
    is_causal: bool = True,
    window_left: int = -1,
    local_visible_lens: Tensor | None = None,
    causal_seqs: Tensor | None = None,
    cp_world: int = 1,
    cp_rank: int = 0,
    cp_interleave_size: int = 1,
    max_seq_len: int | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Absorbed MLA attention of a few new tokens a request over a paged latent cache.

    A key is a whole cache row, a value its first `kv_lora_rank` columns:
    `out = output_scale * softmax(softmax_scale * query @ keys.T) @ keys[:, :kv_lora_rank]`.

    With n = seq_lens[b], row i of the q_len block sees the keys [low, high), where
    - high = n - (q_len - 1) + i if causal (the block's last row sees all), else n;
    - low = max(0, n - q_len - window_left + i) with a window, else 0;
    - `local_visible_lens[b, i]` replaces high whatever `is_causal` says;
    - under context parallelism the causal bound is taken in global positions, see `causal_seqs`.

    Args:
        query: [B, q_len, H, kv_lora_rank + rope], 1 <= H <= 128; float8_e4m3fn, bfloat16, float16 or float32.
        kv_cache: [num_pages, page_size, kv_lora_rank + rope] or [num_pages, 1, page_size, ...], page_size a power of
            two up to 128; the query's dtype, or float8_e4m3fn under a bf16 or fp16 query. Any page and token stride.
        block_tables: [B, max_pages] int32, page ids in order. TokenSpeed's kernels need valid ids up to the next
            multiple of 128 tokens, so fill the rest with 0.
        seq_lens: [B] int32, keys of each request, those of the new tokens included.
        softmax_scale: host float; carries q_scale * k_scale for FP8 (`real = stored * scale`).
        output_scale: host float; carries k_scale for an FP8 cache.
        kv_lora_rank: width of the latent, and of the result.
        is_causal: bottom-right causal mask within the q_len block.
        window_left: -1, or the number of earlier keys a row sees beside its own; at least q_len - 1.
        local_visible_lens: [B, q_len] int32 in [0, n]. Not together with a window or context parallelism.
        causal_seqs: [B] int32, the global lengths; required with cp_world > 1, and only then. `seq_lens` then counts
            the keys of this rank, which holds the global positions g with
            (g // cp_interleave_size) % cp_world == cp_rank, in order. Merge the ranks' states with
            `merge_attn_states_n`. Excludes a window.
        cp_world: context-parallel ranks.
        cp_rank: this rank, in [0, cp_world).
        cp_interleave_size: consecutive positions that one rank holds.
        max_seq_len: a hint of the longest length, for the split plan; changes a result only within rounding. Default:
            the tables' capacity, the one value that stays right when a captured graph is replayed.
        out: [B, q_len, H, kv_lora_rank] buffer to write.

    Returns:
        [B, q_len, H, kv_lora_rank]; bfloat16 for an FP8 query, else the query's dtype.

    Raises:
        ValueError: a shape, stride, device, scale or combination of options that does not fit.
        TypeError: a dtype that does not fit.
        RuntimeError: an input requires grad; or no backend can serve the call (the reasons are listed).
    """


@_operator
def mla_decode_lse(
    query: Tensor,
    kv_cache: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    softmax_scale: float,
    *,
    output_scale: float = 1.0,
    kv_lora_rank: int = 512,
    is_causal: bool = True,
    window_left: int = -1,
    local_visible_lens: Tensor | None = None,
    causal_seqs: Tensor | None = None,
    cp_world: int = 1,
    cp_rank: int = 0,
    cp_interleave_size: int = 1,
    max_seq_len: int | None = None,
    out: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """`mla_decode`, and the LSE of each row for merging: ln(sum(exp(softmax_scale * query @ keys.T))).

    Args:
        out: ([B, q_len, H, kv_lora_rank], [B, q_len, H]) buffers to write. All others as for `mla_decode`.

    Returns:
        The output as from `mla_decode`, and its LSE, [B, q_len, H] float32, natural logarithm, -inf for empty rows.
        `output_scale` does not enter the LSE.

    Raises:
        As `mla_decode`.
    """


@_operator
def mla_prefill(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cum_seq_lens_q: Tensor,
    cum_seq_lens_kv: Tensor,
    softmax_scale: float,
    *,
    output_scale: float = 1.0,
    is_causal: bool = True,
    max_seq_len_q: int | None = None,
    max_seq_len_kv: int | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Ragged attention over expanded keys and values, B sequences packed along the token dimension.

    Sequence b has the query rows [cum_seq_lens_q[b], cum_seq_lens_q[b + 1]) and likewise its keys. Causal is
    bottom-right within each sequence: with n keys and m queries, query i sees the first n - m + i + 1 keys. Rows at or
    past cum_seq_lens_q[-1] belong to no sequence and are empty rows.

    Args:
        query: [Tq, H, Dqk], 1 <= H <= 128; float8_e4m3fn, bfloat16, float16 or float32. DeepSeek-R1: Dqk 192, Dv 128.
        key: [Tkv, H_kv, Dqk], the query's dtype, H a multiple of H_kv. Any strides, the last 1.
        value: [Tkv, H_kv, Dv], likewise; may be half of a split view.
        cum_seq_lens_q: [B + 1] int32, monotone, first 0.
        cum_seq_lens_kv: [B + 1] int32, likewise.
        softmax_scale: host float; carries q_scale * k_scale for FP8.
        output_scale: host float; carries v_scale for FP8.
        is_causal: False for a context chunk that lies wholly before the queries.
        max_seq_len_q: upper bound of the sequences' query rows; default Tq.
        max_seq_len_kv: upper bound of the sequences' keys; default Tkv.
        out: [Tq, H, Dv] buffer to write.

    Returns:
        [Tq, H, Dv]; bfloat16 for FP8, else the query's dtype.

    Raises:
        ValueError, TypeError, RuntimeError: as `mla_decode`.
    """


@_operator
def mla_prefill_lse(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cum_seq_lens_q: Tensor,
    cum_seq_lens_kv: Tensor,
    softmax_scale: float,
    *,
    output_scale: float = 1.0,
    is_causal: bool = True,
    max_seq_len_q: int | None = None,
    max_seq_len_kv: int | None = None,
    out: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """`mla_prefill`, and the natural-log LSE of each row, for merging context chunks with `merge_attn_states`.

    Args:
        out: ([Tq, H, Dv], [Tq, H]) buffers to write. All others as for `mla_prefill`.

    Returns:
        The output as from `mla_prefill`, and its LSE, [Tq, H] float32, -inf for empty rows.

    Raises:
        As `mla_prefill`.
    """


@_operator
def merge_attn_states(
    prefix_output: Tensor,
    prefix_lse: Tensor,
    suffix_output: Tensor,
    suffix_lse: Tensor,
    *,
    out: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """Combine the attention over two disjoint sets of keys into the attention over their union.

    `lse = ln(exp(prefix_lse) + exp(suffix_lse))`, `out = exp(prefix_lse - lse) * prefix_output + ...` (section 2.2 of
    the Cascade Inference note, FlashInfer 2024). A side whose LSE is -inf or +inf is left out whatever its output
    holds, NaN included; if both are, the result is (0, -inf).

    Args:
        prefix_output: [T, H, D]; bfloat16, float16 or float32, last stride 1.
        prefix_lse: [T, H] float32, natural log, any strides: an [H, T] tensor passed as `.T` is not copied.
        suffix_output: [T, H, D], prefix_output's dtype; strides of its own.
        suffix_lse: [T, H] float32.
        out: ([T, H, D], [T, H]) buffers to write.

    Returns:
        The merged output [T, H, D] in the inputs' dtype and its LSE [T, H] float32.

    Raises:
        ValueError, TypeError, RuntimeError: as `mla_decode`.
    """


@_operator
def merge_attn_states_n(
    outputs: Tensor, lses: Tensor, *, out: tuple[Tensor, Tensor] | None = None
) -> tuple[Tensor, Tensor]:
    """`merge_attn_states` of N states in one pass over memory.

    Args:
        outputs: [N, T, H, D], N >= 1; bfloat16, float16 or float32, last stride 1.
        lses: [N, T, H] float32, natural log, any strides.
        out: ([T, H, D], [T, H]) buffers to write.

    Returns:
        The merged output [T, H, D] in the inputs' dtype and its LSE [T, H] float32.

    Raises:
        ValueError, TypeError, RuntimeError: as `mla_decode`.
    """


@_operator
def mla_kv_cache_write(
    kv_cache: Tensor, kv_c: Tensor, k_pe: Tensor, slot_mapping: Tensor, *, k_scale: Tensor | None = None
) -> None:
    """Store the latent and the rotated key of new tokens in their cache slots; no other byte of the cache is touched.

    Args:
        kv_cache: [num_pages, page_size, kv_lora_rank + rope] or [num_pages, 1, page_size, ...], written in place;
            float8_e4m3fn, bfloat16, float16 or float32.
        kv_c: [>= T, kv_lora_rank], the normalised latent; bfloat16, float16 or float32. Rows past T are not used.
        k_pe: [>= T, rope] or [>= T, 1, rope], the rotated key. Neither source may overlap the cache.
        slot_mapping: [T] int64, page * page_size + offset; a negative slot is skipped. Slots must not repeat.
        k_scale: one fp32 element on the cache's device, for an FP8 cache only: x / k_scale is stored, saturated at
            448. None means 1.

    Raises:
        ValueError, TypeError, RuntimeError: as `mla_decode`.
    """


@_operator
def mla_kv_cache_gather(
    kv_cache: Tensor,
    block_tables: Tensor,
    cum_seq_lens: Tensor,
    total_tokens: int,
    *,
    seq_starts: Tensor | None = None,
    k_scale: Tensor | None = None,
    dtype: torch.dtype | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Copy a range of each request's cached tokens into one packed tensor, for chunked-context prefill.

    Args:
        kv_cache: [num_pages, page_size, D] or [num_pages, 1, page_size, D].
        block_tables: [B, max_pages] int32.
        cum_seq_lens: [B + 1] int32, monotone, first 0: request b fills the rows [cum[b], cum[b + 1]).
        total_tokens: rows of the result; a capacity. Rows at or past cum_seq_lens[-1] are 0.
        seq_starts: [B] int32, the first token to copy of each request; default 0.
        k_scale: one fp32 element, for an FP8 cache only: rows are multiplied by it, and `dtype` is needed.
        dtype: of the result; default the cache's. float8_e4m3fn only from an FP8 cache without k_scale.
        out: [total_tokens, D] buffer to write.

    Returns:
        [total_tokens, D].

    Raises:
        ValueError, TypeError, RuntimeError: as `mla_decode`.
    """


@_operator
def mla_kv_pack_quantize_fp8(
    k_nope: Tensor,
    k_pe: Tensor,
    v: Tensor,
    *,
    k_scale_inv: float = 1.0,
    v_scale_inv: float = 1.0,
    out: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """Build the FP8 keys and values of a prefill: [k_nope | k_pe for every head] and v, scaled and saturated at 448.

    Args:
        k_nope: [T, H, Dn]; bfloat16, float16 or float32, last stride 1 (128 columns for DeepSeek-R1).
        k_pe: [T, Dr] or [T, 1, Dr], k_nope's dtype, one rotated key for all heads (64 columns).
        v: [T, H, Dv], k_nope's dtype (128 columns).
        k_scale_inv: multiplies k_nope and k_pe before the conversion.
        v_scale_inv: multiplies v.
        out: ([T, H, Dn + Dr], [T, H, Dv]) buffers to write.

    Returns:
        key [T, H, Dn + Dr] and value [T, H, Dv], float8_e4m3fn.

    Raises:
        ValueError, TypeError, RuntimeError: as `mla_decode`.
    """
