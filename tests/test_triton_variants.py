"""Promise: of each Triton kernel there are two compiled variants, and a call cannot need a third.

What is compiled follows from the model (heads, dims, dtypes), the features of the call (LSE, window, k_scale, ...) and
its sizes where they choose tiles and splits: these are constants of the kernel, and a warm-up goes through them. For
given constants `aligned` serves the calls that models make, and `general` all others: no stride, offset, batch of 1,
single token or value of a scale selects anything else.

Without a GPU Triton is asked what it would compile, and compiles nothing.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

import calls  # noqa: E402
import ts_ops  # noqa: E402
from cross_compile import asking, compiled_by  # noqa: E402
from ts_ops.backends import triton as triton_backend  # noqa: E402
from ts_ops.backends.triton.launch import KERNELS  # noqa: E402

FP32, FP8 = torch.float32, torch.float8_e4m3fn
DECODE = ("mla_decode", "mla_decode_lse")
LONG = 256  # pages of a table whose keys are split


@pytest.fixture
def whole_vectors(monkeypatch):
    """Rows of a multiple of 16 elements in `calls`, so that a contiguous tensor is aligned."""
    for name, size in {"RANK": 32, "ROPE": 16, "DIM": 48, "DIM_QK": 48, "DIM_V": 32}.items():
        monkeypatch.setattr(calls, name, size)

    def set_heads(heads: int) -> None:
        monkeypatch.setattr(calls, "HEADS", heads)
        monkeypatch.setattr(calls, "HEADS_KV", heads)

    return set_heads


def shifted(tensor: Tensor) -> Tensor:
    """The same values and strides, one element off."""
    view = torch.empty(tensor.numel() + 1, dtype=tensor.dtype, device=tensor.device)[1:].view(tensor.shape)
    return view.copy_(tensor)


def transposed(tensor: Tensor) -> Tensor:
    """The same values, all dimensions in the opposite order in memory."""
    return tensor.permute(*reversed(range(tensor.ndim))).contiguous().permute(*reversed(range(tensor.ndim)))


def wild(stride: int) -> Callable[[Tensor], Tensor]:
    """The same tensor, where dimensions of one element have `stride`."""
    return lambda tensor: tensor.as_strided(
        tensor.shape, [stride if size == 1 else s for size, s in zip(tensor.shape, tensor.stride())]
    )


# Of rows, whose elements lie side by side.
ROWS = {
    "padded": calls.padded, "permuted": calls.permuted, "shifted": shifted, "odd stride of one": wild(7),
    "wide stride of one": wild(2**33 + 16),
}  # fmt: skip
# Of tables, lengths, slots and LSEs.
ENTRIES = {
    "padded": calls.padded, "transposed": transposed, "shifted": shifted, "odd stride of one": wild(7),
    "wide stride of one": wild(2**33 + 16),
}  # fmt: skip
SCALES = (0.0, 1.0, -0.5, 16.0, 1e-42, 1)
VALUES = {
    "softmax_scale": SCALES, "output_scale": SCALES, "k_scale_inv": SCALES, "v_scale_inv": SCALES,
    "window_left": (calls.Q_LEN - 1, 16, 2**40), "cp_rank": (0, 1), "cp_interleave_size": (1, 16, 2**31, 2**40),
}  # fmt: skip


def features(operator: str, dtype: torch.dtype) -> Iterator[dict]:
    """Valid calls of each set of features: arguments that a model passes always or never."""
    base = calls.example(operator, dtype)
    yield base
    if operator in DECODE:
        lens = base["seq_lens"]
        yield base | dict(is_causal=False)
        yield base | dict(window_left=5)
        yield base | dict(local_visible_lens=torch.stack([lens - 1] * calls.Q_LEN, dim=1))
        yield base | dict(causal_seqs=2 * lens, cp_world=2, cp_rank=0, cp_interleave_size=2)
    if operator.startswith("mla_prefill"):
        yield base | dict(is_causal=False)
    if operator == "mla_kv_cache_gather":
        yield base | dict(seq_starts=None)
        yield base | dict(k_scale=None)
    if operator == "mla_kv_cache_write":
        yield base | dict(k_scale=None)


def sizes(operator: str, call: dict) -> Iterator[dict]:
    """`call`, one request of one token, and other sizes that choose tiles and splits."""
    yield call
    yield one(operator, call)
    if operator in DECODE:
        table = torch.zeros(call["block_tables"].shape[0], LONG, dtype=torch.int32)
        table[:, : calls.MAX_PAGES] = call["block_tables"]
        yield call | dict(block_tables=table)
        yield one(operator, call | dict(block_tables=table))
    if operator == "merge_attn_states_n":
        for states in (1, 2, 3):
            yield {name: value[:states] for name, value in call.items()}


def one(operator: str, call: dict) -> dict:
    """A batch of one, one token, one page in the cache."""
    call = dict(call)
    for name, value in call.items():
        if name.startswith("cum_seq_lens"):
            call[name] = torch.arange(2, dtype=torch.int32)
        elif name in ("block_tables", "slot_mapping"):
            call[name] = torch.zeros_like(value[:1])
        elif name == "total_tokens":
            call[name] = 1
        elif name in ("seq_lens", "causal_seqs"):
            call[name] = value[-1:]
        elif name == "local_visible_lens":
            call[name] = value[-1:, :1]
        elif isinstance(value, Tensor) and value.ndim:
            call[name] = value[:, :1] if operator == "merge_attn_states_n" else value[:1]
    if operator in DECODE:
        call["query"] = call["query"][:, :1]
    if operator == "mla_kv_cache_gather":
        call["seq_starts"] = None if call["seq_starts"] is None else torch.zeros(1, dtype=torch.int32)
    return call


def disguises(call: dict) -> Iterator[tuple[str, dict]]:
    """The call in other layouts, one argument at a time and all at once; and with other values of its scalars."""
    tensors = {name: value for name, value in call.items() if isinstance(value, Tensor)}
    rows = {n for n, value in tensors.items() if value.is_floating_point() and not n.endswith(("lse", "lses", "scale"))}
    for layouts, names in ((ROWS, rows), (ENTRIES, tensors.keys() - rows)):
        for label, layout in layouts.items():
            relaid = {name: layout(call[name]) for name in names if call[name].ndim}
            yield label, call | relaid
            for name, value in relaid.items():
                yield f"{label} {name}", call | {name: value}
    for label, layout in ROWS.items():
        yield f"all {label}", calls.relaid(layout, call)
    for name, tensor in tensors.items():
        if not tensor.ndim:
            yield f"shifted {name}", call | {name: shifted(tensor)}
    for name, values in VALUES.items():
        for value in values:
            if name in call or name == "output_scale" and "softmax_scale" in call:
                yield f"{name} {value}", call | {name: value}


def out_buffers(operator: str, call: dict) -> Iterator[dict[str, Tensor]]:
    """Buffers for the results, one of them at an odd address, each in turn; last with none there."""
    buffers = calls.buffers(operator, call)
    for name, buffer in buffers.items():
        yield buffers | {name: shifted(buffer)}
    yield buffers


def launch(operator: str, call: dict, buffers: dict[str, Tensor]) -> None:
    args, kwargs = calls.split(calls.overload_of(operator), call)
    getattr(triton_backend, operator)(calls.PROBLEMS[operator](*args, **kwargs), *buffers.values())


@pytest.mark.parametrize("heads", [1, 5, 16])
@pytest.mark.parametrize("operator", calls.NAMES)
def test_no_call_needs_a_third_variant(operator, heads, whole_vectors):
    whole_vectors(heads)
    labels = []
    with asking(90) as wanted:
        for dtype in calls.DTYPES[operator]:
            for feature in features(operator, dtype):
                for call in sizes(operator, feature):
                    for buffers in out_buffers(operator, call):
                        launch(operator, call, buffers)
                        labels += ["plain"] * (len(wanted) - len(labels))
                    for label, disguise in disguises(call):
                        launch(operator, disguise, buffers)
                        labels += [label] * (len(wanted) - len(labels))
    choices = defaultdict(list)
    for variant, label in zip(wanted, labels):
        choices[variant.kernel, variant.general, variant.constants, variant.dtypes].append(label)
    for choice, labels in choices.items():
        assert len(labels) == 1, f"{choice} is compiled anew for {labels}"
    for kernel in {variant.kernel for variant in wanted}:
        assert {v.general for v in wanted if v.kernel == kernel} == {False, True}, f"half of {kernel} was not asked for"


def practical() -> dict[str, tuple[str, dict]]:
    """Calls of a DeepSeek layer: slices of fused projections, a cache of interleaved layers, LSEs of [H, T]."""
    tokens, heads, pages = 3, 16, 4
    projected = torch.zeros(tokens, 1536 + 512 + 64, dtype=calls.BF16)  # the query's latent, the keys', their rope
    latent, k_pe = projected[:, 1536:2048], projected[:, 2048:]
    k_nope, value = torch.zeros(tokens, heads, 256, dtype=calls.BF16).split(128, dim=-1)
    query = torch.zeros(tokens, heads, 192, dtype=calls.BF16)
    cache = torch.zeros(pages, 2, 64, 576, dtype=calls.BF16)[:, 1]
    table, lens = torch.zeros(1, 128, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    cum, scale = torch.tensor([0, tokens], dtype=torch.int32), dict(softmax_scale=192**-0.5)
    decode = dict(query=query.new_zeros(1, 1, heads, 576), kv_cache=cache, block_tables=table, seq_lens=lens, **scale)
    prefill = dict(query=query, key=query, value=value, cum_seq_lens_q=cum, cum_seq_lens_kv=cum, **scale)
    states = dict(prefix_output=value, prefix_lse=torch.zeros(heads, tokens).T)
    states |= dict(suffix_output=value.contiguous(), suffix_lse=torch.zeros(tokens, heads))
    stacked = dict(outputs=torch.zeros(2, 1, heads, 512), lses=torch.zeros(2, 1, heads))
    return {
        "decode": ("mla_decode", decode),
        "decode of one page": ("mla_decode_lse", decode | dict(block_tables=wild(7)(table[:, :1]))),
        "decode with odd strides of one": ("mla_decode", decode | dict(query=wild(7)(decode["query"]))),
        "decode of one head": ("mla_decode", decode | dict(query=query.new_zeros(1, 1, 1, 576))),
        "prefill": ("mla_prefill", prefill),
        "merge": ("merge_attn_states", states),
        "merge of one token's states": ("merge_attn_states_n", stacked),
        "write": ("mla_kv_cache_write", dict(kv_cache=cache, kv_c=latent, k_pe=k_pe, slot_mapping=torch.arange(3))),
        "gather": (
            "mla_kv_cache_gather", dict(kv_cache=cache, block_tables=table, cum_seq_lens=cum[:2], total_tokens=tokens)
        ),
        "pack": ("mla_kv_pack_quantize_fp8", dict(k_nope=k_nope, k_pe=k_pe[:, None], v=value)),
    }  # fmt: skip


@pytest.mark.parametrize("name", practical())
def test_the_calls_of_a_model_are_aligned(name):
    operator, call = practical()[name]
    with asking(90) as wanted:
        launch(operator, call, calls.buffers(operator, call))
    assert wanted and not any(variant.general for variant in wanted)


def test_compiled_counts_each_variant_once():
    dim = 16  # as nowhere else
    aligned = [torch.zeros(3, 4, dim), torch.zeros(3, 4)] * 2
    general = [shifted(aligned[0]), *aligned[1:]]
    before = KERNELS["_merge_kernel"].compiled(90)
    for call in (aligned, general, aligned, general):
        problem = calls.PROBLEMS["merge_attn_states"](*call)
        compiled_by(90, lambda: triton_backend.merge_attn_states(problem, *problem.allocate()))
    assert KERNELS["_merge_kernel"].compiled(90) == before + 2
    assert triton_backend.compiled(torch.device("cpu")) == {}


def test_a_stride_past_2_31_is_general():
    outputs = torch.empty(2, 2**20, 64, 32, device="meta")
    with asking(90) as wanted:
        problem = calls.PROBLEMS["merge_attn_states_n"](outputs, outputs[..., 0])
        triton_backend.merge_attn_states_n(problem, *problem.allocate())
    assert [variant.general for variant in wanted] == [True]


def run(backend: str, operator: str, call: dict, buffers: dict[str, Tensor]) -> dict[str, Tensor]:
    """What the call wrote."""
    with ts_ops.use_backend(backend):
        calls.invoke(operator, call | buffers, "out" if buffers else "default")
    return buffers or {"kv_cache": call["kv_cache"]}


# An element from the wrong place is off by about 1. Scores of some hundreds have errors of 1e-4 in fp32; weights and
# results are rounded to bf16.
TOLERANCE = {FP32: 1e-3, calls.BF16: 2e-2, FP8: 2e-2}


@pytest.mark.gpu
@pytest.mark.parametrize(
    "operator, dtype",
    [(name, dtype) for name in calls.NAMES for dtype in calls.DTYPES[name]
     if dtype in (FP32, calls.BF16) or dtype == FP8 and "cache" in name],
)  # fmt: skip
def test_nothing_compiles_once_both_variants_have(operator, dtype, whole_vectors):
    whole_vectors(16)
    with torch.device("cuda") as device:
        cases = [call for feature in features(operator, dtype) for call in sizes(operator, feature)]
        for call in cases:
            odd = {n: shifted(v) for n, v in call.items() if isinstance(v, Tensor) and v.is_floating_point()}
            for warm_up in (call, call | odd):
                for buffers in out_buffers(operator, warm_up):
                    run("triton", operator, warm_up, buffers)
        compiled = triton_backend.compiled(device)
        assert sum(compiled.values()) >= 2
        for call in cases:
            for label, disguise in disguises(call):
                same = {"kv_cache": disguise["kv_cache"].clone()} if operator == "mla_kv_cache_write" else {}
                expected = run("reference", operator, disguise | same, calls.buffers(operator, disguise))
                for buffers in out_buffers(operator, disguise):
                    actual = run("triton", operator, disguise, buffers)
                    assert triton_backend.compiled(device) == compiled, f"{label} compiled"
                    for name, result in actual.items():
                        torch.testing.assert_close(
                            result.float(), expected[name].float(), rtol=TOLERANCE[dtype],
                            atol=TOLERANCE[dtype] * max(1.0, abs(disguise.get("output_scale", 1.0))),
                            msg=lambda text: f"{label}, {name}: {text}",
                        )  # fmt: skip
