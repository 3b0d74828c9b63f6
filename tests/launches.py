"""What a call runs on a GPU and what it allocates, from torch.profiler.

`Trace.launches` lists kernels, copies and fills in the order of their start, those of a replayed CUDA graph one by one.
On a CPU there are none, but allocations are seen on both: a clone of a tensor shows as one of its size. A replayed
graph allocates nothing, so there a clone shows as a copy of that many bytes, or as a kernel of that many threads.
"""

import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch.profiler import ProfilerActivity, profile

KINDS = ("kernel", "gpu_memcpy", "gpu_memset")
ELEMENTS_A_THREAD = 64  # more than Inductor's or ATen's copying kernels give one thread


@dataclass(frozen=True)
class Launch:
    kind: str
    name: str
    bytes: int  # of a copy or a fill; a kernel's are not known
    threads: int  # of a kernel

    def moves(self, elements: int, itemsize: int) -> bool:
        """It may have read or written a tensor of so many elements whole."""
        if self.kind == "kernel":
            return self.threads * ELEMENTS_A_THREAD >= elements
        return self.bytes >= elements * itemsize

    def __str__(self):
        return f"{self.name} ({self.threads} threads)" if self.kind == "kernel" else f"{self.name} ({self.bytes} bytes)"


@dataclass(frozen=True)
class Trace:
    launches: list[Launch]
    allocations: list[int]  # bytes of each, on any device

    def listed(self) -> str:
        return "".join(f"\n{number:3} {launch}" for number, launch in enumerate(self.launches, 1))


def trace(call: Callable[[], object], device: str) -> Trace:
    """Profile one call; the caller has warmed it up."""
    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * (device == "cuda")
    # The first kernels after the profiler has started may be missed, and a range must not end before its work has.
    synchronize = torch.cuda.synchronize if device == "cuda" else lambda: None
    synchronize()
    with TemporaryDirectory() as folder:
        path = Path(folder, "trace.json")
        with profile(activities=activities, profile_memory=True) as profiler:
            call()
            synchronize()
        profiler.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    return Trace(launches_of(events), allocations_of(events))


def start_profiler(device: str) -> None:
    """Before the first capture: CUPTI then knows the graphs' kernels. It must stay, for graphs do not outlive it."""
    if device == "cuda":
        os.environ.setdefault("TEARDOWN_CUPTI", "0")
        trace(lambda: torch.ones(8, device="cuda"), device)


def launches_of(events: list[dict]) -> list[Launch]:
    ran = sorted((event for event in events if event.get("cat") in KINDS), key=lambda event: float(event["ts"]))
    return [
        Launch(event["cat"], event["name"], int(arguments.get("bytes", 0)), threads_of(arguments))
        for event in ran
        for arguments in [event.get("args", {})]
    ]


def threads_of(arguments: dict) -> int:
    threads = 1
    for size in (*arguments.get("grid", ()), *arguments.get("block", ())):
        threads *= size
    return threads


def allocations_of(events: list[dict]) -> list[int]:
    sizes = (int(event["args"]["Bytes"]) for event in events if event.get("name") == "[memory]")
    return [size for size in sizes if size > 0]
