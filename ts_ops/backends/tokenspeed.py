"""The adapter onto the TokenSpeed kernels (package `tokenspeed_mla`), for Blackwell GPUs.

Decode and prefill take the path that serving systems run, with the kernel's own causal, window and context-parallel
masks. What the kernels leave to their caller is done here; each item names the function of `tokenspeed_mla` 2.0.4
where it can be read.

- Decode's LSE is a base-2 logarithm (`epilogue`), and so is the one that the reduction writes (`reduction_kernel`).
- A decode row that sees no key is left unwritten (`split_kv_kernel`, one split) or holds the mean of a tile (`softmax`,
  whose masked score is -1e6): one small launch behind the kernel writes (0, -inf) there and converts the LSE. With
  `local_visible_lens` the kernel masks with -inf and writes such rows itself.
- That masked score is finite before scaling, so a tiny softmax_scale would let masked keys in: such calls, and BF16
  context parallelism, which the kernel refuses, are expressed through `local_visible_lens`.
- Decode folds q_len into the heads (`__call__`), which is right only where a query token follows the heads of the one
  before. Queries that lie otherwise are copied.
- The FP8 kernel reads a request's table in groups of 128 tokens (`load_tma_k_one_k_tile`): tables of another width are
  padded with page 0.
- Prefill ignores strides (`BlackwellFusedMultiHeadAttentionForward.__call__`) and has no output scale. A causal tile of
  256 rows without keys is a loop of no steps, which its pipeline never leaves (`FusedMask.get_trip_count`), and a row
  without keys is divided by 0 (`correction_epilog`): rows beyond their sequence's keys become a sequence of their own,
  which has no keys and which the kernel does write. Rows past the last sequence are written here.

Two preconditions remain with the caller (`ts_ops.allocate_kv_cache` and tables filled with page 0 meet them): cache
memory is finite, as V past a request is multiplied by 0, and table entries up to the next multiple of 128 tokens are
page ids. Likewise the keys and values of a prefill are finite.

A kernel that was not compiled before is compiled at its first call, which takes seconds; under CUDA graph capture that
is an error, raised before anything is recorded. `ts_ops.warmup` compiles what a deployment needs.
"""

import functools
import importlib.util
import inspect
import math
import threading
from types import SimpleNamespace
from typing import NamedTuple

import torch
from torch import Tensor

from ..meta.contract import FP8, MAX_PAGE_SIZE, Decode, PackQuantize, Prefill, Problem
from ..workspace import sm_count

CAPABILITIES = ((10, 0), (10, 3), (10, 7))
INSTALL = "pip install 'tokenspeed-mla>=2.0.4,<3'"
RANK, ROPE = 512, 64
PREFILL_DIMS = (192, 128)
KEY_TILE = MAX_PAGE_SIZE  # keys that a decode kernel reads at a time
ALIGNMENT = 16  # bytes, of addresses and strides: what TMA takes
INT32_LIMIT = 2**31
WIDEST_WINDOW = 2**30
# Below it a masked score of -1e6 is less than 100 away from 0 once scaled.
LEAST_SCALE = 1e-4
LN_2 = math.log(2.0)

_compiled: set[tuple] = set()
_compiling = threading.Lock()


def unavailable(device: torch.device) -> str | None:
    if device.type != "cuda":
        return "the TokenSpeed kernels are for Blackwell GPUs"
    capability = torch.cuda.get_device_capability(device)
    if capability not in CAPABILITIES:
        return "the TokenSpeed kernels need compute capability 10.0, 10.3 or 10.7, got {}.{}".format(*capability)
    return package_problem()


@functools.cache
def package_problem() -> str | None:
    """Why `tokenspeed_mla` cannot be used here, with the command that mends it; None if it can."""
    if importlib.util.find_spec("tokenspeed_mla") is None:
        return f"the package tokenspeed_mla is not installed: {INSTALL}"
    try:
        import tokenspeed_mla
    except Exception as error:  # whatever ails it must not take the other backends down
        return f"the package tokenspeed_mla cannot be imported ({error!r}): {INSTALL}"
    if (error := getattr(tokenspeed_mla, "_IMPORT_ERROR", None)) is not None:
        return f"the package tokenspeed_mla lacks a dependency ({error}): {INSTALL}"
    for module, distribution in (("tvm_ffi", "apache-tvm-ffi"), ("triton", "triton>=3.6")):
        if importlib.util.find_spec(module) is None:
            return f"TokenSpeed needs {distribution}, which is not installed: pip install '{distribution}'"
    for function, needed in (
        (tokenspeed_mla.tokenspeed_mla_decode, {"return_lse", "window_left", "causal_seqs", "local_visible_lens"}),
        (tokenspeed_mla.tokenspeed_mla_prefill, {"return_lse", "out"}),
    ):
        if missing := sorted(needed - set(inspect.signature(function).parameters)):
            return f"the package tokenspeed_mla is too old: its {function.__name__} has no {missing[0]}: {INSTALL}"
    return None


@functools.cache
def _package() -> SimpleNamespace:
    import tokenspeed_mla
    from tokenspeed_mla import mla_decode, mla_helpers

    from .triton import finish, launch

    return SimpleNamespace(
        decode=tokenspeed_mla.tokenspeed_mla_decode,
        prefill=tokenspeed_mla.tokenspeed_mla_prefill,
        pack=tokenspeed_mla.mla_kv_pack_quantize_fp8,
        planner=mla_decode,
        helpers=mla_helpers,
        packs_by_itself="enable_packed_q" not in inspect.signature(tokenspeed_mla.tokenspeed_mla_decode).parameters,
        finish=finish,
        on_device=launch.on_device,
    )


@functools.cache
def _hardware(device: torch.device) -> tuple[tuple[int, int], int]:
    """Compute capability and number of multiprocessors."""
    return torch.cuda.get_device_capability(device), sm_count(device)


def why_not(operator: str, problem: Problem) -> str | None:
    limits = {Decode: _why_not_decode, Prefill: _why_not_prefill, PackQuantize: _why_not_pack}.get(type(problem))
    return limits(problem) if limits else f"the package tokenspeed_mla has no kernel for {operator}"


def _why_not_decode(problem: Decode) -> str | None:
    query, cache = problem.query, problem.kv_cache
    rope = problem.head_dim - problem.kv_lora_rank
    if (problem.kv_lora_rank, rope) != (RANK, ROPE):
        return f"TokenSpeed decode takes a kv_lora_rank of 512 and 64 rope dims, got {problem.kv_lora_rank} and {rope}"
    if query.dtype == torch.float32 or query.dtype != cache.dtype:
        return f"TokenSpeed decode takes FP8, BF16 or FP16, the same for both, got {query.dtype} over {cache.dtype}"
    if problem.page_size == 1:
        return "TokenSpeed decode takes pages of at least 2 tokens, got 1"
    if problem.softmax_scale <= 0.0:
        return f"TokenSpeed decode takes a positive softmax_scale, got {problem.softmax_scale}"
    if _needs_visible_lens(problem) and (query.dtype == torch.float16 or problem.window_left >= 0):
        needed = "a context-parallel call" if problem.cp_world > 1 else f"a softmax_scale of {problem.softmax_scale}"
        return f"TokenSpeed decode takes {needed} only without a window, and not in FP16"
    if problem.local_visible_lens is not None and query.dtype == torch.float16:
        return "TokenSpeed decode takes no local_visible_lens in FP16"
    if not _tma_can_read(cache):
        return "TokenSpeed decode takes a kv_cache whose start and strides are multiples of 16 bytes and below 2^31"
    if problem.rows * RANK >= INT32_LIMIT:
        return f"TokenSpeed decode indexes its output with 32 bits, got {problem.rows} rows of {RANK}"
    return None


def _why_not_prefill(problem: Prefill) -> str | None:
    dims, dtype = (problem.dim_qk, problem.dim_v), problem.query.dtype
    if dims != PREFILL_DIMS:
        return "TokenSpeed prefill takes head dims of 192 and 128, got {} and {}".format(*dims)
    if dtype not in (FP8, torch.bfloat16):
        return f"TokenSpeed prefill takes FP8 or BF16 (its result is BF16), got {dtype}"
    if problem.softmax_scale <= 0.0:
        return f"TokenSpeed prefill takes a positive softmax_scale, got {problem.softmax_scale}"
    largest = max(tensor.numel() for tensor in (problem.query, problem.key, problem.value))
    if largest >= INT32_LIMIT:
        return f"TokenSpeed prefill indexes with 32 bits, got a tensor of {largest} elements"
    return None


def _why_not_pack(problem: PackQuantize) -> str | None:
    dims = (problem.dim_nope, problem.dim_rope, problem.dim_v)
    if problem.k_nope.dtype == torch.float32:
        return "TokenSpeed's pack takes BF16 and FP16, got torch.float32"
    if any(dim < 1 or dim & (dim - 1) for dim in dims):
        return "TokenSpeed's pack takes dims that are powers of two, got {}, {} and {}".format(*dims)
    sources = (problem.k_nope, problem.k_pe, problem.v)
    reach = max(sum((n - 1) * stride for n, stride in zip(t.shape, t.stride())) for t in sources)
    if max(reach, problem.rows * max(problem.dim_nope + problem.dim_rope, problem.dim_v)) >= INT32_LIMIT:
        return f"TokenSpeed's pack indexes with 32 bits, got {problem.tokens} tokens of {problem.heads} heads"
    return None


def _tma_can_read(tensor: Tensor) -> bool:
    """Start and strides of a [.., D] tensor, last stride 1, as TMA takes them; strides of size-1 dims do not matter."""
    size = tensor.element_size()
    strides = [stride for stride, n in zip(tensor.stride()[:-1], tensor.shape) if n > 1]
    fits = all(0 < stride < INT32_LIMIT and stride * size % ALIGNMENT == 0 for stride in strides)
    return fits and tensor.storage_offset() * size % ALIGNMENT == 0


def _parallel(problem: Decode) -> bool:
    """The causal bound depends on which keys the rank holds."""
    return problem.cp_world > 1 and problem.is_causal


def _needs_visible_lens(problem: Decode) -> bool:
    """The kernel's own masks do not serve: none for 16-bit context parallelism, and leaky ones at tiny scales."""
    if problem.local_visible_lens is not None:
        return False
    return problem.softmax_scale < LEAST_SCALE or (_parallel(problem) and problem.query.dtype != FP8)


def mla_decode(problem: Decode, out: Tensor, lse: Tensor | None = None) -> None:
    if problem.capacity == 0 or problem.num_pages == 0:
        return _fill_empty(out, lse)
    package = _package()
    with package.on_device(problem.device):
        plan = decode_plan(problem, lse is not None)
        _refuse_to_compile_in_capture("mla_decode", plan.variant)
        visible = problem.local_visible_lens
        if _needs_visible_lens(problem):
            visible = package.finish.visible_lens(problem)
        parallel = visible is None and _parallel(problem)
        fp8 = problem.query.dtype == FP8
        call = functools.partial(
            package.decode,
            query=_adjacent(problem.query),
            kv_cache=_plain_strides(problem.kv_cache),
            workspace_buffer=torch.empty(plan.workspace, dtype=torch.int8, device=problem.device),
            kv_lora_rank=RANK,
            qk_rope_head_dim=ROPE,
            block_tables=_whole_tiles(problem.block_tables, problem.page_size) if fp8 else _dense(problem.block_tables),
            seq_lens=_dense(problem.seq_lens),
            max_seq_len=plan.max_seq_len,
            softmax_scale=problem.softmax_scale,
            output_scale=problem.output_scale,
            causal_mask=problem.is_causal,
            window_left=plan.window_left,
            return_lse=lse is not None,
            causal_seqs=_dense(problem.causal_seqs) if parallel else None,
            cp_world=problem.cp_world if parallel else 1,
            cp_rank=problem.cp_rank if parallel else 0,
            cp_interleave_size=problem.cp_interleave_size if parallel else 1,
            local_visible_lens=None if visible is None else _dense(visible),
        )
        log2_lse = _run(call, plan.variant, out)
        if visible is None:
            package.finish.finish_decode(problem, out, lse, log2_lse)
        elif lse is not None:
            torch.mul(log2_lse, LN_2, out=lse)


def mla_prefill(problem: Prefill, out: Tensor, lse: Tensor | None = None) -> None:
    if problem.tokens_kv == 0 or problem.batch == 0:
        return _fill_empty(out, lse)
    package = _package()
    with package.on_device(problem.device):
        variant = prefill_variant(problem, lse is not None)
        _refuse_to_compile_in_capture("mla_prefill", variant)
        if problem.is_causal:
            cum_q, cum_kv = package.finish.separate_empty_rows(problem)
        else:
            cum_q, cum_kv = _dense(problem.cum_seq_lens_q), _dense(problem.cum_seq_lens_kv)
        call = functools.partial(
            package.prefill,
            query=_dense(problem.query),
            key=_dense(problem.key),
            value=_dense(problem.value),
            seq_lens=cum_kv,  # which the kernel never reads
            cum_seq_lens=cum_kv,
            max_seq_len=problem.tokens_kv,
            batch_size=cum_q.shape[0] - 1,
            softmax_scale=problem.softmax_scale,
            is_causal=problem.is_causal,
            return_lse=lse is not None,
            cum_seq_lens_q=cum_q,
            max_seq_len_q=min(problem.max_seq_len_q or problem.tokens_q, problem.tokens_q),
        )
        kernel_lse = _run(call, variant, out)
        if problem.output_scale != 1.0:
            out.mul_(problem.output_scale)
        package.finish.finish_prefill(problem, out, lse, kernel_lse)


def mla_kv_pack_quantize_fp8(problem: PackQuantize, key: Tensor, value: Tensor) -> None:
    package = _package()
    with package.on_device(problem.device):
        package.pack(
            k_nope=problem.k_nope,
            k_pe=problem.k_pe,
            v=problem.v,
            k_scale_inv=problem.k_scale_inv,
            v_scale_inv=problem.v_scale_inv,
            k_out=key,
            v_out=value,
        )


mla_decode_lse = mla_decode
mla_prefill_lse = mla_prefill


class Plan(NamedTuple):
    """What a decode call asks of the package: `variant` is the compiled kernel's identity, `workspace` is in bytes."""

    max_seq_len: int
    window_left: int
    workspace: int
    variant: tuple


def decode_plan(problem: Decode, with_lse: bool) -> Plan:
    """The package's own split planner decides; the hint is rounded up, so that few variants exist."""
    keys = problem.capacity if problem.max_seq_len is None else min(problem.max_seq_len, problem.capacity)
    max_seq_len = max(KEY_TILE, 1 << (keys - 1).bit_length()) if keys > 0 else KEY_TILE
    # A window wider than any cache is none; passed on, it could overflow the kernel's 32-bit sums.
    window = problem.window_left if problem.window_left < WIDEST_WINDOW else -1
    visible = problem.local_visible_lens is not None or _needs_visible_lens(problem)
    parallel = _parallel(problem) and not visible
    device = problem.device
    workspace, shape_variant = _split_plan(
        problem.query.dtype, problem.batch, problem.q_len, problem.heads, max_seq_len, window,
        *_hardware(device),
    )  # fmt: skip
    context = (problem.cp_world, problem.cp_rank, problem.cp_interleave_size) if parallel else (1, 0, 1)
    variant = (
        "mla_decode", device, problem.query.dtype, problem.page_size, problem.heads, problem.q_len, problem.is_causal,
        window, *context, with_lse, visible, *shape_variant,
    )  # fmt: skip
    return Plan(max_seq_len, window, workspace, variant)


@functools.cache
def _split_plan(
    dtype: torch.dtype, batch: int, q_len: int, heads: int, max_seq_len: int, window: int,
    capability: tuple[int, int], sms: int,
) -> tuple[int, tuple]:  # fmt: skip
    """Bytes of workspace, and the part of the compile key that comes from sizes: see `tokenspeed_mla_decode`."""
    package = _package()
    planner, helpers = package.planner, package.helpers
    fp8 = dtype == FP8
    tile, _ = helpers.select_mla_decode_tilers(heads, q_len, is_fp8=fp8, compute_capability=capability)
    fold = helpers.get_mla_decode_fold_sq_factor(heads, q_len, tile[0])
    rows, blocks = heads * fold, q_len // fold
    packed = package.packs_by_itself and tile[0] == 128 and -(-heads * q_len // tile[0]) < blocks
    if packed:
        rows, blocks, fold = tile[0], helpers.compute_q_tile_layout(heads, q_len, tile[0])[1], 1
    keys = max_seq_len if window < 0 else min(max_seq_len, window + q_len)
    splits, workspace = planner._get_split_kv_and_workspace_size(batch, blocks, rows, RANK, sms, keys, dtype, tile, 1)
    reducer = (1, 256)
    if fp8:
        d_tiles = planner._get_reducer_d_tiles(batch, q_len, heads, sms, splits)
        reducer = (d_tiles, planner._get_reducer_max_splits(splits))
    return workspace, (workspace == 0, fold, packed, *reducer)


def prefill_variant(problem: Prefill, with_lse: bool) -> tuple:
    return ("mla_prefill", problem.device, problem.query.dtype, problem.is_causal, with_lse)


def compiled(device: torch.device) -> dict[str, int]:
    """Kernels that calls on `device` have compiled so far, by operator."""
    counts: dict[str, int] = {}
    for name, where, *_ in _compiled:
        if where == device:
            counts[name] = counts.get(name, 0) + 1
    return counts


def _refuse_to_compile_in_capture(operator: str, variant: tuple) -> None:
    if variant not in _compiled and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            f"tokenspeed::{operator} would have to compile a kernel inside a CUDA graph capture. Call ts_ops.warmup "
            f"before capturing, with these heads, page size, dtypes, q_lens, batch sizes and max_seq_len. The kernel: "
            f"{variant[1:]}"
        )


def _run(call, variant: tuple, out: Tensor) -> Tensor | None:
    """`call` into `out`, by way of a buffer where `out` is not aligned; its LSE, if it has one."""
    aligned = out.data_ptr() % ALIGNMENT == 0
    buffer = out if aligned else torch.empty_like(out)
    if variant in _compiled:
        result = call(out=buffer)
    else:  # one thread compiles at a time, and each kernel once
        with _compiling:
            result = call(out=buffer)
            _compiled.add(variant)
    if not aligned:
        out.copy_(buffer)
    return result[1] if isinstance(result, tuple) else None


def _dense(tensor: Tensor) -> Tensor:
    """Contiguous and aligned, a copy where `tensor` is not."""
    if tensor.is_contiguous() and tensor.data_ptr() % ALIGNMENT == 0:
        return tensor
    return tensor.clone(memory_format=torch.contiguous_format)


def _adjacent(query: Tensor) -> Tensor:
    """[B, q_len, H, D] whose tokens follow each other's heads, a copy where `query` lies otherwise."""
    plain = _plain_strides(query)
    follows = plain.shape[1] == 1 or plain.stride(1) == plain.shape[2] * plain.stride(2)
    if follows and _tma_can_read(plain) and plain.data_ptr() % ALIGNMENT == 0:
        return plain
    return plain.clone(memory_format=torch.contiguous_format)


def _plain_strides(tensor: Tensor) -> Tensor:
    """The same view with the strides of size-1 dims, which may be anything, as a contiguous tensor would have them."""
    return tensor.view(tensor.shape)


def _whole_tiles(table: Tensor, page_size: int) -> Tensor:
    """The table with rows of whole groups of 128 tokens: what is missing is page 0."""
    missing = -table.shape[1] % (KEY_TILE // page_size)
    return torch.nn.functional.pad(table, (0, missing)) if missing else _dense(table)


def _fill_empty(out: Tensor, lse: Tensor | None) -> None:
    out.zero_()
    if lse is not None:
        lse.fill_(-math.inf)
