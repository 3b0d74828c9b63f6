"""FLOP formulas of the attention operators, for FlopCounterMode and Inductor's estimates.

Lengths live on the device, so the formulas count with what the host knows. Decode: every query row sees the whole
capacity of its block table (`max_seq_len` where given). Prefill: the B sequences have equal lengths, Tq / B and
Tkv / B. A multiply-add is two operations; the softmax is not counted, as in torch's own attention formulas.

`torch.utils.flop_counter` imports triton, and importing `ts_ops` must not. So the formulas are registered when that
module is imported, by whoever needs it.
"""

import importlib.util
import sys
from importlib.abc import MetaPathFinder

import torch

from .schema import NAMESPACE

COUNTER = "torch.utils.flop_counter"


def decode_flops(
    query_shape, kv_cache_shape, block_tables_shape, *args, kv_lora_rank=512, max_seq_len=None, out_shape=None, **kwargs
) -> int:
    """2 * B * q_len * H * S * (D + kv_lora_rank): scores over D columns, values over kv_lora_rank."""
    batch, q_len, heads, head_dim = query_shape
    capacity = block_tables_shape[1] * kv_cache_shape[-2]
    keys = capacity if max_seq_len is None else min(max_seq_len, capacity)
    return 2 * batch * q_len * heads * keys * (head_dim + kv_lora_rank)


def prefill_flops(
    query_shape, key_shape, value_shape, cum_q_shape, cum_kv_shape, *args, is_causal=True, out_shape=None, **kwargs
) -> int:
    """2 * H * pairs * (Dqk + Dv), pairs being the (query, key) pairs that the mask leaves."""
    tokens_q, heads, dim_qk = query_shape
    tokens_kv, _, dim_v = value_shape
    batch = max(cum_q_shape[0] - 1, 1)
    pairs = tokens_q * tokens_kv // batch
    if is_causal:
        # Bottom-right: row i of n misses the last n - 1 - i keys, as far as there are that many.
        rows, keys = tokens_q // batch, tokens_kv // batch
        missed = min(rows, keys)
        pairs -= batch * (missed * (missed - 1) // 2 + (rows - missed) * keys)
    return 2 * heads * pairs * (dim_qk + dim_v)


def register_flops() -> None:
    if COUNTER in sys.modules:
        _register(sys.modules[COUNTER])
    else:
        sys.meta_path.insert(0, _OnImport())


def _register(counter) -> None:
    ops = getattr(torch.ops, NAMESPACE)
    counter.register_flop_formula([ops.mla_decode, ops.mla_decode_lse])(decode_flops)
    counter.register_flop_formula([ops.mla_prefill, ops.mla_prefill_lse])(prefill_flops)


class _OnImport(MetaPathFinder):
    """Finds nothing itself: when the counter is first imported, lets the other finders load it, then registers."""

    def find_spec(self, name, path=None, target=None):
        if name != COUNTER:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        load = spec.loader.exec_module

        def load_and_register(module) -> None:
            load(module)
            _register(module)

        spec.loader.exec_module = load_and_register
        return spec
