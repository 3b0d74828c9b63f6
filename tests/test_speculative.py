"""Promise: drafts change how many tokens a decode call yields, and no token; sampling follows its distribution."""

import re

import pytest
import torch

import speculative
from checkpoint import load_model
from engine import Engine, EngineSettings, Sampling
from generation import Settings, generate
from paged_cache import FP8, PagedCache
from speculative import PromptLookup, sample, uniform
from tiny_models import YARN, Case

pytestmark = pytest.mark.usefixtures("one_thread")

MIXTURE = Case("speculative", 2, settings={
    "rope_parameters": YARN, "num_hidden_layers": 2, "q_lora_rank": None, "topk_method": "greedy",
})  # fmt: skip
PROMPTS = [[5, 6, 7, 8] * 5, [1], list(range(40)), [3, 3, 3], [9, 10, 11, 12, 13] * 2 + [9, 10]]
NEW = 40
SAMPLING = Sampling(max_new_tokens=NEW)


@pytest.fixture(scope="module")
def model(saved):
    return load_model(saved(MIXTURE))


@pytest.fixture(scope="module")
def expected(model):
    settings = Settings(max_new_tokens=NEW, page_size=16, compile=False)
    return [generate(model, [prompt], settings).tokens[0] for prompt in PROMPTS]


def engine_of(model, **settings) -> Engine:
    defaults = dict(num_pages=100, page_size=8, batch_sizes=(1, 2, 4, 8), prefill_tokens=32)
    return Engine(model, EngineSettings(**defaults | settings))


@pytest.mark.parametrize("tokens, count, draft", [
    ([1, 2, 3], 2, []),  # nothing repeats
    ([1], 2, []),
    ([1, 2, 3, 4, 1, 2], 2, [3, 4]),
    ([1, 2, 3, 4, 1, 2], 6, [3, 4, 1, 2, 3, 4]),  # past the end, what is copied repeats
    ([7, 7], 3, [7, 7, 7]),
    ([1, 9, 2, 9, 9], 1, [9]),  # the last occurrence counts
    ([1, 2, 5, 0, 3, 2, 6, 1, 2], 1, [5]),  # the longest n-gram counts, though 2 was later followed by 6
    ([8, 1, 2, 3, 5, 9, 1, 2, 3, 6, 8, 1, 2, 3], 1, [6]),  # of at most three
])  # fmt: skip
def test_drafts(tokens, count, draft):
    assert PromptLookup().propose(tokens, count) == draft
    growing = PromptLookup()
    for length in range(1, len(tokens)):
        growing.propose(tokens[:length], count)
    assert growing.propose(tokens, count) == draft


@pytest.mark.parametrize("num_pages", [400, 62], ids=["roomy", "tight"])
@pytest.mark.parametrize("draft_tokens", [1, 4, 7])
def test_greedy_output_is_that_of_plain_decoding(draft_tokens, num_pages, model, expected):
    """Of these drafts a few are accepted, and many are not."""
    engine = engine_of(model, draft_tokens=draft_tokens, num_pages=num_pages, page_size=2)
    assert engine.generate(PROMPTS, SAMPLING) == expected
    counts = engine.counts
    assert (counts["preemptions"] > 0) == (num_pages == 62)
    assert 0 < counts["accepted"] < counts["drafted"]
    assert engine.pages.free == num_pages - 1


def test_it_takes_fewer_calls(saved):
    """With attention turned down, the next token is mostly up to the last one, and output soon runs in circles."""
    model = load_model(saved(MIXTURE))
    for layer in model.layers:
        layer.self_attn.o_proj.weight.mul_(0.05)
    plain, drafted = engine_of(model), engine_of(model, draft_tokens=4)
    assert plain.generate(PROMPTS[2:4], SAMPLING) == drafted.generate(PROMPTS[2:4], SAMPLING)
    assert drafted.counts["decode_calls"] < 0.9 * plain.counts["decode_calls"] == 0.9 * (NEW - 1)
    assert drafted.counts["decode_tokens"] == plain.counts["decode_tokens"] == 2 * (NEW - 1)


def test_sampled_output_is_that_of_plain_decoding(model):
    """Each position has its own number, so a draft is kept only if it is what that number picks."""
    sampling = Sampling(max_new_tokens=NEW, temperature=0.6, top_p=0.9, seed=4)
    plain, drafted = engine_of(model), engine_of(model, draft_tokens=3)
    assert plain.generate(PROMPTS, sampling) == drafted.generate(PROMPTS, sampling)
    assert 0 < drafted.counts["accepted"] < drafted.counts["drafted"]


def test_a_request_stops_within_a_draft(model, expected):
    """On each position in turn, so that the stop falls before, on and after accepted drafts; on the last token too."""
    row = max(range(len(PROMPTS)), key=lambda index: len(set(expected[index])))
    for new in range(1, NEW + 1):
        [tokens] = engine_of(model, draft_tokens=4).generate([PROMPTS[row]], Sampling(max_new_tokens=new))
        assert tokens == expected[row][:new]
    engine = engine_of(model, draft_tokens=4)
    for stop in set(expected[row]):
        [tokens] = engine.generate([PROMPTS[row]], Sampling(max_new_tokens=NEW, stop_token_ids=(stop,)))
        assert tokens == expected[row][: expected[row].index(stop) + 1]


@pytest.mark.parametrize("dtype, query", [(torch.float32, False), (FP8, False), (FP8, True)], ids=str)
def test_a_decode_call_of_several_tokens_is_that_of_one_each(dtype, query, model):
    """Logits of q tokens at once and one after the other, in ragged rows. fp32: as in test_model.py.

    FP8: keys and query are rounded the same, except where fp32's rounding tips them.
    """
    q_len, limit = 3, 3e-5 if dtype == torch.float32 else 5e-2
    dim = model.config.attention.cache_dim
    caches = [
        PagedCache(len(model.layers), [32, 32, 8], 8, dim, dtype=dtype, device="cpu") for _ in range(2)
    ]  # fmt: skip
    for cache in caches:
        for layer in cache.layers:
            if layer.k_scale is not None:
                layer.k_scale.fill_(2.0**-5)
    tokens = torch.randint(97, (3, 12))
    # A row that is not there, and one that ends with the last slot of its page.
    lengths = [12, 0, 8]
    with torch.inference_mode():
        single, several = [], []
        for step in range(12):
            lens = torch.tensor(
                [min(step + 1, length) if step < length else 0 for length in lengths], dtype=torch.int32
            )
            single.append(model.decode(tokens[:, step], lens, caches[0].block_tables, caches[0].layers, query))
        for first in range(0, 12, q_len):
            # The last row has 8 tokens: its third call would begin with one too many, so it is left out.
            lens = torch.tensor([first + q_len if first + q_len <= n else 0 for n in lengths], dtype=torch.int32)
            block = tokens[:, first : first + q_len]
            several.append(model.decode(block, lens, caches[1].block_tables, caches[1].layers, query))
    single, several = torch.stack(single, dim=1), torch.cat(several, dim=1)
    assert several.shape == single.shape == (3, 12, 97)
    for row, count in ((0, 12), (2, 6)):
        error = (several[row, :count] - single[row, :count]).abs().max().item()
        print(f"largest error {error:.1e}")
        assert error < limit
    assert single[0].std() > 0.5


def test_rows_past_the_pages_of_a_sequence_are_not_stored(model):
    """Drafts that can no longer be needed have no page, and must not be written to the null page."""
    dim = model.config.attention.cache_dim
    cache = PagedCache(len(model.layers), [8], 8, dim, dtype=torch.float32, device="cpu")
    with torch.inference_mode():
        seq_lens = torch.tensor([10], dtype=torch.int32)
        model.decode(torch.tensor([[1, 2, 3, 4]]), seq_lens, cache.block_tables, cache.layers)
    for layer in cache.layers:
        assert not layer.pages[0].any()
        assert layer.pages[1].any(dim=1).tolist() == [False] * 6 + [True] * 2


@pytest.mark.parametrize("temperature, top_p", [(1.0, 1.0), (0.5, 1.0), (1.0, 0.7), (2.0, 0.9)])
def test_samples_follow_the_distribution(temperature, top_p):
    """Each number in a fine grid is drawn once, so frequencies are probabilities, but for the grid's step."""
    torch.manual_seed(5)
    logits, draws = torch.randn(12) * 2, 4000
    options = [(temperature, top_p, (index + 0.5) / draws) for index in range(draws)]
    counts = sample(logits.expand(draws, -1), options).bincount(minlength=12)
    probabilities = (logits.double() / temperature).softmax(dim=-1)
    order = probabilities.argsort(descending=True)
    kept = 1 + (probabilities[order].cumsum(0) < top_p).sum().item()
    probabilities[order[kept:]] = 0
    assert kept < 12 or top_p == 1.0
    assert (counts / draws - probabilities / probabilities.sum()).abs().max() < 2 / draws
    assert counts[order[kept:]].sum() == 0


def test_extreme_options_of_a_sample():
    """The largest number in float64 is 1 in fp32; temperatures near 0 leave the likeliest; rows do not mix."""
    logits = torch.tensor([1.0, 3.0, 2.0]).repeat(6, 1)
    almost_one = 1 - 2.0**-53
    options = [
        (0.0, 1.0, 0.9), (1.0, 1.0, almost_one), (1.0, 0.7, almost_one), (1e-30, 1.0, 0.99), (1e-300, 1.0, 0.99),
        (1.0, 1e-9, almost_one),
    ]  # fmt: skip
    assert sample(logits, options).tolist() == [1, 0, 2, 1, 1, 1]


def test_numbers_are_those_of_seed_and_index():
    numbers = [uniform(seed, index) for seed in range(30) for index in range(30)]
    assert len(set(numbers)) == len(numbers) and 0 <= min(numbers) and max(numbers) < 1
    assert 0.45 < sum(numbers) / len(numbers) < 0.55
    assert uniform(3, 4) == numbers[3 * 30 + 4]


def test_command(saved, capsys):
    arguments = ["--model", str(saved(MIXTURE)), "--device", "cpu", "--prompt-ids", "5,6,7,8,5,6,7,8,5"]
    assert speculative.main([*arguments, "--max-new-tokens", "60", "--page-size", "8"]) == 0
    printed = capsys.readouterr().out
    assert re.search(r"0 draft tokens: [\d.]+ s, 9 tokens prefilled, 59 decoded in 59 calls\n", printed)
    match = re.search(r"4 draft tokens: .* 59 decoded in (\d+) calls, (\d+)% of \d+ drafts accepted\n", printed)
    assert match and int(match[1]) < 59 and int(match[2]) > 0
    assert re.search(r"speed-up [\d.]+, 1 of 1 outputs the same\n$", printed)
