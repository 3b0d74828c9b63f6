"""Targets: the (backend, device) pairs that law tests run on.

- `reference`: plain torch on the CPU.
- `interpreter`: the Triton kernels on CPU tensors, in a process started with TRITON_INTERPRET=1. Triton then compiles
  nothing, so `make test` runs these in a process of their own. bf16 arithmetic and conversions to fp8 and bf16 are
  wrong in the interpreter, so those dtypes are left to the other targets.
- `gpu`: the Triton kernels on the first GPU; marked `gpu`, skipped without one.

A test that takes `target` runs on each; `target.backend` is forced while it runs.
"""

import os
from dataclasses import dataclass

import pytest
import torch

import ts_ops

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


@dataclass(frozen=True)
class Target:
    name: str
    backend: str
    device: str

    def supports(self, *dtypes: torch.dtype) -> bool:
        """False where the interpreter computes wrongly in one of these dtypes."""
        return self.name != "interpreter" or torch.bfloat16 not in dtypes


REFERENCE = Target("reference", "reference", "cpu")
INTERPRETER = Target("interpreter", "triton", "cpu")
GPU = Target("gpu", "triton", "cuda")


def pytest_generate_tests(metafunc):
    if "target" in metafunc.fixturenames:
        cpu = INTERPRETER if INTERPRETED else REFERENCE
        params = [pytest.param(cpu, id=cpu.name), pytest.param(GPU, id=GPU.name, marks=pytest.mark.gpu)]
        metafunc.parametrize("target", params)


def pytest_collection_modifyitems(items):
    for item in items:
        if "gpu" in item.keywords and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="needs an NVIDIA GPU"))
        if INTERPRETED and "target" not in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.skip(reason="runs without TRITON_INTERPRET"))


@pytest.fixture(autouse=True)
def _forced_backend(request):
    if "target" not in request.fixturenames:
        yield
        return
    with ts_ops.use_backend(request.getfixturevalue("target").backend):
        yield


@pytest.fixture(scope="module")
def one_thread():
    """Matrices of tiny models gain nothing from threads, and lose much where other processes want the cores."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)
