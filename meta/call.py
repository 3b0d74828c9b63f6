"""The two forms that torch calls: functional and `.out`, built from the contract and a way to serve.

The fakes (`meta/fake.py`) serve a checked problem by doing nothing, the implementations (`ts_ops/dispatch.py`) by
running a backend. Being built here, both check, allocate and return alike.
"""

from collections.abc import Callable
from functools import partial

from torch import Tensor

from . import contract
from .autograd import mark_written, refuse_gradients
from .schema import Operator

Serve = Callable[[contract.Problem, tuple[Tensor, ...]], None]

PROBLEMS = {
    "mla_decode": contract.Decode,
    "mla_decode_lse": partial(contract.Decode, with_lse=True),
    "mla_prefill": contract.Prefill,
    "mla_prefill_lse": partial(contract.Prefill, with_lse=True),
    "merge_attn_states": contract.Merge,
    "merge_attn_states_n": contract.MergeN,
    "mla_kv_cache_write": contract.CacheWrite,
    "mla_kv_cache_gather": contract.CacheGather,
    "mla_kv_pack_quantize_fp8": contract.PackQuantize,
}


def functional(operator: Operator, serve: Serve) -> Callable:
    """Arguments -> checked problem -> fresh outputs, filled by `serve`."""
    name, problem_of = operator.name, PROBLEMS[operator.name]

    def call(*args, **kwargs):
        refuse_gradients(name, args, kwargs)
        problem = problem_of(*args, **kwargs)
        outputs = problem.allocate()
        serve(problem, outputs)
        if problem.written:
            mark_written(problem.written)
        return outputs[0] if len(outputs) == 1 else outputs or None

    return call


def out_variant(operator: Operator, serve: Serve) -> Callable:
    """The `.out` overload: the caller's buffers in place of fresh ones, no result."""
    name, problem_of = operator.name, PROBLEMS[operator.name]

    def call(*args, **kwargs):
        refuse_gradients(name, args, kwargs)
        buffers = tuple(kwargs.pop(name) for name in operator.outs)
        problem = problem_of(*args, **kwargs)
        problem.check_buffers(operator.outs, buffers)
        serve(problem, buffers)
        mark_written(buffers)

    return call
