"""Random valid problems for `test_properties.py`: Hypothesis strategies of the cases that the law tests build.

Choices and sizes begin with the simplest: Hypothesis shrinks a failure towards the first choice and the least number.
Profiles:

- `fast`, the default: few examples, the same ones in every run.
- `thorough`, chosen by `--hypothesis-profile=thorough`: 2000 examples a property, others in every run; `conftest.py`
  picks a seed and prints it, and `--hypothesis-seed` replays it.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

import test_laws_cache as cache_laws
import test_laws_decode as decode_laws
import test_laws_merge as merge_laws
import test_laws_pack as pack_laws
import test_laws_prefill as prefill_laws

FP8 = torch.float8_e4m3fn
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"

COMMON = {"deadline": None, "print_blob": True, "suppress_health_check": [HealthCheck.too_slow]}  # as on a busy machine
settings.register_profile("fast", max_examples=200, derandomize=True, **COMMON)
settings.register_profile("thorough", max_examples=2000, **COMMON)
settings.load_profile("fast")


def problem_property(share: float = 1.0) -> Callable:
    """Decorator of a test that takes `data`, for it to draw from: `share` of the profile's examples."""
    if INTERPRETED:
        share /= 5  # 0.1 s a launch or so
    elif torch.cuda.is_available():
        share /= 4  # where many examples are compilations
    most = max(1, round(settings.default.max_examples * share))
    return lambda test: settings(max_examples=most)(given(data=st.data())(test))


seeds = st.integers(0, 2**16)
batches = st.sampled_from((1, 2, 3, 4, 0))
output_scales = st.sampled_from((1.0, 1.7, 0.037, -7.3, 0.0))
page_sizes = st.sampled_from((1, 2, 4, 8, 16, 32, 64, 128))


def padded(tensor: Tensor) -> Tensor:
    """The same values amid NaN: odd offset, odd strides."""
    inner = prefill_laws.poisoned(tensor, [size + 1 for size in tensor.shape])[(slice(1, None),) * tensor.ndim]
    return inner.copy_(tensor)


def permuted(tensor: Tensor) -> Tensor:
    """The same values with the first dimension innermost but for the last."""
    return tensor.movedim(0, -2).contiguous().movedim(-2, 0)


LAYOUTS = {"contiguous": lambda t: t, "padded": padded, "permuted": permuted}
layouts = st.sampled_from(tuple(LAYOUTS))


def dtypes(target, *choices: torch.dtype) -> st.SearchStrategy:
    return st.sampled_from([dtype for dtype in choices if target.supports(dtype)])


def one_sign(tensor: Tensor) -> None:
    """Make the values positive, NaN apart. Tolerances are relative to a row's norm; where a row has few columns, values
    of both signs can cancel in all of them, and leave a norm that has nothing to do with the error."""
    tensor.copy_(tensor.float().abs())


FEW_COLUMNS = 8


@dataclass(frozen=True)
class Decode:
    """A case of the decode laws, and what they keep fixed."""

    case: decode_laws.Case
    tensors: dict = field(default_factory=dict)  # local_visible_lens or causal_seqs
    layout: str = "contiguous"  # of the query; metadata is strided where it is not contiguous
    scale: float = 1.0  # times the law tests' own
    output_scale: float = 1.0
    seed: int = 0

    def build(self, device: str) -> tuple[tuple, dict]:
        case = self.case
        query, cache, table, lengths, scale = decode_laws.build(case, device, self.seed)
        if case.rank < FEW_COLUMNS:
            one_sign(cache)
        tensors = {name: torch.tensor(v, dtype=torch.int32, device=device) for name, v in self.tensors.items()}
        if "local_visible_lens" in tensors:
            tensors["local_visible_lens"] = tensors["local_visible_lens"].reshape(len(case.lengths), case.q_len)
        if self.layout != "contiguous":
            table, lengths, *values = (strided(t) for t in (table, lengths, *tensors.values()))
            tensors = dict(zip(tensors, values))
        options = dict(case.options, **tensors, kv_lora_rank=case.rank, output_scale=self.output_scale)
        return (LAYOUTS[self.layout](query), cache, table, lengths, scale * self.scale), options


def strided(tensor: Tensor) -> Tensor:
    """Every other element of a tensor whose rest holds other numbers."""
    return torch.stack((tensor, tensor * 3 + 1), dim=-1)[..., 0]


@st.composite
def decodes(draw, target) -> Decode:
    longest, most_rows = (60, 60) if target.name == "interpreter" else (200, 400)
    query = draw(dtypes(target, FP32, FP16, BF16, FP8))
    cache = draw(st.sampled_from((None, FP8))) if query in (FP16, BF16) else None
    lengths = [draw(st.integers(0, longest)) for _ in range(draw(batches))]
    q_len = draw(st.integers(1, 8))
    counts = (1, 2, 3, 5, 8, 16, 20, 33, 64, 128)
    heads = draw(st.sampled_from([h for h in counts if h * q_len * len(lengths) <= most_rows]))
    options, tensors = {"is_causal": draw(st.booleans())}, {}
    kind = draw(st.sampled_from(("plain", "window", "visible", "parallel")))
    if kind == "window":
        windows = st.integers(q_len - 1, longest + q_len) | st.sampled_from((2**31 - 1, 2**40, 2**63 - 1))
        options["window_left"] = draw(windows)
    elif kind == "visible":
        tensors["local_visible_lens"] = [[draw(st.integers(0, n)) for _ in range(q_len)] for n in lengths]
    elif kind == "parallel":
        world, interleave = draw(st.integers(2, 5)), draw(st.sampled_from((1, 2, 3, 16, 64, 2**20)))
        rank = draw(st.integers(0, world - 1))
        options |= {"cp_world": world, "cp_rank": rank, "cp_interleave_size": interleave}
        tensors["causal_seqs"] = lengths
        lengths = [sum(g // interleave % world == rank for g in range(n)) for n in lengths]
    hint = draw(st.sampled_from((None, 0, 1, 64, 2**31 - 1)))
    case = decode_laws.Case(
        tuple(lengths),
        heads=heads,
        q_len=q_len,
        page_size=draw(page_sizes),
        rank=draw(st.sampled_from((1, 8, 16, 33, 64, 100, 256, 512))),
        rope=draw(st.sampled_from((0, 1, 16, 64))),
        query=query,
        cache=cache,
        options=options if hint is None else options | {"max_seq_len": hint},
        spare_pages=draw(st.integers(0, 3)),
        cache_layout=draw(st.sampled_from(("plain", "4d", "strided", "token-major"))),
    )
    # Larger FP8 scores are beyond what the tensor cores keep of a sum.
    scales = (1.0, 0.25, 0.0, -1.0, 1e-42) + (() if query == FP8 else (3.0,))
    return Decode(
        case, tensors, draw(layouts), draw(st.sampled_from(scales)), draw(output_scales), draw(seeds)
    )  # fmt: skip


@dataclass(frozen=True)
class Prefill:
    case: prefill_laws.Case
    hints: dict = field(default_factory=dict)
    strided: bool = False
    seed: int = 0

    def build(self, device: str) -> tuple[tuple, dict]:
        torch.manual_seed(self.seed)
        arguments, options = prefill_laws.build(self.case, device)
        if self.case.dim_v < FEW_COLUMNS:
            one_sign(arguments[2])
        if self.strided:
            arguments = (*arguments[:3], strided(arguments[3]), strided(arguments[4]), arguments[5])
        return arguments, options | self.hints


@st.composite
def prefills(draw, target) -> Prefill:
    longest, most_rows = (20, 40) if target.name == "interpreter" else (80, 1000)
    batch = draw(batches)
    q_lens = [draw(st.integers(0, longest // 2)) for _ in range(batch)]
    kv_lens = [draw(st.integers(0, longest)) for _ in range(batch)]
    padding = draw(st.integers(0, 5))
    counts = [(kv, kv * group) for kv in (1, 2, 3, 4) for group in (1, 2, 3, 8, 32)]
    rows = sum(q_lens) + padding
    heads_kv, heads = draw(st.sampled_from([n for n in counts if n == (1, 1) or n[1] * rows <= most_rows]))
    dim_qk = draw(st.sampled_from((1, 8, 16, 40, 64, 192)))
    case = prefill_laws.Case(
        tuple(q_lens),
        tuple(kv_lens),
        dtype=draw(dtypes(target, FP32, FP16, BF16, FP8)),
        is_causal=draw(st.booleans()),
        heads=heads,
        heads_kv=heads_kv,
        dim_qk=dim_qk,
        dim_v=draw(st.sampled_from((1, 8, 16, 48, 128, 300))),
        softmax_scale=draw(st.sampled_from((1.0, 0.25, 0.0, -1.0, 1e-42))) * 1.25 / dim_qk**0.5,
        output_scale=draw(output_scales),
        layout=draw(st.sampled_from(tuple(prefill_laws.LAYOUTS))),
        padding=padding,
    )
    bounds = max(q_lens, default=0), max(kv_lens, default=0)
    hints = [draw(st.sampled_from((None, bound, bound + 100))) for bound in bounds]
    hints = {name: hint for name, hint in zip(("max_seq_len_q", "max_seq_len_kv"), hints) if hint is not None}
    return Prefill(case, hints, draw(st.booleans()), draw(seeds))


@dataclass(frozen=True)
class Merge:
    case: merge_laws.Case
    dtype: torch.dtype = FP32
    empty: float = 0.0  # part of the rows that are
    layout: str = ""
    seed: int = 0

    def build(self, device: str) -> tuple[Tensor, Tensor]:
        torch.manual_seed(self.seed)
        outputs, lses = merge_laws.random_states(self.case, self.dtype, device, self.empty)
        if self.case.dim < FEW_COLUMNS:
            one_sign(outputs)
        return merge_laws.LAYOUTS[self.layout](outputs, lses) if self.layout else (outputs, lses)


@st.composite
def merges(draw, target) -> Merge:
    case = merge_laws.Case(
        tokens=draw(st.integers(0, 6)),
        heads=draw(st.sampled_from((1, 2, 3, 8, 33, 128))),
        dim=draw(st.sampled_from((1, 8, 65, 128, 576))),
        states=draw(st.sampled_from((2, 1, 3, 4, 9))),
    )
    layout = draw(st.sampled_from(("", *merge_laws.LAYOUTS)))
    empty = draw(st.sampled_from((0.0, 0.3, 0.9, 1.0)))
    return Merge(case, draw(dtypes(target, FP32, FP16, BF16)), empty, layout, draw(seeds))


@st.composite
def writes(draw, target) -> cache_laws.Write:
    cache = draw(dtypes(target, FP32, FP16, BF16, FP8))
    scales = (None, 1.0, 0.125, 4.0) + (() if target.name == "interpreter" else (0.037, 7.3))
    return cache_laws.Write(
        cache=cache,
        kv_c=draw(dtypes(target, FP32, FP16, BF16)),
        k_pe=draw(dtypes(target, FP32, FP16, BF16)),
        rank=draw(st.sampled_from((1, 8, 33, 64, 512))),
        rope=draw(st.sampled_from((0, 1, 16, 64))),
        page_size=draw(page_sizes),
        tokens=draw(st.integers(0, 70)),
        scale=draw(st.sampled_from(scales)) if cache == FP8 else None,
        padded=draw(st.booleans()),
        four_dims=draw(st.booleans()),
    )


@st.composite
def gathers(draw, target) -> cache_laws.Gather:
    cache = draw(dtypes(target, FP32, FP16, BF16, FP8))
    floats = [dtype for dtype in (FP32, FP16, BF16) if target.supports(dtype)]
    dtype = draw(st.sampled_from([None, *floats] + [FP8] * (cache == FP8)))
    lengths = [draw(st.integers(0, 70)) for _ in range(draw(batches))]
    starts = [draw(st.integers(0, 70)) for _ in lengths] if draw(st.booleans()) else None
    scaled = cache == FP8 and dtype in floats
    return cache_laws.Gather(
        cache,
        dtype,
        tuple(lengths),
        tuple(starts) if starts else None,
        dim=draw(st.sampled_from((1, 8, 65, 128, 576))),
        page_size=draw(page_sizes),
        scale=draw(st.sampled_from((None, 1.0, 0.037, 7.3))) if scaled else None,
        spare=draw(st.integers(-20, 20)),
        padded=draw(st.booleans()),
        four_dims=draw(st.booleans()),
    )


@dataclass(frozen=True)
class Pack:
    case: pack_laws.Case
    dtype: torch.dtype
    scales: dict
    exact: bool  # values that become e4m3 numbers without rounding; else of all magnitudes, NaN and infinity among them
    layout: str
    head: bool  # k_pe as [T, 1, rope]
    seed: int

    def build(self, device: str) -> tuple[Tensor, Tensor, Tensor]:
        torch.manual_seed(self.seed)
        case = self.case
        k_nope = self.values(case.tokens, case.heads, case.nope, scale=self.scales["k_scale_inv"])
        k_pe = self.values(case.tokens, case.rope, scale=self.scales["k_scale_inv"])
        v = self.values(case.tokens, case.heads, case.value, scale=self.scales["v_scale_inv"])
        k_nope, k_pe, v = (LAYOUTS[self.layout](tensor.to(device, self.dtype)) for tensor in (k_nope, k_pe, v))
        return k_nope, k_pe[:, None] if self.head else k_pe, v

    def values(self, *shape: int, scale: float) -> Tensor:
        if self.exact:
            return pack_laws.exact_fp8(*shape) / scale
        values = torch.randn(shape) * 10 ** (torch.rand(shape) * 9 - 5)
        lot = torch.rand(shape)
        for share, value in ((0.06, float("nan")), (0.04, float("inf")), (0.02, float("-inf"))):
            values[lot < share] = value
        return values


@st.composite
def packs(draw, target) -> Pack:
    case = pack_laws.Case(
        tokens=draw(st.integers(1, 20)),
        heads=draw(st.sampled_from((1, 2, 7, 16, 128))),
        nope=draw(st.sampled_from((1, 8, 65, 128))),
        rope=draw(st.sampled_from((0, 1, 16, 64))),
        value=draw(st.sampled_from((1, 8, 100, 128))),
    )
    exact = target.name == "interpreter" or draw(st.booleans())
    choices = st.sampled_from((1.0, 0.5, 2.0, -2.0) + (() if exact else (0.037, 7.3, 0.0)))
    scales = {"k_scale_inv": draw(choices), "v_scale_inv": draw(choices)}
    dtype = draw(dtypes(target, FP32, FP16, BF16))
    return Pack(case, dtype, scales, exact, draw(layouts), draw(st.booleans()), draw(seeds))
