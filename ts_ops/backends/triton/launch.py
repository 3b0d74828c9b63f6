"""What every Triton launch shares."""

import contextlib
import math

import torch
import triton
import triton.language as tl

LOG2_E = math.log2(math.e)  # softmax in base 2: exp2 is one instruction
LN_2 = tl.constexpr(math.log(2.0))  # and back to the natural log of an LSE

# Contracting a multiply and an add into one fma changes bits, and Triton's default for it differs between releases.
OPTIONS = {"enable_fp_fusion": True}


SHARED_BYTES = {(8, 0): 166_912, (8, 7): 166_912, (9, 0): 232_448, (10, 0): 232_448, (10, 3): 232_448}
SHARED_BYTES_ELSEWHERE = 101_376  # compute capability 8.6, 8.9 and 12.x


def target_capability(device: torch.device) -> tuple[int, int] | None:
    """Of the tensors' GPU or, for other tensors, of the one that Triton compiles for; None under the interpreter."""
    if device.type == "cuda":
        return torch.cuda.get_device_capability(device)
    if triton.knobs.runtime.interpret:
        return None
    return divmod(triton.runtime.driver.active.get_current_target().arch, 10)


def shared_bytes(capability: tuple[int, int]) -> int:
    """Shared memory that one block may use."""
    return SHARED_BYTES.get(capability, SHARED_BYTES_ELSEWHERE)


def on_device(device: torch.device):
    """Launch on the tensor's GPU, whichever is current; nothing to do for CPU tensors under the interpreter."""
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()
