"""Compile the Triton kernels that a launcher launches, for a GPU that is not there.

`compiled_by(capability, launch)` calls `launch()` on CPU tensors with a driver that names the target and no device:
every `kernel[grid](...)` then compiles exactly the variant that the launcher asks for (constants, alignment, warps,
stages) and launches nothing. So no signature is written down twice. `asking` only notes what would be compiled.
"""

import contextlib
import functools
import itertools
import re
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia import compiler as nvidia
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from ts_ops.backends.triton.launch import KERNELS

MAX_SHARED = {80: 166_912, 86: 101_376, 89: 101_376, 90: 232_448}  # bytes a block may use
_fresh = itertools.count(1000)  # devices for which nothing is compiled


@dataclass(frozen=True)
class Compiled:
    name: str
    registers: int
    stack: int  # bytes a thread; more than 0 means that registers spill
    shared: int
    sass: str

    def count(self, instruction: str) -> int:
        return len(re.findall(rf"\b{instruction}\b", self.sass))


@dataclass(frozen=True)
class Wanted:
    """A variant of a kernel."""

    kernel: str
    general: bool
    constants: tuple[tuple[str, str], ...]  # with the arguments that are None
    dtypes: tuple[str, ...]  # of pointers
    key: str  # Triton's own


class _NoDevice:
    """The part of a Triton driver that compilation asks.

    Triton keeps what it has compiled by device, so that each target needs one of its own.
    """

    def __init__(self, target: GPUTarget, device: int):
        self.target, self.device = target, device

    def get_current_target(self):
        return self.target

    def get_current_device(self):
        return self.device

    def get_current_stream(self, device):
        return 0


def compiled_by(capability: int, launch: Callable[[], None]) -> list[Compiled]:
    with _compile_only(capability, device=capability) as kernels:
        launch()
    return [_inspect(kernel) for kernel in kernels]


@contextlib.contextmanager
def asking(capability: int) -> Iterator[list[Wanted]]:
    """Collects the variants that the launches inside need, each once. Nothing is compiled."""
    wanted = []
    device = next(_fresh)

    def note(*, key, fn, compile, **_) -> bool:
        function = fn.jit_function
        constants = [(function.arg_names[path[0]], repr(value)) for path, value in compile["constants"].items()]
        dtypes = [dtype for dtype in compile["signature"].values() if dtype.startswith("*")]
        general = function is KERNELS[function.__name__].general
        wanted.append(Wanted(function.__name__, general, tuple(constants), tuple(dtypes), key))
        function.device_caches[device][0][key] = "compiled"
        return True  # no need to compile

    triton.knobs.runtime.jit_cache_hook = note
    try:
        with _compile_only(capability, device):
            yield wanted
    finally:
        triton.knobs.runtime.jit_cache_hook = None


@contextlib.contextmanager
def _compile_only(capability: int, device: int) -> Iterator[list[triton.compiler.CompiledKernel]]:
    """Collects what is launched inside, compiled."""
    kernels = []
    run = JITFunction.run

    def compile_only(self, *args, grid, warmup, **kwargs):
        kernels.append(run(self, *args, grid=grid, warmup=True, **kwargs))

    active = driver._active  # reset_active() would look for a GPU
    driver.set_active(_NoDevice(GPUTarget("cuda", capability, 32), device))
    JITFunction.run = compile_only
    try:
        yield kernels
    finally:
        JITFunction.run = run
        driver._active = active


def _inspect(kernel: triton.compiler.CompiledKernel) -> Compiled:
    with tempfile.TemporaryDirectory() as folder:
        cubin = Path(folder) / "kernel.cubin"
        cubin.write_bytes(kernel.asm["cubin"])
        (usage,) = resource_usage(cubin).values()
        sass = _cuobjdump("-sass", cubin)
    return Compiled(kernel.metadata.name, usage["registers"], usage["stack"], kernel.metadata.shared, sass)


def resource_usage(cubin: Path) -> dict[str, dict[str, int]]:
    """Registers and bytes of stack a thread, by function."""
    functions = re.findall(r"Function (\S+):\s+REG:(\d+) STACK:(\d+)", _cuobjdump("--dump-resource-usage", cubin))
    return {name: {"registers": int(registers), "stack": int(stack)} for name, registers, stack in functions}


def _cuobjdump(option: str, cubin: Path) -> str:
    command = [_tool(), option, str(cubin)]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


@functools.cache
def _tool() -> str:
    return str(Path(nvidia.__file__).parent / "bin" / "cuobjdump")
