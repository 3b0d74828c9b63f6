"""What a call costs on the host before a backend starts: microseconds, by part, for each operator.

    python examples/benchmarks/overhead.py [--device cuda]

- dispatcher: PyTorch's dispatcher and its conversion of the arguments to Python
- autograd: the step through the Autograd key and the inference-only check (no_grad against inference_mode)
- contract: reading and checking the arguments
- allocation: the outputs
- choosing: which backend serves
- total: all of it, as `ts_ops.<operator>` under no_grad, with a backend that does nothing
- overhead: total less the allocation, which a direct call of the backend would need too

Every figure is the thread's CPU time in the best of many short rounds, so that other work on the machine disturbs it
little.
"""

import argparse
import time
from collections.abc import Callable
from functools import partial

import torch
from ts_ops.meta.call import PROBLEMS, functional

import ts_ops
from ts_ops import dispatch, meta


def microseconds(call: Callable[[], object], rounds: int = 100, calls: int = 50) -> float:
    best = float("inf")
    for _ in range(rounds):
        start = time.thread_time()
        for _ in range(calls):
            call()
        best = min(best, time.thread_time() - start)
    return best / calls * 1e6


def example_calls(device: str) -> dict[str, tuple]:
    """Arguments of a small call of each operator; DeepSeek-R1's dimensions with 16 heads."""
    make = partial(torch.zeros, device=device)
    bf16 = partial(make, dtype=torch.bfloat16)
    int32 = partial(make, dtype=torch.int32)
    cache, tables, lengths = bf16(8, 64, 576), int32(4, 2), int32(4)
    decode = (bf16(4, 1, 16, 576), cache, tables, lengths, 0.1)
    prefill = (bf16(8, 16, 192), bf16(8, 16, 192), bf16(8, 16, 128), int32(5), int32(5), 0.1)
    return {
        "mla_decode": decode,
        "mla_decode_lse": decode,
        "mla_prefill": prefill,
        "mla_prefill_lse": prefill,
        "merge_attn_states": (bf16(8, 16, 128), make(8, 16), bf16(8, 16, 128), make(8, 16)),
        "merge_attn_states_n": (bf16(3, 8, 16, 128), make(3, 8, 16)),
        "mla_kv_cache_write": (cache, bf16(8, 512), bf16(8, 64), make(8, dtype=torch.int64)),
        "mla_kv_cache_gather": (cache, tables, int32(5), 8),
        "mla_kv_pack_quantize_fp8": (bf16(8, 16, 128), bf16(8, 64), bf16(8, 16, 128)),
    }


def serving_nothing(device: str) -> None:
    """Make every backend kernel that may serve on `device` an empty function."""
    for name in dispatch.PREFERENCE[torch.device(device).type]:
        backend = dispatch._backend(name)
        for operator in meta.OPERATORS:
            setattr(backend, operator.name, lambda problem, *outputs: None)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu")
    device = parser.parse_args().device
    serving_nothing(device)

    columns = ("dispatcher", "autograd", "contract", "allocation", "choosing", "total", "overhead")
    print(f"{'':26}" + "".join(f"{column:>12}" for column in columns))
    calls = example_calls(device)
    for operator in meta.OPERATORS:
        arguments = calls[operator.name]
        problem = PROBLEMS[operator.name](*arguments)
        outputs = problem.allocate()
        run = partial(dispatch.serve, operator.name)
        op, function = getattr(torch.ops.tokenspeed, operator.name).default, getattr(ts_ops, operator.name)
        with torch.inference_mode():
            in_inference_mode = microseconds(lambda: op(*arguments))
        with torch.no_grad():
            in_no_grad = microseconds(lambda: op(*arguments))
            total = microseconds(lambda: function(*arguments))
        implementation = functional(operator, run)
        kernel = microseconds(lambda: implementation(*arguments))
        contract = microseconds(lambda: PROBLEMS[operator.name](*arguments))
        allocation = microseconds(problem.allocate)
        choosing = microseconds(lambda: run(problem, outputs))
        figures = (
            in_inference_mode - kernel, in_no_grad - in_inference_mode, contract, allocation, choosing, total,
            total - allocation,
        )  # fmt: skip
        print(f"{operator.name:26}" + "".join(f"{figure:12.1f}" for figure in figures))


if __name__ == "__main__":
    main()
