"""A model of the TokenSpeed kernels: the real `tokenspeed_mla` runs on CPU tensors, and this stands where it launches.

`install` lets the package's public wrappers run without a GPU, through their own checks and split planner. What they
would launch is replaced by `DecodeKernel` and `PrefillKernel`, which do what the kernels do, hazards included. Each
hazard is marked [n] where it is modelled, and HAZARDS says which function of the package it was read from;
`tests/test_tokenspeed.py` holds a digest of each, so that another release says what to read again.

Arithmetic is fp32 and softmax weights are not rounded to the dtype: this models what is written where, not accuracy.
"""

import contextlib
import functools
import math
from dataclasses import dataclass, field
from types import SimpleNamespace

import torch
from torch import Tensor

FP8 = torch.float8_e4m3fn
TILE = 128  # keys of a tile, and of a group of table entries
PREFILL_ROWS = 256  # query rows of a prefill tile
MASKED_SCORE = -1.0e6

HAZARDS = {
    1: ("decode's LSE is a base-2 logarithm",
        ["mla_decode_fp8.epilogue", "mla_decode_fp8.reduction_kernel", "mla_decode_fp16.epilogue",
         "mla_decode_fp16.reduction_kernel"]),
    2: ("an empty request is not written where there is one split",
        ["mla_decode_fp8.split_kv_kernel", "mla_decode_fp16.split_kv_kernel"]),
    3: ("a masked score is finite, so a row without keys averages its tile",
        ["mla_decode_fp8.softmax", "mla_decode_fp16.softmax"]),
    4: ("values past the request are multiplied by 0, not skipped",
        ["mla_decode_fp8.load_tma_v_one_k_tile", "mla_decode_fp16.load_tma_v_one_k_tile"]),
    5: ("the FP8 kernel reads table entries in groups of 128 tokens, whatever the row's width",
        ["mla_decode_fp8.load_tma_k_one_k_tile"]),
    6: ("folded and packed queries are read as if each token followed the heads of the one before",
        ["mla_decode_fp8.__call__", "mla_decode_fp16.__call__"]),
    7: ("the context-parallel bound is not limited to seq_lens", ["mla_decode_fp8._get_dcp_local_bound"]),
    8: ("tables, lengths and outputs are read as contiguous, whatever their strides",
        ["mla_decode._get_compiled_mla_kernel"]),
    9: ("the caller has no say in where the LSE goes, and what the kernel leaves out of it is 0",
        ["mla_decode.tokenspeed_mla_decode"]),
    10: ("prefill ignores the strides of query, key and value", ["fmha.__call__"]),
    11: ("rows past the last sequence are not written", ["fmha.kernel"]),
    12: ("a causal tile without keys is a loop of no steps, which its pipeline never leaves",
         ["fmha_helpers.get_trip_count", "fmha.softmax"]),
    13: ("a prefill row without keys is divided by 0", ["fmha.correction_epilog"]),
    14: ("max_seq_len_q sizes the grid: too small a bound drops rows", ["mla_prefill.tokenspeed_mla_prefill"]),
    15: ("prefill has no output scale", ["mla_prefill.tokenspeed_mla_prefill"]),
    16: ("addresses and strides are taken to be multiples of 16 bytes",
         ["mla_decode._get_compiled_mla_kernel", "mla_prefill._to_cute"]),
    17: ("a window's lower bound is a 32-bit sum",
         ["mla_decode_fp8.get_k_tile_count", "mla_decode_fp16.get_k_tile_count"]),
    18: ("an empty tensor has no TMA descriptor, and an empty grid no launch",
         ["mla_decode_fp8.make_paged_tiled_tma_atom", "mla_decode_fp16.make_paged_tiled_tma_atom", "fmha.__call__"]),
}  # fmt: skip
# Of each function's source without white space, in tokenspeed_mla 2.0.4.
READ_FROM = {
    "fmha.__call__": "8974fc1ad8a6",
    "fmha.correction_epilog": "2025a092005b",
    "fmha.kernel": "4546427b8e7a",
    "fmha.softmax": "cd127c2df5f6",
    "fmha_helpers.get_trip_count": "02c673351a9a",
    "mla_decode._get_compiled_mla_kernel": "70df7cc88e92",
    "mla_decode.tokenspeed_mla_decode": "cf974731025b",
    "mla_decode_fp16.__call__": "a8b85da0b458",
    "mla_decode_fp16.epilogue": "73dcdc9b6724",
    "mla_decode_fp16.get_k_tile_count": "ef3ea712f823",
    "mla_decode_fp16.load_tma_v_one_k_tile": "339d308c5998",
    "mla_decode_fp16.make_paged_tiled_tma_atom": "417d11ce6d62",
    "mla_decode_fp16.reduction_kernel": "9ce7c6041efd",
    "mla_decode_fp16.softmax": "ce4b36bfc7c5",
    "mla_decode_fp16.split_kv_kernel": "94941eebadb2",
    "mla_decode_fp8.__call__": "f7bb7cccf156",
    "mla_decode_fp8._get_dcp_local_bound": "f8c2d38ac1ff",
    "mla_decode_fp8.epilogue": "4aad10a533b3",
    "mla_decode_fp8.get_k_tile_count": "f9dd75c0a352",
    "mla_decode_fp8.load_tma_k_one_k_tile": "10d4dca4d301",
    "mla_decode_fp8.load_tma_v_one_k_tile": "13235ab6f1f8",
    "mla_decode_fp8.make_paged_tiled_tma_atom": "417d11ce6d62",
    "mla_decode_fp8.reduction_kernel": "9c09532243db",
    "mla_decode_fp8.softmax": "553a620ce0ab",
    "mla_decode_fp8.split_kv_kernel": "d7d9a791faf9",
    "mla_prefill._to_cute": "095883272f87",
    "mla_prefill.tokenspeed_mla_prefill": "257d65df7e66",
}


class WouldHang(AssertionError):
    """The kernel would never return."""


class OutOfBounds(AssertionError):
    """The kernel would read memory that it was not given."""


@dataclass
class Machine:
    """What was compiled and launched, by the keys that the package compiles by."""

    decode_variants: list[dict] = field(default_factory=list)
    prefill_variants: list[dict] = field(default_factory=list)
    splits: list[int] = field(default_factory=list)
    workspaces: list[int] = field(default_factory=list)
    last_variant: dict | None = None  # of the decode launched last
    capturing: bool = False
    launches: bool = True  # False: kernels are planned and compiled, and do nothing


def install(monkeypatch, *, capability=(10, 0), sms=148, compiler=None) -> Machine:
    """Make this process a Blackwell machine for CPU tensors, as far as the adapter and the package can see.

    `compiler(name, variant, compile)` is called for each kernel that the package would compile; `compile()` does it.
    """
    import tvm_ffi
    from tokenspeed_mla import mla_decode, mla_prefill

    from ts_ops.backends import tokenspeed

    machine = Machine()
    compile_decode = mla_decode._get_compiled_mla_kernel.__wrapped__
    compile_prefill = mla_prefill._compile_prefill_kernel

    @functools.cache
    def compiled_decode(**variant):
        machine.decode_variants.append(variant)
        if compiler:
            compiler("decode", variant, lambda: compile_decode(**variant))
        return DecodeKernel(variant, machine)

    def compiled_prefill(q_dtype, head_dim_qk, head_dim_v, is_causal, return_lse, **options):
        variant = dict(q_dtype=q_dtype, is_causal=is_causal, return_lse=return_lse)
        machine.prefill_variants.append(variant)
        if compiler:
            dims = dict(head_dim_qk=head_dim_qk, head_dim_v=head_dim_v)
            compiler("prefill", variant, lambda: compile_prefill(**variant, **dims, **options))
        return PrefillKernel(is_causal, return_lse, machine)

    def patch(module, name, value):
        monkeypatch.setattr(module, name, value)

    patch(torch.cuda, "get_device_capability", lambda device=None: capability)
    patch(torch.cuda, "is_current_stream_capturing", lambda: machine.capturing)
    patch(tvm_ffi, "use_torch_stream", contextlib.nullcontext)
    patch(mla_decode, "get_num_sm", lambda device: sms)
    patch(mla_decode, "get_max_active_clusters", lambda size: sms // size)
    patch(mla_decode, "_get_compiled_mla_kernel", compiled_decode)
    patch(mla_prefill, "_compiled_kernels", {})
    patch(mla_prefill, "_compile_prefill_kernel", compiled_prefill)
    patch(mla_prefill, "_enable_ex2_emulation", lambda: False)
    patch(mla_prefill, "_to_cute", lambda tensor, dtype: tensor)
    patch(mla_prefill, "_to_cute_1d", lambda tensor: (tensor, tensor))
    patch(tokenspeed, "unavailable", lambda device: tokenspeed.package_problem())
    patch(tokenspeed, "_hardware", lambda device: (capability, sms))
    patch(tokenspeed, "_compiled", set())
    forget()
    return machine


def without_finish() -> None:
    """Leave out the adapter's own launches, which run on CPU tensors only where Triton interprets."""
    from ts_ops.backends import tokenspeed

    tokenspeed._package().finish = SimpleNamespace(
        finish_decode=lambda *_: None,
        finish_prefill=lambda *_: None,
        visible_lens=lambda problem: problem.seq_lens.new_zeros(problem.batch, problem.q_len),
        separate_empty_rows=lambda problem: (problem.cum_seq_lens_q, problem.cum_seq_lens_kv),
    )


def forget() -> None:
    """Drop what the adapter and dispatch remember of a machine."""
    from ts_ops import dispatch
    from ts_ops.backends import tokenspeed

    tokenspeed._split_plan.cache_clear()
    tokenspeed._package.cache_clear()
    dispatch._candidates.cache_clear()


class DecodeKernel:
    """What `_get_compiled_mla_kernel` returns, and the launch or two behind it."""

    def __init__(self, variant: dict, machine: Machine):
        self.variant, self.machine = variant, machine

    def __call__(self, q_latent, q_rope, c_latent, c_rope, table, out, lse, workspace, split_kv, seqs, *rest):
        variant = self.variant
        fp8 = variant["torch_dtype"] == FP8
        causal_seqs = rest[0] if fp8 else None
        block_splits, softmax_scale, output_scale, *visible = rest[1:] if fp8 else rest
        visible = visible[0] if visible else None
        splits, scale_log2 = split_kv.value, softmax_scale.value * math.log2(math.e)
        assert block_splits is None
        for tensor in (q_latent, q_rope, c_latent, c_rope, out):
            assert_aligned(tensor)  # [16]
        assert c_latent.numel() and table.numel()  # [18]
        assert (workspace is None) == variant["is_workspace_size_zero"] == (splits == 1)
        assert (lse is None) != variant["return_lse"]
        assert (visible is not None) == variant["has_local_visible_lens"]
        self.machine.last_variant = variant
        self.machine.splits.append(splits)
        self.machine.workspaces.append(0 if workspace is None else workspace.numel())
        if not self.machine.launches:
            return

        batch, q_len, heads, rank = out.shape
        queries = torch.cat((self._rows(q_latent), self._rows(q_rope)), dim=-1)  # [B, q_len * H, D]
        table, seqs, out = contiguous(table), contiguous(seqs), contiguous(out)  # [8]
        visible = None if visible is None else contiguous(visible)
        causal_seqs = None if causal_seqs is None else contiguous(causal_seqs)
        for b in range(batch):
            length = int(seqs[b])
            tiles = math.ceil(length / TILE)
            window = variant["window_left"]
            assert length - q_len - window > -(2**31)  # [17]
            first = max(0, length - q_len - window) // TILE if window >= 0 else 0
            if tiles == first:
                if splits > 1 or visible is not None:  # [2]
                    out[b] = 0
                    if lse is not None:
                        lse[b] = -math.inf
                continue
            keys = torch.cat([self._tile(c_latent, c_rope, table, b, t) for t in range(first, tiles)])  # [n, D]
            position = first * TILE + torch.arange(len(keys))
            seen = self._seen(position, length, b, causal_seqs, visible)  # [q_len, n]
            scores = (queries[b] @ keys.T).view(q_len, heads, -1)
            scores = scores.masked_fill(~seen[:, None], -math.inf if visible is not None else MASKED_SCORE)  # [3]
            per_split = math.ceil((tiles - first) / splits) * TILE
            states = [
                self._partial(scores[..., n : n + per_split], keys[n : n + per_split, :rank], scale_log2)
                for n in range(0, len(keys), per_split)
            ]
            outputs, logs = (torch.stack(part) for part in zip(*states))  # [S, q_len, H, rank], [S, q_len, H]
            total = torch.logsumexp(logs * math.log(2), dim=0) / math.log(2)
            weights = torch.where(total == -math.inf, 0.0, torch.exp2(logs - total))
            out[b] = (outputs * weights[..., None]).sum(dim=0) * output_scale.value
            if lse is not None:
                lse[b] = total  # [1]; [9]: of what is not written, 0 is left

    def _rows(self, query: Tensor) -> Tensor:
        """[B, q_len, H, D] as [B, q_len * H, D] fp32."""
        batch, q_len, heads, dim = query.shape
        stride_b, stride_q, stride_h, _ = query.stride()
        group = q_len if self.variant["pack_q"] else self.variant["fold_sq_factor"]
        shape, strides = (batch, q_len // group, group * heads, dim), (stride_b, stride_q * group, stride_h, 1)
        rows = query.as_strided(shape, strides, query.storage_offset())  # [6]
        return rows.float().reshape(batch, q_len * heads, dim)

    def _tile(self, c_latent: Tensor, c_rope: Tensor, table: Tensor, b: int, tile: int) -> Tensor:
        """The 128 keys of a tile, [128, D] fp32, whether or not they belong to the request [4]."""
        pages = TILE // self.variant["page_size"]
        entries = tile * pages + torch.arange(pages)
        if self.variant["torch_dtype"] == FP8:  # [5]
            flat = b * table.shape[1] + entries
            if int(flat.max()) >= table.numel():
                raise OutOfBounds(f"table entry {int(flat.max())} of {table.numel()}")
            ids = table.flatten()[flat]
        else:
            inside = entries < table.shape[1]
            ids = torch.where(inside, table[b][entries.clamp(max=table.shape[1] - 1)], 0)
        if not bool(((ids >= 0) & (ids < len(c_latent))).all()):
            raise OutOfBounds(f"page ids {ids.tolist()} of {len(c_latent)} pages")
        ids = ids.long()
        return torch.cat((c_latent[ids].float(), c_rope[ids].float()), dim=-1).flatten(0, 1)

    def _seen(self, position: Tensor, length: int, b: int, causal_seqs, visible) -> Tensor:
        variant = self.variant
        q_len, world, window = variant["seq_len_q"], variant["cp_world"], variant["window_left"]
        row = torch.arange(q_len)
        if visible is not None:
            bound = visible[b]
        elif not variant["causal_mask"]:
            bound = torch.full((q_len,), length)
        elif world == 1:
            bound = length - (q_len - 1) + row
        else:
            whole = int(causal_seqs[b]) - (q_len - 1) + row
            interleave, rank = variant["cp_interleave_size"], variant["cp_rank"]
            cycle = world * interleave
            full = torch.div(whole, cycle, rounding_mode="floor")
            bound = full * interleave + (whole - full * cycle - rank * interleave).clamp(0, interleave)  # [7]
        seen = position < bound[:, None]
        if window >= 0:
            seen &= position > (length - q_len - window + row - 1)[:, None]
        return seen

    @staticmethod
    def _partial(scores: Tensor, values: Tensor, scale_log2: float) -> tuple[Tensor, Tensor]:
        """Normalised output and log2 LSE of one split."""
        peak = scores.amax(dim=-1, keepdim=True)
        weights = torch.exp2((scores - torch.where(peak == -math.inf, 0.0, peak)) * scale_log2)
        total = weights.sum(dim=-1, keepdim=True)
        out = weights @ values / torch.where(total == 0.0, 1.0, total)  # [4]: 0 * NaN is NaN
        log = torch.log2(total) + torch.where(total == 0.0, 0.0, peak) * scale_log2
        return torch.where(total == 0.0, 0.0, out), log[..., 0]


class PrefillKernel:
    """What `_compile_prefill_kernel` returns."""

    def __init__(self, is_causal: bool, return_lse: bool, machine: Machine):
        self.is_causal, self.return_lse, self.machine = is_causal, return_lse, machine

    def __call__(self, query, key, value, out, sizes, cum_q, cum_kv, lse, scale_log2, scale, output_scale, *rest):
        assert (lse is None) != self.return_lse
        assert output_scale.value == 1.0  # [15]
        assert rest[2] is not None if self.is_causal else rest[2] is None
        if not self.machine.launches:
            return
        batch, max_q, _, _, heads, heads_kv, _, _ = (size.value for size in sizes)
        for tensor in (query, key, value, out):
            assert tensor.data_ptr() % 16 == 0  # [16]
            assert tensor.numel() and batch  # [18]
        query, key, value, out = (contiguous(t)[0] for t in (query, key, value, out))  # [10]; [T, H_kv, group, D]
        cum_q, cum_kv = contiguous(cum_q), contiguous(cum_kv)  # [8]
        query, out = query.flatten(1, 2), out.view(out.shape[0], heads, -1)
        key, value = key[:, :, 0].float(), value[:, :, 0].float()
        for s in range(batch):  # [11]
            q_start, q_end = cum_q[s : s + 2].tolist()
            k_start, k_end = cum_kv[s : s + 2].tolist()
            q_len, kv_len = q_end - q_start, k_end - k_start
            for tile in range(math.ceil(max_q / PREFILL_ROWS)):  # [14]
                first = tile * PREFILL_ROWS
                if first >= q_len:
                    break
                rows = slice(q_start + first, q_start + min(first + PREFILL_ROWS, q_len))
                if kv_len <= 0:
                    out[rows] = 0
                    if lse is not None:
                        lse[rows] = -math.inf
                    continue
                steps = math.ceil(kv_len / TILE)
                if self.is_causal:
                    steps = min(steps, math.ceil((first + PREFILL_ROWS + kv_len - q_len) / TILE))
                if steps <= 0:  # [12]
                    raise WouldHang(f"query rows from {first} of {q_len}, with {kv_len} keys, see none")
                # A tile past the sequence holds the keys of the next one, as finite numbers times 0.
                keys, values = (t[k_start : k_start + steps * TILE] for t in (key, value))
                position = torch.arange(len(keys))
                bound = torch.full((rows.stop - rows.start,), kv_len)
                if self.is_causal:
                    bound = kv_len - q_len + 1 + torch.arange(rows.start, rows.stop) - q_start
                seen = position < bound.clamp(max=kv_len)[:, None]
                for h in range(heads):
                    kv_head = h // (heads // heads_kv)
                    scores = query[rows, h].float() @ keys[:, kv_head].T
                    scores = scores.masked_fill(~seen, -math.inf)
                    peak = scores.amax(dim=-1, keepdim=True)
                    peak = torch.where(peak == -math.inf, 0.0, peak)
                    weights = torch.exp2((scores - peak) * scale_log2.value)
                    total = weights.sum(dim=-1, keepdim=True)
                    out[rows, h] = (weights @ values[:, kv_head] * (1.0 / total)).to(out.dtype)  # [13]
                    if lse is not None:
                        lse[rows, h] = (torch.log(total) + scale.value * peak)[:, 0]


def assert_aligned(tensor: Tensor) -> None:
    size = tensor.element_size()
    assert tensor.stride(-1) == 1 and all(stride * size % 16 == 0 for stride in tensor.stride()[:-1])
    assert tensor.data_ptr() % 16 == 0


def contiguous(tensor: Tensor) -> Tensor:
    """The tensor that code which ignores strides sees."""
    strides, inner = [], 1
    for size in reversed(tensor.shape):
        strides.insert(0, inner)
        inner *= size
    return tensor.as_strided(tensor.shape, strides, tensor.storage_offset())
