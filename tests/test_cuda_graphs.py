"""Promise: graphs, streams and eager calls share nothing (law 7, and law 8 for the bits).

Any number of graphs, in pools of their own or in one, captured in any order of sizes, with eager calls of any size
between captures and replays, on one stream or on two at once: each result has the bits of an eager call on the same
inputs. A graph keeps its outputs and at most `workspace_bound` of scratch. Kernels may be compiled under capture, and
after a warm-up none is.

Every comparison is of bits, and every test also shows that it would have seen a result that is wrong or stale.
"""

import functools
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import calls
import graphs
import ts_ops
from graphs import WRITE, Checked, Recording, Size
from ts_ops import dispatch

MIB = 2**20
SIZES = [
    Size(1, 1, 16, 128), Size(2, 2, 16, 256), Size(1, 1, 16, 4096), Size(3, 4, 16, 512), Size(17, 1, 16, 1024),
    Size(8, 1, 128, 1024), Size(64, 2, 16, 2048),
]  # fmt: skip
LARGER = Size(48, 4, 16, 4096)
SMALL = [Size(1, 1, 2, 64), Size(2, 2, 2, 128), Size(3, 1, 4, 192)]  # for a CPU


def sizes_for(place) -> tuple[list[Size], Size]:
    """Sizes to capture in ascending order, and a larger one to run between."""
    if place.device == "cpu":
        return SMALL, Size(4, 2, 4, 256)
    # The reference's prefill goes over all keys for each request.
    return (SIZES[:4], Size(24, 2, 16, 4096)) if place.backend == "reference" else (SIZES, LARGER)


def run_larger(place) -> None:
    for operator in calls.NAMES:
        graphs.outputs(place, operator, graphs.arguments(operator, sizes_for(place)[1], place.device, seed=99))


@graphs.on_every_backend
@pytest.mark.parametrize("pools", ["shared", "private"])
@pytest.mark.parametrize("order", ["ascending", "descending"])
def test_many_graphs_outlive_whatever_happens_around_them(order, pools, place):
    """Larger calls, freed memory, random replays; of a captured call nothing is kept but its inputs and outputs.

    A graph with a pool of its own keeps its results whatever else is replayed. Graphs that share one may lay scratch of
    a call over the results of a later one, as torch documents: theirs are read before the next replay.
    """
    device = place.device
    if device == "cpu" and (order, pools) != ("descending", "private"):
        pytest.skip("without graphs the same test again")
    sizes = sizes_for(place)[0][:: 1 if order == "ascending" else -1]
    pool = torch.cuda.graph_pool_handle() if pools == "shared" and device == "cuda" else None
    recorded, bystanders = [], []
    for size in sizes:
        for operator in calls.NAMES:
            static = graphs.arguments(operator, size, device, seed=0)
            graphs.outputs(place, operator, static)  # compiles, where a capture may not
            step = functools.partial(graphs.outputs, place, operator, static)
            recorded.append((operator, size, static, Recording(step, device, pool)))
            del static, step
        run_larger(place)
        bystanders += graphs.churn(device)

    rounds = []
    for turn in range(1, 3):
        order_of_replay = random.Random(turn).sample(range(len(recorded)), len(recorded))
        expected, read = {}, {}
        for count, number in enumerate(order_of_replay):
            operator, size, static, recording = recorded[number]
            fresh = graphs.arguments(operator, size, device, seed=1000 * turn + number)
            graphs.refill(static, fresh)
            if operator != WRITE:
                graphs.poison(recording.results)
            recording.replay()
            if pool is not None:
                read[number] = tuple(result.clone() for result in recording.results)
            expected[number] = graphs.outputs(place, operator, fresh)
            if count % 16 == 15:
                run_larger(place)
                bystanders += graphs.churn(device)
        # The others only now, when all have been replayed: no replay may touch the results of another.
        for number, (operator, size, _, recording) in enumerate(recorded):
            read.setdefault(number, tuple(result.clone() for result in recording.results))
            assert graphs.same_bits(read[number], expected[number]), (turn, operator, size)
        rounds.append([read[number] for number in range(len(recorded))])
    for (operator, size, *_), first, second in zip(recorded, *rounds):
        assert not graphs.same_bits(first, second), (operator, size, "a stale result would not be seen")
    for block in bystanders:
        assert (block == graphs.PATTERN).all(), "memory of someone else was written"


@graphs.on_every_backend
@pytest.mark.parametrize("pair", ["graph-graph", "graph-eager", "eager-eager"])
def test_two_streams_at_once(pair, place):
    """Scratch that two calls shared would be overwritten by one while the other reads it."""
    on_gpu = place.device == "cuda"
    if not on_gpu and pair != "graph-graph":
        pytest.skip("without streams the same test again")
    sizes = (Size(4, 1, 16, 2048), Size(9, 2, 16, 1024)) if on_gpu else (Size(1, 1, 2, 64), Size(2, 2, 2, 64))
    both = [Checked(place, size, seed, repeats=4) for seed, size in enumerate(sizes)]
    streams = [torch.cuda.Stream(), torch.cuda.Stream()] if on_gpu else [None, None]
    graphs.wait(place.device)
    for checked, stream in zip(both, streams):  # a first step each, alone, which compiles
        with graphs.on_stream(stream):
            checked.step()
        graphs.wait(place.device)
        assert checked.wrong.item() == 0, "two calls in a row give different bits"
    launches = []
    for kind, checked, stream in zip(pair.split("-"), both, streams):
        # Both graphs are captured on torch's one capture stream, as is usual: a buffer for each stream would be shared.
        # But for the reference: cuBLAS has such a buffer, so its graphs need a stream each.
        own = stream if place.backend == "reference" else None
        launches.append(Recording(checked.step, place.device, stream=own).replay if kind == "graph" else checked.step)

    def run(rounds: int) -> list[int]:
        before = [checked.wrong.item() for checked in both]
        for _ in range(rounds):
            graphs.hold(streams)
            for launch, stream in zip(launches, streams):
                with graphs.on_stream(stream):
                    launch()
        graphs.wait(place.device)
        return [checked.wrong.item() - count for checked, count in zip(both, before)]

    assert run(100 if pair == "graph-graph" and on_gpu else 40 if on_gpu else 2) == [0, 0]
    for checked in both:
        checked.spoil()
    graphs.wait(place.device)
    assert run(1) == [checked.comparisons for checked in both], "a wrong result would not be counted"


@graphs.on_serving_backends
def test_memory_that_a_graph_keeps(place):
    """Alive in its pool are its outputs alone; reserved are they and scratch, as the caching allocator rounds them."""
    workspace = ts_ops.workspace_bound("cuda")
    assert workspace > 0
    lines = [
        f"workspace_bound {workspace / MIB:.1f} MiB; MiB of one graph: outputs, alive, reserved, reserved in shared"
    ]
    for operator in calls.NAMES:
        shared_pool, shared_before, private_sum, held = torch.cuda.graph_pool_handle(), 0, 0, []
        for size in (SIZES[5], SIZES[0], SIZES[2], SIZES[6], SIZES[3]):  # up and down
            static = graphs.arguments(operator, size, "cuda", seed=0)
            graphs.outputs(place, operator, static)
            step = functools.partial(graphs.outputs, place, operator, static)
            private, shared = Recording(step, "cuda"), Recording(step, "cuda", shared_pool)
            held += [private, shared]
            # A write has no results of its own.
            results = () if operator == WRITE else private.results
            kept = sum(result.nbytes for result in results)
            reserved, alive = graphs.pool_bytes(private.graph.pool())
            shared_now, _ = graphs.pool_bytes(shared_pool)
            bound = sum(reserved_for(result.nbytes) for result in results) + reserved_for(workspace)
            growth, shared_before = shared_now - shared_before, shared_now
            private_sum += reserved
            figures = "".join(f"{count / MIB:9.2f}" for count in (kept, alive, reserved, growth))
            lines.append(
                f"{operator:<26}B {size.batch:<3} q {size.q_len} H {size.heads:<4}keys {size.capacity:<5}{figures}"
            )
            assert alive == kept, lines[-1]
            assert reserved <= bound and growth <= bound, lines[-1]
        assert shared_before <= private_sum
    print("\n" + "\n".join(lines))

    def keeps_more():
        return *graphs.outputs(place, "mla_decode", call), torch.empty(
            workspace + 64 * MIB, dtype=torch.uint8, device="cuda"
        )

    call = graphs.arguments("mla_decode", SIZES[0], "cuda", seed=0)
    leak = Recording(keeps_more, "cuda")
    reserved, alive = graphs.pool_bytes(leak.graph.pool())
    assert alive > leak.results[0].nbytes and reserved > reserved_for(leak.results[0].nbytes) + reserved_for(workspace)


def reserved_for(size: int) -> int:
    """Most that the caching allocator reserves for a tensor of at most `size` bytes: segments of 2 MiB for up to 1 MiB,
    of 20 MiB for up to 10 MiB, then multiples of 2 MiB."""
    return 2 * MIB if size <= MIB else max(20 * MIB, -(-size // (2 * MIB)) * 2 * MIB)


@graphs.on_every_backend
def test_ten_thousand_replays(place):
    """Lengths, tables, slots and data drawn on the device before each; the comparison stays there too."""
    device, on_gpu = place.device, place.device == "cuda"
    turns = 20 if not on_gpu else 1000 if place.backend == "reference" else 10_000
    batch, heads, pages, max_pages, page_size = (8, 16, 40, 16, 64) if on_gpu else (3, 2, 10, 3, 16)
    with torch.device(device):
        query = torch.zeros(batch, 1, heads, 576, dtype=torch.bfloat16)
        latent, k_pe = query.new_zeros(batch, 512), query.new_zeros(batch, 64)
        caches = [torch.zeros(pages, page_size, 576, dtype=torch.bfloat16) for _ in range(2)]
        tables = torch.zeros(batch, max_pages, dtype=torch.int32)
        lengths, slots = torch.zeros(batch, dtype=torch.int32), torch.zeros(batch, dtype=torch.int64)
        suffix, suffix_lse = query.new_zeros(batch, heads, 512), torch.zeros(batch, heads)
        lane = torch.arange(batch)
        wrong, stale = (torch.zeros((), dtype=torch.int64) for _ in range(2))

    write = dict(kv_c=latent, k_pe=k_pe, slot_mapping=slots)
    decode = dict(query=query, kv_cache=caches[0], block_tables=tables, seq_lens=lengths, softmax_scale=0.05)
    attend = graphs.backend_of(place, "mla_decode_lse", decode)
    others = "reference" if place.backend == "reference" else "triton"

    def step(cache):
        with ts_ops.use_backend(others):
            ts_ops.mla_kv_cache_write(cache, **write)
        with ts_ops.use_backend(attend):
            out, lse = ts_ops.mla_decode_lse(query, cache, tables, lengths, 0.05)
        with ts_ops.use_backend(others):
            return ts_ops.merge_attn_states(out.flatten(0, 1), lse.flatten(0, 1), suffix, suffix_lse)

    step(caches[0])
    recording = Recording(lambda: step(caches[0]), device)
    caches[1].copy_(caches[0])
    previous = recording.results[0].clone()
    for _ in range(turns):
        for tensor in (query, latent, k_pe, suffix, suffix_lse):
            tensor.normal_()
        lengths.random_(0, max_pages * page_size + 1)
        tables.random_(0, pages)
        slots.random_(0, pages * page_size // batch).mul_(batch).add_(lane)  # no two alike
        slots.masked_fill_(lengths % 8 == 0, -1)
        recording.replay()
        for actual, expected in zip(recording.results, step(caches[1])):
            wrong += (graphs.bits(actual) != graphs.bits(expected)).any()
        stale += (recording.results[0] == previous).all()
        previous.copy_(recording.results[0])
    assert wrong.item() == 0, f"{wrong.item()} results of {turns} replays differ from eager calls"
    assert stale.item() == 0, "two replays in a row agree: a stale result would not be seen"
    assert graphs.same_bits(caches[:1], caches[1:]) and caches[0].count_nonzero() > 0


def first_use() -> None:
    """Capture each operator in a process that has not called it, then replay it on other inputs."""
    device, reference = torch.device("cuda:0"), graphs.ON_GPU[-1]
    with torch.device(device), ts_ops.use_backend("triton"):
        for operator in calls.NAMES:
            static, later = calls.example(operator), graphs.other_example(operator)
            right = [result.clone() for result in graphs.outputs(reference, operator, graphs.copy_of(later))]
            before = dispatch.compiled(device)
            recording = Recording(functools.partial(graphs.outputs, graphs.GPU, operator, static), "cuda")
            assert dispatch.compiled(device) != before, f"{operator}: nothing was left to compile"
            graphs.refill(static, later)
            recording.replay()
            for actual, expected in zip(recording.results, right):
                torch.testing.assert_close(actual.float(), expected.float(), rtol=2e-2, atol=2e-2)
            assert graphs.same_bits(recording.results, graphs.outputs(graphs.GPU, operator, later)), operator
            print(f"{operator}: compiled under capture, and right", flush=True)


@pytest.mark.gpu
def test_kernels_first_used_under_capture(tmp_path):
    """Triton compiles and loads them there. (TokenSpeed refuses: test_warmup.py.) In a process of its own, with nothing
    from Triton's cache on disk; and a capture that fails cannot disturb other tests."""
    command = [sys.executable, "-c", "import test_cuda_graphs; test_cuda_graphs.first_use()"]
    environment = os.environ | {"TRITON_CACHE_DIR": str(tmp_path)}
    done = subprocess.run(
        command, cwd=Path(__file__).parent, env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("compiled under capture, and right") == len(calls.NAMES)


@graphs.on_serving_backends
def test_nothing_compiles_under_capture_after_a_warm_up(place):
    """A ladder of batch sizes, largest first, as engines capture it; each graph is then right at other lengths."""
    operators = ("mla_decode_lse", WRITE, "mla_kv_cache_gather", "merge_attn_states")
    heads, batches, q_lens, capacity = 16, (1, 2, 4, 8, 16), (1, 2), 1024
    device = torch.device("cuda", torch.cuda.current_device())
    with ts_ops.use_backend(place.backend):
        served = [name for name in operators if place.backend == "triton" or name.startswith("mla_decode")]
        ts_ops.warmup(heads, max_seq_len=capacity, batch_sizes=batches, q_lens=q_lens, operators=served, progress=False)
        before = dispatch.compiled(device)
        assert sum(before.values()) > 0
        recorded = []
        for batch in reversed(batches):
            for q_len in q_lens:
                for operator in served:
                    static = graphs.arguments(operator, Size(batch, q_len, heads, capacity), "cuda", seed=batch)
                    step = functools.partial(graphs.outputs, place, operator, static)
                    recorded.append((operator, batch, q_len, static, Recording(step, "cuda")))
                    assert dispatch.compiled(device) == before, (operator, batch, q_len)
        for operator, batch, q_len, static, recording in recorded:
            fresh = graphs.arguments(operator, Size(batch, q_len, heads, capacity), "cuda", seed=batch + 100)
            graphs.refill(static, fresh)
            recording.replay()
            assert graphs.same_bits(recording.results, graphs.outputs(place, operator, fresh)), (operator, batch, q_len)
