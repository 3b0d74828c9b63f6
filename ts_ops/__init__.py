"""MLA attention operators for `torch.compile` and CUDA graphs: `torch.ops.tokenspeed.*`.

Importing this package registers the operators. The functions below are the same operators with types and docstrings.
"""

from . import dispatch, meta
from .cache import allocate_kv_cache, pack_query_fp8
from .dispatch import use_backend
from .ops import (
    merge_attn_states,
    merge_attn_states_n,
    mla_decode,
    mla_decode_lse,
    mla_kv_cache_gather,
    mla_kv_cache_write,
    mla_kv_pack_quantize_fp8,
    mla_prefill,
    mla_prefill_lse,
)
from .precision import allow_fp8_weights
from .warmup import warmup
from .workspace import workspace_bound

__version__ = "0.1.0"

__all__ = [
    "allocate_kv_cache",
    "allow_fp8_weights",
    "merge_attn_states",
    "merge_attn_states_n",
    "meta",
    "mla_decode",
    "mla_decode_lse",
    "mla_kv_cache_gather",
    "mla_kv_cache_write",
    "mla_kv_pack_quantize_fp8",
    "mla_prefill",
    "mla_prefill_lse",
    "pack_query_fp8",
    "use_backend",
    "warmup",
    "workspace_bound",
]

dispatch.register()
