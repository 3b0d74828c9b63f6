"""The real TokenSpeed kernels compile to sm_100a code, without a GPU, in the variants that warm-up asks for.

A handful here; `pytest -m grid` compiles many more (half an hour). Needs tokenspeed-mla and its compiler, no GPU.
"""

import importlib
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parent / "tokenspeed_cross_compile.py"
MAX_REGISTERS = 168  # of 65,536 for the 384 threads of a block
HANDFUL = {  # kernel, dtype, and whether keys are split: each of these was compiled
    ("decode", "torch.bfloat16", True), ("decode", "torch.float8_e4m3fn", True),
    ("decode", "torch.float8_e4m3fn", False), ("prefill", "torch.bfloat16", None),
}  # fmt: skip


def compiled(*options: str) -> list[dict]:
    pytest.importorskip("tokenspeed_mla")
    command = [sys.executable, str(SCRIPT), *options]
    output = subprocess.run(command, check=True, capture_output=True, text=True, cwd=SCRIPT.parent).stdout
    return [json.loads(line) for line in output.splitlines() if line.startswith("{")]


def check(rows: list[dict]) -> None:
    for row in rows:
        assert row["bytes"] > 50_000, row
        for usage in row["functions"].values():
            assert 0 < usage["registers"] <= MAX_REGISTERS and usage["stack"] == 0, row


def kind(row: dict) -> tuple:
    variant = row["variant"]
    split = variant.get("is_workspace_size_zero")
    return row["kernel"], variant.get("torch_dtype") or variant["q_dtype"], split and split == "False"


def test_a_handful():
    rows = compiled()
    check(rows)
    assert {kind(row) for row in rows} == HANDFUL
    for row in rows:  # a split decode is two kernels
        assert len(row["functions"]) == (2 if kind(row)[2] else 1)


@pytest.mark.grid
def test_the_grid():
    rows = compiled("--grid")
    check(rows)
    assert len(rows) > 60


def test_pack_saturates_in_hardware():
    """The package's pack kernel does not clamp: law 11 rests on the instruction that its conversion compiles to."""
    triton = pytest.importorskip("tokenspeed_triton")
    from tokenspeed_triton.backends.compiler import GPUTarget
    from tokenspeed_triton.compiler import ASTSource

    kernel = importlib.import_module("tokenspeed_mla.mla_kv_pack_quantize_fp8")._mla_kv_pack_quantize_fp8_kernel
    constants = dict(
        QK_NOPE=128, QK_ROPE=64, V_HEAD=128, FP8_DTYPE=triton.language.float8e4nv, BLOCK_S=4, ENABLE_PDL=False
    )
    types = {"k_out_ptr": "*fp8e4nv", "v_out_ptr": "*fp8e4nv", "k_scale_inv": "fp32", "v_scale_inv": "fp32"}
    signature = {
        name: "constexpr" if name in constants else types.get(name, "*bf16" if name.endswith("_ptr") else "i32")
        for name in kernel.arg_names
    }
    compiled = triton.compile(ASTSource(kernel, signature, constants), target=GPUTarget("cuda", 100, 32))
    conversions = set(re.findall(r"cvt\S*e4m3\S*", compiled.asm["ptx"]))
    assert conversions and all("satfinite" in conversion for conversion in conversions)
