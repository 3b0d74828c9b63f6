"""Compile the Triton kernels that a launcher launches, for a GPU that is not there.

`compiled_by(capability, launch)` calls `launch()` on CPU tensors with a driver that names the target and no device:
every `kernel[grid](...)` then compiles exactly the variant that the launcher asks for (constants, alignment, warps,
stages) and launches nothing. So no signature is written down twice.
"""

import functools
import re
import subprocess
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia import compiler as nvidia
from triton.runtime import driver
from triton.runtime.jit import JITFunction

MAX_SHARED = {80: 166_912, 86: 101_376, 89: 101_376, 90: 232_448}  # bytes a block may use


@dataclass(frozen=True)
class Compiled:
    name: str
    registers: int
    stack: int  # bytes a thread; more than 0 means that registers spill
    shared: int
    sass: str

    def count(self, instruction: str) -> int:
        return len(re.findall(rf"\b{instruction}\b", self.sass))


class _NoDevice:
    """The part of a Triton driver that compilation asks."""

    def __init__(self, target: GPUTarget):
        self.target = target

    def get_current_target(self):
        return self.target

    def get_current_device(self):
        return self.target.arch  # Triton keeps compiled kernels per device: keep targets apart

    def get_current_stream(self, device):
        return 0


def compiled_by(capability: int, launch: Callable[[], None]) -> list[Compiled]:
    kernels = []
    run = JITFunction.run

    def compile_only(self, *args, grid, warmup, **kwargs):
        kernels.append(run(self, *args, grid=grid, warmup=True, **kwargs))

    active = driver._active  # reset_active() would look for a GPU
    driver.set_active(_NoDevice(GPUTarget("cuda", capability, 32)))
    JITFunction.run = compile_only
    try:
        launch()
    finally:
        JITFunction.run = run
        driver._active = active
    return [_inspect(kernel) for kernel in kernels]


def _inspect(kernel: triton.compiler.CompiledKernel) -> Compiled:
    with tempfile.TemporaryDirectory() as folder:
        cubin = Path(folder) / "kernel.cubin"
        cubin.write_bytes(kernel.asm["cubin"])
        usage = _cuobjdump("--dump-resource-usage", cubin)
        sass = _cuobjdump("-sass", cubin)
    registers, stack = (int(re.search(rf"{field}:(\d+)", usage).group(1)) for field in ("REG", "STACK"))
    return Compiled(kernel.metadata.name, registers, stack, kernel.metadata.shared, sass)


def _cuobjdump(option: str, cubin: Path) -> str:
    command = [_tool(), option, str(cubin)]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


@functools.cache
def _tool() -> str:
    return str(Path(nvidia.__file__).parent / "bin" / "cuobjdump")
