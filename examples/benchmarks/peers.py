"""The kernels that ours are compared with, an adapter each, and the published figures of one that has no package.

An adapter turns a case and its inputs (`cases.py`) into a call of the peer, whose result the case can check. What a
peer plans on the host, or once for a batch (FlashInfer's plan, FlashMLA's schedule, laid-out index arrays), is done in
`prepare` and not timed: an engine does it once a step for all layers. Ours plan within the call.
"""

import importlib
import importlib.metadata
import importlib.util
import math
from collections.abc import Callable

import torch

BF16, FP8 = torch.bfloat16, torch.float8_e4m3fn


def first_line(error: Exception) -> str:
    text = str(error).strip()
    return f"{type(error).__name__}: {text.splitlines()[0]}" if text else type(error).__name__


class Peer:
    name = ""
    module = ""  # what is imported
    package = ""  # what pip installs
    version = ""  # the one whose interface this adapter was written for
    needs = ""  # further packages to install
    dtypes: tuple[torch.dtype, ...] = (BF16,)

    def unavailable(self, device: torch.device) -> str | None:
        """Why this peer cannot run here; None if it can."""
        if importlib.util.find_spec(self.module) is None:
            return f"not installed: pip install {self.package}=={self.version}{self.needs}"
        if device.type != "cuda":
            return "needs an NVIDIA GPU"
        try:
            importlib.import_module(self.module)
        except Exception as error:  # a package built for another torch fails in many ways
            return f"does not import: {first_line(error)}"
        return None

    def describe(self) -> str:
        return f"{self.package} {importlib.metadata.version(self.package)}"

    def prepare(self, case, inputs) -> Callable:
        raise NotImplementedError


class FlashMLA(Peer):
    name, module, package, version = "FlashMLA", "flash_mla", "tokenspeed-flashmla", "1.0.0.post20260615"

    def prepare(self, case, inputs) -> Callable:
        from flash_mla import flash_mla_with_kvcache, get_mla_metadata

        schedule, _ = get_mla_metadata()  # filled by the first call
        cache = inputs.cache_of_peers[:, :, None]
        return lambda: flash_mla_with_kvcache(
            inputs.query, cache, inputs.tables, inputs.lengths, 512, schedule, softmax_scale=inputs.scale, causal=True
        )[0]


class FlashInfer(Peer):
    """Its MLA kernel for Hopper. It multiplies the cache in its stored dtype, so there is none for FP8 caches."""

    name, module, package, version = "FlashInfer", "flashinfer", "flashinfer-python", "0.6.3"
    needs = " apache-tvm-ffi"

    def prepare(self, case, inputs) -> Callable:
        from flashinfer.mla import BatchMLAPagedAttentionWrapper

        query, cache, tables, lengths = inputs.query, inputs.cache_of_peers, inputs.tables, inputs.lengths
        batch, q_len, heads, _ = query.shape
        page_size = cache.shape[1]
        pages = (lengths + page_size - 1) // page_size
        used = torch.arange(tables.shape[1], device=tables.device) < pages[:, None]
        page_starts = torch.zeros(batch + 1, dtype=torch.int32, device=tables.device)
        page_starts[1:] = pages.cumsum(0)
        query_starts = torch.arange(batch + 1, dtype=torch.int32, device=tables.device) * q_len
        workspace = torch.empty(128 << 20, dtype=torch.uint8, device=tables.device)
        wrapper = BatchMLAPagedAttentionWrapper(workspace, backend="fa3")
        wrapper.plan(
            query_starts, page_starts, tables[used], lengths, heads, 512, 64, page_size, q_len > 1, inputs.scale,
            query.dtype, cache.dtype,
        )  # fmt: skip
        rows = query.flatten(0, 1)
        parts = rows[..., :512], rows[..., 512:], cache[..., :512], cache[..., 512:]
        return lambda: wrapper.run(*parts).view(batch, q_len, heads, 512)


class FlashInferMerge(Peer):
    name, module, package, version = "FlashInfer", "flashinfer", "flashinfer-python", "0.6.3"
    needs = " apache-tvm-ffi"

    def prepare(self, case, inputs) -> Callable:
        from flashinfer import merge_state

        prefix_lse, suffix_lse = inputs.prefix_lse * math.log2(math.e), inputs.suffix_lse * math.log2(math.e)
        return lambda: merge_state(inputs.prefix, prefix_lse, inputs.suffix, suffix_lse)


class CuDNN(Peer):
    name = "cuDNN"

    def unavailable(self, device: torch.device) -> str | None:
        if device.type != "cuda":
            return "needs an NVIDIA GPU"
        return None if torch.backends.cudnn.is_available() else "not in this build of torch"

    def describe(self) -> str:
        return f"{torch.backends.cudnn.version()}, through torch's scaled_dot_product_attention"

    def prepare(self, case, inputs) -> Callable:
        from torch.nn.attention import SDPBackend, sdpa_kernel

        query, key, value = (x.transpose(1, 2) for x in inputs.by_sequence())

        def call():
            with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
                out = torch.nn.functional.scaled_dot_product_attention(
                    query, key, value, is_causal=case.causal, scale=inputs.scale
                )
            return out.transpose(1, 2)

        return call


class FlashAttention3(Peer):
    name, module, package = "FlashAttention-3", "flash_attn_interface", "tokenspeed-fa3"
    version = "3.0.0.post20260810"
    dtypes = (BF16, FP8)

    def prepare(self, case, inputs) -> Callable:
        from flash_attn_interface import flash_attn_func

        query, key, value = inputs.by_sequence()
        return lambda: flash_attn_func(query, key, value, softmax_scale=inputs.scale, causal=case.causal)


PEERS: dict[str, tuple[Peer, ...]] = {
    "decode": (FlashMLA(), FlashInfer()),
    "prefill": (CuDNN(), FlashAttention3()),
    "merge": (FlashInferMerge(),),
    "cache": (),
}


# Dense FP8 x FP8 decode of vLLM's fork of FlashMLA, which has no package and so cannot run beside ours: microseconds on
# one NVIDIA H200 (torch 2.11, pages of 64, `triton.testing.do_bench`), and those of the BF16 peers on the same machine.
# (batch, length, heads, q_len): (fork, FlashMLA BF16, FlashInfer 0.6.3 BF16)
FORK = "FlashMLA FP8 fork"
FORK_FIGURES = {
    (1, 4096, 128, 1): (19.0, 25, 23),
    (1, 65536, 128, 1): (45.9, 57, 60),
    (4, 8192, 128, 1): (32.4, 41, 33),
    (16, 8192, 128, 1): (70.9, 74, 78),
    (64, 8192, 128, 1): (216, 230, 258),
    (128, 4096, 128, 1): (225, 255, 267),
    (128, 8192, 128, 1): (423, 479, 518),
    (64, 8192, 128, 2): (419, 480, 513),
    (64, 8192, 64, 1): (128, 175, None),
    (64, 8192, 16, 1): (120, 173, 158),
    (128, 8192, 16, 1): (218, 315, 291),
    (16, 32768, 16, 1): (119, 172, 159),
}


def published_fork(case, now: dict[str, float]) -> tuple[float, str] | None:
    """The fork's microseconds for a case, scaled by how much slower a BF16 peer runs now than then; and how so.

    Args:
        case: None is returned where it has no figure.
        now: microseconds of the BF16 peers in this run, by name.
    """
    if case.operator != "decode" or case.shortest:
        return None
    fork, *then = FORK_FIGURES.get((case.batch, case.length, case.heads, case.q_len), (None,))
    for peer, before in zip(("FlashMLA", "FlashInfer"), then):
        if before and peer in now:
            scaled = fork * now[peer] / before
            return scaled, f"published, scaled: {fork} x {now[peer]:.1f} / {before} ({peer} bf16 now / then)"
    return None
