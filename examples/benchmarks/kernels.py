"""Time the operators beside their peers and this machine's ceilings, in one process.

    python examples/benchmarks/kernels.py [--operators decode prefill merge cache] [--dtypes bf16 fp8]
        [--cases headline|full] [--backends triton ...] [--csv FILE] [--plots FOLDER] [--time-limit SECONDS]

Every result is checked against float64 before it is timed; `cases.py` has the problems, `measure.py` says how times are
taken, `peers.py` what runs beside ours. Without --backends the backend that serves such calls anyway is timed;
hopper-fp8-weights is Hopper's under `ts_ops.allow_fp8_weights`, for decode in FP8. Columns
of the table: microseconds (median, 10th and 90th percentile); the larger of the floors that bytes and FLOPs set, by the
copy and the matrix products measured at the start, and its share in the time; the error ||out - ref|| / ||ref||, of all
that was checked and of the worst row; the ratio of our time to that of the fastest peer of the same dtype. A peer that
has no kernel for the dtypes asked for runs in bf16. Nothing here changes the clocks; --device cpu runs tiny cases to
prove the path.
"""

import argparse
import importlib.util
import sys
import time
from pathlib import Path

import torch
from cases import PRESETS
from measure import DTYPE_NAMES, FP8_WEIGHTS, TABLE_HEAD, Ceilings, CsvFile, Stopwatch, plot, run_case, table_line
from peers import PEERS, Peer

from ts_ops import dispatch


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--operators", nargs="+", choices=PEERS, default=list(PEERS), help="default: all")
    parser.add_argument("--dtypes", nargs="+", choices=DTYPE_NAMES, default=list(DTYPE_NAMES), help="default: both")
    parser.add_argument("--cases", choices=PRESETS, help="default: headline, on a CPU tiny")
    backends = *dispatch.BACKENDS, FP8_WEIGHTS
    parser.add_argument("--backends", nargs="+", choices=backends, help="of ours, to force and compare")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--repeats", type=int, default=15, help="timed runs of each contender (default: 15)")
    parser.add_argument("--time-limit", type=float, metavar="SECONDS", help="start no case after this time")
    parser.add_argument("--csv", metavar="FILE", help="write all rows to this file")
    parser.add_argument("--plots", metavar="FOLDER", help="write a PNG for each operator to this folder")
    options = parser.parse_args(arguments)
    on_gpu = options.device == "cuda"
    options.cases = options.cases or ("headline" if on_gpu else "tiny")
    if options.repeats < 1:
        parser.error(f"argument --repeats: must be at least 1, got {options.repeats}")
    if options.time_limit is not None and options.time_limit <= 0:
        parser.error(f"argument --time-limit: must be above 0, got {options.time_limit:g}")
    if options.csv and not Path(options.csv).absolute().parent.is_dir():
        parser.error(f"argument --csv: no folder {Path(options.csv).absolute().parent}")
    if on_gpu and not torch.cuda.is_available():
        parser.error("no NVIDIA GPU here: --device cpu runs tiny cases")
    if not on_gpu and options.cases != "tiny":
        parser.error(f"argument --cases: {options.cases} needs an NVIDIA GPU, got --device cpu")
    if options.plots and importlib.util.find_spec("matplotlib") is None:
        parser.error("argument --plots: matplotlib is not installed: pip install matplotlib")
    return options


@torch.no_grad()
def main(arguments: list[str] | None = None) -> int:
    """0, or 1 where a call of ours failed or gave a wrong result."""
    started = time.monotonic()
    options = parse(arguments)
    torch.manual_seed(0)
    device = torch.device(options.device)
    dtypes = [DTYPE_NAMES[name] for name in options.dtypes]
    stopwatch = Stopwatch(device)
    ceilings = Ceilings.measured(stopwatch, options.repeats)
    where = torch.cuda.get_device_name(device) if stopwatch.on_gpu else "CPU"
    title = f"{where}, torch {torch.__version__}; measured ceilings: {ceilings}"
    print(title)
    peers = {operator: available_peers(operator, device) for operator in options.operators}
    csv_file = CsvFile(options.csv) if options.csv else None
    cases = [case for case in PRESETS[options.cases] if case.operator in options.operators]
    rows, not_run = [], []
    for case in cases:
        if not set(case.dtypes) & set(dtypes):
            print(f"{case.operator} {case.label}: has no {' or '.join(options.dtypes)}")
            continue
        if options.time_limit and time.monotonic() - started > options.time_limit:
            not_run.append(f"{case.operator} {case.label}")
            continue
        if not rows or rows[-1].operator != case.operator:
            print(f"\n{case.operator}\n{TABLE_HEAD}")
        new = run_case(case, dtypes, options.backends, peers[case.operator], stopwatch, ceilings, options.repeats)
        print("\n".join(map(table_line, new)), flush=True)
        rows += new
        if csv_file:
            csv_file.write(new)
    if csv_file:
        csv_file.close()
    if not_run:
        print(f"\nnot run, after the time limit of {options.time_limit:g} s: {', '.join(not_run)}")
    if options.plots:
        for path in plot(rows, options.plots, title):
            print(f"wrote {path}")
    print(f"{time.monotonic() - started:.0f} s in all")
    return int(any(row.failed for row in rows))


def available_peers(operator: str, device: torch.device) -> list[Peer]:
    """Those that can run here; each is named with its version or the reason why it cannot."""
    if not PEERS[operator]:
        print(f"{operator}: no peer has a package of its own for these operators")
    available = []
    for peer in PEERS[operator]:
        reason = peer.unavailable(device)
        print(f"{operator} peer {peer.name}: {reason or peer.describe()}")
        if reason is None:
            available.append(peer)
    return available


if __name__ == "__main__":
    sys.exit(main())
