"""What autograd must know: a call that would need a gradient raises, and what a call writes counts as written.

Unguarded, torch would let such a call pass and yield `grad=None` in a compiled backward. Fakes and implementations both
begin with `refuse_gradients`, so that a call is refused when it is traced and when it runs. A kernel for the Autograd
key could do the same, but it would convert all arguments to Python and back once more: 6 to 9 microseconds a call
under `no_grad`, against 0.1.
"""

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from .schema import NAMESPACE


def refuse_gradients(name: str, args: tuple, kwargs: dict) -> None:
    """RuntimeError if grad mode is on and an input requires grad."""
    if torch.is_grad_enabled():
        for value in (*args, *kwargs.values()):
            if isinstance(value, Tensor) and value.requires_grad:
                raise RuntimeError(
                    f"{NAMESPACE}::{name} is inference only: an input requires grad while grad mode is on. "
                    "Call it under torch.no_grad() or torch.inference_mode(), or detach the input."
                )


def mark_written(tensors: tuple[Tensor, ...]) -> None:
    """Bump the version of each tensor, so that a backward pass through one saved before raises instead of using the new
    values. Inference tensors have no version."""
    for tensor in tensors:
        if not tensor.is_inference():
            increment_version(tensor)
