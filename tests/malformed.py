"""Malformed calls, made by rule: each is a valid call with one thing wrong.

The facts are those of the docstrings in `ts_ops/ops.py`: the shape of every tensor, where a name that occurs twice ties
two sizes; its dtypes; the range of every number; what excludes what. They stand here apart from `meta/contract.py`, so
that a check which is lost there is missed here. A rule makes rows of facts, and `TABLE` is all rows.
"""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from itertools import combinations

import torch
from torch import Tensor

import calls
from calls import BF16, DIM, FP8, Q_LEN, B

FP16, FP32 = torch.float16, torch.float32
FLOATS, MATRIX = (BF16, FP16, FP32), (BF16, FP16, FP32, FP8)
NEVER = (torch.bool, torch.int16, torch.int32, torch.int64, torch.float64, torch.complex64, torch.float8_e5m2)
LOWEST, LARGEST = -(2**63), 2**63 - 1
MERGE, MERGE_N, WRITE, GATHER, PACK = calls.NAMES[4:]

# A size is a name; `+1` is one more, `>=` at least as many, and `~` marks the parts that add up to a size.
SHAPES = {
    "mla_decode": dict(
        query="B Q H D", kv_cache="N P D", block_tables="B M", seq_lens="B", local_visible_lens="B Q", causal_seqs="B",
        out="B Q H R", lse="B Q H",
    ),
    "mla_prefill": dict(
        query="T H Dqk", key="Tkv Hkv Dqk", value="Tkv Hkv Dv", cum_seq_lens_q="B+1", cum_seq_lens_kv="B+1",
        out="T H Dv", lse="T H",
    ),
    MERGE: dict(
        prefix_output="T H D", prefix_lse="T H", suffix_output="T H D", suffix_lse="T H", out="T H D", lse="T H",
    ),
    MERGE_N: dict(outputs="N T H D", lses="N T H", out="T H D", lse="T H"),
    WRITE: dict(kv_cache="N P D", kv_c=">=T ~D", k_pe=">=T ~D", slot_mapping="T", k_scale=""),
    GATHER: dict(kv_cache="N P D", block_tables="B M", cum_seq_lens="B+1", seq_starts="B", k_scale="", out="C D"),
    PACK: dict(k_nope="T H Dn", k_pe="T Dr", v="T H Dv", key="T H Dk", value="T H Dv"),
}  # fmt: skip
WITH_A_HEAD = "with a head"
HEADED = ("kv_cache", "k_pe")  # may have a dimension of size 1 behind the first, the one KV head

DTYPES = {
    **dict.fromkeys(("query", "key", "value", "kv_cache"), MATRIX),
    **dict.fromkeys(("prefix_output", "suffix_output", "outputs", "kv_c", "k_nope", "k_pe", "v"), FLOATS),
    **dict.fromkeys(("prefix_lse", "suffix_lse", "lses", "k_scale"), (FP32,)),
    **dict.fromkeys(("block_tables", "seq_lens", "local_visible_lens", "causal_seqs", "seq_starts"), (torch.int32,)),
    **dict.fromkeys(("cum_seq_lens", "cum_seq_lens_q", "cum_seq_lens_kv"), (torch.int32,)),
    "slot_mapping": (torch.int64,),
}
# These have the first argument's dtype; a cache may also be FP8 under a half-precision query.
LIKE_THE_FIRST = {
    "mla_decode": ("kv_cache",), "mla_prefill": ("key", "value"), MERGE: ("suffix_output",), PACK: ("k_pe", "v"),
}  # fmt: skip
DENSE = {name for name, dtypes in DTYPES.items() if BF16 in dtypes}  # the last stride is 1

# Sizes that contradict no other size, and yet are not allowed: the argument that is blamed, and the sizes.
NOT_PAGES = [("kv_cache", dict(P=p)) for p in (0, 3, 6, 12, 24, 48, 96, 127, 129, 256)]
FORBIDDEN_SIZES = {
    "mla_decode": [("query", dict(H=0)), ("query", dict(H=129)), ("query", dict(H=256)), ("kv_cache", dict(D=0))]
    + NOT_PAGES,
    "mla_prefill": [("query", dict(H=h, Hkv=h)) for h in (129, 256)]
    + [("query", dict(Hkv=h)) for h in (2, 3, 4, 6, 10)]  # H is 5
    + [("query", dict(H=0)), ("key", dict(Hkv=0)), ("query", dict(Dqk=0)), ("value", dict(Dv=0))]
    + [("cum_seq_lens_q", dict(B=-1))],
    MERGE: [("prefix_output", dict(D=0))],
    MERGE_N: [("outputs", dict(N=0)), ("outputs", dict(D=0))],
    WRITE: [("kv_cache", dict(D=0)), *NOT_PAGES],
    GATHER: [("kv_cache", dict(D=0)), *NOT_PAGES],
    PACK: [("k_nope", dict(Dn=0)), ("v", dict(Dv=0))],
}

WORLD = 4
# Lowest and highest value. `window_left` may also be -1.
NUMBERS = {
    "kv_lora_rank": (1, DIM), "window_left": (Q_LEN - 1, None),
    "cp_world": (1, None), "cp_rank": (0, WORLD - 1), "cp_interleave_size": (1, LARGEST // WORLD),
    **dict.fromkeys(("max_seq_len", "max_seq_len_q", "max_seq_len_kv", "total_tokens"), (0, None)),
}  # fmt: skip
NOT_SCALES = (float("nan"), float("inf"), float("-inf"), 1e39, -1e39)  # not finite, or not in float32


def zeros(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
    return torch.zeros(shape, dtype=dtype)


# What a decode may do beside plain attention; no two together.
OPTIONS: dict[str, Callable[[], dict]] = {
    "window_left": lambda: dict(window_left=4),
    "local_visible_lens": lambda: dict(local_visible_lens=zeros(B, Q_LEN)),
    "cp_world": lambda: dict(cp_world=WORLD, cp_rank=3, cp_interleave_size=2, causal_seqs=zeros(B)),
}


def bases(operator: str) -> dict[str, Callable[[], dict]]:
    """Valid calls; between them they give every tensor argument. The first is the plainest."""
    plain = calls.example(operator)
    made = {str(dtype)[6:]: lambda dtype=dtype: calls.example(operator, dtype) for dtype in calls.DTYPES[operator]}
    for name in HEADED:
        if name in plain:
            made[f"{name} {WITH_A_HEAD}"] = lambda name=name: plainest(operator, **{name: lambda t: t.unsqueeze(1)})
    if "query" in plain and "kv_cache" in plain:
        made["FP8 cache"] = lambda: plainest(operator, kv_cache=lambda t: t.to(FP8))
        made |= {name: lambda make=make: calls.example(operator) | make() for name, make in OPTIONS.items()}
    return made


def plainest(operator: str, **changes: Callable[[Tensor], Tensor]) -> dict:
    call = calls.example(operator)
    return call | {name: change(call[name]) for name, change in changes.items()}


def valid(operator: str, overload: str, base: str) -> dict:
    call = bases(operator)[base]()
    return call | calls.buffers(operator, call) if overload == "out" else call


@dataclass(frozen=True)
class Row:
    operator: str
    argument: str
    what: str
    spoil: Callable[[dict], dict] = field(repr=False)  # the valid call -> the arguments to change
    base: str = "bfloat16"
    error: type = ValueError
    # The error begins with one of these, several where arguments contradict each other; by default `argument`.
    blames: tuple[str, ...] = ()
    mentions: str = ""  # by default `argument`
    rule: str = ""
    overload: str = "default"

    def __str__(self) -> str:
        what = self.what.replace("torch.", "").replace(" ", "_")
        return f"{self.operator}{'.out' * (self.overload == 'out')}-{self.argument}-{what}"

    def arguments(self) -> dict:
        call = valid(self.operator, self.overload, self.base)
        return call | self.spoil(call)

    def describes(self, text: str) -> bool:
        """`text` begins with the name of an argument to blame, and names the one that is wrong."""
        blamed = text.split(" ", 1)[0] in (self.blames or (self.argument,))
        return blamed and re.search(rf"\b{self.mentions or self.argument}\b", text) is not None


def retensored(operator: str, name: str, what: str, change: Callable[[Tensor], Tensor], **options) -> Row:
    """A row that changes one tensor."""
    return Row(operator, name, what, lambda call: {name: change(call[name])}, **options)


def tensors(operator: str) -> Iterator[tuple[str, dict, str, Tensor]]:
    """Every tensor of every valid call. Rows of the same name are one, so the plainest call that has it serves."""
    for base, make in bases(operator).items():
        call = make()
        yield from ((base, call, name, value) for name, value in call.items() if isinstance(value, Tensor))


def plain_name(operator: str) -> str:
    return operator.removesuffix("_lse")  # whose facts are the same


def shape_of(operator: str, name: str) -> list[str]:
    return SHAPES[plain_name(operator)][name].split()


def size_name(token: str) -> str:
    return token.strip(">=~+1")


def allowed_dtypes(operator: str, name: str, first: torch.dtype) -> tuple[torch.dtype, ...]:
    if name not in LIKE_THE_FIRST.get(plain_name(operator), ()):
        return DTYPES[name]
    return (first, FP8) if name == "kv_cache" and first in (BF16, FP16) else (first,)


def dtypes(operator: str) -> Iterator[Row]:
    for base, call, name, _ in tensors(operator):
        first = next(iter(call.values())).dtype
        allowed = allowed_dtypes(operator, name, first)
        for wrong in (dtype for dtype in (*NEVER, *MATRIX) if dtype not in allowed):
            under = f" under {first}" if wrong in DTYPES[name] else ""
            yield retensored(operator, name, f"{wrong}{under}", retyped(wrong), base=base, error=TypeError)


def retyped(dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
    return lambda tensor: zeros(*tensor.shape, dtype=dtype)


def ranks(operator: str) -> Iterator[Row]:
    for base, _, name, tensor in tensors(operator):
        if name == "k_scale":  # one element of whatever rank
            for size in (0, 2):
                yield retensored(operator, name, f"{size} elements", lambda t, n=size: zeros(n, dtype=FP32), base=base)
            continue
        right = len(shape_of(operator, name))
        for wrong in {*range(6)} - {right, right + (name in HEADED)}:
            yield retensored(operator, name, f"rank{wrong}", of_rank(wrong), base=base)
        if tensor.ndim > right:
            for heads in (0, 2, 3):
                yield retensored(operator, name, f"{heads} KV heads", resized(1, heads), base=base)


def of_rank(rank: int) -> Callable[[Tensor], Tensor]:
    return lambda tensor: zeros(*[1] * (rank - tensor.ndim), *tensor.shape[:rank], dtype=tensor.dtype)


def resized(dim: int, size: int) -> Callable[[Tensor], Tensor]:
    return lambda tensor: zeros(*tensor.shape[:dim], size, *tensor.shape[dim + 1 :], dtype=tensor.dtype)


def devices(operator: str) -> Iterator[Row]:
    for base, call, name, _ in tensors(operator):
        others = tuple(other for other, value in call.items() if isinstance(value, Tensor) and other != name)
        first = name == next(iter(call))
        yield retensored(
            operator, name, "elsewhere", elsewhere, base=base,
            blames=others if first else (), mentions="the first argument" if first else "",
        )  # fmt: skip


def elsewhere(tensor: Tensor) -> Tensor:
    return torch.empty_like(tensor, device="meta" if tensor.device.type == "cpu" else "cpu")


def tied_sizes(operator: str) -> Iterator[Row]:
    """A size that arguments share is changed in one of them: by one, to one as if to be broadcast, past a bound."""
    for base, call, name, tensor in tensors(operator):
        shape = shape_of(operator, name)
        if len(shape) != tensor.ndim:
            continue
        for dim, token in enumerate(shape):
            own, size = size_name(token), tensor.shape[dim]
            partners = list(others_of_size(operator, own, call, name))
            sizes = [partner_size for _, _, partner_size in partners]
            for wrong in {size - 1, size + 1, 1, *(s + 1 for s in sizes), *(s - 1 for s in sizes)} - {size, -1}:
                if any(contradict(token, wrong, tied, there) for _, tied, there in partners):
                    blamed = (name, *(other for other, _, _ in partners))
                    what = f"{own} {wrong} not {size}"
                    yield retensored(operator, name, what, resized(dim, wrong), base=base, blames=blamed)


def others_of_size(operator: str, size: str, call: dict, name: str) -> Iterator[tuple[str, str, int]]:
    for other, value in call.items():
        if other != name and isinstance(value, Tensor):
            shape = shape_of(operator, other)
            for dim, token in enumerate(shape):
                if size_name(token) == size:
                    yield other, token, value.shape[dim - len(shape) if dim else 0]


def contradict(token: str, size: int, other: str, other_size: int) -> bool:
    """Whether an argument of (wrong) `size` cannot go with the other one."""
    if token[:2] == other[:2] == ">=" or token[0] == other[0] == "~":
        return False
    if token.startswith(">="):
        return size < other_size
    if other.startswith(">="):
        return size > other_size
    return "~" in token + other or size - token.endswith("+1") != other_size - other.endswith("+1")


def forbidden_sizes(operator: str) -> Iterator[Row]:
    for blamed, sizes in FORBIDDEN_SIZES[plain_name(operator)]:
        what = " ".join(f"{name} {size}" for name, size in sizes.items())
        yield Row(operator, blamed, what, lambda call, sizes=sizes: resize(operator, call, sizes))
    if f"kv_cache {WITH_A_HEAD}" in bases(operator):
        base = f"kv_cache {WITH_A_HEAD}"
        yield retensored(operator, "kv_cache", "P 3 beside a head", lambda t: t[:, :, :3], base=base)
    if operator == WRITE:
        yield Row(operator, "kv_c", "all columns are rope", lambda call: dict(
            kv_c=call["kv_c"][:, :0], k_pe=zeros(call["k_pe"].shape[0], DIM, dtype=BF16)))  # fmt: skip


def resize(operator: str, call: dict, sizes: dict[str, int]) -> dict:
    """The call's tensors with the named sizes changed."""
    changed = {name: value for name, value in call.items() if isinstance(value, Tensor)}
    for name in changed:
        for dim, token in enumerate(shape_of(operator, name)):
            if (size := size_name(token)) in sizes:
                changed[name] = resized(dim, sizes[size] + token.endswith("+1"))(changed[name])
    return changed


def strides(operator: str) -> Iterator[Row]:
    for base, _, name, tensor in tensors(operator):
        if name not in DENSE:
            continue
        for what, layout in SPARSE_ROWS.items():
            if layout(tensor).stride(-1) != 1:
                yield retensored(operator, name, what, layout, base=base)
    if operator == WRITE:
        for dim, what in ((0, "pages"), (1, "tokens")):
            yield retensored(
                operator, "kv_cache", f"the same {what}", lambda t, dim=dim: t.narrow(dim, 0, 1).expand_as(t)
            )


SPARSE_ROWS: dict[str, Callable[[Tensor], Tensor]] = {
    "last stride 2": lambda t: torch.stack((t, t), dim=-1)[..., 0],
    "last stride 0": lambda t: t[..., :1].expand_as(t),
    "columns first": lambda t: t.transpose(0, -1).contiguous().transpose(0, -1),
}


def numbers(operator: str) -> Iterator[Row]:
    for argument in calls.overload_of(operator)._schema.arguments:
        name = argument.name
        low, high = NUMBERS.get(name, (None, None))
        wrong = [*NOT_SCALES] if str(argument.type) == "float" else []
        if low is not None:
            wrong += [low - 1, -2, LOWEST]
        if high is not None:
            wrong += [high + 1, LARGEST]
        for value in wrong:
            base = "cp_world" if name.startswith("cp_") else "bfloat16"
            yield Row(operator, name, f"{value}", lambda call, name=name, value=value: {name: value}, base)


def options(operator: str) -> Iterator[Row]:
    def row(argument, what, base="bfloat16", error=ValueError, **changes):
        def spoil(call):
            return {name: change() if callable(change) else change for name, change in changes.items()}

        return Row(operator, argument, what, spoil, base, error)

    def all_of(names):
        return lambda call: dict(item for name in names for item in OPTIONS[name]().items())

    if "causal_seqs" in SHAPES[plain_name(operator)]:
        for names in (*combinations(OPTIONS, 2), tuple(OPTIONS)):
            yield Row(operator, names[0], f"with {' and '.join(names[1:])}", all_of(names), blames=names)
        yield row("causal_seqs", "missing", "cp_world", causal_seqs=None)
        yield row("causal_seqs", "without cp_world", causal_seqs=lambda: zeros(B))
        yield row("cp_rank", "without cp_world", cp_rank=1)
        yield row("cp_rank", "beyond a smaller cp_world", "cp_world", cp_world=3)
        yield row("cp_interleave_size", "0 without cp_world", cp_interleave_size=0)
        yield row("cp_world", "0 and no causal_seqs", cp_world=0)
    if "k_scale" in SHAPES[plain_name(operator)]:
        for dtype in FLOATS:
            name = str(dtype)[6:]
            yield row("k_scale", f"for a {name} cache", name, k_scale=lambda: zeros(1, dtype=FP32))
    if operator == GATHER:
        for wrong in NEVER:
            yield row("dtype", f"{wrong}", error=TypeError, dtype=wrong)
        for dtype in FLOATS:
            yield row("dtype", f"FP8 from {dtype}", str(dtype)[6:], dtype=FP8)
        yield row("dtype", "FP8 and k_scale", "float8_e4m3fn", dtype=FP8)
        yield row("dtype", "not given beside k_scale", "float8_e4m3fn", dtype=None)


def shared_memory(operator: str) -> Iterator[Row]:
    """What a call writes lies over one of its sources, wholly or by a few bytes."""
    if operator == WRITE:
        for base, _, name, _ in tensors(operator):
            if name != "kv_cache":
                yield from overlapping(operator, "kv_cache", name, base)


def overlapping(operator: str, written: str, source: str, base: str) -> Iterator[Row]:
    def spoil(call, last):
        ends = call[written].nbytes, call[source].nbytes
        first = (ends[0] - 1) // 16 * 16 if last else 0  # where the source begins; a multiple of every item's size
        memory = torch.zeros(first + max(ends), dtype=torch.uint8)

        def part(name, offset):
            return memory[offset : offset + call[name].nbytes].view(call[name].dtype).view(call[name].shape)

        return {written: part(written, 0), source: part(source, first)}

    for last, what in ((False, "is in the memory of"), (True, "ends in the memory of")):
        yield Row(operator, written, f"{what} {source}", lambda call, last=last: spoil(call, last), base,
                  mentions=source)  # fmt: skip


def out_buffers(operator: str) -> Iterator[Row]:
    """Buffers of the `.out` overload, which are to be exactly like the results."""
    for base, make in bases(operator).items():
        call = make()
        buffers = calls.buffers(operator, call)
        sources = [name for name, value in call.items() if isinstance(value, Tensor)]
        for name, right in buffers.items():

            def row(what, change, error=ValueError, name=name, base=base):
                return retensored(operator, name, what, change, base=base, error=error)

            for wrong in (dtype for dtype in (*NEVER, *MATRIX) if dtype != right.dtype):
                yield row(f"{wrong} for {right.dtype}" if wrong in MATRIX else f"{wrong}", retyped(wrong), TypeError)
            for wrong in {*range(6)} - {right.ndim}:
                yield row(f"rank{wrong}", of_rank(wrong))
            for dim, size in enumerate(shape_of(operator, name)):
                for wrong in (right.shape[dim] - 1, right.shape[dim] + 1, 1):
                    yield row(f"{size} {wrong} not {right.shape[dim]}", resized(dim, wrong))
            for what, layout in SCATTERED.items():
                yield row(what, layout)
            yield row("elsewhere", elsewhere)
            for source in sources:
                yield from overlapping(operator, name, source, base)
            sources.append(name)


SCATTERED: dict[str, Callable[[Tensor], Tensor]] = SPARSE_ROWS | {
    "padded rows": lambda t: torch.cat((t, t), dim=-1)[..., : t.shape[-1]],
    "the same rows": lambda t: t[:1].expand_as(t),
    "every other row": lambda t: torch.stack((t, t), dim=1)[:, 0],
}

RULES = (dtypes, ranks, devices, tied_sizes, forbidden_sizes, strides, numbers, options, shared_memory)


def table() -> list[Row]:
    made = {}
    for rule in (*RULES, out_buffers):
        for operator, overload in calls.OVERLOADS:
            if rule is out_buffers and overload == "default":
                continue
            for row in rule(operator):
                row = replace(row, rule=rule.__name__, overload=overload)
                made.setdefault(str(row), row)
    order = {overload: place for place, overload in enumerate(calls.OVERLOADS)}
    return sorted(made.values(), key=lambda row: order[row.operator, row.overload])


TABLE = table()
