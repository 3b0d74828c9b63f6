"""A small valid call of every operator, by argument name, and how to make it through either overload.

Tensors are made by torch's factory functions without a device, so `with torch.device(...)` or a FakeTensorMode around
`example` decides what they are. Sizes are distinct and odd where they may be, so that no stride is degenerate.
"""

import torch
from torch import Tensor
from ts_ops.meta import OPERATORS
from ts_ops.meta.call import PROBLEMS

FP8 = torch.float8_e4m3fn
BF16 = torch.bfloat16

B, Q_LEN, HEADS, RANK, ROPE = 3, 2, 5, 16, 8
DIM = RANK + ROPE
PAGES, PAGE_SIZE, MAX_PAGES = 7, 4, 3
TOKENS, TOKENS_KV, HEADS_KV, DIM_QK, DIM_V = 11, 13, 5, 12, 9

BY_NAME = {operator.name: operator for operator in OPERATORS}
NAMES = tuple(BY_NAME)
WITH_OUT = tuple(operator.name for operator in OPERATORS if operator.outs)
OVERLOADS = [(name, "default") for name in NAMES] + [(name, "out") for name in WITH_OUT]


def floats(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
    return torch.randn(*shape).to(dtype)


def int32(values) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def _decode(dtype: torch.dtype) -> dict:
    return dict(
        query=floats(B, Q_LEN, HEADS, DIM, dtype=dtype),
        kv_cache=floats(PAGES, PAGE_SIZE, DIM, dtype=dtype),
        block_tables=int32([[1, 2, 3], [4, 5, 0], [6, 0, 0]]),
        seq_lens=int32([11, 6, 2]),
        softmax_scale=0.25,
        kv_lora_rank=RANK,
    )


def _prefill(dtype: torch.dtype) -> dict:
    return dict(
        query=floats(TOKENS, HEADS, DIM_QK, dtype=dtype),
        key=floats(TOKENS_KV, HEADS_KV, DIM_QK, dtype=dtype),
        value=floats(TOKENS_KV, HEADS_KV, DIM_V, dtype=dtype),
        cum_seq_lens_q=int32([0, 5, 5, 11]),
        cum_seq_lens_kv=int32([0, 5, 6, 13]),
        softmax_scale=0.25,
    )


def _merge(dtype: torch.dtype) -> dict:
    return dict(
        prefix_output=floats(TOKENS, HEADS, DIM_V, dtype=dtype),
        prefix_lse=torch.randn(TOKENS, HEADS),
        suffix_output=floats(TOKENS, HEADS, DIM_V, dtype=dtype),
        suffix_lse=torch.randn(TOKENS, HEADS),
    )


def _write(dtype: torch.dtype) -> dict:
    call = dict(
        kv_cache=torch.zeros(PAGES, PAGE_SIZE, DIM, dtype=dtype),
        kv_c=floats(TOKENS, RANK),
        k_pe=floats(TOKENS, ROPE),
        slot_mapping=torch.tensor([4, 5, 6, 7, -1, 9, 10, 20, 21]),
    )
    return call | (dict(k_scale=torch.tensor(0.5)) if dtype == FP8 else {})


def _gather(dtype: torch.dtype) -> dict:
    call = dict(
        kv_cache=floats(PAGES, PAGE_SIZE, DIM, dtype=dtype),
        block_tables=int32([[1, 2, 3], [4, 5, 0], [6, 0, 0]]),
        cum_seq_lens=int32([0, 9, 9, 12]),
        total_tokens=TOKENS_KV,
        seq_starts=int32([2, 0, 1]),
    )
    return call | (dict(k_scale=torch.tensor(0.5), dtype=BF16) if dtype == FP8 else {})


def _pack(dtype: torch.dtype) -> dict:
    return dict(
        k_nope=floats(TOKENS, HEADS, DIM_QK, dtype=dtype),
        k_pe=floats(TOKENS, ROPE, dtype=dtype),
        v=floats(TOKENS, HEADS, DIM_V, dtype=dtype),
        k_scale_inv=2.0,
    )


_EXAMPLES = {
    "mla_decode": _decode,
    "mla_decode_lse": _decode,
    "mla_prefill": _prefill,
    "mla_prefill_lse": _prefill,
    "merge_attn_states": _merge,
    "merge_attn_states_n": lambda dtype: dict(
        outputs=floats(4, TOKENS, HEADS, DIM_V, dtype=dtype), lses=torch.randn(4, TOKENS, HEADS)
    ),
    "mla_kv_cache_write": _write,
    "mla_kv_cache_gather": _gather,
    "mla_kv_pack_quantize_fp8": _pack,
}

# The dtypes of each operator's first argument; the other arguments' follow.
DTYPES = {
    name: (BF16, torch.float16, torch.float32)
    if name.startswith("merge") or name == "mla_kv_pack_quantize_fp8"
    else (BF16, torch.float16, torch.float32, FP8)
    for name in NAMES
}


def example(operator: str, dtype: torch.dtype = BF16) -> dict:
    """Arguments of a valid call, by name."""
    return _EXAMPLES[operator](dtype)


def buffers(operator: str, arguments: dict) -> dict[str, Tensor]:
    """Buffers for the `.out` overload, filled with NaN so that a row left unwritten shows."""
    args, kwargs = split(overload_of(operator), arguments)
    results = PROBLEMS[operator](*args, **kwargs).results
    return {
        name: torch.full(shape, float("nan")).to(dtype) for name, (shape, dtype) in zip(BY_NAME[operator].outs, results)
    }


def results_of(operator: str, arguments: dict) -> dict[str, Tensor]:
    """Call the functional overload: its results by the names of their buffers."""
    results = invoke(operator, arguments)
    return dict(zip(BY_NAME[operator].outs, results if isinstance(results, tuple) else (results,)))


def invoke(operator: str, arguments: dict, overload: str = "default"):
    op = overload_of(operator, overload)
    args, kwargs = split(op, arguments)
    return op(*args, **kwargs)


def invoke_compiled(operator: str, arguments: dict, overload: str = "default", **options):
    """The call as a compiled graph of its own."""
    op = overload_of(operator, overload)
    args, kwargs = split(op, arguments)
    torch._dynamo.reset()
    return torch.compile(lambda *args, **kwargs: op(*args, **kwargs), fullgraph=True, **options)(*args, **kwargs)


def overload_of(operator: str, overload: str = "default"):
    return getattr(getattr(torch.ops.tokenspeed, operator), overload)


def split(op, arguments: dict) -> tuple[tuple, dict]:
    """`arguments` as the positional and the keyword arguments of `op`."""
    positional = [argument.name for argument in op._schema.arguments if not argument.kwarg_only]
    args = tuple(arguments[name] for name in positional)
    return args, {name: value for name, value in arguments.items() if name not in positional}


def padded(tensor: Tensor) -> Tensor:
    """The same values, cut out of a larger tensor: odd offset, odd strides."""
    larger = torch.zeros([size + 1 for size in tensor.shape], dtype=tensor.dtype)
    inner = larger[tuple(slice(1, None) for _ in tensor.shape)]
    inner.copy_(tensor)
    return inner


def permuted(tensor: Tensor) -> Tensor:
    """The same values with all dimensions but the last in the opposite order in memory."""
    order = [*reversed(range(tensor.ndim - 1)), tensor.ndim - 1]
    return tensor.permute(order).contiguous().permute(order) if tensor.ndim > 2 else padded(tensor)


def broadcast(tensor: Tensor) -> Tensor:
    """The first row of `tensor`, expanded with stride 0."""
    return tensor[:1].expand_as(tensor)


def relaid(layout, arguments: dict) -> dict:
    """`arguments` with every floating-point tensor in another layout, and every integer one with stride 2."""
    result = dict(arguments)
    for name, value in arguments.items():
        if isinstance(value, Tensor) and value.ndim:
            result[name] = layout(value) if value.is_floating_point() else torch.stack((value, value), dim=-1)[..., 0]
    return result
