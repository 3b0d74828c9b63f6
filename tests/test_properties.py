"""Promise: the laws hold for any valid problem, not only for those that somebody thought of.

Hypothesis draws the problems (`problems.py`): sizes from 0, page sizes, head counts, dims, dtypes, strides, windows,
visible lengths, context parallelism, hints, scales. As in the law tests, whose builders and tolerances these are,
memory outside the request holds NaN and wild page ids, outputs are poisoned, and the float64 oracle says what is right.
Query rows that see no key hold NaN too. A failure is shrunk, and printed with the decorator that replays it.
"""

import math

import pytest
import torch
from torch import Tensor

import oracle
import test_laws_cache as cache_laws
import test_laws_decode as decode_laws
import test_laws_merge as merge_laws
import test_laws_pack as pack_laws
import test_laws_prefill as prefill_laws
import ts_ops

pytest.importorskip("hypothesis")  # of the extra `dev`
import problems  # noqa: E402
from problems import BF16, FP8, FP32, problem_property, st  # noqa: E402

ops = torch.ops.tokenspeed


def error_bound(tolerances: dict, dtype: torch.dtype, columns: int, target) -> float:
    """Of a row. The law tests' tolerances take rounding errors at their mean square; in few columns they may all be at
    their worst, twice as large."""
    tolerance = tolerances[dtype]
    if not target.supports(BF16 if dtype == FP8 else dtype):
        tolerance = prefill_laws.TRUNCATED_TOLERANCE
    return tolerance * (2 if columns < 32 else 1)


def contents(arguments) -> list[list[int]]:
    tensors = [value for value in arguments if isinstance(value, Tensor)]
    copies = [tensor.clone(memory_format=torch.contiguous_format) for tensor in tensors]
    return [copy.flatten().view(torch.uint8).tolist() for copy in copies]


def poison_empty_rows(query: Tensor, lse: Tensor) -> None:
    """NaN in the queries of rows that see no key, by their LSE."""
    empty = (lse == -math.inf).to(query.device)
    query.copy_(torch.where(empty[..., None], math.nan, query.float()))


def assert_untouched(memory: Tensor) -> None:
    guard = prefill_laws.GUARD
    assert (memory[:guard] == 7.0).all() and (memory[-guard:] == 7.0).all(), "written outside the output"


@problem_property()
def test_decode(target, data):
    problem = data.draw(problems.decodes(target))
    case = problem.case
    arguments, options = problem.build(target.device)
    expected, expected_lse = oracle.decode(*arguments, **options)
    query = arguments[0]
    poison_empty_rows(query, expected_lse)
    before = contents((*arguments, *options.values()))

    dtype = BF16 if query.dtype == FP8 else query.dtype
    out, out_memory = prefill_laws.guarded(expected.shape, dtype, target.device)
    lse, lse_memory = prefill_laws.guarded(expected_lse.shape, FP32, target.device)
    ops.mla_decode_lse.out(*arguments, **options, out=out, lse=lse)
    assert_untouched(out_memory)
    assert_untouched(lse_memory)
    assert contents((*arguments, *options.values())) == before, "an input was written"
    assert oracle.row_error(out, expected) <= error_bound(decode_laws.TOLERANCE, case.query, case.rank, target)
    tolerance = decode_laws.LSE_TOLERANCE[case.query] * max(1.0, abs(problem.scale))
    oracle.assert_lse_close(lse, expected_lse, tolerance)
    assert prefill_laws.same_bits(ts_ops.mla_decode(*arguments, **options), out)


@problem_property()
def test_prefill(target, data):
    problem = data.draw(problems.prefills(target))
    case = problem.case
    arguments, options = problem.build(target.device)
    expected, expected_lse = oracle.prefill(*arguments, **options)
    poison_empty_rows(arguments[0], expected_lse)
    before = contents(arguments)

    out, lse = prefill_laws.attend(arguments, options)
    assert contents(arguments) == before, "an input was written"
    assert oracle.row_error(out, expected) <= error_bound(prefill_laws.TOLERANCE, case.dtype, case.dim_v, target)
    oracle.assert_lse_close(lse, expected_lse, prefill_laws.LSE_TOLERANCE[case.dtype])
    assert prefill_laws.same_bits(ts_ops.mla_prefill(*arguments, **options), out)


@problem_property()
def test_merge(target, data):
    """By merge_attn_states_n and, where there are two states, by merge_attn_states."""
    problem = data.draw(problems.merges(target))
    outputs, lses = problem.build(target.device)
    expected, expected_lse = oracle.merge(outputs, lses)
    for out, lse in merge_laws.merge(outputs, lses):
        assert oracle.row_error(out, expected) <= merge_laws.TOLERANCE[problem.dtype]
        oracle.assert_lse_close(lse, expected_lse, merge_laws.LSE_TOLERANCE)


@problem_property(0.5)
def test_parts_of_the_keys_merge_to_the_whole(target, data):
    """Prefill states over any cuts of the keys, merged at once, are the state over all keys."""
    keys = data.draw(st.integers(0, 60), label="keys")
    cuts = sorted(data.draw(st.lists(st.integers(0, keys), max_size=4), label="cuts"))
    torch.manual_seed(data.draw(problems.seeds, label="seed"))
    query, key, value = (torch.randn(rows, 2, dim).to(target.device) for rows, dim in ((5, 24), (keys, 24), (keys, 16)))

    def attend(attention, first, end):
        cums = (prefill_laws.cumulative((rows,), target.device) for rows in (5, end - first))
        return attention(query, key[first:end], value[first:end], *cums, 0.25, is_causal=False)

    parts = [attend(ts_ops.mla_prefill_lse, first, end) for first, end in zip((0, *cuts), (*cuts, keys))]
    out, lse = ts_ops.merge_attn_states_n(*(torch.stack(states) for states in zip(*parts)))
    expected, expected_lse = attend(oracle.prefill, 0, keys)
    assert oracle.row_error(out, expected) <= 2 * prefill_laws.TOLERANCE[FP32]
    oracle.assert_lse_close(lse, expected_lse, 2 * prefill_laws.LSE_TOLERANCE[FP32])


@problem_property()
def test_write(target, data):
    case = data.draw(problems.writes(target))
    torch.manual_seed(data.draw(problems.seeds, label="seed"))
    cache_laws.test_write_touches_only_its_slots(target, case)


@problem_property()
def test_gather(target, data):
    case = data.draw(problems.gathers(target))
    torch.manual_seed(data.draw(problems.seeds, label="seed"))
    cache_laws.test_gather(target, case)


@problem_property()
def test_pack(target, data):
    problem = data.draw(problems.packs(target))
    tensors = problem.build(target.device)
    results = pack_laws.pack(*tensors, **problem.scales)
    for result, expected in zip(results, oracle.pack(*tensors, **problem.scales)):
        oracle.assert_same(result, oracle.to_fp8(expected))
