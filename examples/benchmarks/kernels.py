"""Time the operators against their peers and against the machine's own ceilings, on one GPU, in one process.

    python examples/benchmarks/kernels.py [decode] [prefill] [merge] [--csv FILE]

Every result is checked against float64 before it is timed. Each call is captured in a CUDA graph, so that times are
the GPU's and not the host's, and its replays are timed by `triton.testing.do_bench` (the L2 cache is flushed between
runs) in interleaved rounds, each long enough for the clocks to settle at what the kernel's power allows; a ratio
compares two medians of this one run. Peers that are not
installed are named at the top. Columns of the decode table: microseconds, and the share that the memory or the
arithmetic floor has in our time, by the ceilings measured in the same run.
"""

import argparse
import csv
import importlib.util
import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass

import torch
import triton
from triton.testing import do_bench

import ts_ops

FP8 = torch.float8_e4m3fn
SCALE = 192**-0.5
ROUNDS = 3


@dataclass(frozen=True)
class Decode:
    batch: int
    length: int
    heads: int
    q_len: int = 1
    dtype: torch.dtype = torch.bfloat16
    page_size: int = 64


DECODE = [
    Decode(batch, length, heads, q_len, dtype)
    for dtype in (torch.bfloat16, FP8)
    for batch, length, heads, q_len in (
        (1, 4096, 128, 1), (1, 65536, 128, 1), (4, 8192, 128, 1), (16, 8192, 128, 1), (64, 8192, 128, 1),
        (128, 4096, 128, 1), (64, 8192, 128, 2), (64, 8192, 64, 1), (64, 8192, 16, 1), (128, 8192, 16, 1),
        (16, 32768, 16, 1),
    )
]  # fmt: skip
PREFILL = [(1, 4096, True), (1, 8192, True), (4, 2048, True), (1, 8192, False)]
MERGE = [8192, 32768]


def medians(calls: dict[str, Callable]) -> dict[str, float]:
    """Median microseconds of a replay of each call; the calls take turns, and turns at being first."""
    graphs = {}
    for name, call in calls.items():
        call()
        torch.cuda.synchronize()
        graphs[name] = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graphs[name]):
            call()
    times = {name: [] for name in calls}
    order = list(graphs)
    for _ in range(ROUNDS):
        order.append(order.pop(0))
        for name in order:
            times[name].append(do_bench(graphs[name].replay, warmup=100, rep=150, return_mode="median") * 1e3)
    return {name: statistics.median(values) for name, values in times.items()}


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return ((actual.double() - expected).norm() / expected.norm()).item()


def ceilings() -> tuple[float, float]:
    """Measured copy bandwidth (bytes/s, read + write) and bf16 matrix rate (FLOP/s)."""
    source = torch.randn(1 << 29, device="cuda")
    target = torch.empty_like(source)
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in "ab")
    copy = do_bench(lambda: target.copy_(source), return_mode="median") / 1e3
    product = do_bench(lambda: a @ b, return_mode="median") / 1e3
    return 2 * source.nbytes / copy, 2 * 8192**3 / product


def decode_inputs(case: Decode):
    pages = -(-case.length // case.page_size)
    cache = torch.randn(case.batch * pages, case.page_size, 576, device="cuda", dtype=torch.bfloat16)
    table = torch.randperm(case.batch * pages, device="cuda", dtype=torch.int32).view(case.batch, pages)
    lengths = torch.full((case.batch,), case.length, dtype=torch.int32, device="cuda")
    query = torch.randn(case.batch, case.q_len, case.heads, 576, device="cuda", dtype=torch.bfloat16)
    return query.to(case.dtype), cache.to(case.dtype), table, lengths


def decode_expected(query, cache, table, lengths) -> torch.Tensor:
    """Float64 output of the last request, [q_len, H, 512]."""
    keys = cache[table[-1].long()].flatten(0, 1)[: int(lengths[-1])].double()
    scores = query[-1].double() @ keys.T * SCALE
    q_len, last = query.shape[1], torch.arange(keys.shape[0], device="cuda")
    for i in range(q_len):
        scores[i].masked_fill_(last >= keys.shape[0] - (q_len - 1) + i, -torch.inf)
    return torch.softmax(scores, dim=-1) @ keys[:, :512]


def flash_mla_call(query, cache, table, lengths) -> Callable:
    import flash_mla

    plan, _ = flash_mla.get_mla_metadata()
    return lambda: flash_mla.flash_mla_with_kvcache(
        query, cache[:, :, None], table, lengths, 512, plan, softmax_scale=SCALE, causal=True
    )[0]


def flashinfer_call(query, cache, table, lengths) -> Callable:
    import flashinfer

    batch, q_len, heads, _ = query.shape
    pages = table.shape[1]
    wrapper = flashinfer.mla.BatchMLAPagedAttentionWrapper(
        torch.empty(128 << 20, dtype=torch.uint8, device="cuda"), backend="fa3"
    )
    starts = torch.arange(batch + 1, dtype=torch.int32, device="cuda")
    wrapper.plan(
        starts * q_len, starts * pages, table.flatten(), lengths, heads, 512, 64, cache.shape[1], q_len > 1, SCALE,
        query.dtype, cache.dtype,
    )  # fmt: skip
    flat = query.flatten(0, 1)
    return lambda: wrapper.run(flat[..., :512], flat[..., 512:], cache[..., :512], cache[..., 512:]).view(
        batch, q_len, heads, 512
    )


DECODE_PEERS = {"flash_mla": flash_mla_call, "flashinfer": flashinfer_call}


def bench_decode(bandwidth: float, rate: float, rows: list[dict]) -> None:
    print(f"\n{'decode':28}{'ours µs':>9}{'floor':>7}{'error':>9}" + "".join(f"{p:>22}" for p in DECODE_PEERS))
    for case in DECODE:
        inputs = decode_inputs(case)
        expected = decode_expected(*inputs)
        calls = {"ours": lambda: ts_ops.mla_decode(*inputs, SCALE)}
        if case.dtype != FP8:  # neither peer has a dense FP8 x FP8 decode for Hopper
            for name, make in DECODE_PEERS.items():
                if importlib.util.find_spec(name):
                    try:
                        calls[name] = make(*inputs)
                        calls[name]()
                    except Exception as error:  # a peer may refuse a shape: say so and go on
                        calls.pop(name, None)
                        print(f"  {name} refuses {case}: {str(error).splitlines()[0]}", file=sys.stderr)
        errors = {name: relative_error(call()[-1], expected) for name, call in calls.items()}
        assert all(error < 2e-2 for error in errors.values()), errors
        times = medians(calls)
        size = case.batch * case.length * 576 * inputs[1].element_size()
        flops = 2 * case.batch * case.q_len * case.heads * case.length * 1088
        floor = max(size / bandwidth, flops / rate) * 1e6
        label = f"{str(case.dtype)[6:14]} B{case.batch} S{case.length} H{case.heads} q{case.q_len}"
        line = f"{label:28}{times['ours']:9.1f}{floor / times['ours']:7.0%}{errors['ours']:9.1e}"
        for peer in DECODE_PEERS:
            line += f"{times[peer]:12.1f} ({times['ours'] / times[peer]:5.2f}x)" if peer in times else f"{'-':>22}"
        print(line, flush=True)
        rows.append({"operator": "mla_decode", "case": label, **times})


def bench_prefill(bandwidth: float, rate: float, rows: list[dict]) -> None:
    from torch.nn.attention import SDPBackend, sdpa_kernel

    print(f"\n{'prefill bf16 H128 192/128':28}{'ours µs':>9}{'TFLOP/s':>9}{'error':>9}{'cuDNN':>22}")
    for batch, length, causal in PREFILL:
        tokens = batch * length
        query, key = (torch.randn(tokens, 128, 192, device="cuda", dtype=torch.bfloat16) for _ in "qk")
        value = torch.randn(tokens, 128, 128, device="cuda", dtype=torch.bfloat16)
        cum = torch.arange(batch + 1, device="cuda", dtype=torch.int32) * length
        q, k, v = (x.view(batch, length, 128, -1).transpose(1, 2) for x in (query, key, value))

        def cudnn():
            with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
                return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=SCALE)

        calls = {
            "ours": lambda: ts_ops.mla_prefill(query, key, value, cum, cum, SCALE, is_causal=causal),
            "cudnn": cudnn,
        }
        scores = q[-1, 0].double() @ k[-1, 0].double().T * SCALE
        if causal:
            scores += torch.full_like(scores, -torch.inf).triu(1)
        expected = torch.softmax(scores, -1) @ v[-1, 0].double()
        error = relative_error(calls["ours"]()[-length:, 0], expected)
        assert error < 1e-2, error
        times = medians(calls)
        flops = 2 * batch * 128 * length * length * 320 / (2 if causal else 1)
        label = f"B{batch} S{length} {'causal' if causal else 'full'}"
        print(
            f"{label:28}{times['ours']:9.1f}{flops / times['ours'] / 1e6:9.0f}{error:9.1e}"
            f"{times['cudnn']:12.1f} ({times['ours'] / times['cudnn']:5.2f}x)",
            flush=True,
        )
        rows.append({"operator": "mla_prefill", "case": label, **times})


def bench_merge(bandwidth: float, rate: float, rows: list[dict]) -> None:
    print(f"\n{'merge bf16 H128 D128':28}{'ours µs':>9}{'TB/s':>7}{'of copy':>9}")
    for tokens in MERGE:
        prefix, suffix = (torch.randn(tokens, 128, 128, device="cuda", dtype=torch.bfloat16) for _ in "ps")
        lse, other = (torch.randn(tokens, 128, device="cuda") for _ in "ps")
        calls = {"ours": lambda: ts_ops.merge_attn_states(prefix, lse, suffix, other)}
        weight = torch.sigmoid(lse.double() - other.double())[..., None]
        error = relative_error(calls["ours"]()[0], weight * prefix.double() + (1 - weight) * suffix.double())
        assert error < 1e-2, error
        time = medians(calls)["ours"]
        speed = 3 * (prefix.nbytes + lse.nbytes) / time * 1e6
        label = f"T{tokens}"
        print(f"{label:28}{time:9.1f}{speed / 1e12:7.2f}{speed / bandwidth:9.1%}", flush=True)
        rows.append({"operator": "merge_attn_states", "case": label, "ours": time})


BENCHES = {"decode": bench_decode, "prefill": bench_prefill, "merge": bench_merge}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="*", metavar="decode|prefill|merge", help="default: all three")
    parser.add_argument("--csv", help="also write the medians, in microseconds, to this file")
    options = parser.parse_args()
    if unknown := set(options.what).difference(BENCHES):
        parser.error(f"unknown benchmark {sorted(unknown)[0]!r}; choose from {', '.join(BENCHES)}")
    if not torch.cuda.is_available():
        sys.exit("these benchmarks need an NVIDIA GPU")
    torch.manual_seed(0)
    bandwidth, rate = ceilings()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, triton {triton.__version__}")
    print(f"ceilings measured now: copy {bandwidth / 1e12:.2f} TB/s, bf16 matrix product {rate / 1e12:.0f} TFLOP/s")
    for peer in DECODE_PEERS:
        if not importlib.util.find_spec(peer):
            print(f"peer not installed: {peer}")
    rows: list[dict] = []
    for name in options.what or BENCHES:
        BENCHES[name](bandwidth, rate, rows)
    if options.csv:
        with open(options.csv, "w", newline="") as file:
            writer = csv.DictWriter(file, ["operator", "case", "ours", *DECODE_PEERS, "cudnn"])
            writer.writeheader()
            writer.writerows(rows)


if __name__ == "__main__":
    main()
