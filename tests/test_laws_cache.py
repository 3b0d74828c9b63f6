"""The paged latent cache: a write touches only its slots, a gather reads only its requests.

- Write: rows land at page * page_size + offset, rounded to the cache's dtype (law 11 for FP8); every other byte stays,
  also those between pages and rows; negative slots are skipped; rows past the slots are not used.
- Gather: rows of all requests in order; zeros at and past cum_seq_lens[-1]; nothing past `total_tokens`. Neither NaN
  elsewhere in the cache nor ids elsewhere in the table matter (law 5).
- Both layouts, any strides, every page size, caches past 2^31 elements.
"""

import math
from dataclasses import dataclass, field

import pytest
import torch

import oracle

ops = torch.ops.tokenspeed
FP8 = torch.float8_e4m3fn
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


def make_cache(pages, page_size, dim, dtype, device, *, padded=False, four_dims=False):
    """A cache of random bytes and the storage it lies in; `padded` leaves gaps between rows and between pages."""
    width, height = (dim + 16, page_size + 3) if padded else (dim, page_size)
    storage = torch.randn(pages + 1, height, width).to(dtype)
    storage.view(torch.uint8).view(-1)[::5] = 0x7F  # NaN in FP8
    storage = storage.to(device)
    cache = storage[:pages, :page_size, :dim]
    return (cache[:, None] if four_dims else cache), storage


def exact_fp8(*shape):
    """Values of e4m3: converting them is right even in the interpreter, which rounds others wrongly."""
    return torch.randint(-126, 127, shape).abs().to(torch.uint8).view(FP8).float() * torch.randn(shape).sign()


def bytes_of(tensor):
    return tensor.detach().cpu().contiguous().view(torch.uint8)


def expect_written(storage, cache, rows: dict, dtype):
    """The storage after a write of `rows`, built on the CPU."""
    after = storage.cpu().clone()
    for (page, offset), row in rows.items():
        after[page, offset, : row.numel()] = oracle.to_fp8(row) if dtype == FP8 else row.to(dtype)
    return after


@dataclass(frozen=True)
class Write:
    cache: torch.dtype = FP16
    kv_c: torch.dtype = FP16
    k_pe: torch.dtype = FP16
    rank: int = 512
    rope: int = 64
    page_size: int = 64
    tokens: int = 9
    scale: float | None = None
    padded: bool = False
    four_dims: bool = False

    def __str__(self):
        kinds = "-".join(str(d).removeprefix("torch.") for d in (self.cache, self.kv_c, self.k_pe))
        sizes = f"{self.rank}+{self.rope}-page{self.page_size}-T{self.tokens}"
        return f"{kinds}-{sizes}-{self.scale}{'-padded' * self.padded}"


WRITES = [
    Write(),
    Write(page_size=1, tokens=1),
    Write(FP32, FP32, FP32, rank=100, rope=24, page_size=16, padded=True),
    Write(FP32, FP16, FP32, rank=96, rope=1, page_size=8, tokens=67),
    Write(FP16, FP32, FP16, rank=65, rope=0, page_size=128, four_dims=True),
    Write(FP8, FP16, FP32, padded=True),
    Write(FP8, FP32, FP16, scale=0.125, rank=320, rope=32, page_size=2, four_dims=True),
    Write(FP8, FP32, FP32, scale=4.0, rank=40, rope=8, page_size=32, tokens=130),
    Write(BF16, BF16, BF16),
    Write(BF16, FP32, FP16, rank=192),
    Write(FP16, BF16, FP32, rank=128, padded=True),
    Write(FP8, BF16, BF16, scale=2.0),
]


def place(case, pages):
    """Distinct slots in random order, every third one skipped."""
    slots = torch.randperm(pages * case.page_size)[: case.tokens]
    slots[1::3] = torch.tensor([-1, -7, -(2**40)]).repeat(case.tokens)[: slots[1::3].numel()]
    return slots


@pytest.mark.parametrize("case", WRITES, ids=str)
def test_write_touches_only_its_slots(target, case):
    if not target.supports(case.cache, case.kv_c, case.k_pe):
        pytest.skip("bf16 is wrong in the interpreter")
    device, pages = target.device, case.tokens // case.page_size + 3
    cache, storage = make_cache(
        pages, case.page_size, case.rank + case.rope, case.cache, device, padded=case.padded, four_dims=case.four_dims
    )
    scale = None if case.scale is None else torch.tensor([case.scale], device=device)
    values = exact_fp8(case.tokens + 2, case.rank + case.rope) * (case.scale or 1.0)
    fused = torch.cat((values, values), dim=-1).to(device)  # rows wider than what is written, and two more of them
    kv_c = fused.to(case.kv_c)[:, : case.rank]
    k_pe = fused.to(case.k_pe)[:, case.rank : case.rank + case.rope]
    slots = place(case, pages)
    expected = expect_written(storage, cache, oracle.cache_rows(cache, kv_c, k_pe, slots, scale), case.cache)

    ops.mla_kv_cache_write(cache, kv_c, k_pe[:, None] if case.four_dims else k_pe, slots.to(device), k_scale=scale)
    assert torch.equal(bytes_of(storage), bytes_of(expected))


@pytest.mark.parametrize("scale", [None, 0.037, 1.0, 7.3])
@pytest.mark.parametrize("dtype", [BF16, FP16, FP32], ids=str)
def test_write_quantises(target, dtype, scale):
    """clamp(x / k_scale, ±448) by an fp32 division, to nearest even; NaN stays NaN, infinity saturates."""
    if target.name == "interpreter":
        pytest.skip("the interpreter rounds fp8 wrongly")
    values = torch.randn(64, 576) * torch.logspace(-5, 4, 64)[:, None] * (scale or 1.0)
    values[0, :6] = torch.tensor([math.nan, -math.nan, math.inf, -math.inf, 3e38, -3e38])
    values = values.to(target.device, dtype)
    k_scale = None if scale is None else torch.tensor(scale, device=target.device)
    cache, _ = make_cache(2, 64, 576, FP8, target.device)
    slots = torch.arange(64, device=target.device) + 32
    ops.mla_kv_cache_write(cache, values[:, :512], values[:, 512:], slots, k_scale=k_scale)
    rows = oracle.cache_rows(cache, values[:, :512], values[:, 512:], slots, k_scale)
    oracle.assert_same(cache.reshape(-1, 576)[32:96], oracle.to_fp8(torch.stack(list(rows.values()))))


@pytest.mark.parametrize("pair", [(BF16, FP16), (FP16, BF16), (FP32, BF16), (FP32, FP16)], ids=str)
def test_write_rounds_to_nearest(target, pair):
    """Source to cache dtype as torch converts: ties to even, overflow to infinity, NaN kept."""
    source, stored = pair
    if not target.supports(source, stored):
        pytest.skip("bf16 is wrong in the interpreter")
    values = (torch.randn(64, 80) * torch.logspace(-9, 6, 64)[:, None]).to(target.device, source)
    values[3, :3] = torch.tensor([math.nan, math.inf, -math.inf])
    cache, _ = make_cache(4, 16, 80, stored, target.device)
    ops.mla_kv_cache_write(cache, values[:, :64], values[:, 64:], torch.arange(64, device=target.device))
    oracle.assert_same(cache.reshape(64, 80), values.to(stored))


def test_write_of_nothing(target):
    cache, storage = make_cache(3, 4, 24, FP16, target.device)
    before = bytes_of(storage)
    rows = torch.ones(5, 24, dtype=FP16, device=target.device)
    for slots in (torch.empty(0, dtype=torch.int64), torch.full((5,), -1)):
        ops.mla_kv_cache_write(cache, rows[:, :16], rows[:, 16:], slots.to(target.device))
    assert torch.equal(bytes_of(storage), before)


def test_write_takes_strided_slots(target):
    cache, storage = make_cache(3, 4, 24, FP16, target.device)
    rows = torch.randn(5, 24).to(target.device, FP16)
    slots = torch.tensor([7, 9, -1, 9, 0, 9, 11, 9, 3])
    expected = expect_written(storage, cache, oracle.cache_rows(cache, rows[:, :16], rows[:, 16:], slots[::2]), FP16)
    ops.mla_kv_cache_write(cache, rows[:, :16], rows[:, 16:], slots.to(target.device)[::2])
    assert torch.equal(bytes_of(storage), bytes_of(expected))


def test_write_never_leaves_the_cache(target):
    """A stale slot past the cache has no defined result, but must not reach other memory."""
    if target.backend == "reference":
        pytest.skip("plain torch raises IndexError")
    cache, storage = make_cache(3, 4, 24, FP16, target.device)
    before = bytes_of(storage)
    rows = torch.ones(4, 24, dtype=FP16, device=target.device)
    slots = torch.tensor([12, 13, 15, 2**33], device=target.device)  # the storage has one page more than the cache
    ops.mla_kv_cache_write(cache, rows[:, :16], rows[:, 16:], slots)
    assert torch.equal(bytes_of(storage), before)


@dataclass(frozen=True)
class Gather:
    cache: torch.dtype = FP16
    dtype: torch.dtype | None = None
    lengths: tuple[int, ...] = (70, 0, 0, 3, 128, 1, 0)
    starts: tuple[int, ...] | None = None
    dim: int = 576
    page_size: int = 64
    scale: float | None = None
    spare: int = 5  # total_tokens beyond the last request; negative: the requests do not fit
    padded: bool = False
    four_dims: bool = False

    def __str__(self):
        kinds = "-".join(str(d).removeprefix("torch.") for d in (self.cache, self.dtype))
        extras = f"{'-starts' * bool(self.starts)}{'-padded' * self.padded}{'-4d' * self.four_dims}"
        return f"{kinds}-B{len(self.lengths)}-D{self.dim}-page{self.page_size}-{self.scale}-spare{self.spare}{extras}"


GATHERS = [
    Gather(),
    Gather(lengths=(33,), page_size=1, dim=64),
    Gather(lengths=(0, 0, 0), dim=96),
    Gather(lengths=(), dim=96),
    Gather(lengths=(0, 9), spare=0, dim=65, page_size=4, padded=True),
    Gather(lengths=(5, 17, 60), starts=(64, 3, 130), page_size=32, four_dims=True),
    Gather(lengths=(20, 30), spare=-13, dim=100, page_size=8, padded=True, four_dims=True),
    Gather(lengths=(1,) * 40, dim=72, page_size=2, starts=tuple(range(40))),
    Gather(FP32, FP32, dim=320, page_size=128, lengths=(130, 7)),
    Gather(FP32, FP16, dim=192, lengths=(40, 2)),
    Gather(FP16, FP32, dim=192, lengths=(40, 2), starts=(1, 0)),
    Gather(FP8, FP16, lengths=(40, 2, 64), starts=(7, 0, 64)),
    Gather(FP8, FP32, scale=0.037, dim=96, padded=True),
    Gather(FP8, FP16, scale=7.3, dim=576, lengths=(9, 0, 44), four_dims=True),
    Gather(FP8, FP8, padded=True, dim=576, lengths=(65, 1)),
    Gather(FP8, lengths=(20, 30), starts=(4, 40), dim=72, page_size=16),
    Gather(BF16, starts=(0, 5, 9, 1, 64, 64, 0)),
    Gather(BF16, FP32, dim=512),
    Gather(BF16, FP16, dim=80),
    Gather(FP8, BF16, scale=0.037, starts=(0, 5, 9, 1, 64, 64, 0)),
    Gather(FP8, BF16, dim=576, padded=True, four_dims=True),
]


@dataclass
class Paged:
    """Inputs of a gather: scattered pages; all other pages hold NaN, all other table entries stale or wild ids."""

    case: Gather
    device: str
    args: list = field(init=False)
    options: dict = field(init=False)

    def __post_init__(self):
        case, device = self.case, self.device
        starts = case.starts or (0,) * len(case.lengths)
        used = [math.ceil((start + length) / case.page_size) for start, length in zip(starts, case.lengths)]
        pages = sum(used) + 2
        cache, storage = make_cache(
            pages, case.page_size, case.dim, case.cache, "cpu", padded=case.padded, four_dims=case.four_dims
        )
        storage.fill_(math.nan)
        order = torch.randperm(pages)
        shape = len(used), max(used, default=0) + 2
        table = torch.tensor([-1, 2**31 - 1, pages, -(2**31), 0]).repeat(math.prod(shape))[: math.prod(shape)]
        table = table.reshape(shape).int()
        rows = cache.squeeze(1) if case.four_dims else cache
        for b, count in enumerate(used):
            mine, order = order[:count], order[count:]
            # Pages before the first token of the request are outside it too.
            first, end = starts[b], starts[b] + case.lengths[b]
            for position in range(first, end if case.lengths[b] else first):
                page = mine[position // case.page_size]
                table[b, position // case.page_size] = page
                rows[page, position % case.page_size] = exact_fp8(case.dim).to(case.cache)
        cum = torch.tensor([0, *case.lengths]).cumsum(0).int()
        # The cache keeps its strides on the device.
        storage = storage.to(device)
        cache = storage[:pages, : case.page_size, : case.dim]
        self.args = [cache[:, None] if case.four_dims else cache, table.to(device), cum.to(device)]
        self.total = max(0, int(cum[-1]) + case.spare)
        self.options = {
            "seq_starts": None if case.starts is None else torch.tensor(case.starts, dtype=torch.int32, device=device),
            "k_scale": None if case.scale is None else torch.tensor([[case.scale]], device=device),
        }

    def expected(self):
        case = self.case
        cache, table, cum = self.args
        table = torch.where((table < 0) | (table >= cache.shape[0]), 0, table)  # only for the oracle's indexing
        rows = oracle.gather(cache, table, cum, self.total, **self.options)
        return rows.float().to(case.dtype or case.cache)


@pytest.mark.parametrize("case", GATHERS, ids=str)
def test_gather(target, case):
    if not target.supports(case.cache, case.dtype):
        pytest.skip("bf16 is wrong in the interpreter")
    paged = Paged(case, target.device)
    expected = paged.expected()
    result = ops.mla_kv_cache_gather(*paged.args, paged.total, **paged.options, dtype=case.dtype)
    oracle.assert_same(result, expected)

    # Into a poisoned buffer with memory behind it that must stay.
    buffer = torch.full((paged.total + 40, case.dim), math.nan, device=target.device).to(result.dtype)
    behind = buffer[paged.total :].clone()
    ops.mla_kv_cache_gather.out(*paged.args, paged.total, **paged.options, dtype=case.dtype, out=buffer[: paged.total])
    oracle.assert_same(buffer[: paged.total], expected)
    assert torch.equal(bytes_of(buffer[paged.total :]), bytes_of(behind))


def test_gather_copies_every_code(target):
    """FP8 to FP8 moves bytes: NaN codes and -0 included."""
    codes = torch.arange(256, dtype=torch.uint8).repeat(8, 1).reshape(4, 4, 128).to(target.device)
    table = torch.tensor([[3, 1], [0, 2]], dtype=torch.int32, device=target.device)
    cum = torch.tensor([0, 8, 16], dtype=torch.int32, device=target.device)
    rows = ops.mla_kv_cache_gather(codes.view(FP8), table, cum, 16)
    assert torch.equal(rows.view(torch.uint8), codes[[3, 1, 0, 2]].reshape(16, 128))


@pytest.mark.parametrize("dtype", [BF16, FP16, FP32], ids=str)
def test_gather_dequantises_every_code(target, dtype):
    if target.name == "interpreter":
        pytest.skip("the interpreter reads the NaN codes of fp8 as 480")
    codes = torch.arange(256, dtype=torch.uint8).reshape(1, 2, 128).view(FP8).to(target.device)
    table = torch.zeros(1, 1, dtype=torch.int32, device=target.device)
    cum = torch.tensor([0, 2], dtype=torch.int32, device=target.device)
    for scale in (None, 0.037, 7.3):
        k_scale = None if scale is None else torch.tensor(scale, device=target.device)
        expected = codes.reshape(2, 128).float() * (1.0 if k_scale is None else k_scale)
        result = ops.mla_kv_cache_gather(codes, table, cum, 2, k_scale=k_scale, dtype=dtype)
        oracle.assert_same(result, expected.to(dtype))


def test_padding_is_zero_whatever_the_scale(target):
    cache, _ = make_cache(2, 4, 32, FP8, target.device)
    table = torch.zeros(1, 1, dtype=torch.int32, device=target.device)
    cum = torch.tensor([0, 0], dtype=torch.int32, device=target.device)
    for scale in (math.nan, math.inf):
        k_scale = torch.tensor(scale, device=target.device)
        rows = ops.mla_kv_cache_gather(cache, table, cum, 6, k_scale=k_scale, dtype=FP32)
        assert (rows == 0).all()


def test_gather_from_nothing(target):
    """No requests, no pages in the table, no pages in the cache, no tokens."""
    device = target.device
    for batch, max_pages, pages, total in ((0, 0, 0, 7), (0, 3, 2, 7), (2, 0, 2, 7), (2, 3, 0, 7), (2, 3, 2, 0)):
        cache = torch.full((pages, 4, 48), math.nan, dtype=FP16, device=device)
        table = torch.full((batch, max_pages), -1, dtype=torch.int32, device=device)
        cum = torch.zeros(batch + 1, dtype=torch.int32, device=device)
        rows = ops.mla_kv_cache_gather(cache, table, cum, total)
        assert rows.shape == (total, 48) and (rows == 0).all()


def test_gather_takes_strided_metadata(target):
    paged = Paged(Gather(lengths=(9, 0, 20), starts=(1, 0, 3), dim=96, page_size=8), target.device)
    expected = paged.expected()
    cache, table, cum = paged.args
    table = table.T.contiguous().T
    cum = torch.stack((cum, cum + 1000), dim=1)[:, 0]
    starts = torch.stack((paged.options["seq_starts"],) * 2, dim=1)[:, 1]
    oracle.assert_same(ops.mla_kv_cache_gather(cache, table, cum, paged.total, seq_starts=starts), expected)


def test_what_is_written_is_gathered(target):
    cache, _ = make_cache(6, 16, 576, FP16, target.device)
    rows = torch.randn(50, 576).to(target.device, FP16)
    table = torch.tensor([[5, 2, 0], [1, 4, 3]], dtype=torch.int32, device=target.device)
    cum = torch.tensor([0, 41, 50], dtype=torch.int32, device=target.device)
    request = (torch.arange(50) >= 41).long()
    position = torch.arange(50) - 41 * request
    slots = table.cpu()[request, position // 16].long() * 16 + position % 16
    ops.mla_kv_cache_write(cache, rows[:, :512], rows[:, 512:], slots.to(target.device))
    assert torch.equal(ops.mla_kv_cache_gather(cache, table, cum, 50), rows)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [FP8, BF16], ids=str)
def test_past_2_31_elements_on_gpu(dtype):
    """A cache of over 4 GiB; requests on its first pages, on those around element 2^31, and on its last."""
    page_size, dim = 64, 576
    pages = 2**32 // (page_size * dim) + 100
    cache = torch.zeros(pages, page_size, dim, dtype=torch.uint8, device="cuda").view(FP8) if dtype == FP8 else (
        torch.zeros(pages, page_size, dim, dtype=dtype, device="cuda")
    )  # fmt: skip
    edge = 2**31 // (page_size * dim)
    ids = torch.tensor([[0, pages - 1], [edge - 1, edge], [edge + 1, 2 * edge + 1], [pages - 2, 1]], dtype=torch.int32)
    lengths = torch.tensor([0, 128, 100, 128, 65])
    cum = lengths.cumsum(0).int()
    tokens = int(cum[-1])
    request = torch.repeat_interleave(torch.arange(4), lengths[1:])
    position = torch.arange(tokens) - cum[request]
    slots = ids[request, position // page_size].long() * page_size + position % page_size
    rows = exact_fp8(tokens, dim).cuda().to(BF16)
    ops.mla_kv_cache_write(cache, rows[:, :512], rows[:, 512:], slots.cuda())
    gathered = ops.mla_kv_cache_gather(cache, ids.cuda(), cum.cuda(), tokens + 7, dtype=BF16)
    assert torch.equal(gathered[:tokens], rows) and (gathered[tokens:] == 0).all()
    per_page = torch.stack([part.view(torch.uint8).count_nonzero() for part in cache.split(4096)]).sum()
    assert per_page == rows.to(dtype).view(torch.uint8).count_nonzero(), "bytes outside the slots were written"


@pytest.mark.gpu
def test_gather_past_2_31_result_elements_on_gpu():
    """A few pages gathered over and over into a result of over 2^31 elements."""
    page_size, dim, requests, max_pages = 64, 576, 500, 128
    cache = torch.randn(64, page_size, dim, device="cuda").to(BF16)
    table = torch.randint(0, 64, (requests, max_pages), dtype=torch.int32, device="cuda")
    lengths = torch.full((requests,), page_size * max_pages, device="cuda")
    lengths[3], lengths[7] = 0, 1
    cum = torch.cat((lengths.new_zeros(1), lengths.cumsum(0))).int()
    total = int(cum[-1]) + 100
    assert total * dim > 2**31
    rows = ops.mla_kv_cache_gather(cache, table, cum, total)
    for request in (0, 2, 3, 7, 8, requests - 2, requests - 1):
        first, end = cum[request], cum[request + 1]
        assert torch.equal(rows[first:end], cache[table[request].long()].reshape(-1, dim)[: end - first])
    assert (rows[-100:] == 0).all()
