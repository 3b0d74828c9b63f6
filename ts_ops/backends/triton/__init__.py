"""Triton kernels for every operator, on any GPU that Triton compiles for.

One file a kernel: decode.py (split-KV; pairs.py for FP8) and combine.py, prefill.py, merge.py, cache.py (write and
gather), pack.py.
Under TRITON_INTERPRET=1 the same kernels run on CPU tensors, for tests.
"""

import functools
import os

import torch

from ...meta.contract import FP8, Decode, Prefill

try:
    import triton
except ImportError:
    _MISSING = "the package triton is not installed: pip install 'triton>=3.6'"
else:
    _MISSING = None
    from . import decode, launch, prefill
    from .cache import mla_kv_cache_gather, mla_kv_cache_write  # noqa: F401
    from .decode import mla_decode, mla_decode_lse  # noqa: F401
    from .merge import merge_attn_states, merge_attn_states_n  # noqa: F401
    from .pack import mla_kv_pack_quantize_fp8  # noqa: F401
    from .prefill import mla_prefill, mla_prefill_lse  # noqa: F401

LIMITS = {} if _MISSING else {Decode: decode.why_not, Prefill: prefill.why_not}
OLD_TRITON = not _MISSING and tuple(map(int, triton.__version__.split(".")[:2])) < (3, 7)
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
FP8_CAPABILITY = (8, 9)  # the first with e4m3 conversions; Triton has no such type below it


def unavailable(device: torch.device) -> str | None:
    if _MISSING:
        return _MISSING
    if device.type == "cpu" and not INTERPRETED:
        return "Triton kernels run on a CPU only under the interpreter: set TRITON_INTERPRET=1"
    return None


def why_not(operator: str, problem) -> str | None:
    """Triton serves every checked problem, except dims beyond its tiles, and FP8 where the GPU has none."""
    if not _has_fp8(problem.device) and FP8 in problem.dtypes:
        return f"FP8 needs compute capability 8.9, and {problem.device} has less"
    if type(problem) is Decode and (problem.query.dtype, problem.kv_cache.dtype) == (torch.bfloat16, FP8):
        if _lacks_bf16_conversion(problem.device):
            return "a BF16 query over an FP8 cache needs capability 9.0 or Triton 3.7: pip install 'triton>=3.7'"
    limits = LIMITS.get(type(problem))
    return limits(problem) if limits else None


def compiled(device: torch.device) -> dict[str, int]:
    """Compiled variants of each kernel that this process holds for `device`; {} where Triton compiles nothing."""
    if _MISSING or INTERPRETED or device.type != "cuda":
        return {}
    index = launch.device_index(device)
    return {name: kernel.compiled(index) for name, kernel in launch.KERNELS.items()}


@functools.cache
def _has_fp8(device: torch.device) -> bool:
    return device.type == "cpu" or torch.cuda.get_device_capability(device) >= FP8_CAPABILITY


@functools.cache
def _lacks_bf16_conversion(device: torch.device) -> bool:
    """Triton 3.6 converts FP16 to BF16 with an instruction that came with compute capability 9.0."""
    return OLD_TRITON and device.type == "cuda" and torch.cuda.get_device_capability(device) < (9, 0)
