"""Promise: no operator reads a device value on the host (law 7), so each may be captured in a CUDA graph.

A replay reads lengths, tables, slots and data as they are then, and gives the bits of an eager call: captured at length
1 and replayed at capacity, with requests that finish and join, with NaN and wild page ids outside them, on a cache past
4 GiB, on a GPU that is not the current one, for every head count, page size and q_len. Every backend that the GPU has
is held to it, and the reference. On a CPU the same tests run with eager calls (`graphs.Recording`).
"""

import functools
import math

import pytest
import torch

import calls
import graphs
import oracle
import test_laws_decode as decode_laws
import test_laws_prefill as prefill_laws
from graphs import BF16, FP8, WRITE, Recording, Size
from test_laws_decode import Case


@graphs.on_every_backend
@pytest.mark.parametrize("operator, overload", calls.OVERLOADS, ids=map(".".join, calls.OVERLOADS))
def test_replay_sees_the_inputs_as_they_are_then(operator, overload, place):
    place.skip_unless_it_has(operator)
    with torch.device(place.device):
        static, later = calls.example(operator), graphs.other_example(operator)
        buffers = calls.buffers(operator, static) if overload == "out" else {}
        step = functools.partial(graphs.outputs, place, operator, static)
        if overload == "out":
            step = functools.partial(graphs.outputs_into, place, operator, static, buffers)
        first = [result.clone() for result in step()]  # a kernel may compile on its first call
        recording = Recording(step, place.device)
        graphs.refill(static, later)
        if operator != WRITE:
            graphs.poison(recording.results)
        recording.replay()
        replayed = [result.clone() for result in recording.results]
        assert graphs.same_bits(replayed, graphs.outputs(place, operator, later))
        assert not graphs.same_bits(replayed, first), "a stale result would not be seen"


@graphs.on_every_backend
def test_captured_at_length_1_replayed_at_capacity(place):
    """The plan of a captured decode is made for the tables' capacity, whatever the lengths are at capture."""
    capacity = 4096 if place.device == "cuda" else 128
    for batch, q_len, heads in ((1, 1, 16), (2, 2, 16)) if place.device == "cuda" else ((2, 2, 2),):
        static = graphs.arguments("mla_decode_lse", Size(batch, q_len, heads, capacity), place.device, seed=0)
        static["seq_lens"].fill_(1)
        step = functools.partial(graphs.outputs, place, "mla_decode_lse", static)
        short = [result.clone() for result in step()]
        recording = Recording(step, place.device)
        recording.replay()
        assert graphs.same_bits(recording.results, short)
        static["seq_lens"].fill_(capacity)
        graphs.poison(recording.results)
        recording.replay()
        assert graphs.same_bits(recording.results, step())
        expected, expected_lse = oracle.decode(**static)
        case = Case((), query=BF16)
        assert oracle.row_error(recording.results[0], expected) <= decode_laws.tolerance(case, place)
        oracle.assert_lse_close(recording.results[1], expected_lse, decode_laws.lse_tolerance(case, place))


@graphs.on_serving_backends
@pytest.mark.parametrize("batch, heads, capacity", [(1, 16, 32768), (1, 128, 32768), (16, 16, 8192)])
def test_time_at_capacity_of_a_graph_captured_at_length_1(batch, heads, capacity, place):
    """Within 1.3 times that of a graph captured at capacity, where a plan made for length 1 would take far longer.

    Hopper's plan is made on the device for the lengths of each replay: there even the hint of length 1 costs nothing.
    """
    static = graphs.arguments("mla_decode", Size(batch, 1, heads, capacity), place.device, seed=0)
    recordings = []
    for length, hint in ((1, None), (capacity, None), (1, 1)):
        static["seq_lens"].fill_(length)
        step = functools.partial(graphs.outputs, place, "mla_decode", dict(static, max_seq_len=hint))
        step()
        recordings.append(Recording(step, place.device))
    static["seq_lens"].fill_(capacity)
    early, fresh, planned_short = graphs.fastest(recordings)
    print(
        f"\nB {batch} H {heads} keys {capacity}: {early:.4f} ms, fresh {fresh:.4f}, planned short {planned_short:.4f}"
    )
    assert early <= 1.3 * fresh
    if place.backend == "hopper":
        assert planned_short <= 1.3 * fresh
    else:
        assert planned_short > 1.3 * fresh, "a plan made for length 1 would not be seen"


def scattered(case: Case, lengths: list[int], pages: int, max_pages: int, outside: float):
    """A cache and tables, [pages, page_size, D] and [B, max_pages], and the tables with 0 past each request.

    Each request has pages of its own. All other memory, page 0 and the tails of last pages included, holds `outside`;
    all other table entries are wild, or stale: ids of pages that others use. For a backend that needs them finite and
    valid, they are.
    """
    cache = torch.full((pages, case.page_size, case.rank + case.rope), outside)
    shape = (len(lengths), max_pages)
    clean = torch.zeros(shape, dtype=torch.int32)
    wild = torch.tensor([-1, 2**30, pages, -(2**31)], dtype=torch.int32)[torch.randint(0, 4, shape)]
    stale = torch.randint(0, pages, shape, dtype=torch.int32)
    table = torch.where(torch.rand(shape) < 0.5, wild, stale) if math.isnan(outside) else clean.clone()
    free = (1 + torch.randperm(pages - 1)).tolist()
    for b, length in enumerate(lengths):
        for p in range(math.ceil(length / case.page_size)):
            page = free.pop()
            table[b, p] = clean[b, p] = page
            rows = cache[page, : length - p * case.page_size]
            rows.copy_(torch.randn(rows.shape))
    return cache.to(case.cache or case.query), table, clean


def joining_and_finishing(batch: int, most: int, steps: int = 6) -> list[list[int]]:
    """Lengths step by step: requests come, grow and go; all of them gone, all of them full."""
    random = [
        torch.where(torch.rand(batch) < 0.4, 0, torch.randint(1, most + 1, (batch,))).tolist() for _ in range(steps)
    ]
    return [*random, [0] * batch, [most] * batch, [0] * (batch - 1) + [1], [most, *[0] * (batch - 1)]]


@graphs.on_every_backend
@pytest.mark.parametrize("dtype", [torch.float16, FP8], ids=["fp16", "fp8"])
def test_decode_of_requests_that_join_and_finish(dtype, place):
    """A finished request is a row of length 0; its output, poisoned before, is (0, -inf), and nothing spreads."""
    case = place.fit(Case((0,) * 5, heads=4, q_len=2, query=dtype))
    pages, max_pages, device = 40, 6, place.device
    most = max_pages * case.page_size
    shape = (len(case.lengths), case.q_len, case.heads)
    query = torch.zeros(*shape, case.rank + case.rope, device=device).to(case.query)
    cache = torch.zeros(pages, case.page_size, case.rank + case.rope, device=device).to(case.query)
    table = torch.zeros(len(case.lengths), max_pages, dtype=torch.int32, device=device)
    lengths = torch.zeros(len(case.lengths), dtype=torch.int32, device=device)
    static = dict(
        query=query, kv_cache=cache, block_tables=table, seq_lens=lengths, softmax_scale=0.15, kv_lora_rank=case.rank
    )
    buffers = {
        "out": torch.empty(*shape, case.rank, dtype=BF16 if case.query == FP8 else case.query, device=device),
        "lse": torch.empty(shape, device=device),
    }
    step = functools.partial(graphs.outputs_into, place, "mla_decode_lse", static, buffers)
    step()
    recording = Recording(step, device)
    for step_lengths in joining_and_finishing(len(case.lengths), most):
        contents, wild_table, clean_table = scattered(case, step_lengths, pages, max_pages, place.outside)
        fresh = dict(
            query=torch.randn(query.shape).to(case.query), kv_cache=contents, block_tables=wild_table,
            seq_lens=torch.tensor(step_lengths, dtype=torch.int32),
        )  # fmt: skip
        graphs.refill(static, fresh)
        graphs.poison(buffers.values())
        recording.replay()
        clean = dict(static, kv_cache=contents.float().nan_to_num(0.0).to(case.query).to(device))
        clean["block_tables"] = clean_table.to(device)
        assert graphs.same_bits(tuple(buffers.values()), graphs.outputs(place, "mla_decode_lse", clean)), step_lengths
        expected, expected_lse = oracle.decode(**clean)
        assert oracle.row_error(buffers["out"], expected) <= decode_laws.tolerance(case, place)
        oracle.assert_lse_close(buffers["lse"], expected_lse, decode_laws.lse_tolerance(case, place))


@graphs.on_every_backend
def test_prefill_of_sequences_that_join_and_finish(place):
    """Sequences of any length, none included, in buffers of one size; what no row may see is NaN."""
    place.skip_unless_it_has("mla_prefill_lse")
    case = place.fit(prefill_laws.Case((), ()))
    tokens_q, tokens_kv, batch, device = 24, 80, 3, place.device
    dtype = case.dtype
    shapes = (
        (tokens_q, case.heads, case.dim_qk),
        (tokens_kv, case.heads, case.dim_qk),
        (tokens_kv, case.heads, case.dim_v),
    )
    static = dict(zip(("query", "key", "value"), (torch.zeros(s, dtype=dtype, device=device) for s in shapes)))
    static |= {f"cum_seq_lens_{name}": torch.zeros(batch + 1, dtype=torch.int32, device=device) for name in ("q", "kv")}
    static["softmax_scale"] = case.softmax_scale
    buffers = {
        "out": torch.empty(tokens_q, case.heads, case.dim_v, dtype=dtype, device=device),
        "lse": torch.empty(tokens_q, case.heads, device=device),
    }
    step = functools.partial(graphs.outputs_into, place, "mla_prefill_lse", static, buffers)
    step()
    recording = Recording(step, device)
    q_steps, kv_steps = (joining_and_finishing(batch, total // batch) for total in (tokens_q, tokens_kv))
    kv_steps.reverse()
    for q_lens, kv_lens in zip(q_steps, kv_steps):
        query, key, value = (torch.full(shape, place.outside) for shape in shapes)
        query[: sum(q_lens)] = torch.randn(sum(q_lens), *shapes[0][1:])
        for b in range(batch):
            if q_lens[b]:
                seen = slice(sum(kv_lens[:b]), sum(kv_lens[: b + 1]))
                key[seen], value[seen] = (torch.randn(kv_lens[b], *shape[1:]) for shape in shapes[1:])
        fresh = {name: rows.to(dtype) for name, rows in zip(("query", "key", "value"), (query, key, value))}
        for name, lens in (("q", q_lens), ("kv", kv_lens)):
            fresh[f"cum_seq_lens_{name}"] = torch.tensor([0, *lens]).cumsum(0).int()
        graphs.refill(static, fresh)
        graphs.poison(buffers.values())
        recording.replay()
        assert graphs.same_bits(tuple(buffers.values()), graphs.outputs(place, "mla_prefill_lse", static))
        expected, expected_lse = oracle.prefill(*static.values())
        assert oracle.row_error(buffers["out"], expected) <= prefill_laws.TOLERANCE[dtype], (q_lens, kv_lens)
        oracle.assert_lse_close(buffers["lse"], expected_lse, prefill_laws.LSE_TOLERANCE[dtype])


@graphs.on_every_backend
def test_write_and_gather_of_requests_that_join_and_finish(place):
    """Padded tokens have slot -1 and NaN to write; gathered rows past the last request are 0 in a poisoned buffer."""
    place.skip_unless_it_has(WRITE)
    case = Case((0,) * 4, query=torch.float16)
    pages, max_pages, device, dim = 30, 5, place.device, case.rank + case.rope
    tokens, total = 9, 150
    cache = torch.zeros(pages, case.page_size, dim, dtype=case.query, device=device)
    rows = torch.zeros(tokens, dim, dtype=case.query, device=device)
    slots = torch.zeros(tokens, dtype=torch.int64, device=device) - 1
    gather = dict(
        kv_cache=cache, block_tables=torch.zeros(4, max_pages, dtype=torch.int32, device=device),
        cum_seq_lens=torch.zeros(5, dtype=torch.int32, device=device), total_tokens=total,
    )  # fmt: skip
    write = dict(kv_cache=cache, kv_c=rows[:, : case.rank], k_pe=rows[:, case.rank :], slot_mapping=slots)
    buffers = {"out": torch.empty(total, dim, dtype=case.query, device=device)}

    def step():
        graphs.outputs(place, WRITE, write)
        return graphs.outputs_into(place, "mla_kv_cache_gather", gather, buffers)

    step()
    recording = Recording(step, device)
    for lengths in joining_and_finishing(4, max_pages * case.page_size):
        contents, table, clean_table = scattered(case, lengths, pages, max_pages, math.nan)
        new_slots = torch.randperm(pages * case.page_size)[:tokens]
        new_slots[torch.rand(tokens) < 0.4] = -1
        new_rows = torch.where((new_slots < 0)[:, None], math.nan, torch.randn(tokens, dim)).to(case.query)
        for static, fresh in ((cache, contents), (rows, new_rows), (slots, new_slots)):
            static.copy_(fresh)
        gather["block_tables"].copy_(table)
        gather["cum_seq_lens"].copy_(torch.tensor([0, *lengths]).cumsum(0).int())
        graphs.poison(buffers.values())
        recording.replay()
        kept = new_slots >= 0
        contents.view(-1, dim)[new_slots[kept]] = new_rows[kept]
        assert graphs.same_bits([cache.cpu()], [contents]), lengths
        expected = oracle.gather(contents, clean_table, gather["cum_seq_lens"].cpu(), total)
        oracle.assert_same(buffers["out"], expected.to(case.query))


HEADS = [Case((5, 70), heads=h, rank=32) for h in (1, 8, 16, 20, 32, 64, 96, 128)]
PAGES = [Case((3, 130, 257), page_size=p, heads=2) for p in (1, 2, 4, 8, 16, 32, 64, 128)]
Q_LENS = [Case(tuple(range(1, 10)), q_len=q, heads=3, rank=16) for q in range(1, 9)]


@graphs.on_every_backend
@pytest.mark.parametrize("case", HEADS + PAGES + Q_LENS, ids=lambda case: case.id)
def test_every_head_count_page_size_and_q_len(case, place):
    """Captured on empty requests, replayed on real ones: what the oracle says."""
    case = place.fit(case)
    args = decode_laws.build(case, place.device, outside=place.outside)
    static = dict(zip(("query", "kv_cache", "block_tables", "seq_lens", "softmax_scale"), args), kv_lora_rank=case.rank)
    expected, expected_lse = oracle.decode(**static)
    lengths = static["seq_lens"].clone()
    static["seq_lens"].zero_()
    step = functools.partial(graphs.outputs, place, "mla_decode_lse", static)
    step()
    recording = Recording(step, place.device)
    recording.replay()
    out, lse = recording.results
    assert (out == 0).all() and (lse == -math.inf).all()
    static["seq_lens"].copy_(lengths)
    recording.replay()
    assert oracle.row_error(out, expected) <= decode_laws.tolerance(case, place)
    oracle.assert_lse_close(lse, expected_lse, decode_laws.lse_tolerance(case, place))


@graphs.on_the_gpu
@pytest.mark.parametrize("dtype", [FP8, BF16], ids=["fp8", "bf16"])
def test_a_cache_past_4_gib(dtype, place):
    """Write, gather and decode in one graph, on pages at the end and on either side of element 2^31."""
    page_size, dim, batch = 64, 576, 3
    pages = 2**32 // (page_size * dim * dtype.itemsize) + 100
    edge = 2**31 // (page_size * dim)
    cache = torch.zeros(pages, page_size, dim, dtype=torch.uint8 if dtype == FP8 else dtype, device="cuda").view(dtype)
    assert cache.nbytes > 2**32 and edge < pages - 1
    capacity = 2 * page_size
    tokens = batch * capacity
    query = torch.zeros(batch, 2, 16, dim, device="cuda").to(dtype)
    rows = torch.zeros(tokens, dim, dtype=BF16, device="cuda")
    slots = torch.full((tokens,), -1, device="cuda")
    tables = torch.zeros(batch, 2, dtype=torch.int32, device="cuda")
    lengths = torch.zeros(batch, dtype=torch.int32, device="cuda")
    cum = torch.zeros(batch + 1, dtype=torch.int32, device="cuda")
    write = dict(kv_cache=cache, kv_c=rows[:, :512], k_pe=rows[:, 512:], slot_mapping=slots)
    gather = dict(kv_cache=cache, block_tables=tables, cum_seq_lens=cum, total_tokens=tokens, dtype=BF16)
    decode = dict(query=query, kv_cache=cache, block_tables=tables, seq_lens=lengths, softmax_scale=0.04)

    def step():
        graphs.outputs(place, WRITE, write)
        gathered = graphs.outputs(place, "mla_kv_cache_gather", gather)
        return *gathered, *graphs.outputs(place, "mla_decode_lse", decode)

    step()
    recording = Recording(step, "cuda")
    last = pages - 1
    for ids, lens in (
        ([[last, edge], [edge - 1, 1], [pages // 2, last - 1]], [128, 70, 100]),
        ([[edge + 1, last - 2], [2, last], [last - 1, 0]], [65, 128, 0]),
    ):
        cache.view(torch.uint8).zero_()
        new = torch.randn(tokens, dim).to(FP8).to(BF16)  # exact in either cache
        new_slots, live = torch.full((tokens,), -1), []
        for b, length in enumerate(lens):
            position = torch.arange(length)
            new_slots[b * capacity : b * capacity + length] = (
                torch.tensor(ids[b])[position // page_size] * page_size + position % page_size
            )
            live.append(new[b * capacity : b * capacity + length])
        live = torch.cat(live)
        new_query = torch.randn(query.shape).to(dtype)
        fresh = (new, new_slots, torch.tensor(ids), torch.tensor(lens), torch.tensor([0, *lens]).cumsum(0), new_query)
        for static, value in zip((rows, slots, tables, lengths, cum, query), fresh):
            static.copy_(value)
        graphs.poison(recording.results)
        recording.replay()
        gathered, out, lse = recording.results
        assert torch.equal(gathered[: len(live)].cpu(), live) and (gathered[len(live) :] == 0).all()
        expected, expected_lse = oracle.decode(**decode)
        case = Case((), query=dtype)
        assert oracle.row_error(out, expected) <= decode_laws.tolerance(case, place)
        oracle.assert_lse_close(lse, expected_lse, decode_laws.lse_tolerance(case, place))
        written = torch.stack([part.view(torch.uint8).count_nonzero() for part in cache.split(4096)]).sum()
        assert int(written) == int(live.to(dtype).view(torch.uint8).count_nonzero()), (
            "bytes outside the slots were written"
        )


@graphs.on_the_gpu
@pytest.mark.parametrize("operator", calls.NAMES)
def test_tensors_of_a_gpu_that_is_not_current(operator, place):
    """Launched where the tensors are, eagerly and under capture; the current device stays what it was."""
    place.skip_unless_it_has(operator)
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    with torch.device("cuda:1"), torch.cuda.device(1):
        call, later = calls.example(operator), graphs.other_example(operator)
        expected_first = graphs.outputs(place, operator, graphs.copy_of(call))
        expected = graphs.outputs(place, operator, graphs.copy_of(later))
        torch.cuda.synchronize()

    def away():
        with torch.cuda.device(0):
            results = graphs.outputs(place, operator, call)
            assert torch.cuda.current_device() == 0
        return results

    with torch.cuda.device(0):
        eager = away()
        torch.cuda.synchronize(1)
        assert all(result.device.index == 1 for result in eager) and graphs.same_bits(eager, expected_first)
        # Capturing makes the stream's GPU the current one; `away` makes it another again.
        recording = Recording(away, "cuda", stream=torch.cuda.Stream(1))
        assert torch.cuda.current_device() == 0
        graphs.refill(call, later)
        torch.cuda.synchronize(1)
        recording.replay()
        torch.cuda.synchronize(1)
        assert torch.cuda.current_device() == 0 and graphs.same_bits(recording.results, expected)
