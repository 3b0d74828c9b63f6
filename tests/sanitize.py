"""Every Triton kernel, in both its variants, over small shapes, each result compared with the reference backend's; with
`--backend hopper`, every kernel of Hopper's, and with `--fp8-weights` too, in its other form.

A program for compute-sanitizer, not a test of pytest's. Fill Triton's cache first, without the sanitizer, by a run for
each group of operators at the same time, for compiling is most of it:

    for word in mla_decode mla_prefill merge mla_kv; do python tests/sanitize.py --only $word & done; wait
    export PYTORCH_NO_CUDA_MEMORY_CACHING=1
    compute-sanitizer --tool memcheck  --error-exitcode 9 python tests/sanitize.py
    compute-sanitizer --tool initcheck --error-exitcode 9 python tests/sanitize.py
    compute-sanitizer --tool racecheck --error-exitcode 9 python tests/sanitize.py
    compute-sanitizer --tool synccheck --error-exitcode 9 python tests/sanitize.py

and look for `ERROR SUMMARY: 0 errors` (racecheck: `RACECHECK SUMMARY: 0 hazards`) and a line that ends in `all right`.

- memcheck needs every tensor in an allocation of its own, or an access just past one lands in a neighbour of the same
  block unseen; initcheck too, or memory that an earlier tensor wrote counts as initialised. Hence the variable.
- Inputs are built and results are compared on the CPU, so nothing but these kernels and copies runs on the GPU.
- Results are made by the functional overloads, in memory from torch.empty: an element that a kernel leaves unwritten is
  an uninitialised read of the copy to the host, and so is scratch that is read before it is written.
- `--only decode` narrows it to the calls whose name contains the word, `--list` names them all.
- `--device cpu` runs the kernels under Triton's interpreter, but for bf16, which that computes wrongly.
"""

import argparse
import itertools
import math
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
parser.add_argument("--backend", default="triton", choices=("triton", "hopper"))
parser.add_argument("--fp8-weights", action="store_true", help="under `ts_ops.allow_fp8_weights`")
parser.add_argument("--only", default="", metavar="WORD")
parser.add_argument("--list", action="store_true")
if __name__ == "__main__" and parser.parse_args().device == "cpu":
    os.environ["TRITON_INTERPRET"] = "1"  # read when triton is imported

import torch  # noqa: E402
from torch import Tensor  # noqa: E402

import calls  # noqa: E402
import oracle  # noqa: E402
import test_laws_cache as cache_laws  # noqa: E402
import test_laws_decode as decode_laws  # noqa: E402
import test_laws_merge as merge_laws  # noqa: E402
import test_laws_pack as pack_laws  # noqa: E402
import test_laws_prefill as prefill_laws  # noqa: E402
import ts_ops  # noqa: E402
from conftest import HOPPER  # noqa: E402
from ts_ops import dispatch  # noqa: E402

FP8 = torch.float8_e4m3fn
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
Call = tuple[str, str, Callable[[], dict]]  # operator, what is special, its arguments on the CPU


def decode_calls() -> Iterator[Call]:
    Case = decode_laws.Case
    pairs = [(FP32, None), (FP16, None), (BF16, None), (FP8, None), (FP16, FP8), (BF16, FP8)]
    r1 = dict(rank=512, rope=64, page_size=64)
    cases = {f"{query}-{cache}": Case((0, 37, 150), query=query, cache=cache) for query, cache in pairs}
    cases |= {f"r1-{query}-{cache}": Case((1, 300), 16, query=query, cache=cache, **r1) for query, cache in pairs}
    cases |= {
        f"r1-128-{query}-{cache}": Case((1, 300), 64, 2, query=query, cache=cache, **r1)
        for query, cache in ((FP16, None), (BF16, None), (FP8, None), (BF16, FP8))
    }
    cases["r1-32"] = Case((1, 300), 32, query=BF16, **r1)
    cases |= {f"{heads} heads": Case((5, 70), heads, rank=32) for heads in (1, 3, 20, 128)}
    cases |= {f"{size} a page": Case((3, 130), 2, page_size=size) for size in (1, 8, 32, 128)}
    cases |= {f"cache {layout}": Case((40, 100), cache_layout=layout) for layout in ("4d", "strided", "token-major")}
    cases |= {f"rank {rank}+{rope}": Case((80,), rank=rank, rope=rope) for rank, rope in ((24, 8), (40, 0), (100, 20))}
    windows = ((1, 5, True), (3, 40, True), (4, 2**31 - 1, False))
    for q_len, window, causal in windows:
        options = {"window_left": window, "is_causal": causal}
        cases[f"window {window}"] = Case((0, 3, 200), 3, q_len, options=options)
    cases["not causal"] = Case((0, 2, 70), 3, 4, options={"is_causal": False})
    cases["parallel"] = Case((16, 75), 3, 4, options={"cp_world": 2, "cp_rank": 1, "cp_interleave_size": 16})
    cases["visible"] = Case((0, 64, 200), q_len=3)
    extra = {
        "parallel": {"causal_seqs": calls.int32([40, 150])},
        "visible": {"local_visible_lens": calls.int32([[0, 0, 0], [64, 0, 30], [10, 200, 199]])},
    }
    if parser.parse_args().backend == "hopper":
        cases = {name: HOPPER.fit(case) for name, case in cases.items()}
        # Ranges of keys that end within requests; more requests than workers, empty ones among them.
        cases["uneven"] = Case((1, 3000, 0, 64, 900), 128, query=FP8, **r1)
        cases["many"] = Case(tuple(range(0, 300, 2)), 16, query=BF16, **r1)
        cases["many, FP8"] = Case(tuple(range(0, 300, 2)), 16, query=FP8, **r1)
    for name, case in cases.items():
        # A hint of one key leaves the keys unsplit; without it the tables' capacity is, over idle multiprocessors.
        for split, hint in (("split", None), ("unsplit", 1)):
            yield "mla_decode_lse", f"{name} {split}", lambda: decode_arguments(case, hint, **extra.get(name, {}))
    plain = cases["cache strided"]
    yield "mla_decode", "without lse", lambda: decode_arguments(plain, 1)
    yield "mla_decode", "without lse, split", lambda: decode_arguments(plain, None)
    yield "mla_decode", "no scale", lambda: decode_arguments(plain, None) | {"softmax_scale": 0.0}
    for layout in (calls.padded, calls.permuted):
        yield "mla_decode_lse", layout.__name__, lambda: calls.relaid(layout, decode_arguments(plain, None))
    yield "mla_decode_lse.out", "split, odd addresses", lambda: decode_arguments(plain, None)


def decode_arguments(case, hint: int | None, **tensors: Tensor) -> dict:
    arguments = named("mla_decode", decode_laws.build(case, "cpu"))
    return arguments | case.options | tensors | {"kv_lora_rank": case.rank, "max_seq_len": hint, "output_scale": 1.7}


def prefill_calls() -> Iterator[Call]:
    Case = prefill_laws.Case
    cases = {
        f"{dtype} {'causal' if causal else 'full'}": Case((70, 0, 5), (130, 9, 0), dtype, causal, heads=4)
        for dtype in (FP32, FP16, BF16, FP8)
        for causal in (True, False)
    }
    cases |= {
        "one key": Case((1,), (1,)),
        "no sequence": Case((), ()),
        "ragged": Case((1, 2, 0, 65, 3), (3, 1, 4, 70, 129), heads=2, heads_kv=1),
        "more queries than keys": Case((90, 20), (30, 20)),
        "many sequences": Case((1,) * 300, (2,) * 300),
        "rank and rope": Case((20,), (40,), heads=1, heads_kv=1, dim_qk=576, dim_v=512),
        "odd dims": Case((20, 3), (40, 5), dim_qk=40, dim_v=300),
        "no scale": Case((20,), (40,), softmax_scale=0.0),
    }
    layouts = [layout for layout in prefill_laws.LAYOUTS if layout != "plain"]
    cases |= {layout: Case((40, 7), (70, 8), FP16, layout=layout) for layout in layouts}
    cases |= {f"{layout} fp8": replace(cases[layout], dtype=FP8) for layout in layouts}
    for name, case in cases.items():
        yield "mla_prefill_lse", name, lambda: prefill_arguments(case)
    yield "mla_prefill", "without lse", lambda: prefill_arguments(cases["ragged"])


def prefill_arguments(case) -> dict:
    arguments, options = prefill_laws.build(case, "cpu")
    return named("mla_prefill", arguments) | options


def merge_calls() -> Iterator[Call]:
    plain = lambda outputs, lses: (outputs, lses)  # noqa: E731
    pair, dtypes = merge_laws.Case(3, 20, 192), merge_laws.DTYPES
    for case, dtype in [*zip([pair] * 3, dtypes), *zip(merge_laws.SHAPES, itertools.cycle(dtypes))]:
        yield from merges(case, dtype, plain, f"{case} {dtype}")
    for (name, layout), states in itertools.product(merge_laws.LAYOUTS.items(), (2, 5)):
        yield from merges(replace(pair, states=states), FP16, layout, f"{name} of {states}")


def merges(case, dtype, layout, name: str) -> Iterator[Call]:
    def arguments(pair: bool) -> dict:
        outputs, lses = layout(*merge_laws.random_states(case, dtype, "cpu"))
        if not pair:
            return {"outputs": outputs, "lses": lses}
        return named("merge_attn_states", (outputs[0], lses[0], outputs[1], lses[1]))

    yield "merge_attn_states_n", name, lambda: arguments(False)
    if case.states == 2:
        yield "merge_attn_states", name, lambda: arguments(True)


def cache_calls() -> Iterator[Call]:
    for case in cache_laws.WRITES:
        yield "mla_kv_cache_write", str(case), lambda: write_arguments(case)
    for case in cache_laws.GATHERS:
        yield "mla_kv_cache_gather", str(case), lambda: gather_arguments(case)


def write_arguments(case) -> dict:
    pages, dim = case.tokens // case.page_size + 3, case.rank + case.rope
    cache, _ = cache_laws.make_cache(
        pages, case.page_size, dim, case.cache, "cpu", padded=case.padded, four_dims=case.four_dims
    )
    values = cache_laws.exact_fp8(case.tokens + 2, dim) * (case.scale or 1.0)
    scale = None if case.scale is None else torch.tensor([case.scale])
    sources = values[:, : case.rank].to(case.kv_c), values[:, case.rank :].to(case.k_pe)
    slots = cache_laws.place(case, pages)
    return named("mla_kv_cache_write", (cache, *sources, slots)) | {"k_scale": scale}


def gather_arguments(case) -> dict:
    paged = cache_laws.Paged(case, "cpu")
    return named("mla_kv_cache_gather", (*paged.args, paged.total)) | paged.options | {"dtype": case.dtype}


def pack_calls() -> Iterator[Call]:
    for case, dtype in zip(pack_laws.CASES, itertools.cycle((FP16, FP32, BF16))):
        yield "mla_kv_pack_quantize_fp8", f"{case} {dtype}", lambda: pack_arguments(case, dtype)
    for layout in (calls.padded, calls.permuted):
        arguments = lambda: calls.relaid(layout, pack_arguments(pack_laws.CASES[3], FP16))  # noqa: E731
        yield "mla_kv_pack_quantize_fp8", layout.__name__, arguments


def out_calls() -> Iterator[Call]:
    """Into the caller's buffers, where only an element's alignment is sure."""
    for operator in calls.WITH_OUT:
        packs = operator == "mla_kv_pack_quantize_fp8"
        make = lambda: pack_arguments(pack_laws.CASES[3], FP16) if packs else calls.example(operator, FP16)  # noqa: E731
        yield f"{operator}.out", "odd addresses", make


def pack_arguments(case, dtype: torch.dtype) -> dict:
    """Values that are e4m3 numbers once scaled, for which no rounding is needed."""
    exact = pack_laws.exact_fp8
    k_nope, k_pe = exact(case.tokens, case.heads, case.nope) / 2, exact(case.tokens, case.rope) / 2
    tensors = k_nope, k_pe, exact(case.tokens, case.heads, case.value) * 4
    scales = {"k_scale_inv": 2.0, "v_scale_inv": 0.25}
    return named("mla_kv_pack_quantize_fp8", [tensor.to(dtype) for tensor in tensors]) | scales


def named(operator: str, values) -> dict:
    names = [argument.name for argument in calls.overload_of(operator)._schema.arguments]
    return dict(zip(names, values))


def moved(value, device: str):
    """On the device, with the strides and the offset in memory that a tensor has; copied as bytes, by no kernel."""
    if not isinstance(value, Tensor):
        return value
    memory = torch.empty(0, dtype=torch.uint8).set_(value.untyped_storage())
    # A copy on the CPU too: the cache is written.
    memory = memory.clone() if device == "cpu" else memory.to(device)
    return memory.view(value.dtype).as_strided(value.shape, value.stride(), value.storage_offset())


def results(operator: str, arguments: dict) -> list[Tensor]:
    """Of a call, on the CPU; of a cache write all the memory that the cache lies in."""
    operator, _, overload = operator.partition(".")
    if overload:
        buffers = odd_buffers(operator, arguments)
        calls.invoke(operator, arguments | buffers, overload)
        return [buffer.cpu() for buffer in buffers.values()]
    returned = calls.invoke(operator, arguments)
    if operator == "mla_kv_cache_write":
        cache = arguments["kv_cache"]
        memory = torch.empty(0, dtype=torch.uint8, device=cache.device).set_(cache.untyped_storage())
        return [memory.cpu()]
    return [result.cpu() for result in (returned if isinstance(returned, tuple) else (returned,))]


def odd_buffers(operator: str, arguments: dict) -> dict[str, Tensor]:
    """Contiguous buffers that begin one element into an allocation."""
    args, kwargs = calls.split(calls.overload_of(operator), arguments)
    problem = calls.PROBLEMS[operator](*args, **kwargs)
    empty = [
        torch.empty(math.prod(shape) + 1, dtype=dtype, device=problem.device)[1:].view(shape)
        for shape, dtype in problem.results
    ]
    return dict(zip(calls.BY_NAME[operator].outs, empty))


def compare(
    operator: str, arguments: dict, actual: list[Tensor], expected: list[Tensor], fp8_weights: bool
) -> None:  # fmt: skip
    """Copies and conversions to the bit; attention within twice the tolerance that the law tests hold each side to."""
    kind = operator.removesuffix(".out").removesuffix("_lse").removesuffix("_n")
    laws = {"mla_decode": decode_laws, "mla_prefill": prefill_laws, "merge_attn_states": merge_laws}.get(kind)
    if laws is None:
        for mine, theirs in zip(actual, expected, strict=True):
            oracle.assert_same(mine, theirs)
        return
    dtype = next(iter(arguments.values())).dtype
    # The interpreter truncates where it should round to bf16.
    rows = 2 * (8e-3 if INTERPRETED and dtype == FP8 else laws.TOLERANCE[dtype])
    if fp8_weights and dtype == FP8:
        rows = 2 * decode_laws.FP8_WEIGHTS_TOLERANCE
    lse = 2 * (laws.LSE_TOLERANCE if laws is merge_laws else laws.LSE_TOLERANCE[dtype])
    # Of 18 instructions (576 dims), each drops what is below 2^-13 of 200, a large score, scaled by 0.054.
    if dtype == FP8:
        lse = max(lse, 18 * 2**-13 * 200 * 0.054)
    error = oracle.row_error(actual[0], expected[0].double())
    assert error <= rows, f"row error {error:.1e} above {rows:.0e}"
    if len(actual) > 1:
        oracle.assert_lse_close(actual[1], expected[1].double(), lse)


INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


def kernels_of(backend: str) -> dict[str, object]:
    """What is to be launched at least once, by name: Triton's kernels in both variants."""
    if backend == "hopper":
        from ts_ops.backends.hopper.decode import KERNELS

        return {kernel.__name__: kernel for kernel in KERNELS}
    from ts_ops.backends.triton.launch import KERNELS

    return {f"{name} ({of})": getattr(KERNELS[name], of) for name in KERNELS for of in ("aligned", "general")}


def count_launches(backend: str) -> Counter:
    """Count, from now on, the launches of every kernel of a backend."""
    kernels = kernels_of(backend)
    counts = Counter(dict.fromkeys(kernels, 0))

    def counted(name, run):
        def wrapper(*args, **kwargs):
            counts[name] += 1
            return run(*args, **kwargs)

        return wrapper

    for name, kernel in kernels.items():
        kernel.run = counted(name, kernel.run)
    return counts


def declined(backend: str, operator: str, arguments: dict) -> bool:
    """Hopper's leaves some calls to Triton."""
    if backend == "triton":
        return False
    name = operator.removesuffix(".out")
    args, kwargs = calls.split(calls.overload_of(name), arguments)
    return dispatch.objection(backend, name, calls.PROBLEMS[name](*args, **kwargs)) is not None


def skipped(arguments: dict) -> bool:
    """The interpreter's bf16 arithmetic is wrong."""
    dtypes = [value.dtype if isinstance(value, Tensor) else value for value in arguments.values()]
    return INTERPRETED and any(dtype == BF16 for dtype in dtypes if isinstance(dtype, torch.dtype))


def main() -> int:
    options = parser.parse_args()
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("there is no GPU here: --device cpu runs the kernels under Triton's interpreter")
    every = itertools.chain(decode_calls(), prefill_calls(), merge_calls(), cache_calls(), pack_calls(), out_calls())
    ran, failed, counts, seconds = 0, 0, count_launches(options.backend), Counter()
    for operator, name, make in every:
        if options.only not in f"{operator} {name}":
            continue
        if options.list:
            print(operator, name)
            continue
        torch.manual_seed(0)
        arguments = make()
        if skipped(arguments):
            continue
        start = time.perf_counter()
        there = {key: moved(value, options.device) for key, value in arguments.items()}
        if declined(options.backend, operator, there):
            continue
        with ts_ops.use_backend(options.backend), ts_ops.allow_fp8_weights(options.fp8_weights):
            actual = results(operator, there)
        seconds[operator] += time.perf_counter() - start
        with ts_ops.use_backend("reference"):
            expected = results(operator, arguments)
        try:
            compare(operator, arguments, actual, expected, options.fp8_weights)
        except AssertionError as error:
            failed += 1
            print(f"WRONG: {operator} ({name}): {error}", flush=True)
        ran += 1
    if options.list:
        return 0
    for operator, spent in seconds.items():
        print(f"{operator}: {spent:.1f} s")
    missing = [kernel for kernel, count in counts.items() if not count]
    if missing and not options.only:
        print(f"not launched: {', '.join(missing)}")
    right = not failed and ran and (options.only or not missing)
    print(f"{ran} calls, {sum(counts.values())} launches, {'all right' if right else f'{failed} WRONG'}")
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
