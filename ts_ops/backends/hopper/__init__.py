"""MLA decode for compute capability 9.0, in Triton's Gluon dialect.

decode.py says what is taken and launches a kernel, decode_fp8.py or decode_16bit.py, and combine.py after it; of
decode_fp8.py, fp8_weights.py is the part that differs where softmax weights may be FP8. They share plan.py (which keys
a block works on), softmax.py, partials.py (where partial results lie), and dialect.py (names that differ between
Triton's versions).
"""

import functools
import importlib
from types import ModuleType

import torch
from torch import Tensor

from ...meta.contract import Decode
from ...workspace import HOPPER


def unavailable(device: torch.device) -> str | None:
    if device.type != "cuda":
        return "Hopper's kernels run on a GPU only"
    return _not_here(device)


def why_not(operator: str, problem) -> str | None:
    return _kernels().why_not(problem) if type(problem) is Decode else f"has no {operator}"


def mla_decode(problem: Decode, out: Tensor, lse: Tensor | None = None) -> None:
    _kernels().mla_decode(problem, out, lse)


mla_decode_lse = mla_decode


def compiled(device: torch.device) -> dict[str, int]:
    """Compiled variants of each kernel that this process holds for `device`."""
    return _kernels().compiled(device)


@functools.cache
def _kernels() -> ModuleType:
    """Imported on a Hopper GPU alone: Gluon is experimental, and a Triton that renames more must not disturb others."""
    return importlib.import_module(f"{__name__}.decode")


@functools.cache
def _not_here(device: torch.device) -> str | None:
    major, minor = torch.cuda.get_device_capability(device)
    if (major, minor) != HOPPER:
        return f"Hopper's kernels need compute capability 9.0; {device} has {major}.{minor}"
    try:
        _kernels()
    except ImportError as error:
        return f"Hopper's kernels need triton>=3.6 with Gluon: {error}"
    except AttributeError as error:
        return f"Hopper's kernels do not know this Triton's Gluon: {error}"
    return None
