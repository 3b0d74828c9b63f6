"""Checking, timing and reporting the contenders of a case, for `kernels.py`.

Times are the GPU's: each call is captured in a CUDA graph, so that the host's work is left out, and each replay stands
between two events, after a write of a buffer larger than the L2 cache, so that it starts cold. The contenders of a case
take turns, and turns at being first, so that clocks and temperature are the same for all; a ratio compares medians of
one run. A call that cannot be captured is timed as it is and marked "eager": its host time counts where the GPU waits.
"""

import csv
import functools
import textwrap
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import torch
from peers import BF16, FORK, FP8, Peer, first_line, published_fork
from torch import Tensor
from ts_ops.meta.call import PROBLEMS

import ts_ops
from ts_ops import dispatch

DTYPE_NAMES = {"bf16": BF16, "fp8": FP8}
NAME_OF = {dtype: name for name, dtype in DTYPE_NAMES.items()}
FP8_WEIGHTS = "hopper-fp8-weights"  # the backend `hopper` under `ts_ops.allow_fp8_weights`
WARM_UPS = 2


@dataclass(frozen=True)
class Timing:
    """Microseconds: median, 10th and 90th percentile."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, microseconds: list[float]) -> "Timing":
        ordered = sorted(microseconds)
        return cls(*(ordered[round(share * (len(ordered) - 1))] for share in (0.5, 0.1, 0.9)))


@dataclass(frozen=True)
class Prepared:
    """A call ready to be timed, the tensors that it fills, and how it runs: "graph" or "eager".

    `call` holds what a graph reads: a peer's workspace and schedule.
    """

    call: Callable[[], object]
    run: Callable[[], object]
    result: Tensor | tuple[Tensor, ...]
    how: str


class Stopwatch:
    def __init__(self, device: torch.device):
        self.device = device
        self.on_gpu = device.type == "cuda"
        if self.on_gpu:
            l2 = torch.cuda.get_device_properties(device).L2_cache_size
            self.flushed = torch.empty(max(2 * l2, 256 << 20), dtype=torch.uint8, device=device)

    def prepare(self, call: Callable[[], object]) -> Prepared:
        """Run `call` (which compiles it), capture it, and fill its results with NaN before the replay that is checked.

        What a replay leaves unwritten then shows up as NaN.
        """
        result = call()
        if not self.on_gpu:
            return Prepared(call, call, result, "eager")
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph):
                result = call()
        except Exception:  # a call that synchronises, say; if it fails outside a capture too, the caller learns why
            torch.cuda.synchronize()
            return Prepared(call, call, call(), "eager")
        for tensor in tensors(result):
            tensor.view(torch.uint8).fill_(0xFF)
        graph.replay()
        torch.cuda.synchronize()
        return Prepared(call, graph.replay, result, "graph")

    def interleaved(self, calls: dict, repeats: int) -> dict:
        """Timing of each call, by its key."""
        order = list(calls)
        spans = {key: [] for key in order}
        for key in order * WARM_UPS:
            self._span(calls[key])
        for _ in range(repeats):
            order = order[1:] + order[:1]
            for key in order:
                spans[key].append(self._span(calls[key]))
        if self.on_gpu:
            torch.cuda.synchronize()
            spans = {key: [start.elapsed_time(end) * 1e3 for start, end in pairs] for key, pairs in spans.items()}
        return {key: Timing.of(values) for key, values in spans.items()}

    def _span(self, call: Callable[[], object]):
        """A pair of events around one cold call, or its microseconds on a CPU."""
        if not self.on_gpu:
            start = time.perf_counter()
            call()
            return (time.perf_counter() - start) * 1e6
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self.flushed.zero_()  # long enough for the host to enqueue what follows
        start.record()
        call()
        end.record()
        return start, end


@dataclass(frozen=True)
class Ceilings:
    """What this device does at most: bytes/s of a copy, both ways; FLOP/s of a matrix product by dtype."""

    bandwidth: float
    rates: dict[torch.dtype, float]

    @classmethod
    def measured(cls, stopwatch: Stopwatch, repeats: int) -> "Ceilings":
        device, on_gpu = stopwatch.device, stopwatch.on_gpu
        source = torch.randn(1 << (29 if on_gpu else 16), device=device)
        target = torch.empty_like(source)
        size = 8192 if on_gpu else 128
        a, b = (torch.randn(size, size, device=device, dtype=BF16) for _ in "ab")
        calls = {"copy": lambda: target.copy_(source), BF16: lambda: a @ b}
        if on_gpu and torch.cuda.get_device_capability(device) >= (8, 9):  # without FP8 units its floors count bytes
            a8, b8, one = a.to(FP8), b.to(FP8).T, torch.ones((), device=device)
            calls[FP8] = lambda: torch._scaled_mm(a8, b8, one, one, out_dtype=BF16, use_fast_accum=True)
        seconds = {key: timing.median / 1e6 for key, timing in stopwatch.interleaved(calls, repeats).items()}
        bandwidth = 2 * source.nbytes / seconds.pop("copy")
        return cls(bandwidth, {dtype: 2 * size**3 / second for dtype, second in seconds.items()})

    def floors(self, size: int, flops: int, dtype: torch.dtype) -> tuple[float, float]:
        """Microseconds that moving `size` bytes and doing `flops` operations take at least."""
        return size / self.bandwidth * 1e6, flops / self.rates.get(dtype, float("inf")) * 1e6

    def __str__(self) -> str:
        products = "".join(f", {NAME_OF[d]} matrix product {rate / 1e12:.4g} TFLOP/s" for d, rate in self.rates.items())
        return f"copy {self.bandwidth / 1e12:.3g} TB/s{products}"


def tensors(result: Tensor | tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return (result,) if isinstance(result, Tensor) else result


def all_finite(result: Tensor | tuple[Tensor, ...]) -> bool:
    return all(bool((x.to(BF16) if x.dtype == FP8 else x).isfinite().all()) for x in tensors(result))


def errors(actual: Tensor, expected: Tensor) -> tuple[float, float]:
    """||actual - expected|| / ||expected||, of the whole and largest over rows (the last dimension)."""
    difference = actual.double() - expected
    whole = difference.norm() / expected.norm()
    rows = difference.norm(dim=-1) / expected.norm(dim=-1)
    return whole.item(), rows.max().item()


@dataclass
class Row:
    """One contender in one case. What was not measured is None; `note` then says why."""

    operator: str
    case: str
    dtype: str
    contender: str
    ours: bool
    how: str = ""  # graph, eager or published
    median_us: float | None = None
    p10_us: float | None = None
    p90_us: float | None = None
    bytes_floor_us: float | None = None
    flops_floor_us: float | None = None
    tb_per_s: float | None = None
    tflop_per_s: float | None = None
    error: float | None = None
    worst_row_error: float | None = None
    ratio: float | None = None  # our time over that of `against`, the fastest peer
    against: str = ""
    note: str = ""
    failed: bool = False  # a call of ours raised or gave a wrong result

    @property
    def floor_us(self) -> float:
        return max(self.bytes_floor_us, self.flops_floor_us)


class Declined(Exception):
    """A backend does not serve the problem."""


def our_call(case, inputs, backend: str | None) -> tuple[Callable, str]:
    """A call through one backend, and the contender's name; Declined with the reason where it does not serve."""
    operator, args, options = case.arguments(inputs)
    problem, function = PROBLEMS[operator](*args, **options), getattr(ts_ops, operator)
    fp8_weights = backend == FP8_WEIGHTS
    if fp8_weights and (operator != "mla_decode" or inputs.query.dtype != FP8):
        raise Declined("only decode in FP8 has weights in FP8")
    name = "hopper" if fp8_weights else backend or dispatch.choice(operator, problem)
    if name is None:
        reasons = dispatch.why_not(operator, problem)
        raise Declined("; ".join(f"{other}: {reason}" for other, reason in reasons.items() if reason))
    if reason := dispatch.objection(name, operator, problem):
        raise Declined(reason)

    def call():
        with ts_ops.use_backend(name), ts_ops.allow_fp8_weights(fp8_weights):
            result = function(*args, **options)
        return inputs.cache if result is None else result

    return call, backend if fp8_weights else name


def run_case(
    case, dtypes: list[torch.dtype], backends: list[str] | None, peers: list[Peer], stopwatch: Stopwatch,
    ceilings: Ceilings, repeats: int,
) -> list[Row]:  # fmt: skip
    """Check all contenders, then time in turns those that passed.

    A sample is compared with float64, and all of the result must be finite. A peer runs in those of `dtypes` that it
    has, or else in bf16.
    """
    inputs_of = functools.cache(lambda dtype: case.inputs(dtype, stopwatch.device))
    expected_of = functools.cache(lambda dtype: case.expected(inputs_of(dtype)))
    rows, prepared = [], {}
    for dtype in (BF16, FP8):
        contenders: list = (backends or [None]) if dtype in dtypes and dtype in case.dtypes else []
        contenders = contenders + [p for p in peers if dtype in ([d for d in dtypes if d in p.dtypes] or [BF16])]
        for contender in contenders:
            row = Row(case.operator, case.label, NAME_OF[dtype], "ts_ops", not isinstance(contender, Peer))
            try:
                inputs = inputs_of(dtype)
                if row.ours:
                    row.contender += f" {contender or ''}".rstrip()
                    call, name = our_call(case, inputs, contender)
                    row.contender = f"ts_ops {name}"
                else:
                    row.contender = contender.name
                    call = contender.prepare(case, inputs)
                ready = stopwatch.prepare(call)
                row.how = ready.how
                row.error, row.worst_row_error = errors(case.sample(inputs, ready.result), expected_of(dtype))
                if row.error <= case.tolerance[dtype] and all_finite(ready.result):
                    prepared[len(rows)] = ready
                else:
                    row.note = f"wrong, so not timed: error {row.error:.1e}, or a value that is not finite"
                    row.failed = row.ours
            except Declined as declined:
                row.note = f"declines: {declined}"
            except Exception as error:
                row.note, row.failed = first_line(error), row.ours
            rows.append(row)
    timings = stopwatch.interleaved({place: ready.run for place, ready in prepared.items()}, repeats)
    for place, timing in timings.items():
        rows[place].median_us, rows[place].p10_us, rows[place].p90_us = timing.median, timing.low, timing.high
    if FP8 in dtypes and FP8 in case.dtypes:
        rows += fork_row(case, rows)
    for row in rows:
        if row.median_us is not None:
            dtype = DTYPE_NAMES[row.dtype]
            size, flops = case.work(inputs_of(dtype))
            row.bytes_floor_us, row.flops_floor_us = ceilings.floors(size, flops, dtype)
            row.tb_per_s, row.tflop_per_s = size / row.median_us / 1e6, flops / row.median_us / 1e6
            compare(row, rows)
    return rows


def fork_row(case, rows: list[Row]) -> list[Row]:
    """The published peer in FP8, where a bf16 peer that ran now relates its figure to this machine."""
    now = {row.contender: row.median_us for row in rows if not row.ours and row.median_us and row.dtype == "bf16"}
    if figure := published_fork(case, now):
        time, note = figure
        return [Row(case.operator, case.label, "fp8", FORK, False, how="published", median_us=time, note=note)]
    return []


def compare(row: Row, rows: list[Row]) -> None:
    """The ratio to the fastest peer of the row's dtype; where there is none, of bf16."""
    peers = [other for other in rows if not other.ours and other.median_us]
    rivals = [peer for peer in peers if peer.dtype == row.dtype] or peers
    if row.ours and rivals:
        best = min(rivals, key=lambda peer: peer.median_us)
        row.ratio, row.against = row.median_us / best.median_us, f"{best.contender} {best.dtype}"


TABLE_HEAD = (
    f"{'case':30}{'dtype':6}{'contender':26}{'how':10}{'µs':>9}{'p10':>9}{'p90':>9}{'floor':>9} {'by':6}{'share':>6}"
    f"{'TB/s':>6}{'TFLOP/s':>8}{'error':>9}{'worst':>9}{'ratio':>7}  against, notes"
)


def table_line(row: Row) -> str:
    def cell(value: float | None, form: str, width: int) -> str:
        return f"{'' if value is None else format(value, form):>{width}}"

    line = f"{row.case:30}{row.dtype:6}{row.contender:26}"
    if row.median_us is None:
        return line + row.note
    by = "bytes" if row.bytes_floor_us >= row.flops_floor_us else "FLOPs"
    line += f"{row.how:10}{row.median_us:9.1f}{cell(row.p10_us, '.1f', 9)}{cell(row.p90_us, '.1f', 9)}"
    line += f"{row.floor_us:9.1f} {by:6}{row.floor_us / row.median_us:6.0%}{row.tb_per_s:6.2f}{row.tflop_per_s:8.0f}"
    line += cell(row.error, ".1e", 9) + cell(row.worst_row_error, ".1e", 9) + cell(row.ratio, ".2f", 7)
    return f"{line}  {'; '.join(filter(None, (row.against, row.note)))}".rstrip()


class CsvFile:
    """The rows in a file that is complete after each of them, so that a run that is cut short leaves what it has."""

    def __init__(self, path: str):
        self.file = open(path, "w", newline="")
        self.writer = csv.DictWriter(self.file, [f.name for f in fields(Row)])
        self.writer.writeheader()

    def write(self, rows: list[Row]) -> None:
        self.writer.writerows(asdict(row) for row in rows)
        self.file.flush()

    def close(self) -> None:
        self.file.close()


def plot(rows: list[Row], folder: str, title: str) -> list[Path]:
    """One PNG an operator: times beside the two floors, and the ratios to the fastest peer where there is one."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    written = []
    Path(folder).mkdir(parents=True, exist_ok=True)
    for operator in dict.fromkeys(row.operator for row in rows):
        timed = [row for row in rows if row.operator == operator and row.median_us is not None]
        if not timed:
            continue
        places, labels = _places(timed)
        colours = _colours(timed)
        panels = 2 if any(row.ratio is not None for row in timed) else 1
        figure = Figure(figsize=(5.5 * panels + 1, 2 + 0.2 * places[-1]), layout="constrained")
        FigureCanvasAgg(figure)
        axes = figure.subplots(1, panels, sharey=True, squeeze=False)[0]
        _plot_times(axes[0], timed, places, colours)
        if panels == 2:
            _plot_ratios(axes[1], timed, places, colours)
        axes[0].set_yticks(list(labels), labels.values())
        axes[0].set_ylim(places[-1] + 0.8, -0.8)
        for panel in axes:
            panel.tick_params(labelsize=7)
        figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=4, fontsize=7)
        figure.suptitle(textwrap.fill(f"{operator}: {title}", 75 * panels), fontsize=8)
        written.append(Path(folder) / f"{operator}.png")
        figure.savefig(written[-1], dpi=130)
    return written


def _places(rows: list[Row]) -> tuple[list[float], dict[float, str]]:
    """Where each bar stands, with a gap between cases, and the name of a case at the middle of its bars."""
    places, groups = [], {}
    for row in rows:
        name = f"{row.case} {row.dtype}"
        places.append(len(places) + 0.8 * len(groups.keys() - {name}))
        groups.setdefault(name, []).append(places[-1])
    return places, {(group[0] + group[-1]) / 2: name for name, group in groups.items()}


def _colours(rows: list[Row]) -> dict[str, str]:
    """Ours in blues, peers in other colours, the same in every case."""
    ours = list(dict.fromkeys(row.contender for row in rows if row.ours))
    peers = list(dict.fromkeys(row.contender for row in rows if not row.ours))
    blues, others = ("#1f4e9c", "#5b9bd5", "#9dc3e6"), ("#c55a11", "#7f7f7f", "#f4b183")
    return dict(zip(ours, blues)) | dict(zip(peers, others))


def _plot_times(axes, rows: list[Row], places: list[float], colours: dict[str, str]) -> None:
    for contender, colour in colours.items():
        bars = [(place, row) for place, row in zip(places, rows) if row.contender == contender]
        label = contender + " (published, scaled)" * (bars[0][1].how == "published")
        axes.barh([place for place, _ in bars], [row.median_us for _, row in bars], 0.85, color=colour, label=label)
    for place, row in zip(places, rows):
        if row.p10_us is not None:
            axes.hlines(place, row.p10_us, row.p90_us, color="black", linewidth=0.8)
    for name, style in (("bytes", "-"), ("FLOPs", ":")):
        floors = [getattr(row, f"{name.lower()}_floor_us") for row in rows]
        known = [(place, floor) for place, floor in zip(places, floors) if floor > 0]
        axes.vlines(
            [floor for _, floor in known], [place - 0.5 for place, _ in known], [place + 0.5 for place, _ in known],
            color="black", linestyle=style, label=f"floor of {name}",
        )  # fmt: skip
    axes.set_xscale("log")
    axes.set_xlabel("microseconds a call, L2 cold: median, 10th to 90th percentile", fontsize=8)


def _plot_ratios(axes, rows: list[Row], places: list[float], colours: dict[str, str]) -> None:
    ratios = [row.ratio or 0.0 for row in rows]
    axes.barh(places, ratios, 0.85, color=[colours[row.contender] for row in rows])
    for place, row in zip(places, rows):
        if row.ratio is not None:
            axes.text(row.ratio, place, f" {row.ratio:.2f} x {row.against}", va="center", fontsize=6)
    axes.axvline(1.0, color="black", linewidth=0.8)
    axes.set_xlim(0, 1.5 * max(1.0, *ratios))
    axes.set_xlabel("our time / the fastest peer's (below 1 ours is faster)", fontsize=8)
