"""Compile the TokenSpeed kernels that warm-up asks for, for a GPU that is not there.

The adapter and the real package choose the variants (`tokenspeed_model.py` stands in for the GPU), and CuTe DSL
compiles each to an sm_100a or sm_103a cubin. Run as a script, it prints one JSON object a kernel; `--grid` compiles
many more than the handful of the test suite. A process of its own, because CuTe DSL reads its environment once.
"""

import argparse
import json
import os
import tempfile
import time
from pathlib import Path

HANDFUL = [
    dict(heads=128, query_dtype="bf16", operators=["mla_decode_lse", "mla_prefill_lse"]),
    dict(heads=16, query_dtype="fp8", q_lens=[4], operators=["mla_decode"]),
    dict(heads=128, query_dtype="fp8", page_size=32, batch_sizes=[8], max_seq_len=256, operators=["mla_decode_lse"]),
]
DECODES = [
    dict(heads=heads, query_dtype=dtype, page_size=page, operators=["mla_decode", "mla_decode_lse"], q_lens=[1, 2])
    for heads, dtype, page in ((16, "bf16", 64), (128, "bf16", 64), (16, "fp8", 64), (64, "fp8", 32), (128, "fp8", 64))
]
FEATURES = [
    dict(is_causal=False), dict(window_left=512), dict(local_visible_lens=True), dict(cp_world=4, cp_rank=1),
    dict(cp_world=4, cp_rank=1, cp_interleave_size=16), dict(q_lens=[3], heads=96), dict(query_dtype="fp16"),
]  # fmt: skip
GRID = [dict(case, batch_sizes=[1, 16, 256], max_seq_len=16384) for case in DECODES]
GRID += [dict(dict(heads=128, query_dtype="fp8", operators=["mla_decode_lse"]), **options) for options in FEATURES]
GRID += [dict(heads=128, query_dtype="fp8", operators=["mla_prefill", "mla_prefill_lse"])]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--grid", action="store_true", help="many more kernels; takes half an hour on two cores")
    parser.add_argument("--capability", choices=("10.0", "10.3"), default="10.0", help="of the GPU; default: 10.0")
    arguments = parser.parse_args()
    capability = tuple(map(int, arguments.capability.split(".")))
    with tempfile.TemporaryDirectory() as folder:
        os.environ |= {"CUTE_DSL_NO_CACHE": "1", "CUTE_DSL_KEEP": "cubin", "CUTE_DSL_DUMP_DIR": folder}
        os.environ |= {"CUTE_DSL_ARCH": "sm_{}{}a".format(*capability)}
        compile_all(GRID if arguments.grid else HANDFUL, Path(folder), capability)


def compile_all(deployments: list[dict], folder: Path, capability: tuple[int, int]) -> None:
    import pytest

    import tokenspeed_model
    import ts_ops
    from cross_compile import resource_usage
    from ts_ops import dispatch
    from ts_ops.warmup import DTYPES

    def compiler(name, variant, compile):
        start = time.perf_counter()
        compile()
        seconds = time.perf_counter() - start
        for cubin in folder.glob("*.cubin"):
            row = {"kernel": name, "seconds": round(seconds, 2), "bytes": cubin.stat().st_size}
            row["functions"] = resource_usage(cubin)
            row["variant"] = {key: str(value) for key, value in variant.items()}
            print(json.dumps(row), flush=True)
            cubin.unlink()

    with pytest.MonkeyPatch.context() as patches:
        machine = tokenspeed_model.install(patches, capability=capability, compiler=compiler)
        machine.launches = False
        tokenspeed_model.without_finish()
        patches.setitem(dispatch.PREFERENCE, "cpu", ("tokenspeed", "reference"))
        for deployment in deployments:
            options = dict(dict(max_seq_len=128), **deployment)
            options["query_dtype"] = DTYPES[options["query_dtype"]]
            ts_ops.warmup(**options, progress=False, device="cpu")


if __name__ == "__main__":
    main()
