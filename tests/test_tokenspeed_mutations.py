"""Every fix of the TokenSpeed adapter is needed: without it, the test that is named here fails.

Each row edits one place of the adapter's source, loads the result as the backend, and runs a law test, which must fail;
the same test passes on the source as it is. `pytest -v` lists the rows.
"""

import functools
import importlib.util
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

import test_laws_decode as decode_laws
import test_laws_prefill as prefill_laws
import test_tokenspeed as adapter_tests
import ts_ops
from conftest import TOKENSPEED, UNSPLIT
from ts_ops import backends, dispatch

FP8, BF16 = torch.float8_e4m3fn, torch.bfloat16
DecodeCase, PrefillCase = decode_laws.Case, prefill_laws.Case
ADAPTER, FINISH = "ts_ops.backends.tokenspeed", "ts_ops.backends.triton.finish"


@dataclass(frozen=True)
class Mutation:
    fix: str  # what is taken away
    old: str
    new: str
    test: object  # (machine) -> None
    module: str = ADAPTER
    unsplit: bool = False


def law(test, *args, **kwargs):
    """A law test with its arguments, on the target that the mutation runs on."""
    return lambda machine, target: test(*args, **kwargs, target=target)


def own(test, *args):
    return lambda machine, target: test(machine, *args)


def with_patches(test):
    def run(machine, target):
        with pytest.MonkeyPatch.context() as patches:
            test(machine, patches)

    return run


PLAIN = law(decode_laws.check, DecodeCase((0, 1, 37, 150)))
SHORT = law(decode_laws.test_rows_of_a_block_at_short_lengths, 5, True, torch.float16)
STRIDED = law(decode_laws.test_strided_arguments_are_read_as_they_lie)
VISIBLE = law(decode_laws.test_local_visible_lens, BF16)
PARALLEL = law(decode_laws.test_context_parallel_ranks_merge_to_the_whole, 2, 1, 4, torch.float32)
PARALLEL_FP8 = law(decode_laws.test_context_parallel_ranks_merge_to_the_whole, 2, 1, 4, FP8)
FEW_KEYS = law(prefill_laws.check, PrefillCase((600, 300), (20, 40), heads=1, heads_kv=1))
RAGGED = law(prefill_laws.check, PrefillCase((5, 70), (40, 75), heads=1, heads_kv=1))

MUTATIONS = [
    Mutation("natural log", "other=0.0) * LN_2", "other=0.0)", PLAIN, FINISH),
    Mutation("natural log, visible lens", "torch.mul(log2_lse, LN_2, out=lse)", "lse.copy_(log2_lse)", VISIBLE),
    Mutation("empty requests", "empty = high <= low", "empty = high < low", PLAIN, FINISH, unsplit=True),
    Mutation("empty rows of a block", "empty = high <= low", "empty = high < low", SHORT, FINISH),
    Mutation("output of empty rows", "    if empty:\n", "    if False:\n", SHORT, FINISH),
    Mutation("LSE of empty rows", 'tl.where(empty, float("-inf"), natural)', "natural", SHORT, FINISH),
    Mutation("empty rows, context parallel", '"HAS_CP": problem.causal_seqs is not None', '"HAS_CP": False',
             PARALLEL_FP8, FINISH),
    Mutation("bf16 context parallel", 'or (_parallel(problem) and problem.query.dtype != FP8)', "", PARALLEL),
    Mutation("tiny scales", "problem.softmax_scale < LEAST_SCALE or ", "",
             law(decode_laws.test_any_finite_softmax_scale, 1e-6)),
    Mutation("queries in order", "query=_adjacent(problem.query)", "query=problem.query", STRIDED),
    Mutation("contiguous lengths", "seq_lens=_dense(problem.seq_lens)", "seq_lens=problem.seq_lens", STRIDED),
    Mutation("contiguous tables", "else _dense(problem.block_tables)", "else problem.block_tables", STRIDED),
    Mutation("contiguous visible lens", "None if visible is None else _dense(visible)", "visible", STRIDED),
    Mutation("contiguous causal_seqs", "causal_seqs=_dense(problem.causal_seqs)", "causal_seqs=problem.causal_seqs",
             law(decode_laws.test_strided_causal_seqs)),
    Mutation("tables of whole tiles", "missing = -table.shape[1] % (KEY_TILE // page_size)", "missing = 0",
             law(decode_laws.check, DecodeCase((3, 130, 257), page_size=2, heads=2, query=FP8))),
    Mutation("workspace", "torch.empty(plan.workspace,", "torch.empty(0,", PLAIN),
    Mutation("no pages", "if problem.capacity == 0 or problem.num_pages == 0:", "if False:",
             law(decode_laws.test_no_pages_at_all)),
    Mutation("windows wider than any cache",
             "problem.window_left if problem.window_left < WIDEST_WINDOW else -1", "problem.window_left",
             law(decode_laws.test_window, 4, 2**31 - 1, True)),
    Mutation("hints in powers of two", "max(KEY_TILE, 1 << (keys - 1).bit_length())", "max(KEY_TILE, keys)",
             own(adapter_tests.test_hints_share_plans)),
    Mutation("strides of single rows", "kv_cache=_plain_strides(problem.kv_cache)", "kv_cache=problem.kv_cache",
             own(adapter_tests.test_strides_of_single_rows)),
    Mutation("aligned buffers", "aligned = out.data_ptr() % ALIGNMENT == 0", "aligned = True",
             own(adapter_tests.test_unaligned_buffers)),
    Mutation("no compilation under capture", '_refuse_to_compile_in_capture("mla_decode", plan.variant)', "pass",
             own(adapter_tests.test_capture, "decode")),
    Mutation("no compilation of a prefill under capture", '_refuse_to_compile_in_capture("mla_prefill", variant)',
             "pass", own(adapter_tests.test_capture, "prefill")),
    Mutation("device of the tensors", "with package.on_device(problem.device):\n        plan", "if True:\n        plan",
             with_patches(adapter_tests.test_runs_on_the_device_of_its_tensors)),
    *(Mutation(f"contiguous {name}", f"{name}=_dense(problem.{name})", f"{name}=problem.{name}",
               law(prefill_laws.check, PrefillCase((5, 70), (40, 75), layout=layout)))
      for name, layout in (("query", "heads_first"), ("key", "heads_first"), ("value", "split"))),
    Mutation("rows beyond their keys", "cum_q, cum_kv = package.finish.separate_empty_rows(problem)",
             "cum_q, cum_kv = problem.cum_seq_lens_q, problem.cum_seq_lens_kv", FEW_KEYS),
    Mutation("contiguous cumulative lengths",
             "cum_q, cum_kv = _dense(problem.cum_seq_lens_q), _dense(problem.cum_seq_lens_kv)",
             "cum_q, cum_kv = problem.cum_seq_lens_q, problem.cum_seq_lens_kv",
             law(prefill_laws.test_strided_cumulative_lengths, False)),
    Mutation("prefill without keys or sequences", "if problem.tokens_kv == 0 or problem.batch == 0:", "if False:",
             law(prefill_laws.test_no_sequences, 0)),
    Mutation("output scale of a prefill", "out.mul_(problem.output_scale)", "pass",
             law(prefill_laws.check, PrefillCase((3,), (5,), output_scale=7.3))),
    Mutation("rows past the last sequence", "tl.maximum(token, seen) * heads * DIM", "end * heads * DIM", RAGGED,
             FINISH),
    Mutation("LSE past the last sequence", "mask=element < tl.minimum(seen, end) * heads", "mask=element < end * heads",
             RAGGED, FINISH),
]  # fmt: skip


def load(name: str, source: Path):
    """The module `name` from another file, in place of the real one."""
    spec = importlib.util.spec_from_file_location(name, source)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def run_mutated(install_tokenspeed, monkeypatch, tmp_path):
    """(mutation or None) -> runs the test on the adapter as the mutation leaves it."""

    def run(mutation: Mutation, apply: bool) -> None:
        with pytest.MonkeyPatch.context() as patches:
            for name in (FINISH, ADAPTER):  # both anew, as the adapter remembers what it imported
                path = Path(importlib.util.find_spec(name).origin)
                text = path.read_text()
                if apply and name == mutation.module:
                    assert text.count(mutation.old) == 1, f"{mutation.old!r} must stand once in {path.name}"
                    text = text.replace(mutation.old, mutation.new)
                copy = tmp_path / f"{apply}_{path.name}"
                copy.write_text(text)
                module = load(name, copy)
                patches.setitem(sys.modules, name, module)
                parent, leaf = name.rsplit(".", 1)
                patches.setattr(sys.modules[parent], leaf, module, raising=False)
            known = dispatch._backend
            patches.setattr(
                dispatch, "_backend", lambda name: backends.tokenspeed if name == "tokenspeed" else known(name)
            )
            install = functools.partial(install_tokenspeed, sms=1 if mutation.unsplit else 148)
            machine = install()
            with ts_ops.use_backend("tokenspeed"):
                mutation.test(machine, UNSPLIT if mutation.unsplit else TOKENSPEED)

    return run


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.fix.replace(" ", "_"))
def test_without(mutation, run_mutated):
    run_mutated(mutation, apply=False)
    try:
        run_mutated(mutation, apply=True)
    except pytest.skip.Exception as skipped:
        raise AssertionError(f"the test was skipped: {skipped}") from None
    except (AssertionError, RuntimeError, ValueError, IndexError, pytest.fail.Exception):
        return
    pytest.fail(f"without {mutation.fix!r} the test passes")
