"""The reference model computes what transformers computes, and its decode step compiles as one graph."""

import math
from dataclasses import replace

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch._dynamo.utils import ReinplaceCounters, counters

import generation
from checkpoint import load_model
from generation import Settings, generate
from paged_cache import FP8, PagedCache
from tiny_models import CASES, YARN, Case, build

LENGTHS = (7, 19, 1)
BLOCKS = Case("three-alike", 3, settings={"rope_parameters": YARN, "first_k_dense_replace": 0})
TWO_LAYERS = Case("two-layers", 3, settings={"rope_parameters": YARN, "num_hidden_layers": 2})


pytestmark = pytest.mark.usefixtures("one_thread")


def prompts_of(vocab: int = 97, lengths=LENGTHS) -> list[list[int]]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(0, vocab, (length,), generator=generator).tolist() for length in lengths]


def cache_for(model, prompts, *, dtype=torch.float32, page_size=8) -> PagedCache:
    dim = model.config.attention.cache_dim
    return PagedCache(len(model.layers), [len(p) + 1 for p in prompts], page_size, dim, dtype=dtype, device="cpu")


@torch.inference_mode()
def logits_of(model, prompts, steps: int, *, kv_dtype=None, fp8_query=False) -> list[torch.Tensor]:
    """Per prompt: the logits [steps, vocab] after its first len - steps + 1 tokens, … up to all of it.

    The first comes from a prefill, the others from decode steps that are fed the prompt's own tokens.
    """
    cache = cache_for(model, prompts, dtype=kv_dtype or model.embed_tokens.weight.dtype)
    logits = [generation.prefill(model, [p[: len(p) - steps + 1] for p in prompts], cache)]
    for step in range(steps - 1):
        tokens = torch.tensor([p[len(p) - steps + 1 + step] for p in prompts])
        cache.seq_lens += 1
        logits.append(model.decode(tokens, cache.seq_lens, cache.block_tables, cache.layers, fp8_query))
    return list(torch.stack(logits, dim=1))


@torch.inference_mode()
def transformers_logits(model, prompts, steps: int) -> list[torch.Tensor]:
    return [model(torch.tensor([p])).logits[0, -steps:].float() for p in prompts]


def largest_error(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> float:
    return max((a - b).abs().max().item() for a, b in zip(ours, theirs, strict=True))


def mean_error(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> float:
    return (torch.stack(ours) - torch.stack(theirs)).square().mean().sqrt().item()


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_logits_are_those_of_transformers(case, saved):
    """fp32: the same sums in another order. Measured at most 1e-5 on logits of up to 10; a wrong scale, rotation,
    route or norm shows at 1e-1 or more."""
    model = load_model(saved(case))
    prompts = prompts_of(lengths=(12, 24, 6))
    theirs = transformers_logits(build(case), prompts, steps=6)
    assert min(rows.std().item() for rows in theirs) > 0.5, "logits so flat would hide errors"
    error = largest_error(logits_of(model, prompts, steps=6), theirs)
    print(f"{case.id}: largest logits error {error:.2e}")
    assert error < 3e-5


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_bf16_logits_are_as_good_as_those_of_transformers(case, saved):
    """Two bf16 computations differ by their rounding, so both are held against fp32 on the same bf16 weights.

    Every expert is chosen: otherwise rounding that breaks a near tie swaps an expert, an error of any size in either.
    """
    all_chosen = {"n_routed_experts": 4, "num_experts_per_tok": 4, "n_group": 2, "topk_group": 2}
    case = replace(case, name=f"{case.name}-all", dtype=torch.bfloat16, settings=case.settings | all_chosen)
    prompts = prompts_of(lengths=(12, 24, 6))
    exact = transformers_logits(build(case).float(), prompts, steps=6)
    theirs = transformers_logits(build(case), prompts, steps=6)
    ours = logits_of(load_model(saved(case)), prompts, steps=6)
    print(
        f"{case.id}: largest error {largest_error(ours, exact):.3f} (transformers {largest_error(theirs, exact):.3f}), "
        f"root mean square {mean_error(ours, exact):.4f} (transformers {mean_error(theirs, exact):.4f})"
    )
    # The largest of 1746 rounding errors scatters widely between two orders of summation, their mean hardly does.
    assert mean_error(ours, exact) < 1.25 * mean_error(theirs, exact)


def test_every_prompt_token_has_the_logits_of_transformers(saved):
    """Not only the last of each sequence: what a row sees within a ragged prefill. Tolerance as above."""
    model, prompts = load_model(saved(CASES[0])), prompts_of()
    cache = cache_for(model, prompts)
    with torch.inference_mode():
        ours = generation.prefill(model, prompts, cache, every_token=True).split(LENGTHS)
    assert largest_error(list(ours), transformers_logits(build(CASES[0]), prompts, steps=0)) < 3e-5


@pytest.mark.parametrize("case", [CASES[0], CASES[2]], ids=lambda case: case.id)
def test_greedy_tokens_are_those_of_transformers(case, saved):
    """64 tokens of each prompt, decoded together, in fp32, where no two candidates are as close as the error."""
    prompts = prompts_of()
    ours = generate(load_model(saved(case)), prompts, Settings(max_new_tokens=64, page_size=16, compile=False)).tokens
    theirs = build(case)
    for prompt, tokens in zip(prompts, ours, strict=True):
        expected = theirs.generate(torch.tensor([prompt]), max_new_tokens=64, do_sample=False)[0, len(prompt) :]
        assert tokens == expected.tolist()


@pytest.mark.parametrize("fp8_query", [False, True], ids=["bf16-query", "fp8-query"])
def test_fp8_cache_is_close(fp8_query, saved):
    """e4m3 keeps 4 significant bits, so elements are off by 2.6 % on average (root mean square), and logits after three
    layers by twice that. A scale that is missing or applied twice, 2^-5 here, shows as an error of about 1.

    Dense, because a mixture may answer a small error with another expert.
    """
    dense = Case("dense", 3, settings={"rope_parameters": YARN, "first_k_dense_replace": 3})
    model, prompts = load_model(saved(dense)), prompts_of(lengths=(12, 24, 6))
    exact = torch.stack(logits_of(model, prompts, steps=6))
    narrow = torch.stack(logits_of(model, prompts, steps=6, kv_dtype=FP8, fp8_query=fp8_query))
    assert torch.equal(narrow[:, 0], exact[:, 0]), "prefill attends to what it has not quantised"
    error = ((narrow - exact).norm() / exact.norm()).item()
    print(f"relative error {error:.4f}")
    assert 0 < error < 0.1


def test_scales_are_set_once_by_the_first_prefill(saved):
    model, prompts = load_model(saved(BLOCKS)), prompts_of()
    cache = cache_for(model, prompts, dtype=FP8)
    with torch.inference_mode():
        generation.prefill(model, prompts, cache)
        scales = [layer.k_scale.item() for layer in cache.layers]
        for layer in model.layers:
            layer.self_attn.kv_a_layernorm.weight.mul_(100)
        generation.prefill(model, prompts, cache)
        fresh = cache_for(model, prompts, dtype=FP8)
        generation.prefill(model, prompts, fresh)
    assert all(math.frexp(scale)[0] == 0.5 for scale in scales), "powers of two"
    assert scales == [layer.k_scale.item() for layer in cache.layers]
    assert all(layer.k_scale.item() > 30 * scale for layer, scale in zip(fresh.layers, scales, strict=True))


def decode_inputs(cache: PagedCache, batch: int, mark=None) -> tuple:
    """Inputs of a decode step for the first `batch` sequences of a cache; `mark(tensor, 0)` is called on each."""
    inputs = torch.arange(batch), cache.seq_lens[:batch].clone() + 1, cache.block_tables[:batch].clone()
    for tensor in inputs:
        if mark is not None:
            mark(tensor, 0)
    return inputs


@pytest.mark.parametrize(
    ("mark", "dtype", "first", "graphs"),
    [
        (None, torch.float32, 1, 3),
        (torch._dynamo.mark_dynamic, torch.float32, 2, 1),
        (torch._dynamo.decorators.mark_unbacked, torch.float32, 1, 1),
        (torch._dynamo.decorators.mark_unbacked, torch.bfloat16, 1, 1),  # groups its experts, see deepseek_moe.Experts
    ],
    ids=["default", "mark_dynamic", "mark_unbacked", "mark_unbacked-bf16"],
)
def test_graphs_over_batch_sizes(mark, dtype, first, graphs, saved):
    """How often Dynamo traces; what the backend then does with a graph does not matter, so there is none."""
    model = load_model(saved(TWO_LAYERS), dtype=dtype)
    cache = cache_for(model, prompts_of(lengths=(9,) * 8), dtype=dtype)
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("eager")
    decode = torch.compile(model.decode, backend=counter, fullgraph=True)
    with torch.inference_mode():
        for batch in (*range(first, 9), *reversed(range(first, 9))):
            decode(*decode_inputs(cache, batch, mark), cache.layers)
    assert counter.frame_count <= graphs


@pytest.mark.parametrize("fp8_query", [False, True], ids=["bf16-query", "fp8-query"])
def test_one_compiled_block_serves_every_layer(fp8_query, saved):
    """Layers differ in weights, cache and k_scale, and in no Python number."""
    model = load_model(saved(BLOCKS), dtype=torch.bfloat16)
    cache = cache_for(model, prompts_of(), dtype=FP8)
    for exponent, layer in enumerate(cache.layers):
        layer.k_scale.fill_(2.0 ** (exponent - 6))
    with torch.inference_mode():
        generation.prefill(model, prompts_of(), cache)
        inputs = decode_inputs(cache, len(LENGTHS))
        expected = model.decode(*inputs, cache.layers, fp8_query)
        torch._dynamo.reset()
        counter = CompileCounterWithBackend("eager")
        for layer in model.layers:
            layer.compile(backend=counter, fullgraph=True)
        assert torch.equal(model.decode(*inputs, cache.layers, fp8_query), expected)
    assert counter.frame_count == 1


def test_compiled_decode_runs_64_steps_on_one_graph(saved):
    """Through Inductor: no break, no recompile, caches written in place, and the tokens of eager mode.

    Inductor's caches are off, for a graph that comes from one reports no missed rewrites. `test_generate.py` does the
    same with an FP8 cache, through the command.
    """
    model = load_model(saved(TWO_LAYERS))
    settings = Settings(max_new_tokens=65, page_size=16, compile=False)
    expected = generate(model, prompts_of(), settings).tokens
    torch._dynamo.reset()
    counters.clear()
    ReinplaceCounters.clear()
    counter = CompileCounterWithBackend("inductor")
    model.decode = torch.compile(model.decode, backend=counter, fullgraph=True)
    with torch._inductor.config.patch(force_disable_caches=True):
        tokens = generate(model, prompts_of(), settings).tokens
    assert tokens == expected
    assert counter.frame_count == 1
    assert not counters["graph_break"]
    assert ReinplaceCounters.get_total_missed_bytes() == 0
