"""Every Triton kernel compiles for GPUs that are not here, without spilling registers, within shared memory.

The launchers themselves choose what is compiled (`cross_compile.py`): sm_90, and sm_80 for what is not FP8. A kernel
that spills stands in SPILLS with its bytes a thread and the reason, and may spill no more than that. So do the variants
for tensors that are not aligned, in GENERAL_SPILLS.
"""

import pytest
import torch
from torch.torch_version import TorchVersion

triton = pytest.importorskip("triton")

from ts_ops.meta import contract  # noqa: E402

from cross_compile import MAX_SHARED, Compiled, compiled_by  # noqa: E402
from ts_ops.backends import triton as triton_backend  # noqa: E402

BF16, FP16, FP32, FP8 = torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn

# (case, capability) -> (most bytes a thread under any Triton from 3.6 on, reason)
LARGE_TILE = "64 x 512 fp32 sums take half of a thread's registers; Triton 3.6 leaves a few values of the set-up over"
MMA = "mma takes operands from registers, beside 64 x 512 fp32 sums"
SPILLS = {
    ("decode-H16-bf16-page16", 90): (256, "a pointer a key; faster than with more warps, which do not spill"),
    ("decode-H128-bf16", 90): (8, LARGE_TILE),
    ("decode-H64-q2-window", 90): (24, LARGE_TILE),
    ("decode-H64-q2-visible", 90): (8, LARGE_TILE),
    ("decode-H64-q2-cp", 90): (8, LARGE_TILE),
    ("decode-H128-bf16-over-fp8", 90): (384, "the FP8 tile's bf16 copy passes through registers for both products"),
    ("decode-H128-fp8", 89): (80, MMA),
    ("decode-H128-bf16", 80): (80, MMA),
}
if (3, 8) <= TorchVersion(triton.__version__) < (3, 9):
    STORED = "Triton 3.8 alone converts a tile as it was loaded, and stores it again for the value product"
    SPILLS |= {
        ("decode-H16-fp8", 90): (240, STORED),
        ("decode-H16-fp8", 89): (176, STORED),
        ("decode-H16-fp8-page16", 90): (248, STORED),
        ("decode-H16-bf16-over-fp8", 90): (424, STORED),
        ("decode-H16-bf16-over-fp8", 89): (240, STORED),
    }


def assert_fit(kernels: list[Compiled], capability: int, stack: int) -> None:
    """At most `stack` bytes a thread, and no more shared memory than there is."""
    assert kernels, "nothing was launched"
    for kernel in kernels:
        assert kernel.stack <= stack, f"{kernel.name} spills {kernel.stack} bytes a thread"
        assert kernel.shared <= MAX_SHARED[capability], f"{kernel.name} needs {kernel.shared} bytes of shared memory"


def empty(*shape, dtype=BF16):
    return torch.empty(shape, dtype=dtype, device="meta")


def ints(*shape, dtype=torch.int32):
    return torch.empty(shape, dtype=dtype, device="meta")


def decode(heads, query=BF16, cache=None, page_size=64, q_len=1, rank=512, rope=64, **options):
    kv_cache = empty(64, page_size, rank + rope, dtype=cache or query)
    names = {"local_visible_lens": (8, q_len), "causal_seqs": (8,)}
    options = {k: ints(*names[k]) if k in names else v for k, v in options.items()}
    problem = contract.Decode(
        empty(8, q_len, heads, rank + rope, dtype=query), kv_cache, ints(8, 8192 // page_size), ints(8), 0.1,
        kv_lora_rank=rank, with_lse=True, **options,
    )  # fmt: skip
    return "mla_decode_lse", problem


def prefill(dtype=BF16, dim_qk=192, dim_v=128, is_causal=True, heads_kv=128):
    problem = contract.Prefill(
        empty(4096, 128, dim_qk, dtype=dtype), empty(4096, heads_kv, dim_qk, dtype=dtype),
        empty(4096, heads_kv, dim_v, dtype=dtype), ints(5), ints(5), 0.1, is_causal=is_causal, with_lse=True,
    )  # fmt: skip
    return "mla_prefill_lse", problem


def merge(dtype=BF16, dim=128):
    state = empty(8192, 128, dim, dtype=dtype), empty(8192, 128, dtype=FP32)
    return "merge_attn_states", contract.Merge(*state, *state)


def merge_n(dtype=BF16, dim=128):
    states = empty(4, 8192, 128, dim, dtype=dtype), empty(4, 8192, 128, dtype=FP32)
    return "merge_attn_states_n", contract.MergeN(*states)


def write(cache=BF16, source=BF16):
    scale = empty(1, dtype=FP32) if cache == FP8 else None
    problem = contract.CacheWrite(
        empty(64, 64, 576, dtype=cache), empty(256, 512, dtype=source), empty(256, 64, dtype=source),
        ints(256, dtype=torch.int64), k_scale=scale,
    )  # fmt: skip
    return "mla_kv_cache_write", problem


def gather(cache=BF16, dtype=None):
    scale = empty(1, dtype=FP32) if cache == FP8 and dtype else None
    problem = contract.CacheGather(
        empty(64, 64, 576, dtype=cache), ints(8, 128), ints(9), 4096, seq_starts=ints(8), k_scale=scale, dtype=dtype
    )
    return "mla_kv_cache_gather", problem


def pack(dtype=BF16):
    heads = empty(4096, 128, 128, dtype=dtype)
    problem = contract.PackQuantize(heads, empty(4096, 64, dtype=dtype), heads)
    return "mla_kv_pack_quantize_fp8", problem


CASES = {
    "decode-H16-bf16": lambda: decode(16),
    "decode-H16-fp8": lambda: decode(16, FP8),
    "decode-H16-bf16-over-fp8": lambda: decode(16, BF16, FP8),
    "decode-H16-fp8-page16": lambda: decode(16, FP8, page_size=16),
    "decode-H16-bf16-page16": lambda: decode(16, page_size=16),
    "decode-H16-fp32": lambda: decode(16, FP32),
    "decode-H32-bf16": lambda: decode(32),
    "decode-H128-bf16": lambda: decode(128),
    "decode-H128-fp8": lambda: decode(128, FP8),
    "decode-H128-bf16-over-fp8": lambda: decode(128, BF16, FP8),
    "decode-H128-bf16-page16": lambda: decode(128, page_size=16),
    "decode-H64-q2-window": lambda: decode(64, q_len=2, window_left=128),
    "decode-H64-q2-visible": lambda: decode(64, q_len=2, local_visible_lens=True),
    "decode-H64-q2-cp": lambda: decode(64, q_len=2, causal_seqs=True, cp_world=2),
    "decode-H20-rank256": lambda: decode(20, rank=256, rope=32),
    "decode-H128-rope128": lambda: decode(128, rope=128),
    "prefill-bf16": lambda: prefill(),
    "prefill-bf16-full": lambda: prefill(is_causal=False),
    "prefill-fp32": lambda: prefill(FP32),
    "prefill-fp8": lambda: prefill(FP8),
    "prefill-bf16-dims-80-48": lambda: prefill(dim_qk=80, dim_v=48),
    "merge-bf16": lambda: merge(),
    "merge-fp32-odd": lambda: merge(FP32, 99),
    "merge_n-bf16": lambda: merge_n(),
    "write-bf16": lambda: write(),
    "write-fp8": lambda: write(FP8),
    "gather-bf16": lambda: gather(),
    "gather-fp8-to-bf16": lambda: gather(FP8, BF16),
    "pack-fp8": lambda: pack(),
}
# sm_90 for all; sm_80, where it is not FP8, for one of each kernel and the largest tiles.
SM_80 = (
    "decode-H16-bf16", "decode-H128-bf16", "prefill-bf16", "merge-bf16", "merge_n-bf16", "write-bf16", "gather-bf16",
)  # fmt: skip


# GPUs with 99 KB of shared memory, where the tiles must be smaller.
SMALL = (
    ("decode-H16-fp8", 89), ("decode-H16-bf16-over-fp8", 89), ("decode-H128-bf16", 86), ("decode-H128-fp8", 89),
    ("decode-H128-bf16-over-fp8", 89), ("prefill-bf16", 86),
)  # fmt: skip


def compiled(capability: int, operator: str, problem) -> list[Compiled]:
    return compiled_by(capability, lambda: getattr(triton_backend, operator)(problem, *problem.allocate()))


def skip_where_refused(case: str, capability: int) -> None:
    if case.endswith("bf16-over-fp8") and capability == 89 and triton_backend.OLD_TRITON:
        pytest.skip("the backend refuses it by name under Triton 3.6")


@pytest.mark.parametrize("case, capability", [(c, 90) for c in CASES] + [(c, 80) for c in SM_80] + [*SMALL])
def test_compiles_without_spills(case, capability):
    skip_where_refused(case, capability)
    allowed, _ = SPILLS.get((case, capability), (0, ""))
    assert_fit(compiled(capability, *CASES[case]()), capability, allowed)


# (case, capability) -> most bytes a thread under any Triton from 3.6 on. A load then takes one element, and a tile's
# addresses, one for each, do not fit the registers.
GENERAL_SPILLS = {
    ("decode-H16-bf16", 90): 0,
    ("decode-H16-fp8", 90): 0,
    ("decode-H16-bf16-over-fp8", 90): 0,
    ("decode-H128-bf16", 90): 720,
    ("decode-H128-bf16", 80): 328,
    ("decode-H128-fp8", 90): 568,
    ("prefill-bf16", 90): 688,
    ("prefill-bf16", 86): 800,
    ("prefill-fp8", 90): 544,
    ("merge-bf16", 90): 0,
    ("merge_n-bf16", 90): 0,
    ("write-fp8", 90): 0,
    ("gather-bf16", 90): 0,
    ("gather-fp8-to-bf16", 90): 0,
    ("pack-fp8", 90): 0,
}


@pytest.mark.parametrize("case, capability", GENERAL_SPILLS)
def test_general_variant_compiles_within_bounds(case, capability):
    operator, problem = CASES[case]()
    for name in problem.__slots__:
        tensor = getattr(problem, name)
        if isinstance(tensor, torch.Tensor) and tensor.is_floating_point():
            setattr(problem, name, empty(*tensor.shape[:-1], tensor.shape[-1] + 1, dtype=tensor.dtype)[..., 1:])
    kernels = compiled(capability, operator, problem)
    assert_fit(kernels, capability, GENERAL_SPILLS[case, capability])


@pytest.mark.parametrize("case, instruction", [("decode-H128-bf16", "HGMMA"), ("decode-H128-fp8", "QGMMA")])
def test_large_tiles_use_the_hopper_tensor_cores(case, instruction):
    kernels = compiled(90, *CASES[case]())
    assert instruction in kernels[0].sass


@pytest.mark.parametrize("rank, rope", [(100, 64), (128, 63), (257, 63), (512, 63)])
def test_fp8_in_odd_dims_stays_off_the_fp8_tensor_cores(rank, rope):
    """Which give garbage where rope columns are loaded byte by byte, also if rows are aligned, as of 257 + 63."""
    kernels = compiled(90, *decode(128, FP8, rank=rank, rope=rope))
    assert "HGMMA" in kernels[0].sass and "QGMMA" not in kernels[0].sass
    assert kernels[0].shared <= MAX_SHARED[90]


@pytest.mark.parametrize("capability", [89, 90])
@pytest.mark.parametrize("case", ["decode-H16-fp8", "decode-H16-fp8-page16", "decode-H16-bf16-over-fp8"])
def test_small_tiles_of_an_fp8_cache_are_not_read_byte_by_byte(case, capability):
    """They are copied asynchronously, and transposed on their way to the value product by ldmatrix."""
    skip_where_refused(case, capability)
    kernel, *_ = compiled(capability, *CASES[case]())
    assert "LDS.U8" not in kernel.sass
    assert "LDGSTS" in kernel.sass and "LDSM.16.MT88" in kernel.sass
