"""Checks that hold for plain and for symbolic sizes, with an error that names the argument.

A size may be symbolic (under `torch.compile` and export), even unbacked; an `if` on it would add a guard or fail.
`require` hands such a condition to `torch._check_value`, which records it. For plain booleans it takes a shorter path:
the contract makes about thirty checks a call, and `torch._check_value` alone would cost half a microsecond each.
"""

from collections.abc import Callable

import torch
from torch import Tensor


def require(condition, message: Callable[[], str]) -> None:
    """Raise ValueError(message()) unless `condition`, a bool or SymBool, holds."""
    if condition is True:
        return
    if condition is False:
        raise ValueError(message())
    torch._check_value(condition, message)


def require_tensor(name: str, tensor: Tensor, ranks: tuple[int, ...], layout: str, dtypes, device) -> None:
    """`tensor` has one of `ranks`, one of `dtypes`, and lies on `device`. `layout` is its documented shape."""
    if tensor.ndim not in ranks:
        raise ValueError(f"{name} must have shape {layout}, got {tensor.ndim} dimensions: {list(tensor.shape)}")
    if tensor.dtype not in dtypes:
        raise TypeError(f"{name} must be {_or(dtypes)}, got {tensor.dtype}")
    if tensor.device != device:
        raise ValueError(f"{name} is on {tensor.device}, but must be on {device} like the first argument")


def require_size(name: str, tensor: Tensor, dim: int, size, reason: str) -> None:
    """`tensor.shape[dim]` equals `size`, which `reason` explains."""
    actual = tensor.shape[dim]
    require(
        actual == size,
        lambda: f"{name} must have size {size} in dimension {dim} ({reason}), got {list(tensor.shape)}",
    )


def require_unit_stride(name: str, tensor: Tensor) -> None:
    """The last dimension is dense: kernels load rows as vectors."""
    stride = tensor.stride(-1)
    require(
        stride == 1,
        lambda: f"{name} must have stride 1 in its last dimension, got strides {list(tensor.stride())}; "
        f"pass {name}.contiguous()",
    )


def require_disjoint(name: str, written: Tensor, sources: dict[str, Tensor | None]) -> None:
    """`written` shares no memory with any of `sources`: kernels read and write them in no set order."""
    for source_name, source in sources.items():
        if source is None or not torch._C._is_alias_of(written, source):
            continue
        first, end = _extent(written)
        source_first, source_end = _extent(source)
        require(
            torch.sym_or(end <= source_first, source_end <= first),
            lambda: f"{name} must not overlap {source_name} in memory; pass {source_name}.clone()",  # noqa: B023
        )


def _extent(tensor: Tensor):
    """First storage element that `tensor` covers and the one past its last; equal where it is empty."""
    first = tensor.storage_offset()
    span = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride()))
    return first, first + torch.sym_min(tensor.numel(), 1) * (span + 1)


def require_finite(name: str, value) -> None:
    """`value` is a finite float. `x - x` is 0 exactly for finite x, and works on a SymFloat too."""
    require(value - value == 0.0, lambda: f"{name} must be finite, got {value}")


def _or(dtypes) -> str:
    names = [str(dtype) for dtype in dtypes]
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} or {names[-1]}"
