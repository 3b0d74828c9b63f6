"""MLA decode for compute capability 9.0, in Triton's Gluon dialect.

decode.py says what is taken and launches a kernel, decode_fp8.py or decode_16bit.py, and combine.py after it. The two
share plan.py (which keys a block works on), softmax.py, and dialect.py (names that differ between Triton's versions).
"""

import functools

import torch

from ...meta.contract import Decode

try:
    import triton  # noqa: F401
except ImportError:
    _MISSING = "the package triton is not installed: pip install 'triton>=3.6'"
else:
    _MISSING = None
    from . import decode
    from .decode import mla_decode, mla_decode_lse  # noqa: F401

CAPABILITY = (9, 0)


def unavailable(device: torch.device) -> str | None:
    if _MISSING:
        return _MISSING
    if device.type != "cuda":
        return "Hopper's kernels run on a GPU only"
    return _not_hopper(device)


def why_not(operator: str, problem) -> str | None:
    return decode.why_not(problem) if type(problem) is Decode else f"has no {operator}"


def compiled(device: torch.device) -> dict[str, int]:
    """Compiled variants of each kernel that this process holds for `device`."""
    index = torch.cuda.current_device() if device.index is None else device.index
    counts = {kernel.__name__: len(kernel.device_caches[index][0]) for kernel in decode.KERNELS}
    return {name: count for name, count in counts.items() if count}


@functools.cache
def _not_hopper(device: torch.device) -> str | None:
    major, minor = torch.cuda.get_device_capability(device)
    if (major, minor) == CAPABILITY:
        return None
    return f"Hopper's kernels need compute capability 9.0; {device} has {major}.{minor}"
