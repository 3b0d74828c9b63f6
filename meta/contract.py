"""What each operator takes and gives: one class an operator, read by the fakes and by every backend.

Constructing a class reads shapes and dtypes once, checks them (see `meta/check.py`) and keeps what a kernel needs;
`allocate()` returns the output tensors. So a fake and a kernel cannot disagree about a shape, a dtype, a stride or an
error. Nothing here reads memory: values on the device are the business of `TS_OPS_CHECK`.

Shapes: B requests, H query heads, D = kv_lora_rank + rope head dim (576 for DeepSeek-R1), T tokens.
"""

import torch
from torch import Tensor

from .check import require, require_disjoint, require_finite, require_size, require_tensor, require_unit_stride

FP8 = torch.float8_e4m3fn
FLOATS = (torch.bfloat16, torch.float16, torch.float32)
MATRIX = (FP8, *FLOATS)
INT32 = (torch.int32,)
FLOAT32 = (torch.float32,)
MAX_HEADS = 128
MAX_PAGE_SIZE = 128


class Problem:
    """A checked call. `results` lists (shape, dtype); all outputs are contiguous and on `device`."""

    __slots__ = ("device", "results", "rows")

    def allocate(self) -> tuple[Tensor, ...]:
        return tuple(torch.empty(shape, dtype=dtype, device=self.device) for shape, dtype in self.results)

    @property
    def dtypes(self) -> set[torch.dtype]:
        """Dtypes of all inputs and results, for a backend that lacks some."""
        inputs = {value.dtype for name in self.__slots__ if isinstance(value := getattr(self, name), Tensor)}
        return inputs.union(dtype for _, dtype in self.results)

    def check_buffers(self, names: tuple[str, ...], buffers: tuple[Tensor, ...]) -> None:
        """Check the buffers of a `.out` call: each is like the result it stands for, and overlaps no input."""
        inputs = {name: value for name in self.__slots__ if isinstance(value := getattr(self, name), Tensor)}
        for name, buffer, (shape, dtype) in zip(names, buffers, self.results):
            require_tensor(name, buffer, (len(shape),), f"{list(shape)}", (dtype,), self.device)
            for dim, size in enumerate(shape):
                require_size(name, buffer, dim, size, f"the result has shape {list(shape)}")
            require(
                buffer.is_contiguous(),
                lambda: f"{name} must be contiguous, got strides {list(buffer.stride())}",  # noqa: B023
            )
            require_disjoint(name, buffer, inputs)
            inputs[name] = buffer


class Decode(Problem):
    """mla_decode and mla_decode_lse: `query` [B, q_len, H, D] over a paged latent cache.

    `kv_cache` is kept as [num_pages, page_size, D] whichever of its two layouts came in.
    """

    __slots__ = (
        "query", "kv_cache", "block_tables", "seq_lens", "softmax_scale", "output_scale", "kv_lora_rank", "is_causal",
        "window_left", "local_visible_lens", "causal_seqs", "cp_world", "cp_rank", "cp_interleave_size", "max_seq_len",
        "batch", "q_len", "heads", "head_dim", "num_pages", "page_size", "max_pages",
    )  # fmt: skip

    def __init__(
        self, query, kv_cache, block_tables, seq_lens, softmax_scale, *, output_scale=1.0, kv_lora_rank=512,
        is_causal=True, window_left=-1, local_visible_lens=None, causal_seqs=None, cp_world=1, cp_rank=0,
        cp_interleave_size=1, max_seq_len=None, with_lse=False,
    ):  # fmt: skip
        device = query.device
        require_tensor("query", query, (4,), "[B, q_len, H, kv_lora_rank + rope]", MATRIX, device)
        cache_dtypes = (query.dtype, FP8) if query.dtype in (torch.bfloat16, torch.float16) else (query.dtype,)
        kv_cache = _paged(kv_cache, cache_dtypes, device)
        batch, q_len, heads, head_dim = query.shape
        num_pages, page_size, _ = kv_cache.shape
        require_tensor("block_tables", block_tables, (2,), "[B, max_pages]", INT32, device)
        require_tensor("seq_lens", seq_lens, (1,), "[B]", INT32, device)

        require_heads("query", query, heads)
        require_unit_stride("query", query)
        require_size("kv_cache", kv_cache, -1, head_dim, "the query's last dimension")
        require(
            kv_lora_rank >= 1,
            lambda: f"kv_lora_rank must be at least 1, got {kv_lora_rank}",
        )
        require(
            kv_lora_rank <= head_dim,
            lambda: f"kv_lora_rank must be at most the query's last dimension {head_dim}, got {kv_lora_rank}",
        )
        require_size("block_tables", block_tables, 0, batch, "the query's batch")
        require_size("seq_lens", seq_lens, 0, batch, "the query's batch")
        require_finite("softmax_scale", softmax_scale)
        require_finite("output_scale", output_scale)
        require_bound("max_seq_len", max_seq_len)

        self.results = (((batch, q_len, heads, kv_lora_rank), _result_dtype(query)),)
        if with_lse:
            self.results += (((batch, q_len, heads), torch.float32),)
        self.device = device
        self.rows = batch * q_len * heads
        self.query, self.kv_cache, self.block_tables, self.seq_lens = query, kv_cache, block_tables, seq_lens
        self.softmax_scale, self.output_scale, self.kv_lora_rank = softmax_scale, output_scale, kv_lora_rank
        self.is_causal, self.window_left = is_causal, window_left
        self.local_visible_lens, self.causal_seqs = local_visible_lens, causal_seqs
        self.cp_world, self.cp_rank, self.cp_interleave_size = cp_world, cp_rank, cp_interleave_size
        self.max_seq_len = max_seq_len
        self.batch, self.q_len, self.heads, self.head_dim = batch, q_len, heads, head_dim
        self.num_pages, self.page_size, self.max_pages = num_pages, page_size, block_tables.shape[1]
        self._check_visibility()

    def _check_visibility(self) -> None:
        window, world, rank = self.window_left, self.cp_world, self.cp_rank
        windowed = not (isinstance(window, int) and window == -1)
        parallel = not (isinstance(world, int) and world == 1)
        if windowed:
            # One sentence holds for any size, symbolic or not: -1 is no window, all else must cover the q_len block.
            require(
                torch.sym_or(window == -1, window >= torch.sym_max(self.q_len - 1, 0)),
                lambda: f"window_left must be -1 (no window) or at least q_len - 1 = {self.q_len - 1}, got {window}",
            )
        if parallel or rank != 0 or self.cp_interleave_size != 1:
            require(world >= 1, lambda: f"cp_world must be at least 1, got {world}")
            require(rank >= 0, lambda: f"cp_rank must be in [0, cp_world = {world}), got {rank}")
            require(rank < world, lambda: f"cp_rank must be in [0, cp_world = {world}), got {rank}")
            require(
                self.cp_interleave_size >= 1,
                lambda: f"cp_interleave_size must be at least 1, got {self.cp_interleave_size}",
            )
        if self.causal_seqs is not None:
            require_tensor("causal_seqs", self.causal_seqs, (1,), "[B]", INT32, self.device)
            require_size("causal_seqs", self.causal_seqs, 0, self.batch, "the query's batch")
            require(
                world > 1,
                lambda: f"causal_seqs is for context parallelism only: pass cp_world > 1 (got {world}) or leave it out",
            )
        elif parallel:
            require(
                world == 1,
                lambda: f"causal_seqs (the global lengths, [B] int32) is required with cp_world = {world}",
            )
        if windowed and parallel:
            require(
                torch.sym_or(window == -1, world == 1),
                lambda: f"window_left = {window} cannot be used with cp_world = {world}: a window has no meaning over "
                "the part of the keys that one rank holds",
            )
        if self.local_visible_lens is not None:
            require_tensor(
                "local_visible_lens", self.local_visible_lens, (2,), "[B, q_len]", INT32, self.device
            )
            require_size("local_visible_lens", self.local_visible_lens, 0, self.batch, "the query's batch")
            require_size("local_visible_lens", self.local_visible_lens, 1, self.q_len, "the query's q_len")
            require(
                window == -1,
                lambda: f"local_visible_lens cannot be used with window_left = {window}: it already is each row's bound",
            )
            require(
                world == 1,
                lambda: f"local_visible_lens cannot be used with cp_world = {world}: it already is each row's bound",
            )

    @property
    def capacity(self):
        """Keys that the block tables can name, an upper bound of every seq_len."""
        return self.max_pages * self.page_size


class Prefill(Problem):
    """mla_prefill and mla_prefill_lse: ragged attention, query [Tq, H, Dqk] over key [Tkv, H_kv, Dqk], value [.., Dv]."""

    __slots__ = (
        "query", "key", "value", "cum_seq_lens_q", "cum_seq_lens_kv", "softmax_scale", "output_scale", "is_causal",
        "max_seq_len_q", "max_seq_len_kv", "batch", "tokens_q", "tokens_kv", "heads", "heads_kv", "dim_qk", "dim_v",
    )  # fmt: skip

    def __init__(
        self, query, key, value, cum_seq_lens_q, cum_seq_lens_kv, softmax_scale, *, output_scale=1.0, is_causal=True,
        max_seq_len_q=None, max_seq_len_kv=None, with_lse=False,
    ):  # fmt: skip
        device = query.device
        require_tensor("query", query, (3,), "[Tq, H, head_dim_qk]", MATRIX, device)
        require_tensor("key", key, (3,), "[Tkv, H_kv, head_dim_qk]", (query.dtype,), device)
        require_tensor("value", value, (3,), "[Tkv, H_kv, head_dim_v]", (query.dtype,), device)
        require_tensor("cum_seq_lens_q", cum_seq_lens_q, (1,), "[B + 1]", INT32, device)
        require_tensor("cum_seq_lens_kv", cum_seq_lens_kv, (1,), "[B + 1]", INT32, device)
        tokens_q, heads, dim_qk = query.shape
        tokens_kv, heads_kv, dim_v = value.shape

        require_heads("query", query, heads)
        require_dim("query", query, dim_qk)
        require_dim("value", value, dim_v)
        require_size("key", key, 0, tokens_kv, "the value's tokens")
        require_size("key", key, 1, heads_kv, "the value's heads")
        require_size("key", key, 2, dim_qk, "the query's last dimension")
        require(heads_kv >= 1, lambda: f"key must have at least one head, got {list(key.shape)}")
        require(
            heads % heads_kv == 0,
            lambda: f"query must have a multiple of the key's {heads_kv} heads, got {list(query.shape)}",
        )
        for name, tensor in (("query", query), ("key", key), ("value", value)):
            require_unit_stride(name, tensor)
        entries = cum_seq_lens_q.shape[0]
        require(entries >= 1, lambda: "cum_seq_lens_q must have B + 1 entries, the first of them 0; got none")
        require_size("cum_seq_lens_kv", cum_seq_lens_kv, 0, entries, "the entries of cum_seq_lens_q")
        require_finite("softmax_scale", softmax_scale)
        require_finite("output_scale", output_scale)
        require_bound("max_seq_len_q", max_seq_len_q)
        require_bound("max_seq_len_kv", max_seq_len_kv)

        self.results = (((tokens_q, heads, dim_v), _result_dtype(query)),)
        if with_lse:
            self.results += (((tokens_q, heads), torch.float32),)
        self.device = device
        self.rows = tokens_q * heads
        self.query, self.key, self.value = query, key, value
        self.cum_seq_lens_q, self.cum_seq_lens_kv = cum_seq_lens_q, cum_seq_lens_kv
        self.softmax_scale, self.output_scale, self.is_causal = softmax_scale, output_scale, is_causal
        self.max_seq_len_q, self.max_seq_len_kv = max_seq_len_q, max_seq_len_kv
        self.batch, self.tokens_q, self.tokens_kv = entries - 1, tokens_q, tokens_kv
        self.heads, self.heads_kv, self.dim_qk, self.dim_v = heads, heads_kv, dim_qk, dim_v


class Merge(Problem):
    """merge_attn_states: two states of [T, H, Dv] and [T, H]."""

    __slots__ = ("prefix_output", "prefix_lse", "suffix_output", "suffix_lse", "tokens", "heads", "dim")

    def __init__(self, prefix_output, prefix_lse, suffix_output, suffix_lse):
        device = prefix_output.device
        require_tensor("prefix_output", prefix_output, (3,), "[T, H, D]", FLOATS, device)
        require_tensor("prefix_lse", prefix_lse, (2,), "[T, H]", FLOAT32, device)
        require_tensor("suffix_output", suffix_output, (3,), "[T, H, D]", (prefix_output.dtype,), device)
        require_tensor("suffix_lse", suffix_lse, (2,), "[T, H]", FLOAT32, device)
        tokens, heads, dim = prefix_output.shape
        require_dim("prefix_output", prefix_output, dim)
        for axis, size in enumerate((tokens, heads, dim)):
            require_size("suffix_output", suffix_output, axis, size, "as in prefix_output")
        for name, lse in (("prefix_lse", prefix_lse), ("suffix_lse", suffix_lse)):
            require_size(name, lse, 0, tokens, "the tokens of prefix_output")
            require_size(name, lse, 1, heads, "the heads of prefix_output")
        require_unit_stride("prefix_output", prefix_output)
        require_unit_stride("suffix_output", suffix_output)

        self.results = _state(tokens, heads, dim, prefix_output.dtype)
        self.device = device
        self.rows = tokens * heads
        self.prefix_output, self.prefix_lse = prefix_output, prefix_lse
        self.suffix_output, self.suffix_lse = suffix_output, suffix_lse
        self.tokens, self.heads, self.dim = tokens, heads, dim


class MergeN(Problem):
    """merge_attn_states_n: N states of [T, H, D] and [T, H], stacked."""

    __slots__ = ("outputs", "lses", "states", "tokens", "heads", "dim")

    def __init__(self, outputs, lses):
        device = outputs.device
        require_tensor("outputs", outputs, (4,), "[N, T, H, D]", FLOATS, device)
        require_tensor("lses", lses, (3,), "[N, T, H]", FLOAT32, device)
        states, tokens, heads, dim = outputs.shape
        require(states >= 1, lambda: f"outputs must hold at least one state, got {list(outputs.shape)}")
        require_dim("outputs", outputs, dim)
        for axis, (size, what) in enumerate(((states, "states"), (tokens, "tokens"), (heads, "heads"))):
            require_size("lses", lses, axis, size, f"the {what} of outputs")
        require_unit_stride("outputs", outputs)

        self.results = _state(tokens, heads, dim, outputs.dtype)
        self.device = device
        self.rows = tokens * heads
        self.outputs, self.lses = outputs, lses
        self.states, self.tokens, self.heads, self.dim = states, tokens, heads, dim


class CacheWrite(Problem):
    """mla_kv_cache_write: the first T rows of `kv_c` and `k_pe` go to the slots of `slot_mapping` [T]."""

    __slots__ = ("kv_cache", "kv_c", "k_pe", "slot_mapping", "k_scale", "page_size", "kv_lora_rank", "rope_dim")

    def __init__(self, kv_cache, kv_c, k_pe, slot_mapping, *, k_scale=None):
        device = kv_cache.device
        kv_cache = _paged(kv_cache, MATRIX, device)
        require_tensor("kv_c", kv_c, (2,), "[>= T, kv_lora_rank]", FLOATS, device)
        k_pe = _rope_rows(k_pe, device)
        require_tensor("slot_mapping", slot_mapping, (1,), "[T]", (torch.int64,), device)
        head_dim, kv_lora_rank, rope_dim, tokens = kv_cache.shape[2], kv_c.shape[1], k_pe.shape[1], slot_mapping.shape[0]
        require(
            kv_lora_rank + rope_dim == head_dim,
            lambda: f"kv_c and k_pe must have {head_dim} columns together (the last dimension of kv_cache), "
            f"got {kv_lora_rank} + {rope_dim}",
        )
        require_dim("kv_c", kv_c, kv_lora_rank)
        for name, rows in (("kv_c", kv_c), ("k_pe", k_pe)):
            require(
                rows.shape[0] >= tokens,
                lambda: f"{name} must have a row for each of the {tokens} slots, got {rows.shape[0]}",  # noqa: B023
            )
            require_unit_stride(name, rows)
        for dim in (0, 1):
            require(
                kv_cache.stride(dim) >= torch.sym_min(head_dim, kv_cache.shape[dim] * head_dim - head_dim),
                lambda: f"kv_cache must not be an expanded tensor, got strides {list(kv_cache.stride())}",
            )
        require_k_scale(k_scale, kv_cache)
        require_disjoint("kv_cache", kv_cache, {"kv_c": kv_c, "k_pe": k_pe, "slot_mapping": slot_mapping, "k_scale": k_scale})

        self.results = ()
        self.device = device
        self.rows = tokens
        self.kv_cache, self.kv_c, self.k_pe, self.slot_mapping, self.k_scale = kv_cache, kv_c, k_pe, slot_mapping, k_scale
        self.page_size, self.kv_lora_rank, self.rope_dim = kv_cache.shape[1], kv_lora_rank, rope_dim


class CacheGather(Problem):
    """mla_kv_cache_gather: tokens of B paged requests, packed into [total_tokens, D]."""

    __slots__ = (
        "kv_cache", "block_tables", "cum_seq_lens", "total_tokens", "seq_starts", "k_scale", "dtype",
        "batch", "page_size", "head_dim", "max_pages", "num_pages",
    )  # fmt: skip

    def __init__(self, kv_cache, block_tables, cum_seq_lens, total_tokens, *, seq_starts=None, k_scale=None, dtype=None):
        device = kv_cache.device
        kv_cache = _paged(kv_cache, MATRIX, device)
        require_tensor("block_tables", block_tables, (2,), "[B, max_pages]", INT32, device)
        require_tensor("cum_seq_lens", cum_seq_lens, (1,), "[B + 1]", INT32, device)
        batch, max_pages = block_tables.shape
        require_size("cum_seq_lens", cum_seq_lens, 0, batch + 1, "B + 1, for the B rows of block_tables")
        require(total_tokens >= 0, lambda: f"total_tokens must not be negative, got {total_tokens}")
        if seq_starts is not None:
            require_tensor("seq_starts", seq_starts, (1,), "[B]", INT32, device)
            require_size("seq_starts", seq_starts, 0, batch, "the rows of block_tables")
        require_k_scale(k_scale, kv_cache)
        dtype = kv_cache.dtype if dtype is None else dtype
        if dtype not in MATRIX:
            raise TypeError(f"dtype must be one of {[str(d) for d in MATRIX]}, got {dtype}")
        if dtype == FP8 and kv_cache.dtype != FP8:
            raise ValueError(f"dtype {FP8} needs an FP8 kv_cache, got one of {kv_cache.dtype}")
        if dtype == FP8 and k_scale is not None:
            raise ValueError(f"dtype must not be {FP8} when k_scale is given: pass the dtype to dequantise to")

        self.results = (((total_tokens, kv_cache.shape[2]), dtype),)
        self.device = device
        self.rows = total_tokens
        self.kv_cache, self.block_tables, self.cum_seq_lens = kv_cache, block_tables, cum_seq_lens
        self.total_tokens, self.seq_starts, self.k_scale, self.dtype = total_tokens, seq_starts, k_scale, dtype
        self.num_pages, self.page_size, self.head_dim = kv_cache.shape
        self.batch, self.max_pages = batch, max_pages


class PackQuantize(Problem):
    """mla_kv_pack_quantize_fp8: k_nope [T, H, Dn] beside the broadcast k_pe [T, Dr], and v [T, H, Dv], both to FP8."""

    __slots__ = ("k_nope", "k_pe", "v", "k_scale_inv", "v_scale_inv", "tokens", "heads", "dim_nope", "dim_rope", "dim_v")

    def __init__(self, k_nope, k_pe, v, *, k_scale_inv=1.0, v_scale_inv=1.0):
        device = k_nope.device
        require_tensor("k_nope", k_nope, (3,), "[T, H, head_dim_nope]", FLOATS, device)
        k_pe = _rope_rows(k_pe, device, (k_nope.dtype,))
        require_tensor("v", v, (3,), "[T, H, head_dim_v]", (k_nope.dtype,), device)
        tokens, heads, dim_nope = k_nope.shape
        dim_rope, dim_v = k_pe.shape[1], v.shape[2]
        require_dim("k_nope", k_nope, dim_nope)
        require_dim("v", v, dim_v)
        require_size("k_pe", k_pe, 0, tokens, "the tokens of k_nope")
        require_size("v", v, 0, tokens, "the tokens of k_nope")
        require_size("v", v, 1, heads, "the heads of k_nope")
        for name, tensor in (("k_nope", k_nope), ("k_pe", k_pe), ("v", v)):
            require_unit_stride(name, tensor)
        require_finite("k_scale_inv", k_scale_inv)
        require_finite("v_scale_inv", v_scale_inv)

        self.results = (
            ((tokens, heads, dim_nope + dim_rope), FP8),
            ((tokens, heads, dim_v), FP8),
        )
        self.device = device
        self.rows = tokens * heads
        self.k_nope, self.k_pe, self.v, self.k_scale_inv, self.v_scale_inv = k_nope, k_pe, v, k_scale_inv, v_scale_inv
        self.tokens, self.heads, self.dim_nope, self.dim_rope, self.dim_v = tokens, heads, dim_nope, dim_rope, dim_v


def require_heads(name: str, tensor: Tensor, heads) -> None:
    require(heads >= 1, lambda: f"{name} must have at least one head, got {list(tensor.shape)}")
    require(heads <= MAX_HEADS, lambda: f"{name} must have at most {MAX_HEADS} heads, got {heads}")


def require_dim(name: str, tensor: Tensor, dim) -> None:
    require(dim >= 1, lambda: f"{name} must have a last dimension of at least 1, got {list(tensor.shape)}")


def require_bound(name: str, bound) -> None:
    if bound is not None:
        require(bound >= 0, lambda: f"{name} must not be negative, got {bound}")


def require_k_scale(k_scale: Tensor | None, kv_cache: Tensor) -> None:
    if k_scale is None:
        return
    require_tensor("k_scale", k_scale, tuple(range(kv_cache.ndim + 2)), "of one element", FLOAT32, kv_cache.device)
    elements = k_scale.numel()
    require(elements == 1, lambda: f"k_scale must have one element, got {list(k_scale.shape)}")
    if kv_cache.dtype != FP8:
        raise ValueError(f"k_scale is for an FP8 kv_cache only: leave it out for {kv_cache.dtype}")


def _paged(kv_cache: Tensor, dtypes, device) -> Tensor:
    """`kv_cache` as [num_pages, page_size, D], checked."""
    require_tensor(
        "kv_cache", kv_cache, (3, 4), "[num_pages, page_size, D] or [num_pages, 1, page_size, D]", dtypes, device
    )
    if kv_cache.ndim == 4:
        require_size("kv_cache", kv_cache, 1, 1, "MLA has one KV head")
        kv_cache = kv_cache.squeeze(1)
    page_size, head_dim = kv_cache.shape[1], kv_cache.shape[2]
    require(page_size >= 1, lambda: f"kv_cache must have a page_size of at least 1, got {list(kv_cache.shape)}")
    # The powers of two up to 128 are exactly the divisors of 128.
    require(
        page_size <= MAX_PAGE_SIZE,
        lambda: f"kv_cache must have a page_size that is a power of two up to {MAX_PAGE_SIZE}, got {page_size}",
    )
    require(
        MAX_PAGE_SIZE % page_size == 0,
        lambda: f"kv_cache must have a page_size that is a power of two up to {MAX_PAGE_SIZE}, got {page_size}",
    )
    require_dim("kv_cache", kv_cache, head_dim)
    require_unit_stride("kv_cache", kv_cache)
    return kv_cache


def _rope_rows(k_pe: Tensor, device, dtypes=FLOATS) -> Tensor:
    """`k_pe` as [T, rope] whether it came as [T, rope] or [T, 1, rope], checked."""
    require_tensor("k_pe", k_pe, (2, 3), "[T, rope] or [T, 1, rope]", dtypes, device)
    if k_pe.ndim == 3:
        require_size("k_pe", k_pe, 1, 1, "the rope key has one head")
        k_pe = k_pe.squeeze(1)
    return k_pe


def _result_dtype(query: Tensor) -> torch.dtype:
    return torch.bfloat16 if query.dtype == FP8 else query.dtype


def _state(tokens, heads, dim, dtype):
    return (((tokens, heads, dim), dtype), ((tokens, heads), torch.float32))
