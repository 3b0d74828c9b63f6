"""Promise: the operators' schemas only ever grow, by keywords with defaults.

Exported programs and AOTInductor packages store a call by its schema: operator, overload, argument names and order. So
a renamed, removed, reordered or retyped argument, or a new one without a default, breaks programs that people have
saved. A failure of the pinned table here is right only where the new schema is the old one plus keywords with
defaults; then the pin is updated with it.
"""

import inspect
import re
import subprocess
import sys

import pytest
import torch
from ts_ops.meta import NAMESPACE, OPERATORS
from ts_ops.meta.call import PROBLEMS

import ts_ops

DECODE = (
    "Tensor query, Tensor kv_cache, Tensor block_tables, Tensor seq_lens, float softmax_scale, *, "
    "float output_scale=1., SymInt kv_lora_rank=512, bool is_causal=True, SymInt window_left=-1, "
    "Tensor? local_visible_lens=None, Tensor? causal_seqs=None, SymInt cp_world=1, SymInt cp_rank=0, "
    "SymInt cp_interleave_size=1, SymInt? max_seq_len=None"
)
PREFILL = (
    "Tensor query, Tensor key, Tensor value, Tensor cum_seq_lens_q, Tensor cum_seq_lens_kv, float softmax_scale, *, "
    "float output_scale=1., bool is_causal=True, SymInt? max_seq_len_q=None, SymInt? max_seq_len_kv=None"
)
MERGE = "Tensor prefix_output, Tensor prefix_lse, Tensor suffix_output, Tensor suffix_lse"
GATHER = (
    "Tensor kv_cache, Tensor block_tables, Tensor cum_seq_lens, SymInt total_tokens, *, "
    "Tensor? seq_starts=None, Tensor? k_scale=None, ScalarType? dtype=None"
)
PACK = "Tensor k_nope, Tensor k_pe, Tensor v, *, float k_scale_inv=1., float v_scale_inv=1."

PINNED = {
    "mla_decode": f"({DECODE}) -> Tensor",
    "mla_decode.out": f"({DECODE}, Tensor(a!) out) -> ()",
    "mla_decode_lse": f"({DECODE}) -> (Tensor, Tensor)",
    "mla_decode_lse.out": f"({DECODE}, Tensor(a!) out, Tensor(b!) lse) -> ()",
    "mla_prefill": f"({PREFILL}) -> Tensor",
    "mla_prefill.out": f"({PREFILL}, Tensor(a!) out) -> ()",
    "mla_prefill_lse": f"({PREFILL}) -> (Tensor, Tensor)",
    "mla_prefill_lse.out": f"({PREFILL}, Tensor(a!) out, Tensor(b!) lse) -> ()",
    "merge_attn_states": f"({MERGE}) -> (Tensor, Tensor)",
    "merge_attn_states.out": f"({MERGE}, *, Tensor(a!) out, Tensor(b!) lse) -> ()",
    "merge_attn_states_n": "(Tensor outputs, Tensor lses) -> (Tensor, Tensor)",
    "merge_attn_states_n.out": "(Tensor outputs, Tensor lses, *, Tensor(a!) out, Tensor(b!) lse) -> ()",
    "mla_kv_cache_write": (
        "(Tensor(a!) kv_cache, Tensor kv_c, Tensor k_pe, Tensor slot_mapping, *, Tensor? k_scale=None) -> ()"
    ),
    "mla_kv_cache_gather": f"({GATHER}) -> Tensor",
    "mla_kv_cache_gather.out": f"({GATHER}, Tensor(a!) out) -> ()",
    "mla_kv_pack_quantize_fp8": f"({PACK}) -> (Tensor, Tensor)",
    "mla_kv_pack_quantize_fp8.out": f"({PACK}, Tensor(a!) key, Tensor(b!) value) -> ()",
}

OVERLOADS = {
    f"{operator.name}.{overload}".removesuffix(".default"): getattr(packet, overload)
    for operator in OPERATORS
    for packet in (getattr(torch.ops.tokenspeed, operator.name),)
    for overload in packet.overloads()
}


def test_every_overload_is_pinned():
    assert set(OVERLOADS) == set(PINNED)


@pytest.mark.parametrize("name", PINNED)
def test_schema(name):
    assert str(OVERLOADS[name]._schema) == f"{NAMESPACE}::{name}{PINNED[name]}"


@pytest.mark.parametrize("name", PINNED)
def test_integers_are_symbolic(name):
    """A plain `int` would recompile for every value."""
    assert not re.search(r"\bint\b", str(OVERLOADS[name]._schema))


@pytest.mark.parametrize("name", PINNED)
def test_tags(name):
    """Functional overloads are marked fit for pt2; `.out` carries no tag, which Inductor would lower wrongly."""
    expected = [] if name.endswith(".out") else [torch.Tag.pt2_compliant_tag]
    assert OVERLOADS[name].tags == expected


def _python_parameters(function) -> dict[str, tuple]:
    return {
        parameter.name: (parameter.kind == parameter.KEYWORD_ONLY, parameter.default)
        for parameter in inspect.signature(function).parameters.values()
    }


def _schema_parameters(name: str) -> dict[str, tuple]:
    return {
        argument.name: (
            argument.kwarg_only,
            argument.default_value if argument.has_default_value() else inspect.Parameter.empty,
        )
        for argument in OVERLOADS[name]._schema.arguments
    }


@pytest.mark.parametrize("operator", OPERATORS, ids=lambda operator: operator.name)
def test_public_function_agrees_with_schema(operator):
    expected = _schema_parameters(operator.name)
    if operator.outs:
        expected["out"] = (True, None)
    assert _python_parameters(getattr(ts_ops, operator.name)) == expected


@pytest.mark.parametrize("operator", OPERATORS, ids=lambda operator: operator.name)
def test_contract_agrees_with_schema(operator):
    problem = PROBLEMS[operator.name]
    actual = _python_parameters(getattr(problem, "func", problem))
    assert (actual.pop("with_lse", None) is not None) == operator.name.startswith(("mla_decode", "mla_prefill"))
    assert actual == _schema_parameters(operator.name)


def test_every_operator_is_public_and_documented():
    for operator in OPERATORS:
        assert operator.name in ts_ops.__all__
        documentation = getattr(ts_ops, operator.name).__doc__
        for buffer in ("Raises:", *(("out:",) if operator.outs else ())):
            assert buffer in documentation, operator.name


def test_taken_name_is_an_import_error(taken="mla_kv_pack_quantize_fp8"):
    """The TokenSpeed engine has operators of its own in this namespace; a clash must say which, and define nothing."""
    program = f"""
import torch
library = torch.library.Library("tokenspeed", "FRAGMENT")
library.define("{taken}(Tensor x) -> Tensor")
try:
    import ts_ops
except ImportError as error:
    print(error)
print(sorted(name for name in {[operator.name for operator in OPERATORS]!r} if hasattr(torch.ops.tokenspeed, name)))
"""
    output = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    message, defined = output.strip().splitlines()
    assert f"torch.ops.tokenspeed.{taken}" in message
    assert defined == f"['{taken}']"
