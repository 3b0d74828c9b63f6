"""The one list of operators: names, arguments, results, and the `.out` overload of each.

Integers are `SymInt`, never `int`: with `int` Dynamo recompiles for every value. Arity is fixed, so the LSE variants
are operators of their own. Schemas only ever grow, by keywords with defaults, because exported programs name them;
`tests/test_schema.py` pins them.

The `.out` overloads return `()` and carry no tag. Inductor's lowering to out-variants that are tagged `torch.Tag.out`
fails on keyword arguments, dynamic shapes and unused outputs (torch 2.13 and 2.14); an untagged overload without
results works in eager mode, under compile and in export.
"""

from typing import NamedTuple

import torch
from torch.library import Library

NAMESPACE = "tokenspeed"


class Operator(NamedTuple):
    name: str
    arguments: str
    results: str
    outs: tuple[str, ...] = ()  # names of the `.out` overload's buffers; empty where there is no such overload

    @property
    def schema(self) -> str:
        return f"{self.name}({self.arguments}) -> {self.results}"

    @property
    def out_schema(self) -> str:
        buffers = ", ".join(f"Tensor({alias}!) {name}" for alias, name in zip("abcd", self.outs))
        star = "" if "*, " in self.arguments else "*, "
        return f"{self.name}.out({self.arguments}, {star}{buffers}) -> ()"


_DECODE = (
    "Tensor query, Tensor kv_cache, Tensor block_tables, Tensor seq_lens, float softmax_scale, *, "
    "float output_scale=1.0, SymInt kv_lora_rank=512, bool is_causal=True, SymInt window_left=-1, "
    "Tensor? local_visible_lens=None, Tensor? causal_seqs=None, "
    "SymInt cp_world=1, SymInt cp_rank=0, SymInt cp_interleave_size=1, SymInt? max_seq_len=None"
)
_PREFILL = (
    "Tensor query, Tensor key, Tensor value, Tensor cum_seq_lens_q, Tensor cum_seq_lens_kv, float softmax_scale, *, "
    "float output_scale=1.0, bool is_causal=True, SymInt? max_seq_len_q=None, SymInt? max_seq_len_kv=None"
)
_PAIR = "(Tensor, Tensor)"

OPERATORS = (
    Operator("mla_decode", _DECODE, "Tensor", ("out",)),
    Operator("mla_decode_lse", _DECODE, _PAIR, ("out", "lse")),
    Operator("mla_prefill", _PREFILL, "Tensor", ("out",)),
    Operator("mla_prefill_lse", _PREFILL, _PAIR, ("out", "lse")),
    Operator(
        "merge_attn_states",
        "Tensor prefix_output, Tensor prefix_lse, Tensor suffix_output, Tensor suffix_lse",
        _PAIR,
        ("out", "lse"),
    ),
    Operator("merge_attn_states_n", "Tensor outputs, Tensor lses", _PAIR, ("out", "lse")),
    Operator(
        "mla_kv_cache_write",
        "Tensor(a!) kv_cache, Tensor kv_c, Tensor k_pe, Tensor slot_mapping, *, Tensor? k_scale=None",
        "()",
    ),
    Operator(
        "mla_kv_cache_gather",
        "Tensor kv_cache, Tensor block_tables, Tensor cum_seq_lens, SymInt total_tokens, *, "
        "Tensor? seq_starts=None, Tensor? k_scale=None, ScalarType? dtype=None",
        "Tensor",
        ("out",),
    ),
    Operator(
        "mla_kv_pack_quantize_fp8",
        "Tensor k_nope, Tensor k_pe, Tensor v, *, float k_scale_inv=1.0, float v_scale_inv=1.0",
        _PAIR,
        ("key", "value"),
    ),
)

# A fragment, because the TokenSpeed engine defines operators of its own in the same namespace.
LIBRARY = Library(NAMESPACE, "FRAGMENT")


def define_operators() -> None:
    """Define every operator and its `.out` overload; ImportError, before any is defined, if a name is taken."""
    namespace = getattr(torch.ops, NAMESPACE)
    taken = [operator.name for operator in OPERATORS if hasattr(namespace, operator.name)]
    if taken:
        raise ImportError(
            f"ts_ops cannot register torch.ops.{NAMESPACE}.{taken[0]}: another package has already defined it. "
            "Import only one of the two in a process."
        )
    for operator in OPERATORS:
        LIBRARY.define(operator.schema, tags=(torch.Tag.pt2_compliant_tag,))
        if operator.outs:
            LIBRARY.define(operator.out_schema)
