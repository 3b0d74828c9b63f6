"""What every Triton launch shares."""

import contextlib
import inspect
import math
from collections.abc import Callable, Sequence
from types import FunctionType

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.runtime.jit import JITFunction

LOG2_E = math.log2(math.e)  # softmax in base 2: exp2 is one instruction
LN_2 = tl.constexpr(math.log(2.0))  # and back to the natural log of an LSE
# Scales below it, or negative, are applied before the max, not after: 0 * -inf or a change of sign cannot be.
SMALLEST_NORMAL = torch.finfo(torch.float32).tiny

# Contracting a multiply and an add into one fma changes bits, and Triton's default for it differs between releases.
OPTIONS = {"enable_fp_fusion": True}

# Keys of a tile in `general`, at most: loads of one element keep an address for each in registers.
GENERAL_BLOCK_N = 32
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


def variants_of(function: JITFunction, device: int) -> int:
    """How many variants of a jitted function this process holds for the GPU of this index."""
    cache = function.device_caches.get(device)
    return len(cache[0]) if cache else 0


def device_index(device: torch.device) -> int:
    return torch.cuda.current_device() if device.index is None else device.index


class Kernel:
    """A Triton kernel in two variants, so that what a warm-up has compiled is all that any later call needs.

    Triton by itself compiles a variant for every combination of arguments that are 1, divisible by 16 or past 2^31: a
    call in a new layout then compiles in the middle of serving, or of a graph capture. Here there are

    - `aligned`, for calls as they are in practice: the pointers and strides in `wide`, which decide how wide loads and
      stores are, are divisible by 16, and every int64 argument fits 32 bits, which it then takes;
    - `general`, which takes nothing for granted.

    Beside that, only constants, dtypes, which optional arguments are None, and in `aligned` the integers in `model`,
    which a model fixes, choose what is compiled. So a parameter that is no tensor and no constant needs a type: int64
    for what may pass 2^31, or its value would decide. A kernel with a parameter ALIGNED is told which variant it is.
    """

    def __init__(self, function: Callable, wide: Sequence[str], model: Sequence[str]):
        types = {name: parameter.annotation for name, parameter in inspect.signature(function).parameters.items()}
        names = list(types)
        self.pointers = [names.index(name) for name in wide if types[name] is inspect.Parameter.empty]
        self.strides = [names.index(name) for name in wide if types[name] is tl.int64]
        self.others = [names.index(name) for name in names if types[name] is tl.int64 and name not in wide]
        self.told = "ALIGNED" in names

        # Untyped, an integer below 2^31 is an int32; and Triton takes longer over each one that has a type.
        short = FunctionType(function.__code__, function.__globals__, function.__name__)
        short.__annotations__ = {name: kind for name, kind in types.items() if kind in (tl.constexpr, tl.float32)}
        arguments = [name for name in names if types[name] is not tl.constexpr]
        self.aligned = triton.jit(short, do_not_specialize=[name for name in arguments if name not in (*wide, *model)])
        self.general = triton.jit(function, do_not_specialize=arguments)

    def launch(self, grid, *arguments, aligned_if: bool = True, general: dict | None = None, **constants) -> None:
        """Launch `aligned` where the arguments and `aligned_if` allow it, else `general`.

        Args:
            aligned_if: what else the kernel takes for granted where it is ALIGNED.
            general: constants and options with which `general` is compiled in the place of some of `constants`.
        """
        aligned = aligned_if
        if aligned:
            address = stride = other = 0
            for index in self.pointers:
                address |= arguments[index].data_ptr()
            for index in self.strides:
                stride |= arguments[index]
            for index in self.others:
                other |= arguments[index]
            aligned = (address | stride) % 16 == 0 and (stride | other) < 2**31
        if self.told:
            constants["ALIGNED"] = aligned
        if aligned:
            self.aligned.run(*arguments, grid=grid, warmup=False, **constants)
        else:
            self.general.run(*arguments, grid=grid, warmup=False, **(constants | (general or {})))

    def compiled(self, device: int) -> int:
        """Variants that this process has compiled, or loaded from Triton's cache on disk, for the GPU of this index."""
        return variants_of(self.aligned, device) + variants_of(self.general, device)


KERNELS: dict[str, Kernel] = {}


def kernel(wide: Sequence[str], model: Sequence[str] = ()) -> Callable[[Callable], Kernel]:
    """Decorator that makes a `Kernel` of a function."""

    def make(function: Callable) -> Kernel:
        KERNELS[function.__name__] = made = Kernel(function, wide, model)
        return made

    return make


def row_strides(tensor: Tensor) -> Sequence[int]:
    """Strides of all dimensions but the last; that of a single element, which may be anything, as an aligned one."""
    strides = tensor.stride()[:-1]
    for stride in strides:
        if stride % 16 or stride >= 2**31:
            return [stride if size > 1 else 0 for size, stride in zip(tensor.shape, strides)]
    return strides


def on_device(device: torch.device):
    """Launch on the tensor's GPU, whichever is current; nothing to do for CPU tensors under the interpreter."""
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()
