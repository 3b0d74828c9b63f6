"""The split plan of the decode kernels, made on the device by each block for itself from the live lengths.

A worker is a block of every row tile with the same number: they read the same keys at the same time. The keys of a
request are cut into tiles of `TILE`; a request without keys counts as one tile, for someone has to write its rows.
Two plans:

- even: each request in the same number of pieces, a worker a piece, or whole requests, the same number a worker. Taken
  where it is nearly as good as the other, because nothing, or little, is left to combine.
- in a row: the tiles of all requests one after the other, cut into ranges of the same length, a worker a range.

A piece that is not a whole request leaves its partial result in a slot of the worker: 1 if it is the request's first
piece, else 0. So a worker needs two slots, and a request's pieces are in the slots 1 of `first`, 0 of `first` + 1 to
`last`. `records` says so to combine.py.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

TILE = gl.constexpr(64)
RANK = gl.constexpr(512)  # columns of a cache row: latents,
ROPE = gl.constexpr(64)  # and rope
HALF = gl.constexpr(256)  # columns of a sum of products
CHUNK = gl.constexpr(64)  # requests looked at together
SLACK = gl.constexpr(16)  # the even plan may take a sixteenth longer than the other, and three tiles
MIN_TILES = gl.constexpr(2)  # a smaller piece costs more in the combine than it saves
UNLIMITED = gl.constexpr(1 << 30)
# Arguments of the decode kernels whose values and alignment do not choose what is compiled.
UNSPECIALIZED = [
    "block_tables", "seq_lens", "lse", "wants_lse", "partial_lse", "records", "scale_log2", "output_scale", "batch",
    "q_len", "heads", "page_rows", "capacity", "window", "causal", "stride_table", "stride_lens",
]  # fmt: skip


@gluon.jit
def key_tiles(length, q_len, window):
    """(first, end) tile that some row of a request of `length` keys sees."""
    low = gl.where(window >= 0, gl.maximum(length - q_len - window, 0), 0)
    return low // TILE, (length + TILE - 1) // TILE


@gluon.jit
def ask_for(pointer):
    """Of memory: to be in L2 soon."""
    gl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [pointer], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def live_length(seq_lens, stride, request, capacity):
    return gl.minimum(gl.maximum(gl.load(seq_lens + request * stride), 0), capacity)


@gluon.jit
def _add(a, b):
    return a + b


@gluon.jit
def _units(first_request, seq_lens, stride, batch, capacity, q_len, window, WARPS: gl.constexpr):
    """Tiles to be shared out of CHUNK requests; 0 past the batch."""
    # Every warp holds all of the chunk: sums and scans then need no shared memory.
    layout: gl.constexpr = gl.BlockedLayout([CHUNK // 32], [32], [WARPS], [0])
    request = first_request + gl.arange(0, CHUNK, layout=layout)
    there = request < batch
    length = gl.load(seq_lens + request * stride, mask=there, other=0)
    first, end = key_tiles(gl.minimum(gl.maximum(length, 0), capacity), q_len, window)
    return gl.where(there, gl.maximum(end - first, 1), 0), there


@gluon.jit
def make_plan(worker, workers, seq_lens, stride, batch, capacity, q_len, window, WARPS: gl.constexpr):
    """(first request, end request, begin, quota) of a worker: `quota` tiles, from tile `begin` of its first request."""
    total = batch * 0
    most = batch * 0
    for first in range(0, batch, CHUNK):
        units, _ = _units(first, seq_lens, stride, batch, capacity, q_len, window, WARPS)
        total += gl.sum(units, axis=0)
        most = gl.maximum(most, gl.max(units, axis=0))
    quota = gl.maximum((total + workers - 1) // workers, MIN_TILES)
    pieces = gl.maximum(gl.minimum(workers // batch, most // MIN_TILES), 1)
    whole = (batch + workers - 1) // workers

    first_request = batch
    end_request = batch
    begin = batch * 0
    if whole * most <= (quota + quota // SLACK + 3) * pieces:
        if whole == 1:
            request = worker // pieces
            if request < batch:
                first, end = key_tiles(live_length(seq_lens, stride, request, capacity), q_len, window)
                units = gl.maximum(end - first, 1)
                quota = (units + pieces - 1) // pieces
                begin = worker % pieces * quota
                if begin < units:
                    first_request = request
                    end_request = request + 1
        else:
            quota = batch * 0 + UNLIMITED
            first_request = gl.minimum(worker * whole, batch)
            end_request = gl.minimum(first_request + whole, batch)
    else:
        start = worker * quota
        first_request = batch * 0
        end_request = batch * 0
        before = batch * 0
        done = batch * 0
        for first in range(0, batch, CHUNK):
            units, there = _units(first, seq_lens, stride, batch, capacity, q_len, window, WARPS)
            ends = before + gl.associative_scan(units, 0, _add)
            past = there & (ends <= start)
            first_request += gl.sum(past.to(gl.int32), axis=0)
            done += gl.sum(gl.where(past, units, 0), axis=0)
            end_request += gl.sum((there & (ends - units < start + quota)).to(gl.int32), axis=0)
            before += gl.sum(units, axis=0)
        begin = start - done
    return first_request, end_request, begin, quota


@gluon.jit
def ask_for_page(plan, block_tables, stride, batch, capacity, PAGE: gl.constexpr):
    """For the id of a worker's first page, if it has one and no window hides it."""
    if (plan[0] < batch) & (capacity > 0):
        page = gl.minimum(plan[2] * TILE, capacity - 1) // PAGE
        ask_for(block_tables + plan[0].to(gl.int64) * stride + page)


@gluon.jit
def piece(request, offset, quota, seq_lens, stride, capacity, q_len, window):
    """The part in one request of a worker's range, which begins `offset` tiles after the request, or before it if < 0.

    -> (length, first, low, high, units): keys of the request, its first tile, the piece [low, high) of its tiles
    counted from there, and how many tiles it counts for: `offset - units` is the next request's offset.

    Walk the requests with `while`: in a `for` loop of a worker partition, Triton 3.6 and 3.7 lose the change of a
    carried integer, here the offset.
    """
    length = live_length(seq_lens, stride, request, capacity)
    first, stop = key_tiles(length, q_len, window)
    units = gl.maximum(stop - first, 1)
    low = gl.maximum(offset, 0)
    high = gl.minimum(offset + quota, stop - first)
    return length, first, low, high, units


@gluon.jit
def last_worker(worker, units, offset, quota):
    """The last of the workers that hold the request of this worker's piece."""
    return worker + (units - 1 - offset) // quota


@gluon.jit
def is_whole(worker, begin_tile, units, offset, quota):
    """Whether this worker's piece is its request."""
    return (begin_tile == 0) & (last_worker(worker, units, offset, quota) == worker)


@gluon.jit
def first_slot_row(worker, begin_tile, row_tile, row_tiles, ROWS: gl.constexpr):
    """Of the scratch that the piece of a worker and a row tile has."""
    slot = 2 * worker + gl.where(begin_tile == 0, 1, 0)
    return (slot * row_tiles + row_tile) * ROWS


@gluon.jit
def start_records(records, batch, workers, worker, row_tile):
    """A worker has a record of its own where there are more requests; until it splits one, of no request."""
    if (batch > workers) & (row_tile == 0):
        _record(records, worker, -1, worker, worker)


@gluon.jit
def record_piece(records, batch, workers, request, worker, begin_tile, units, offset, quota, row_tile):
    """Tell combine.py which workers hold a request, once, by the one with its first piece."""
    if (begin_tile == 0) & (row_tile == 0):
        last = last_worker(worker, units, offset, quota)
        if batch <= workers:
            _record(records, request, request, worker, last)
        elif last > worker:
            _record(records, worker, request, worker, last)


@gluon.jit
def _record(records, index, request, first, last):
    gl.store(records + index * 3, request)
    gl.store(records + index * 3 + 1, first)
    gl.store(records + index * 3 + 2, last)
