"""What each operator takes and gives: one class an operator, read by the fakes and by every backend.

Constructing a class reads shapes and dtypes once, checks them (see `meta/check.py`) and keeps what a kernel needs;
`allocate()` returns the output tensors. So a fake and a kernel cannot disagree about a shape, a dtype, a stride or an
error. Nothing here reads memory: values on the device (lengths, page ids, slots) are not checked.

Shapes: B requests, H query heads, D = kv_lora_rank + rope head dim (576 for DeepSeek-R1), T tokens.
"""

import torch
from torch import Tensor

from .check import (
    either,
    is_constant,
    name_dtypes,
    require,
    require_disjoint,
    require_finite,
    require_size,
    require_tensor,
    require_unit_stride,
)

FP8 = torch.float8_e4m3fn
HALVES = (torch.bfloat16, torch.float16)
FLOATS = (*HALVES, torch.float32)
MATRIX = (FP8, *FLOATS)
INT32 = (torch.int32,)
INT64 = (torch.int64,)
FLOAT32 = (torch.float32,)
INT64_MAX = torch.iinfo(torch.int64).max
MAX_HEADS = 128
MAX_PAGE_SIZE = 128
PAGE_SIZES = frozenset({1, 2, 4, 8, 16, 32, 64, MAX_PAGE_SIZE})


class Problem:
    """A checked call. `results` lists (shape, dtype); all outputs are contiguous and on `device`.

    `rows` is 0 where there is nothing to compute, and `written` names the inputs that the call writes.
    """

    __slots__ = ("device", "results", "rows")
    written: tuple[Tensor, ...] = ()

    def allocate(self) -> tuple[Tensor, ...]:
        device = self.device
        return tuple([torch.empty(shape, dtype=dtype, device=device) for shape, dtype in self.results])

    @property
    def dtypes(self) -> set[torch.dtype]:
        """Dtypes of all inputs and results, for a backend that lacks some."""
        return {tensor.dtype for tensor in self._inputs().values()}.union(dtype for _, dtype in self.results)

    def check_buffers(self, names: tuple[str, ...], buffers: tuple[Tensor, ...]) -> None:
        """Check the buffers of a `.out` call: each is like the result it stands for, and overlaps no input."""
        others = self._inputs()
        for name, buffer, (shape, dtype) in zip(names, buffers, self.results):
            actual = require_tensor(name, buffer, (len(shape),), f"{list(shape)}", (dtype,), self.device)
            for dim, size in enumerate(shape):
                require(actual[dim] == size, "{} must have the result's shape {}, got {}", name, shape, actual)
            if not buffer.is_contiguous():
                raise ValueError(f"{name} must be contiguous, got strides {list(buffer.stride())}")
            require_disjoint(name, buffer, others)
            others[name] = buffer

    def _inputs(self) -> dict[str, Tensor]:
        return {name: value for name in self.__slots__ if isinstance(value := getattr(self, name), Tensor)}


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
        device, dtype = query.device, query.dtype
        shape = require_tensor("query", query, (4,), "[B, q_len, H, kv_lora_rank + rope]", MATRIX, device)
        batch, q_len, heads, head_dim = shape
        kv_cache = _paged(kv_cache, (dtype, FP8) if dtype in HALVES else (dtype,), device)
        pages = kv_cache.shape
        tables = require_tensor("block_tables", block_tables, (2,), "[B, max_pages]", INT32, device)
        lengths = require_tensor("seq_lens", seq_lens, (1,), "[B]", INT32, device)

        require_heads("query", shape, heads)
        require_unit_stride("query", query)
        require_size("kv_cache", pages, 2, head_dim, "the query's last dimension")
        require(kv_lora_rank >= 1, "kv_lora_rank must be at least 1, got {}", kv_lora_rank)
        require(
            kv_lora_rank <= head_dim,
            "kv_lora_rank must be at most the query's last dimension {}, got {}", head_dim, kv_lora_rank,
        )  # fmt: skip
        require_size("block_tables", tables, 0, batch, "the query's batch")
        require_size("seq_lens", lengths, 0, batch, "the query's batch")
        require_finite("softmax_scale", softmax_scale)
        require_finite("output_scale", output_scale)
        if max_seq_len is not None:
            require_bound("max_seq_len", max_seq_len)

        self.device = device
        self.rows = batch * q_len * heads
        output = ((batch, q_len, heads, kv_lora_rank), _result_dtype(dtype))
        self.results = (output, ((batch, q_len, heads), torch.float32)) if with_lse else (output,)
        self.query, self.kv_cache, self.block_tables, self.seq_lens = query, kv_cache, block_tables, seq_lens
        self.softmax_scale, self.output_scale, self.kv_lora_rank = softmax_scale, output_scale, kv_lora_rank
        self.is_causal, self.window_left = is_causal, window_left
        self.local_visible_lens, self.causal_seqs = local_visible_lens, causal_seqs
        self.cp_world, self.cp_rank, self.cp_interleave_size = cp_world, cp_rank, cp_interleave_size
        self.max_seq_len = max_seq_len
        self.batch, self.q_len, self.heads, self.head_dim = batch, q_len, heads, head_dim
        self.num_pages, self.page_size, self.max_pages = pages[0], pages[1], tables[1]
        # A call without law 3's options is the usual one. A symbolic integer is no plain int, and is checked.
        plain = type(window_left) is type(cp_world) is type(cp_rank) is type(cp_interleave_size) is int
        options = (window_left, cp_world, cp_rank, cp_interleave_size)
        if not plain or options != (-1, 1, 0, 1) or local_visible_lens is not None or causal_seqs is not None:
            self._check_visibility()

    def _check_visibility(self) -> None:
        """Law 3's options. Each condition holds for symbolic integers too, so none is asked with an `if`."""
        window, world, rank, interleave = self.window_left, self.cp_world, self.cp_rank, self.cp_interleave_size
        windowed, parallel = not is_constant(window, -1), not is_constant(world, 1)
        if windowed:
            least = self.q_len - 1
            require(
                either(window == -1, window >= least),
                "window_left must be -1 (no window) or at least q_len - 1 = {}, got {}", least, window,
            )  # fmt: skip
        if parallel or not is_constant(rank, 0) or not is_constant(interleave, 1):
            require(world >= 1, "cp_world must be at least 1, got {}", world)
            require(rank >= 0, "cp_rank must be in [0, cp_world = {}), got {}", world, rank)
            require(rank < world, "cp_rank must be in [0, cp_world = {}), got {}", world, rank)
            require(interleave >= 1, "cp_interleave_size must be at least 1, got {}", interleave)
            require(
                world * interleave <= INT64_MAX,
                "cp_interleave_size times cp_world must be at most 2**63 - 1, got {} and {}", interleave, world,
            )  # fmt: skip
        if self.causal_seqs is not None:
            shape = require_tensor("causal_seqs", self.causal_seqs, (1,), "[B]", INT32, self.device)
            require_size("causal_seqs", shape, 0, self.batch, "the query's batch")
            require(
                world > 1,
                "causal_seqs is for context parallelism only: pass cp_world > 1 (got {}) or leave it out", world,
            )  # fmt: skip
        elif parallel:
            require(
                world == 1, "causal_seqs (the global lengths, [B] int32) is required with cp_world > 1 (got {})", world
            )
        if windowed and parallel:
            require(
                either(window == -1, world == 1),
                "window_left cannot be used with cp_world > 1 (got {} and {}): a window has no meaning over the part "
                "of the keys that one rank holds", window, world,
            )  # fmt: skip
        if self.local_visible_lens is not None:
            name = "local_visible_lens"
            shape = require_tensor(name, self.local_visible_lens, (2,), "[B, q_len]", INT32, self.device)
            require_size(name, shape, 0, self.batch, "the query's batch")
            require_size(name, shape, 1, self.q_len, "the query's q_len")
            excluded = "local_visible_lens cannot be used with {} (got {}): it already is each row's bound"
            require(window == -1, excluded, "window_left", window)
            require(world == 1, excluded, "cp_world > 1", world)

    @property
    def capacity(self):
        """Keys that the block tables can name, an upper bound of every seq_len."""
        return self.max_pages * self.page_size


class Prefill(Problem):
    """mla_prefill and mla_prefill_lse: ragged, query [Tq, H, Dqk] over key [Tkv, H_kv, Dqk], value [.., Dv]."""

    __slots__ = (
        "query", "key", "value", "cum_seq_lens_q", "cum_seq_lens_kv", "softmax_scale", "output_scale", "is_causal",
        "max_seq_len_q", "max_seq_len_kv", "batch", "tokens_q", "tokens_kv", "heads", "heads_kv", "dim_qk", "dim_v",
    )  # fmt: skip

    def __init__(
        self, query, key, value, cum_seq_lens_q, cum_seq_lens_kv, softmax_scale, *, output_scale=1.0, is_causal=True,
        max_seq_len_q=None, max_seq_len_kv=None, with_lse=False,
    ):  # fmt: skip
        device, dtype = query.device, query.dtype
        shape = require_tensor("query", query, (3,), "[Tq, H, head_dim_qk]", MATRIX, device)
        key_shape = require_tensor("key", key, (3,), "[Tkv, H_kv, head_dim_qk]", (dtype,), device)
        value_shape = require_tensor("value", value, (3,), "[Tkv, H_kv, head_dim_v]", (dtype,), device)
        (entries,) = require_tensor("cum_seq_lens_q", cum_seq_lens_q, (1,), "[B + 1]", INT32, device)
        entries_kv = require_tensor("cum_seq_lens_kv", cum_seq_lens_kv, (1,), "[B + 1]", INT32, device)
        tokens_q, heads, dim_qk = shape
        tokens_kv, heads_kv, dim_v = value_shape

        require_heads("query", shape, heads)
        require_dim("query", shape, dim_qk)
        require_dim("value", value_shape, dim_v)
        require_size("key", key_shape, 0, tokens_kv, "the value's tokens")
        require_size("key", key_shape, 1, heads_kv, "the value's heads")
        require_size("key", key_shape, 2, dim_qk, "the query's last dimension")
        require(heads_kv >= 1, "key must have at least one head, got {}", key_shape)
        require(heads % heads_kv == 0, "query must have a multiple of the key's {} heads, got {}", heads_kv, shape)
        require_unit_stride("query", query)
        require_unit_stride("key", key)
        require_unit_stride("value", value)
        require(entries >= 1, "cum_seq_lens_q must have B + 1 entries, the first of them 0; got none")
        require_size("cum_seq_lens_kv", entries_kv, 0, entries, "the entries of cum_seq_lens_q")
        require_finite("softmax_scale", softmax_scale)
        require_finite("output_scale", output_scale)
        if max_seq_len_q is not None:
            require_bound("max_seq_len_q", max_seq_len_q)
        if max_seq_len_kv is not None:
            require_bound("max_seq_len_kv", max_seq_len_kv)

        self.device = device
        self.rows = tokens_q * heads
        output = ((tokens_q, heads, dim_v), _result_dtype(dtype))
        self.results = (output, ((tokens_q, heads), torch.float32)) if with_lse else (output,)
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
        device, dtype = prefix_output.device, prefix_output.dtype
        shape = require_tensor("prefix_output", prefix_output, (3,), "[T, H, D]", FLOATS, device)
        prefix = require_tensor("prefix_lse", prefix_lse, (2,), "[T, H]", FLOAT32, device)
        other = require_tensor("suffix_output", suffix_output, (3,), "[T, H, D]", (dtype,), device)
        suffix = require_tensor("suffix_lse", suffix_lse, (2,), "[T, H]", FLOAT32, device)
        tokens, heads, dim = shape
        require_dim("prefix_output", shape, dim)
        require_size("suffix_output", other, 0, tokens, "as in prefix_output")
        require_size("suffix_output", other, 1, heads, "as in prefix_output")
        require_size("suffix_output", other, 2, dim, "as in prefix_output")
        require_size("prefix_lse", prefix, 0, tokens, "the tokens of prefix_output")
        require_size("prefix_lse", prefix, 1, heads, "the heads of prefix_output")
        require_size("suffix_lse", suffix, 0, tokens, "the tokens of prefix_output")
        require_size("suffix_lse", suffix, 1, heads, "the heads of prefix_output")
        require_unit_stride("prefix_output", prefix_output)
        require_unit_stride("suffix_output", suffix_output)

        self.device = device
        self.rows = tokens * heads
        self.results = _state(tokens, heads, dim, dtype)
        self.prefix_output, self.prefix_lse = prefix_output, prefix_lse
        self.suffix_output, self.suffix_lse = suffix_output, suffix_lse
        self.tokens, self.heads, self.dim = tokens, heads, dim


class MergeN(Problem):
    """merge_attn_states_n: N states of [T, H, D] and [T, H], stacked."""

    __slots__ = ("outputs", "lses", "states", "tokens", "heads", "dim")

    def __init__(self, outputs, lses):
        device = outputs.device
        shape = require_tensor("outputs", outputs, (4,), "[N, T, H, D]", FLOATS, device)
        lse_shape = require_tensor("lses", lses, (3,), "[N, T, H]", FLOAT32, device)
        states, tokens, heads, dim = shape
        require(states >= 1, "outputs must hold at least one state, got {}", shape)
        require_dim("outputs", shape, dim)
        require_size("lses", lse_shape, 0, states, "the states of outputs")
        require_size("lses", lse_shape, 1, tokens, "the tokens of outputs")
        require_size("lses", lse_shape, 2, heads, "the heads of outputs")
        require_unit_stride("outputs", outputs)

        self.device = device
        self.rows = tokens * heads
        self.results = _state(tokens, heads, dim, outputs.dtype)
        self.outputs, self.lses = outputs, lses
        self.states, self.tokens, self.heads, self.dim = states, tokens, heads, dim


class CacheWrite(Problem):
    """mla_kv_cache_write: the first T rows of `kv_c` and `k_pe` go to the slots of `slot_mapping` [T]."""

    __slots__ = (
        "kv_cache", "kv_c", "k_pe", "slot_mapping", "k_scale", "page_size", "kv_lora_rank", "rope_dim", "written",
    )  # fmt: skip

    def __init__(self, kv_cache, kv_c, k_pe, slot_mapping, *, k_scale=None):
        device = kv_cache.device
        kv_cache = _paged(kv_cache, MATRIX, device)
        rows, kv_lora_rank = latent = require_tensor("kv_c", kv_c, (2,), "[>= T, kv_lora_rank]", FLOATS, device)
        k_pe = _rope_rows(k_pe, FLOATS, device)
        rope_rows, rope_dim = k_pe.shape
        (tokens,) = require_tensor("slot_mapping", slot_mapping, (1,), "[T]", INT64, device)
        num_pages, page_size, head_dim = kv_cache.shape
        require(
            kv_lora_rank + rope_dim == head_dim,
            "kv_c and k_pe must have {} columns together (the last dimension of kv_cache), got {} + {}",
            head_dim, kv_lora_rank, rope_dim,
        )  # fmt: skip
        require_dim("kv_c", latent, kv_lora_rank)
        too_few = "{} must have a row for each of the {} slots in slot_mapping, got {}"
        require(rows >= tokens, too_few, "kv_c", tokens, rows)
        require(rope_rows >= tokens, too_few, "k_pe", tokens, rope_rows)
        require_unit_stride("kv_c", kv_c)
        require_unit_stride("k_pe", k_pe)
        strides = kv_cache.stride()
        for dim, size in ((0, num_pages), (1, page_size)):
            require(
                either(strides[dim] >= head_dim, size <= 1),
                "kv_cache must not have rows that overlap in memory, as an expanded tensor has; got strides {}",
                strides,
            )  # fmt: skip
        if k_scale is not None:
            require_k_scale(k_scale, kv_cache)
        sources = {"kv_c": kv_c, "k_pe": k_pe, "slot_mapping": slot_mapping, "k_scale": k_scale}
        require_disjoint("kv_cache", kv_cache, sources)

        self.device = device
        self.rows = tokens
        self.results = ()
        self.written = (kv_cache,)
        self.kv_cache, self.kv_c, self.k_pe, self.slot_mapping = kv_cache, kv_c, k_pe, slot_mapping
        self.k_scale = k_scale
        self.page_size, self.kv_lora_rank, self.rope_dim = page_size, kv_lora_rank, rope_dim


class CacheGather(Problem):
    """mla_kv_cache_gather: tokens of B paged requests, packed into [total_tokens, D]."""

    __slots__ = (
        "kv_cache", "block_tables", "cum_seq_lens", "total_tokens", "seq_starts", "k_scale", "dtype",
        "batch", "page_size", "head_dim", "max_pages", "num_pages",
    )  # fmt: skip

    def __init__(
        self, kv_cache, block_tables, cum_seq_lens, total_tokens, *, seq_starts=None, k_scale=None, dtype=None
    ):
        device = kv_cache.device
        kv_cache = _paged(kv_cache, MATRIX, device)
        batch, max_pages = require_tensor("block_tables", block_tables, (2,), "[B, max_pages]", INT32, device)
        entries = require_tensor("cum_seq_lens", cum_seq_lens, (1,), "[B + 1]", INT32, device)
        require_size("cum_seq_lens", entries, 0, batch + 1, "B + 1, for the B rows of block_tables")
        require(total_tokens >= 0, "total_tokens must not be negative, got {}", total_tokens)
        if seq_starts is not None:
            starts = require_tensor("seq_starts", seq_starts, (1,), "[B]", INT32, device)
            require_size("seq_starts", starts, 0, batch, "the rows of block_tables")
        if k_scale is not None:
            require_k_scale(k_scale, kv_cache)
        cache_dtype = kv_cache.dtype
        dtype = cache_dtype if dtype is None else dtype
        if dtype not in MATRIX:
            raise TypeError(f"dtype must be {name_dtypes(MATRIX)}, got {dtype}")
        if dtype == FP8 and cache_dtype != FP8:
            raise ValueError(f"dtype {FP8} needs an FP8 kv_cache, got one of {cache_dtype}")
        if dtype == FP8 and k_scale is not None:
            raise ValueError(f"dtype must not be {FP8} when k_scale is given: pass the dtype to dequantise to")

        self.num_pages, self.page_size, self.head_dim = kv_cache.shape
        self.device = device
        self.rows = total_tokens
        self.results = (((total_tokens, self.head_dim), dtype),)
        self.kv_cache, self.block_tables, self.cum_seq_lens = kv_cache, block_tables, cum_seq_lens
        self.total_tokens, self.seq_starts, self.k_scale, self.dtype = total_tokens, seq_starts, k_scale, dtype
        self.batch, self.max_pages = batch, max_pages


class PackQuantize(Problem):
    """mla_kv_pack_quantize_fp8: k_nope [T, H, Dn] beside the broadcast k_pe [T, Dr], and v [T, H, Dv], both to FP8."""

    __slots__ = (
        "k_nope", "k_pe", "v", "k_scale_inv", "v_scale_inv", "tokens", "heads", "dim_nope", "dim_rope", "dim_v",
    )  # fmt: skip

    def __init__(self, k_nope, k_pe, v, *, k_scale_inv=1.0, v_scale_inv=1.0):
        device, dtype = k_nope.device, (k_nope.dtype,)
        shape = require_tensor("k_nope", k_nope, (3,), "[T, H, head_dim_nope]", FLOATS, device)
        k_pe = _rope_rows(k_pe, dtype, device)
        rope_shape = k_pe.shape
        v_shape = require_tensor("v", v, (3,), "[T, H, head_dim_v]", dtype, device)
        tokens, heads, dim_nope = shape
        dim_rope, dim_v = rope_shape[1], v_shape[2]
        require_dim("k_nope", shape, dim_nope)
        require_dim("v", v_shape, dim_v)
        require_size("k_pe", rope_shape, 0, tokens, "the tokens of k_nope")
        require_size("v", v_shape, 0, tokens, "the tokens of k_nope")
        require_size("v", v_shape, 1, heads, "the heads of k_nope")
        require_unit_stride("k_nope", k_nope)
        require_unit_stride("k_pe", k_pe)
        require_unit_stride("v", v)
        require_finite("k_scale_inv", k_scale_inv)
        require_finite("v_scale_inv", v_scale_inv)

        self.device = device
        self.rows = tokens * heads
        self.results = (
            ((tokens, heads, dim_nope + dim_rope), FP8),
            ((tokens, heads, dim_v), FP8),
        )
        self.k_nope, self.k_pe, self.v, self.k_scale_inv, self.v_scale_inv = k_nope, k_pe, v, k_scale_inv, v_scale_inv
        self.tokens, self.heads, self.dim_nope, self.dim_rope, self.dim_v = tokens, heads, dim_nope, dim_rope, dim_v


def require_heads(name: str, shape: torch.Size, heads) -> None:
    if (some := heads >= 1) is not True:
        require(some, "{} must have at least one head, got {}", name, shape)
    if (few := heads <= MAX_HEADS) is not True:
        require(few, "{} must have at most {} heads, got {}", name, MAX_HEADS, heads)


def require_dim(name: str, shape: torch.Size, dim) -> None:
    if (some := dim >= 1) is not True:
        require(some, "{} must have a last dimension of at least 1, got {}", name, shape)


def require_bound(name: str, bound) -> None:
    require(bound >= 0, "{} must not be negative, got {}", name, bound)


def require_k_scale(k_scale: Tensor, kv_cache: Tensor) -> None:
    shape = require_tensor("k_scale", k_scale, (0, 1, 2, 3, 4), "of one element", FLOAT32, kv_cache.device)
    require(k_scale.numel() == 1, "k_scale must have one element, got {}", shape)
    if kv_cache.dtype != FP8:
        raise ValueError(f"k_scale is for an FP8 kv_cache only: leave it out for {kv_cache.dtype}")


def _paged(kv_cache: Tensor, dtypes, device) -> Tensor:
    """`kv_cache` as [num_pages, page_size, D], checked."""
    layout = "[num_pages, page_size, D] or [num_pages, 1, page_size, D]"
    shape = require_tensor("kv_cache", kv_cache, (3, 4), layout, dtypes, device)
    if len(shape) == 4:
        require_size("kv_cache", shape, 1, 1, "MLA has one KV head")
        kv_cache = kv_cache.select(1, 0)
    page_size = shape[-2]
    if type(page_size) is not int or page_size not in PAGE_SIZES:
        # The powers of two up to 128 are exactly the divisors of 128, which a symbolic size can be asked for.
        not_a_power = "kv_cache must have a page_size that is a power of two up to {}, got {}"
        require(page_size >= 1, not_a_power, MAX_PAGE_SIZE, page_size)
        require(page_size <= MAX_PAGE_SIZE, not_a_power, MAX_PAGE_SIZE, page_size)
        require(MAX_PAGE_SIZE % page_size == 0, not_a_power, MAX_PAGE_SIZE, page_size)
    require_dim("kv_cache", shape, shape[-1])
    require_unit_stride("kv_cache", kv_cache)
    return kv_cache


def _rope_rows(k_pe: Tensor, dtypes, device) -> Tensor:
    """`k_pe` as [T, rope] whether it came as [T, rope] or [T, 1, rope], checked."""
    shape = require_tensor("k_pe", k_pe, (2, 3), "[T, rope] or [T, 1, rope]", dtypes, device)
    if len(shape) == 2:
        return k_pe
    require_size("k_pe", shape, 1, 1, "the rope key has one head")
    return k_pe.select(1, 0)


def _result_dtype(query: torch.dtype) -> torch.dtype:
    return torch.bfloat16 if query == FP8 else query


def _state(tokens, heads, dim, dtype):
    return (((tokens, heads, dim), dtype), ((tokens, heads), torch.float32))
