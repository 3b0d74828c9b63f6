"""Split-KV scratch: how much a call may ask for, and how many splits that allows.

A backend takes its scratch from `torch.empty` inside the operator and drops it when the operator returns. In eager
mode that is the caching allocator; under capture it is the graph's private pool, which lives as long as the graph.
There is no module-level buffer: nothing to grow, nothing that goes stale under a captured graph, nothing that two
streams share.
"""

from functools import cache

import torch

HOPPER = (9, 0)  # its compute capability

# 64 partial rows of 513 fp32 numbers (a 512-wide output and its LSE) for every multiprocessor: one M64 tile each. The
# TokenSpeed kernels attain this bound and never exceed it, nor does Triton's decode. On Hopper a multiprocessor leaves
# two such tiles, at the ends of its range of keys, in 16 bits a number, and a record of three numbers.
BYTES_PER_SM = 64 * 513 * 4
HOPPER_BYTES_PER_SM = 2 * 64 * 257 * 4 + 3 * 4


@cache
def sm_count(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def workspace_bound(device: torch.device | str | int | None = None) -> int:
    """Largest scratch in bytes that one call can ask for on `device`, whatever its batch, head count or lengths.

    Args:
        device: a CUDA device (default: the current one), or a CPU, which needs no scratch: 0.
    """
    if device is None:
        device = torch.cuda.current_device() if torch.cuda.is_available() else "cpu"
    device = torch.device(device)
    if device.type != "cuda":
        return 0
    is_hopper = torch.cuda.get_device_capability(device) == HOPPER
    return (HOPPER_BYTES_PER_SM if is_hopper else BYTES_PER_SM) * sm_count(device)


def max_splits(rows: int, row_floats: int, sms: int) -> int:
    """Most splits for which `rows` partial results of `row_floats` fp32 numbers stay within the bound; at least 1."""
    return max(1, BYTES_PER_SM * sms // (rows * row_floats * 4))
