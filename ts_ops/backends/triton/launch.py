"""What every Triton launch shares."""

import contextlib

import torch

# Contracting a multiply and an add into one fma changes bits, and Triton's default for it differs between releases.
OPTIONS = {"enable_fp_fusion": True}


def on_device(device: torch.device):
    """Launch on the tensor's GPU, whichever is current; nothing to do for CPU tensors under the interpreter."""
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()


def next_power_of_2(n: int) -> int:
    return 1 << (n - 1).bit_length()
