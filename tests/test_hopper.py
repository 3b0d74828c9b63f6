"""Hopper's decode compiles as it should, says what it takes, stays within its scratch, and shares out any batch.

Laws are tested in test_laws_decode.py, target `hopper`. Here, on a CPU: wgmma that ptxas would run one at a time,
partitions that spill in their loops, shared memory; the reasons of `why_not`. In Triton's interpreter: the merge of
pieces. On such a GPU: the split plan.
"""

import math
import re

import pytest
import torch
from torch.torch_version import TorchVersion

triton = pytest.importorskip("triton")

from ts_ops.meta.contract import Decode  # noqa: E402

import oracle  # noqa: E402
import test_laws_decode as decode_laws  # noqa: E402
import ts_ops  # noqa: E402
from conftest import HOPPER, HOPPER_FP8_WEIGHTS  # noqa: E402
from cross_compile import MAX_SHARED, compiled_by  # noqa: E402
from ts_ops.backends import hopper  # noqa: E402
from ts_ops.backends.hopper import combine, decode, partials  # noqa: E402
from ts_ops.workspace import HOPPER_BYTES_PER_SM  # noqa: E402

BF16, FP16, FP8 = torch.bfloat16, torch.float16, torch.float8_e4m3fn
SMS = 132
on_hopper = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="needs compute capability 9.0"
)
# Most bytes of stack a thread. They hold what the set-up of a piece and its store need beside 128 sums a thread; the
# loop over tiles of keys touches them at most LOOP_SPILLS times.
STACK, LOOP_SPILLS = (96, 2) if TorchVersion(triton.__version__) < (3, 9) else (128, 7)
# Waits for wgmma in the whole kernel, at most. One that ptxas serialises has a wait for each of its 34 to 52.
WAITS = {"decode_fp8_kernel": 7, "decode_16bit_kernel": 3}


@pytest.fixture
def no_gpu(monkeypatch):
    """Problems of CPU tensors, as if they were on a GPU of 132 multiprocessors."""
    monkeypatch.setattr(decode, "sm_count", lambda device: SMS)


def problem(
    batch=2, q_len=1, heads=128, page_size=64, pages=8, dtype=BF16, cache=None, rank=512, rope=64, scale=0.1, **options
) -> Decode:
    query = torch.zeros(batch, q_len, heads, rank + rope).to(dtype)
    kv_cache = torch.zeros(pages, page_size, rank + rope).to(cache or dtype)
    tables = torch.zeros(batch, 4, dtype=torch.int32)
    lengths = torch.zeros(batch, dtype=torch.int32)
    return Decode(query, kv_cache, tables, lengths, scale, kv_lora_rank=rank, **options)


def tile_loops(sass: str) -> list[list[str]]:
    """The instructions of the smallest loop around each matrix product."""
    lines = [(int(m[1], 16), m[2]) for m in re.finditer(r"/\*([0-9a-f]{4,6})\*/\s+([^;]*);", sass)]
    jumps = [(int(m[1], 16), at) for at, text in lines if (m := re.search(r"BRA.*?(0x[0-9a-f]+)", text))]
    around = [
        min(((b, e) for b, e in jumps if b <= at <= e), key=lambda span: span[1] - span[0])
        for at, text in lines if "GMMA" in text
    ]  # fmt: skip
    return [[text for at, text in lines if begin <= at <= end] for begin, end in set(around)]


@pytest.mark.parametrize(
    "dtype, heads, page_size, with_lse, fp8_weights",
    [
        (FP8, 128, 64, True, False), (FP8, 128, 32, False, False), (FP8, 32, 64, False, False),
        (FP8, 16, 64, False, False), (FP8, 96, 128, True, False), (FP8, 128, 64, True, True),
        (FP8, 16, 32, False, True), (FP8, 96, 128, True, True), (BF16, 128, 64, True, False),
        (BF16, 16, 32, False, False), (FP16, 128, 64, False, False),
    ],
)  # fmt: skip
def test_compiles_for_sm_90(dtype, heads, page_size, with_lse, fp8_weights, no_gpu):
    asked = problem(heads=heads, page_size=page_size, dtype=dtype, with_lse=with_lse)
    assert decode.why_not(asked) is None
    outputs = asked.allocate()
    with ts_ops.allow_fp8_weights(fp8_weights):
        kernel, merge = compiled_by(90, lambda: decode.mla_decode(asked, *outputs))
    assert kernel.shared <= MAX_SHARED[90]  # a change of layout that goes through shared memory would not fit
    assert kernel.stack <= STACK and merge.stack <= 8
    assert len(re.findall("WARPGROUP.DEPBAR", kernel.sass)) <= WAITS[kernel.name] + fp8_weights
    loops = sorted(tile_loops(kernel.sass), key=len)
    # Scores, and sums of values; around scores with weights in FP8 the loop over pieces, which asks for the first ones.
    assert len(loops) == 2 + fp8_weights
    for body in loops[:2]:
        assert sum("LDL" in text or "STL" in text for text in body) <= LOOP_SPILLS


@pytest.mark.parametrize("dtype", [BF16, FP8], ids=["bf16", "fp8"])
@pytest.mark.parametrize("q_len", [1, 2])
@pytest.mark.parametrize("heads", [16, 64, 128])
def test_serves_what_models_ask_for(heads, q_len, dtype, no_gpu):
    for options in ({}, {"is_causal": False}, {"window_left": 100}, {"with_lse": True}, {"max_seq_len": 100}):
        assert decode.why_not(problem(heads=heads, q_len=q_len, dtype=dtype, **options)) is None


@pytest.mark.parametrize(
    "reason, changes",
    [
        ("the same for query and cache", {"cache": FP8}),
        ("takes FP8, BF16 or FP16", {"dtype": torch.float32}),
        ("kv_lora_rank of 512", {"rank": 256}),
        ("64 rope columns, got 512 and 32", {"rope": 32}),
        ("pages of 32, 64, 128 tokens, got 16", {"page_size": 16}),
        ("softmax_scale that is a normal positive number", {"scale": -0.1}),
        ("softmax_scale that is a normal positive number", {"scale": 0.0}),
        ("neither local_visible_lens", {"local_visible_lens": torch.zeros(2, 1, dtype=torch.int32)}),
        ("context parallelism", {"causal_seqs": torch.zeros(2, dtype=torch.int32), "cp_world": 2}),
        ("64 rows of q_len * H for each multiprocessor", {"q_len": 70}),
        ("got 0 pages", {"pages": 0}),
    ],
)
def test_reasons(reason, changes, no_gpu):
    assert reason in decode.why_not(problem(**changes))


def test_reasons_of_strides(no_gpu):
    asked = problem(heads=8, q_len=2, batch=3)
    query, cache, tables, lengths = asked.query, asked.kv_cache, asked.block_tables, asked.seq_lens

    def why_not(query=query, cache=cache, tables=tables):
        return decode.why_not(Decode(query, cache, tables, lengths, 0.1))

    assert why_not() is None
    assert "one stride" in why_not(query.transpose(0, 2).contiguous().transpose(0, 2))
    assert "one stride" in why_not(query[:, :, :1].expand(-1, -1, 8, -1))
    assert why_not(torch.cat((query, query), dim=-1)[..., :576]) is None
    odd = torch.zeros(query.numel() + 1, dtype=BF16)[1:].view_as(query)
    assert "takes a query aligned to 16 bytes" in why_not(odd)
    odd = torch.zeros(cache.numel() + 1, dtype=BF16)[1:].view_as(cache)
    assert "takes a kv_cache aligned to 16 bytes" in why_not(cache=odd)
    assert why_not(cache=torch.zeros(8, 66, 592, dtype=BF16)[:, :64, :576]) is None
    assert "page stride that is a multiple" in why_not(cache=cache.transpose(0, 1).contiguous().transpose(0, 1))
    assert "do not overlap" in why_not(cache=cache[:, :1].expand(-1, 64, -1))
    assert "dense rows" in why_not(tables=tables.repeat_interleave(2, dim=1)[:, ::2])


def test_warm_up_calls_it_and_what_serves_in_its_place(no_gpu, monkeypatch):
    """Aligned calls of either kind: what this backend declines compiles variants of Triton's decode."""
    asked = []

    def note(query, *args, out=None, **kwargs):
        asked.append(Decode(query, *args, **kwargs))
        return torch.empty(0)

    monkeypatch.setattr(torch.ops.tokenspeed, "mla_decode", note)
    ts_ops.warmup(16, batch_sizes=(2, 3), max_seq_len=100, q_lens=(1, 2), operators=("mla_decode",), device="cpu")
    reasons = {(p.batch, p.q_len, p.query.data_ptr() % 16 == 0, (decode.why_not(p) or "served")[:19]) for p in asked}
    for batch, q_len in ((2, 1), (2, 2), (3, 1), (3, 2)):
        assert {reason for b, q, aligned, reason in reasons if (b, q, aligned) == (batch, q_len, True)} == {
            "served", "takes a page stride",
        }  # fmt: skip


def test_other_operators_and_devices():
    asked = problem()
    assert hopper.why_not("mla_prefill", object()) == "has no mla_prefill"
    assert "GPU only" in hopper.unavailable(asked.device)


@pytest.mark.parametrize(
    "capability, error, reason",
    [
        ((9, 0), None, None),
        ((9, 0), ImportError("no module named gluon"), "triton>=3.6 with Gluon: no module named gluon"),
        ((9, 0), AttributeError("gl has no barrier"), "do not know this Triton's Gluon: gl has no barrier"),
        ((8, 0), ImportError("not to be imported"), "need compute capability 9.0; cuda:0 has 8.0"),
    ],
)
def test_a_triton_that_does_not_fit_is_a_reason_and_disturbs_no_other_gpu(capability, error, reason, monkeypatch):
    def kernels():
        if error:
            raise error

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(hopper, "_kernels", kernels)
    hopper._not_here.cache_clear()
    found = hopper.unavailable(torch.device("cuda:0"))
    hopper._not_here.cache_clear()
    assert found is None if reason is None else reason in found


def test_scratch_is_within_the_bound():
    most = 0
    for sms in (1, 78, SMS):
        for heads in (1, 3, 16, 20, 64, 100, 128):
            for q_len in (1, 2, 5, 8):
                for batch in (1, 2, 64, 5000):
                    if math.ceil(q_len * heads / 64) <= sms:
                        used = 4 * sum(decode.scratch_sizes(batch, q_len * heads, sms))
                        assert used <= HOPPER_BYTES_PER_SM * sms
                        most = max(most, used / (HOPPER_BYTES_PER_SM * sms))
    assert most > 0.99


@pytest.mark.parametrize(
    "batch, rows, per_program", [(64, 128, 4), (128, 128, 4), (96, 128, 1), (64, 64, 1), (128, 64, 4), (1, 128, 1)]
)
def test_fewer_programs_combine_a_batch_that_fills_the_workers(batch, rows, per_program):
    block_rows, row_tiles, workers = decode.tiles(rows, SMS)
    (programs, records), constants = decode.combine_grid(block_rows, row_tiles, batch, workers)
    assert records == min(batch, workers)
    assert constants["PER_PROGRAM"] == per_program
    parts = 512 // constants["PART"]
    assert programs == math.ceil(row_tiles * block_rows / 2 / per_program) * parts


@pytest.mark.parametrize("transposed", [False, True], ids=["16-bit", "fp8"])
def test_partial_results_are_looked_for_where_they_are_stored(transposed, monkeypatch):
    """What decode stores of a row and two columns, combine takes for theirs; four words of a thread are neighbours."""
    monkeypatch.setattr(partials, "WORDS", 256)
    rows, columns = torch.arange(64), torch.arange(256)
    if transposed:
        words = partials.words_of_fp8.fn(columns, rows).T
        four = words.unflatten(1, (-1, 2, 8)).unflatten(0, (-1, 2)).permute(1, 3, 0, 2, 4)
    else:
        words = partials.words_of_16bit.fn(rows, columns)
        four = words.unflatten(1, (-1, 2, 4)).unflatten(0, (-1, 2, 8)).permute(1, 4, 0, 2, 3, 5)
    first = four[0, 0]
    assert (first % 4 == 0).all()
    assert torch.equal(four.flatten(0, 1), torch.stack([first, first + 2, first + 1, first + 3]))

    pairs = torch.arange(32)
    first, second = partials.rows_of_pair.fn(pairs, transposed)
    is_second, column = partials.place_of_word.fn(torch.arange(2 * len(columns)), transposed)
    row = torch.where(is_second[None, :], second[:, None], first[:, None])
    assert torch.equal(words[row, column.expand_as(row)].flatten(), torch.arange(words.numel()))


@pytest.mark.parametrize("rows, row_tiles, chunk", [(5, 1, 2), (5, 1, 8), (20, 2, 8)])
@pytest.mark.parametrize("dtype", [FP8, FP16, BF16], ids=["fp8", "fp16", "bf16"])
def test_pieces_are_combined(dtype, rows, row_tiles, chunk, interpreted, monkeypatch):
    """Of one request workers 1 to 4 have a piece, of another 4 to 7; a third is whole, and its rows are not touched."""
    monkeypatch.setattr(combine, "wait_for_kernel_before", lambda: None)
    monkeypatch.setattr(partials, "WORDS", 256)
    stored = FP16 if dtype == FP8 else dtype
    block_rows, workers = 16, 8
    records = torch.tensor([[2, 1, 4], [1, 0, 0], [0, 4, 7]], dtype=torch.int32)
    values = torch.randn(2 * workers, row_tiles, block_rows, 512).to(stored)
    lses = torch.randn(2 * workers, row_tiles, block_rows) * 5
    lses[2 * 2, :, :3] = -math.inf  # a piece in which rows saw nothing
    lses[:, :, 1] = -math.inf
    row, pair = torch.arange(block_rows), torch.arange(256)
    place = partials.words_of_fp8.fn(pair, row).T if dtype == FP8 else partials.words_of_16bit.fn(row, pair)
    words = torch.empty(2 * workers, row_tiles, block_rows * 256, dtype=torch.int32)
    words[:, :, place.flatten()] = values.view(torch.int32).flatten(2)
    out = torch.full((3, rows, 512), 7.0, dtype=FP16 if dtype == FP16 else BF16)
    lse = torch.full((3, rows), 7.0)
    pairs = row_tiles * block_rows // 2
    combine.combine_kernel[2 * triton.cdiv(pairs, 4), 3](
        records, words, lses, out.view(torch.int32), lse, 1, 1.5, rows, row_tiles, TRANSPOSED=dtype == FP8,
        FROM_BF16=stored == BF16, TO_BF16=out.dtype == BF16, ROWS=block_rows, PART=256, PER_PROGRAM=4, CHUNK=chunk,
    )  # fmt: skip
    assert (out[1] == 7).all() and (lse[1] == 7).all()
    for request, first, last in ((2, 1, 4), (0, 4, 7)):
        slots = torch.tensor([2 * first + 1, *range(2 * first + 2, 2 * last + 1, 2)])
        pieces = values[slots].flatten(1, 2)[:, :rows].double()
        states = lses[slots].flatten(1, 2)[:, :rows].double() * math.log(2)
        expected_lse = states.logsumexp(0)
        expected = 1.5 * (pieces * (states - expected_lse).exp().nan_to_num(0)[..., None]).sum(0)
        tolerance = 2**-10 if out.dtype == FP16 else 2**-7  # the interpreter truncates to bf16
        torch.testing.assert_close(out[request].double(), expected, rtol=tolerance, atol=1e-4)
        oracle.assert_lse_close(lse[request], expected_lse, 1e-5)


@pytest.mark.gpu
@on_hopper
@pytest.mark.parametrize("batch", [1, 3, 40, 64, 132, 300, 700])
@pytest.mark.parametrize("window", [-1, 200])
def test_the_plan_gives_every_tile_to_one_worker(batch, window):
    from triton.experimental import gluon
    from triton.experimental.gluon import language as gl

    from ts_ops.backends.hopper.plan import make_plan

    @gluon.jit
    def kernel(out, lens, batch, capacity, q_len, window):
        plan = make_plan(gl.program_id(0), gl.num_programs(0), lens, 1, batch, capacity, q_len, window, 4)
        for index in gl.static_range(4):
            gl.store(out + gl.program_id(0) * 4 + index, plan[index])

    for workers in (1, 8, 66, 132):
        for lengths in (
            torch.randint(0, 5000, (batch,)),
            torch.full((batch,), 4096),
            torch.randint(4000, 4097, (batch,)),
        ):
            out = torch.full((workers, 4), -1, dtype=torch.int32, device="cuda")
            kernel[(workers,)](out, lengths.to("cuda", torch.int32), batch, 8192, 1, window, num_warps=4)
            low = (lengths - 1 - window).clamp(min=0) // 64 if window >= 0 else 0 * lengths
            tiles = ((lengths + 63) // 64 - low).tolist()
            shared_out, longest = [[] for _ in tiles], 0
            for first, end, offset, quota in out.tolist():
                worked = 0
                for request in range(first, end):
                    units = max(tiles[request], 1)
                    piece = range(max(offset, 0), min(offset + quota, units))
                    assert piece
                    shared_out[request] += piece
                    worked += len(piece)
                    offset -= units
                longest = max(longest, worked)
            assert shared_out == [list(range(max(count, 1))) for count in tiles]
            fair = math.ceil(sum(max(count, 1) for count in tiles) / workers)
            assert longest <= max(fair + fair // 16 + 3, 2)


@pytest.mark.gpu
@on_hopper
@pytest.mark.parametrize(
    "dtype, place",
    [(BF16, HOPPER), (FP8, HOPPER), (FP8, HOPPER_FP8_WEIGHTS)],
    ids=["bf16", "fp8", "fp8 weights"],
)
@pytest.mark.parametrize("batch, heads, q_len, most", [(7, 128, 1, 4000), (64, 16, 2, 3000), (300, 64, 1, 500)])
def test_any_batch_in_a_graph(batch, heads, q_len, most, dtype, place):
    """Captured with one key a request, replayed with lengths that plan in other ways, NaN outside the requests."""
    pages = math.ceil(most / 64)
    cache = torch.full((batch * pages + 1, 64, 576), math.nan, device="cuda", dtype=BF16).to(dtype)
    tables = torch.randperm(batch * pages, device="cuda").int().view(batch, pages)
    query = torch.randn(batch, q_len, heads, 576, device="cuda").to(dtype)
    lengths = torch.ones(batch, dtype=torch.int32, device="cuda")
    case = decode_laws.Case((), query=dtype)
    with ts_ops.use_backend("hopper"), ts_ops.allow_fp8_weights(place == HOPPER_FP8_WEIGHTS):
        ts_ops.mla_decode_lse(query, cache, tables, lengths, 0.05)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out, lse = ts_ops.mla_decode_lse(query, cache, tables, lengths, 0.05)
    for drawn in (torch.randint(0, most + 1, (batch,)), torch.full((batch,), most), torch.zeros(batch)):
        lengths.copy_(drawn)
        cache.fill_(math.nan)
        position = torch.arange(pages * 64, device="cuda")
        inside = (position < lengths[:, None]).view(batch, pages, 64)
        keys = torch.randn(int(inside.sum()), 576, device="cuda").to(dtype)
        page, token = tables.long()[:, :, None].expand_as(inside)[inside], position.view(1, pages, 64) % 64
        cache.view(torch.uint8 if dtype == FP8 else BF16)[page, token.expand_as(inside)[inside]] = (
            keys.view(torch.uint8) if dtype == FP8 else keys
        )
        out.fill_(math.nan)
        graph.replay()
        some = torch.arange(0, batch, max(1, batch // 8), device="cuda")
        expected, expected_lse = oracle.decode(query[some], cache, tables[some], lengths[some], 0.05)
        assert oracle.row_error(out[some], expected) <= decode_laws.tolerance(case, place)
        oracle.assert_lse_close(lse[some], expected_lse, decode_laws.lse_tolerance(case, place))
        assert not out.isnan().any()
