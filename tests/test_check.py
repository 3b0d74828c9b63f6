"""Promise: with TS_OPS_CHECK=1 a value that breaks the contract raises, named, before anything is written.

ValueError gives the operator, the argument, the first request at fault and the value; buffers and cache keep their
bits. Valid calls of every operator, overload and dtype pass with the bits of an unchecked call, those at the edge of
what is allowed included. What only TokenSpeed's kernels need is asked only where they serve. Under CUDA graph capture a
call that would read raises RuntimeError. While checks are off, the dispatcher calls the backends themselves.
"""

import os
import subprocess
import sys
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

import calls
import ts_ops
from calls import BF16, DIM, FP8, NAMES, PAGE_SIZE, PAGES, int32
from ts_ops import check, dispatch
from ts_ops.backends import reference

DECODES, PREFILLS = ("mla_decode", "mla_decode_lse"), ("mla_prefill", "mla_prefill_lse")
WRITE, GATHER = "mla_kv_cache_write", "mla_kv_cache_gather"
NAN, INF = float("nan"), float("inf")
SLOTS = PAGES * PAGE_SIZE
READING = (*DECODES, *PREFILLS, WRITE, GATHER)  # merging and packing have no value that could be wrong


def switch(monkeypatch, on: bool) -> None:
    monkeypatch.setattr(check, "ENABLED", on)
    dispatch._candidates.cache_clear()


@pytest.fixture
def checked(monkeypatch):
    switch(monkeypatch, True)
    yield
    dispatch._candidates.cache_clear()


@pytest.fixture
def on_tokenspeed(checked, monkeypatch):
    """What serves goes by TokenSpeed's name."""
    monkeypatch.setattr(dispatch, "PREFERENCE", {"cpu": ("tokenspeed",)})
    monkeypatch.setattr(dispatch, "_backend", lambda name: reference)


@dataclass(frozen=True)
class Bad:
    """A valid call of `operator`, spoilt: a value replaces an argument, a function makes it from the valid one.

    `says` is the error's text after the operator's name, with " ... " for what is left out.
    """

    operator: str
    says: str
    changes: dict
    dtype: torch.dtype

    def __str__(self) -> str:
        return f"{self.operator}-{self.says.replace(' ', '_')}"

    def arguments(self) -> dict:
        return spoilt(calls.example(self.operator, self.dtype), self.changes)


def spoilt(call: dict, changes: dict) -> dict:
    return call | {name: change(call[name]) if callable(change) else change for name, change in changes.items()}


def rows(operators, table: list[tuple[str, dict]], dtype: torch.dtype = BF16) -> list[Bad]:
    names = (operators,) if isinstance(operators, str) else operators
    return [Bad(name, says, changes, dtype) for name in names for says, changes in table]


def with_entry(*index_and_value):
    """The valid argument but for one element."""
    *index, value = index_and_value

    def change(valid: Tensor) -> Tensor:
        changed = valid.clone()
        changed[tuple(index)] = value
        return changed

    return change


def second_of_two(seq_lens: list[int], causal_seqs: list[int]) -> dict:
    """The context-parallel rank that holds the positions 2, 3, 6, 7, 10, ..."""
    lengths = dict(seq_lens=int32(seq_lens), causal_seqs=int32(causal_seqs))
    return lengths | dict(cp_world=2, cp_rank=1, cp_interleave_size=2)


BAD = [
    *rows(DECODES, [
        ("seq_lens of request 1 must be in [0, 12], the 3 pages of 4 ... got -1", dict(seq_lens=with_entry(1, -1))),
        ("seq_lens of request 1 ... got 13", dict(seq_lens=int32([12, 13, 99]))),
        ("block_tables[0, 2] of request 0 must be a page id in [0, 7); got -1", dict(
            block_tables=with_entry(0, 2, -1))),
        ("block_tables[1, 1] of request 1 ... got 7", dict(block_tables=int32([[1, 2, 3], [4, 7, 9], [8, 0, 0]]))),
        ("block_tables[0, 0] of request 0 ... [0, 0); got 1", dict(kv_cache=lambda t: t[:0])),
        ("local_visible_lens of request 1, row 1, must be in [0, 6] ... got 7", dict(
            local_visible_lens=int32([[11, 0], [6, 7], [9, 9]]))),
        ("local_visible_lens of request 0, row 1, ... got -2", dict(
            local_visible_lens=int32([[1, -2], [7, 0], [0, 0]]))),
        ("seq_lens of request 1 must be 2, what rank 1 of 2 (cp_interleave_size 2) holds ... causal_seqs; got 3",
         second_of_two([5, 3, 1], [11, 6, 2])),
        ("seq_lens of request 0 must be 5 ... got 4", second_of_two([4, 2, 0], [11, 6, 2]) | dict(is_causal=False)),
        ("causal_seqs of request 1 must not be negative; got -6", second_of_two([5, 0, 0], [11, -6, 2])),
    ]),
    *rows(PREFILLS, [
        ("cum_seq_lens_q[0], where request 0 begins, must be 0; got 1", dict(cum_seq_lens_q=with_entry(0, 1))),
        ("cum_seq_lens_q[2], where request 1 ends, must be at least 5 ... got 4", dict(
            cum_seq_lens_q=with_entry(2, 4))),
        ("cum_seq_lens_q[1], where request 0 ends, must be at most 11, the tokens of query ... got 12", dict(
            cum_seq_lens_q=int32([0, 12, 12, 13]))),
        ("cum_seq_lens_kv[0] ... got -1", dict(cum_seq_lens_kv=with_entry(0, -1))),
        ("cum_seq_lens_kv[2], where request 1 ends ... got 6", dict(cum_seq_lens_kv=with_entry(1, 7))),
        ("cum_seq_lens_kv[3], where request 2 ends, must be at most 13 ... got 14", dict(
            cum_seq_lens_kv=with_entry(3, 14))),
        ("max_seq_len_q must be at least the 6 query rows of request 2; got 5", dict(max_seq_len_q=5)),
        ("max_seq_len_kv must be at least the 5 keys of request 0; got 4", dict(max_seq_len_kv=4)),
    ]),
    *rows(WRITE, [
        ("slot_mapping[1] must be -1 (skip the token) or a slot in [0, 28); got 28", dict(
            slot_mapping=torch.tensor([4, SLOTS, 99]))),
        ("slot_mapping[2] must be -1 ... got -2", dict(slot_mapping=torch.tensor([4, -1, -2]))),
        ("slot_mapping[5] must not repeat a slot; got 6, which slot_mapping[3] ", dict(
            slot_mapping=torch.tensor([4, -1, 5, 6, -1, 6, 5]))),
    ]),
    *rows(GATHER, [
        ("cum_seq_lens[0], where request 0 begins, must be 0; got 2", dict(cum_seq_lens=with_entry(0, 2))),
        ("cum_seq_lens[2], where request 1 ends, must be at least 9 ... got 8", dict(cum_seq_lens=with_entry(2, 8))),
        ("cum_seq_lens[3], where request 2 ends, must be at most 11 ... (total_tokens); got 12", dict(total_tokens=11)),
        ("seq_starts of request 2 must not be negative; got -1", dict(seq_starts=with_entry(2, -1))),
        ("seq_starts of request 0 and its length ... at most 12, the 3 pages ... got 4 + 9", dict(
            seq_starts=with_entry(0, 4))),
        ("seq_starts of request 2 and its length by cum_seq_lens ... got 0 + 13", dict(
            seq_starts=None, cum_seq_lens=int32([0, 0, 0, 13]))),
        ("block_tables[0, 1] of request 0 must be a page id in [0, 7); got 7", dict(
            block_tables=with_entry(0, 1, PAGES))),
        ("block_tables[2, 0] of request 2 ... got -1", dict(block_tables=with_entry(2, 0, -1))),
    ]),
    *[bad for scale in (0.0, -0.5, NAN, INF) for bad in rows((WRITE, GATHER), [
        (f"k_scale must be finite and above 0; got {scale}", dict(k_scale=torch.tensor([scale]))),
    ], FP8)],
]  # fmt: skip


def bits(tensors: dict) -> dict[str, Tensor]:
    return {name: value.contiguous().view(torch.uint8).clone() for name, value in tensors.items()}


def assert_raises(bad: Bad, overload: str) -> None:
    """The call is refused in the words of `bad`, and every tensor that it names keeps its bits and its version."""
    call = bad.arguments()
    call |= calls.buffers(bad.operator, call) if overload == "out" else {}
    tensors = {name: value for name, value in call.items() if isinstance(value, Tensor)}
    before, versions = bits(tensors), {name: value._version for name, value in tensors.items()}
    with pytest.raises(ValueError) as caught:
        calls.invoke(bad.operator, call, overload)
    first, *others = bad.says.split(" ... ")
    text = str(caught.value)
    assert text.startswith(f"tokenspeed::{bad.operator}: {first}"), text
    for part in others:
        assert part in text, text
        text = text[text.index(part) + len(part) :]
    assert all(torch.equal(now, before[name]) for name, now in bits(tensors).items())
    assert versions == {name: value._version for name, value in tensors.items()}


def overloads(table: list[Bad]):
    params = [(bad, overload) for bad in table for name, overload in calls.OVERLOADS if name == bad.operator]
    return pytest.mark.parametrize(("bad", "overload"), params, ids=lambda value: str(value))


@overloads(BAD)
def test_a_wrong_value_is_named_and_nothing_is_written(bad, overload, checked):
    assert_raises(bad, overload)


def test_every_operator_that_reads_values_has_rows():
    assert {bad.operator for bad in BAD} == set(READING)


def results(operator: str, overload: str, call: dict) -> dict[str, Tensor]:
    """Everything that a call leaves behind."""
    call = {name: value.clone() if isinstance(value, Tensor) else value for name, value in call.items()}
    if overload == "out":
        outs = calls.buffers(operator, call)
        calls.invoke(operator, call | outs, "out")
    else:
        outs = {name: value for name, value in calls.results_of(operator, call).items() if value is not None}
    return bits(outs | ({"kv_cache": call["kv_cache"]} if operator == WRITE else {}))


def assert_passes(operator: str, overload: str, call: dict, monkeypatch) -> None:
    """With checks on, the bits of the call without them."""
    switch(monkeypatch, False)
    expected = results(operator, overload, call)
    switch(monkeypatch, True)
    actual = results(operator, overload, call)
    assert expected and all(torch.equal(actual[name], expected[name]) for name in expected)


@pytest.mark.parametrize(
    ("operator", "overload", "dtype"),
    [(name, overload, dtype) for name, overload in calls.OVERLOADS for dtype in calls.DTYPES[name]],
)
def test_a_valid_call_passes_with_the_same_bits(operator, overload, dtype, checked, monkeypatch):
    assert_passes(operator, overload, calls.example(operator, dtype), monkeypatch)
    assert_passes(operator, overload, calls.relaid(calls.padded, calls.example(operator, dtype)), monkeypatch)


ALLOWED = {
    "full tables": (DECODES, dict(seq_lens=int32([12, 12, 12]))),
    "wild ids past the requests": (DECODES, dict(block_tables=int32([[1, 2, 3], [4, 5, -1], [6, 2**30, -(2**31)]]))),
    "padded requests": (DECODES, dict(seq_lens=int32([11, 0, 0]), block_tables=int32([[1, 2, 3], [-1] * 3, [99] * 3]))),
    "no columns in the tables": (DECODES, dict(
        seq_lens=int32([0, 0, 0]), block_tables=lambda t: t[:, :0], kv_cache=lambda t: t[:0])),
    "a hint that is too small": (DECODES, dict(max_seq_len=1)),
    "a page of several requests": (DECODES, dict(block_tables=int32([[1, 2, 3], [1, 2, 0], [1, 0, 0]]))),
    "visible up to the length": (DECODES, dict(local_visible_lens=int32([[0, 11], [6, 6], [2, 1]]))),
    "a rank's share": (DECODES, second_of_two([5, 2, 0], [11, 6, 2])),
    "a cache of NaN": (DECODES, dict(kv_cache=lambda t: t * NAN)),
    "rows past the last sequence": (PREFILLS, dict(
        cum_seq_lens_q=int32([0, 3, 3, 8]), cum_seq_lens_kv=int32([0, 0, 4, 6]))),
    "exact bounds": (PREFILLS, dict(max_seq_len_q=6, max_seq_len_kv=7)),
    "no sequences": (PREFILLS, dict(cum_seq_lens_q=int32([0]), cum_seq_lens_kv=int32([0]))),
    "no keys": (PREFILLS, dict(key=lambda t: t[:0], value=lambda t: t[:0], cum_seq_lens_kv=lambda t: t * 0)),
    "NaN keys": (PREFILLS, dict(key=lambda t: t * NAN)),
    "first and last slot": ((WRITE,), dict(slot_mapping=torch.tensor([SLOTS - 1, -1, 0, -1]))),
    "no slot": ((WRITE,), dict(slot_mapping=torch.tensor([-1, -1]))),
    "exact capacity": ((GATHER,), dict(total_tokens=12)),
    "up to the last entry": ((GATHER,), dict(
        seq_starts=int32([3, 0, 9]), block_tables=int32([[1, 2, 3], [0] * 3, [-1, -1, 6]]))),
    "wild ids outside the ranges": ((GATHER,), dict(block_tables=int32([[1, 2, 3], [-1, 99, 7], [6, -1, 2**30]]))),
    "a start that nothing is copied from": ((GATHER,), dict(seq_starts=int32([2, -5, 1]))),
    "no starts": ((GATHER,), dict(seq_starts=None)),
    "no requests": ((GATHER,), dict(
        block_tables=lambda t: t[:0], cum_seq_lens=lambda t: t[:1], seq_starts=lambda t: t[:0])),
}  # fmt: skip


@pytest.mark.parametrize(
    ("case", "operator", "overload"),
    [(case, name, form) for case in ALLOWED for name, form in calls.OVERLOADS if name in ALLOWED[case][0]],
)
def test_what_is_allowed_passes(case, operator, overload, checked, monkeypatch):
    assert_passes(operator, overload, spoilt(calls.example(operator), ALLOWED[case][1]), monkeypatch)


@pytest.mark.parametrize(("operator", "emptied"), [
    ("mla_decode", dict(query=lambda t: t[:, :0], seq_lens=lambda t: t + 99)),
    ("mla_prefill", dict(query=lambda t: t[:0], cum_seq_lens_q=lambda t: t - 9)),
    (WRITE, dict(slot_mapping=lambda t: t[:0])),
    (GATHER, dict(total_tokens=0, cum_seq_lens=lambda t: t - 9)),
])  # fmt: skip
def test_without_rows_no_value_is_looked_at(operator, emptied, checked):
    """No backend runs, so nothing can go wrong."""
    calls.invoke(operator, spoilt(calls.example(operator), emptied))


# Requests of 11, 6 and 2 tokens: TokenSpeed's kernels read tables and caches as if each had 128.
TAIL = "for TokenSpeed's kernels read the entries up to the next multiple of 128 tokens"
FINITE = "must be finite"
ONLY_TOKENSPEED = [
    *rows(DECODES, [
        (f"block_tables[1, 2] of request 1 must be a page id in [0, 7), {TAIL} ... got -1", dict(
            block_tables=with_entry(1, 2, -1))),
        (f"kv_cache {FINITE} ... page 3 of request 0 (block_tables[0, 2]) has nan at [3, 5]", dict(
            kv_cache=with_entry(3, 3, 5, NAN))),
        (f"kv_cache {FINITE} ... page 6 of request 2 (block_tables[2, 0]) has -inf at [0, 0]", dict(
            kv_cache=with_entry(6, 0, 0, -INF))),
        # The adapter pads rows of fewer than 128 tokens with page 0.
        (f"kv_cache {FINITE} ... page 0 of request 0 (block_tables[0, 3]) has inf", dict(
            kv_cache=with_entry(0, 0, 0, INF))),
        # Whatever a request of length 0 names is not read for it.
        (f"kv_cache {FINITE} ... page 4 of request 1 (block_tables[1, 0]) has nan", dict(
            kv_cache=with_entry(4, 0, 0, NAN), seq_lens=int32([0, 6, 2]), block_tables=with_entry(0, 1, 4))),
    ]),
    *rows(PREFILLS, [
        (f"key {FINITE} ... token 5, of request 1, has nan at [2, 3]", dict(key=with_entry(5, 2, 3, NAN))),
        (f"value {FINITE} ... token 12, of no request, has inf", dict(
            value=with_entry(12, 0, 0, INF), cum_seq_lens_kv=with_entry(3, 12))),
    ]),
    *rows(DECODES, [(f"kv_cache {FINITE} ... page 4 ... nan at [1, 2]", dict(
        kv_cache=lambda t: with_entry(4, 1, 2, NAN)(t.float()).to(FP8)))], FP8),
]  # fmt: skip


@overloads(ONLY_TOKENSPEED)
def test_what_only_tokenspeed_needs(bad, overload, on_tokenspeed):
    assert_raises(bad, overload)


@overloads(ONLY_TOKENSPEED)
def test_what_only_tokenspeed_needs_is_not_asked_of_others(bad, overload, checked):
    call = bad.arguments()
    calls.invoke(bad.operator, call | (calls.buffers(bad.operator, call) if overload == "out" else {}), overload)


@overloads(BAD)
def test_tokenspeed_needs_the_rest_too(bad, overload, on_tokenspeed):
    assert_raises(bad, overload)


@pytest.mark.parametrize("operator", NAMES)
def test_valid_calls_pass_on_tokenspeed(operator, on_tokenspeed):
    for dtype in calls.DTYPES[operator]:
        calls.invoke(operator, calls.example(operator, dtype))
    for case in ("no columns in the tables", "no keys"):
        if operator in ALLOWED[case][0]:
            calls.invoke(operator, spoilt(calls.example(operator), ALLOWED[case][1]))


def test_a_cache_is_looked_at_in_chunks(on_tokenspeed, monkeypatch):
    """Several pages a chunk, one, and one that is larger than a chunk."""
    for elements in (3 * PAGE_SIZE * DIM, PAGE_SIZE * DIM, 1):
        monkeypatch.setattr(check, "CHUNK_ELEMENTS", elements)
        calls.invoke("mla_decode", calls.example("mla_decode"))
        assert_raises(ONLY_TOKENSPEED[1], "default")


@pytest.mark.parametrize(("operator", "overload"), calls.OVERLOADS)
def test_capture_is_refused(operator, overload, checked, monkeypatch):
    """Where a call would read: not for merging and packing. (What capture looks like on a GPU: the next test.)"""
    monkeypatch.setattr(check, "capturing", lambda device: True)
    call = calls.example(operator)
    if operator == WRITE:
        call["kv_cache"] += 1.0
    outs = calls.buffers(operator, call) if overload == "out" else {}
    before = bits(outs | ({"kv_cache": call["kv_cache"]} if operator == WRITE else {}))
    if operator not in READING:
        calls.invoke(operator, call | outs, overload)
        return
    with pytest.raises(RuntimeError, match=f"^tokenspeed::{operator}: TS_OPS_CHECK=1 reads .* capture .* Unset"):
        calls.invoke(operator, call | outs, overload)
    after = bits(outs | ({"kv_cache": call["kv_cache"]} if operator == WRITE else {}))
    assert all(torch.equal(after[name], before[name]) for name in before)


@pytest.mark.gpu
@pytest.mark.parametrize("operator", READING)
def test_capture_is_refused_on_a_gpu(operator, checked):
    """The refusal reads nothing, so that the capture ends well and later calls work."""
    with torch.device("cuda"):
        call = calls.example(operator)
        calls.invoke(operator, call)
        kept = torch.zeros(3)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            kept += 1
            with pytest.raises(RuntimeError, match="TS_OPS_CHECK=1 reads .* capture"):
                calls.invoke(operator, call)
        graph.replay()
        assert (kept == 1).all()
        calls.invoke(operator, call)


@pytest.mark.gpu
@overloads(BAD)
def test_a_wrong_value_on_a_gpu(bad, overload, checked):
    with torch.device("cuda"):
        moved = {name: value.cuda() if isinstance(value, Tensor) else value for name, value in bad.changes.items()}
        assert_raises(Bad(bad.operator, bad.says, moved, bad.dtype), overload)


def test_compiled_code_is_checked_when_it_runs(checked):
    """Tracing sees no values: the same graph raises or not by what it is given, and with the plain ValueError."""
    torch._dynamo.reset()
    call = calls.example("mla_decode")
    compiled = torch.compile(ts_ops.mla_decode, fullgraph=True)
    with torch._dynamo.config.patch(error_on_recompile=True):
        with pytest.raises(ValueError, match="tokenspeed::mla_decode: seq_lens of request 1 .* got 13"):
            compiled(**call | dict(seq_lens=int32([12, 13, 12])))
        assert torch.equal(compiled(**call), ts_ops.mla_decode(**call))


def test_off_the_backends_are_called_themselves(monkeypatch):
    """Nothing is in the way of a call, and wrong values are not looked at."""
    device = torch.device("cpu")
    assert not check.ENABLED
    dispatch._candidates.cache_clear()
    assert dispatch._candidates(device, None) == (("reference", reference),)
    monkeypatch.setattr(check, "check", lambda *_: pytest.fail("checked"))
    calls.invoke("mla_decode", calls.example("mla_decode") | dict(max_seq_len=0, block_tables=int32([[1, 2, 3]] * 3)))


def in_a_process(program: str, value: str) -> subprocess.CompletedProcess:
    environment = os.environ | {"TS_OPS_CHECK": value}
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment, timeout=300)


CALL = """
import torch, ts_ops
ts_ops.mla_kv_cache_write(torch.zeros(2, 4, 24), torch.ones(2, 16), torch.ones(2, 8), torch.tensor([3, 3]))
"""


@pytest.mark.parametrize("value", ["1", "0", ""])
def test_environment(value):
    result = in_a_process(CALL, value)
    expected = "ValueError: tokenspeed::mla_kv_cache_write: slot_mapping[1] must not repeat a slot; got 3"
    assert (result.returncode == 0) == (value != "1")
    assert (expected in result.stderr) == (value == "1")


def test_another_value_is_refused():
    """`true` would otherwise be taken for off."""
    result = in_a_process("import ts_ops", "true")
    assert "ValueError: TS_OPS_CHECK must be 1 (check) or 0 (the default), got 'true'" in result.stderr
