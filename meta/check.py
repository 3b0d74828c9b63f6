"""Checks that hold for plain and for symbolic sizes, with an error that names the argument.

A size may be symbolic (under `torch.compile` and export), even unbacked; an `if` on it would add a guard or fail.
`require` hands such a condition to `torch._check_value`, which records it. A plain True returns at once, and messages
are formatted only when they are raised: the contract makes about thirty checks a call, on the host's critical path.
"""

import torch
from torch import Tensor

FLOAT32_MAX = torch.finfo(torch.float32).max


def require(condition, message: str, *values) -> None:
    """Raise ValueError(message.format(*values)) unless `condition`, a bool or SymBool, holds."""
    if condition is True:
        return
    if condition is False:
        raise ValueError(_format(message, values))
    torch._check_value(condition, lambda: _format(message, values))


def either(first, second):
    """`first or second` for bools and SymBools."""
    if first is True or second is False:
        return first
    if first is False or second is True:
        return second
    return first | second


def is_constant(value, constant: int) -> bool:
    """`value` is the plain integer `constant`; False for a symbolic one, whatever it may turn out to be."""
    return isinstance(value, int) and value == constant


def require_tensor(name: str, tensor: Tensor, ranks: tuple[int, ...], layout: str, dtypes, device) -> torch.Size:
    """`tensor` has one of `ranks`, one of `dtypes`, and lies on `device`; its shape. `layout` is the documented one."""
    shape = tensor.shape
    if len(shape) not in ranks:
        raise ValueError(f"{name} must have shape {layout}, got {len(shape)} dimensions: {list(shape)}")
    if tensor.dtype not in dtypes:
        raise TypeError(f"{name} must be {name_dtypes(dtypes)}, got {tensor.dtype}")
    if tensor.device != device:
        raise ValueError(f"{name} is on {tensor.device}, but must be on {device} like the first argument")
    return shape


def require_size(name: str, shape: torch.Size, dim: int, size, reason: str) -> None:
    """`shape[dim]` equals `size`, which `reason` explains."""
    if (same := shape[dim] == size) is not True:
        require(same, "{} must have size {} in dimension {} ({}), got {}", name, size, dim, reason, shape)


def require_unit_stride(name: str, tensor: Tensor) -> None:
    """The last dimension is dense: kernels load rows as vectors."""
    strides = tensor.stride()
    if (dense := strides[-1] == 1) is not True:
        require(
            either(dense, tensor.shape[-1] <= 1),
            "{} must have stride 1 in its last dimension, got strides {}; pass {}.contiguous()",
            name, strides, name,
        )  # fmt: skip


def require_disjoint(name: str, written: Tensor, sources: dict[str, Tensor | None]) -> None:
    """`written` shares no memory with any of `sources`: kernels read and write them in no set order."""
    for source_name, source in sources.items():
        if source is None or not torch._C._is_alias_of(written, source):
            continue
        first, end = _extent(written)
        source_first, source_end = _extent(source)
        require(
            either(end <= source_first, source_end <= first),
            "{} must not overlap {} in memory; pass {}.clone()", name, source_name, source_name,
        )  # fmt: skip


def _extent(tensor: Tensor):
    """First byte of its storage that `tensor` covers and the one past its last; equal where it is empty."""
    span = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride())) + 1
    first = tensor.storage_offset()
    return first * tensor.itemsize, (first + torch.sym_min(tensor.numel(), 1) * span) * tensor.itemsize


def require_finite(name: str, value) -> None:
    """`value`, a float or SymFloat, is finite as a float32 too: kernels take it as one."""
    if (finite := abs(value) <= FLOAT32_MAX) is not True:
        require(finite, "{} must be finite in float32, got {}", name, value)


def _format(message: str, values: tuple) -> str:
    return message.format(*(list(value) if isinstance(value, tuple) else value for value in values))


def name_dtypes(dtypes) -> str:
    names = [str(dtype) for dtype in dtypes]
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} or {names[-1]}"
