"""What every Triton launch shares."""

import contextlib
import math

import torch
import triton.language as tl

LOG2_E = math.log2(math.e)  # softmax in base 2: exp2 is one instruction
LN_2 = tl.constexpr(math.log(2.0))  # and back to the natural log of an LSE

# Contracting a multiply and an add into one fma changes bits, and Triton's default for it differs between releases.
OPTIONS = {"enable_fp_fusion": True}


def on_device(device: torch.device):
    """Launch on the tensor's GPU, whichever is current; nothing to do for CPU tensors under the interpreter."""
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()
