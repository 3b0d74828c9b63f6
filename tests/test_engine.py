"""Promise: the engine gives each request what it gets alone, whatever else runs, arrives, is preempted or is refused.

In fp32, where no two candidates of these models are as close as the rounding of another batch size. On a GPU, decode
runs in graphs captured once, with the bits of eager calls.
"""

import random
import re
import signal
from dataclasses import dataclass, field, replace

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

import generate as command
from checkpoint import load_model
from engine import Engine, EngineSettings, Refused, Sampling
from generation import Settings, generate, prefill
from paged_cache import FP8, PageAllocator, PagedCache
from speculative import sample, uniform
from tiny_models import YARN, Case, build

pytestmark = pytest.mark.usefixtures("one_thread")
gpu = pytest.mark.gpu

MIXTURE = Case("engine", 3, settings={"rope_parameters": YARN, "num_hidden_layers": 2})
DENSE = Case("engine-dense", 3, settings={
    "rope_parameters": YARN, "num_hidden_layers": 2, "first_k_dense_replace": 2,
})  # fmt: skip
LENGTHS = (1, 23, 5, 40, 2, 64, 9, 17)
NEW = 16


@pytest.fixture(scope="module")
def model(saved):
    return load_model(saved(MIXTURE))


@pytest.fixture(scope="module")
def prompts():
    return [torch.randint(97, (n,), generator=torch.Generator().manual_seed(n)).tolist() for n in LENGTHS]


@pytest.fixture(scope="module")
def expected(model, prompts):
    """Each prompt alone, by the plain generation loop."""
    settings = Settings(max_new_tokens=NEW, page_size=16, compile=False)
    return [generate(model, [prompt], settings).tokens[0] for prompt in prompts]


def engine_of(model, **settings) -> Engine:
    defaults = dict(num_pages=100, page_size=8, batch_sizes=(1, 2, 4), prefill_tokens=32, chunk_tokens=16)
    return Engine(model, EngineSettings(**defaults | settings))


def assert_idle(engine: Engine) -> None:
    """Every page is back, once."""
    assert not engine.running and not engine.waiting
    free = engine.pages.take(engine.pages.free)
    assert sorted(free) == list(range(1, engine.settings.num_pages))
    engine.pages.give(free)


def assert_in_order(engine: Engine) -> None:
    """Requests are served first come, first served; tables name a request's own pages, then the null page."""
    queue = [*engine.running, *engine.waiting]
    assert [request.id for request in queue] == sorted(request.id for request in queue)
    assert len(engine.running) <= max(engine.settings.batch_sizes)
    owned = [page for request in queue for page in request.pages]
    assert len(owned) + engine.pages.free == engine.settings.num_pages - 1 and len(set(owned)) == len(owned)
    for request in queue:
        assert request.table.tolist() == request.pages + [0] * (len(request.table) - len(request.pages))
        assert len(request.table) * engine.settings.page_size % 128 == 0


@dataclass(frozen=True)
class Scenario:
    name: str
    settings: dict = field(default_factory=dict)
    preempts: bool = False
    spread: int = 1  # requests arrive within so many steps


SCENARIOS = [
    Scenario("at-once"),
    Scenario("spread", spread=30),
    Scenario("small-pieces", {"prefill_tokens": 3, "chunk_tokens": 5}, spread=10),
    Scenario("large-pages", {"page_size": 128, "num_pages": 9, "batch_sizes": (8,)}),
    Scenario("tight", {"num_pages": 25, "page_size": 4}, preempts=True),
    Scenario("tight-spread", {"num_pages": 55, "page_size": 2, "prefill_tokens": 7}, preempts=True, spread=12),
]


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.name)
def test_each_request_gets_what_it_gets_alone(scenario, seed, model, prompts, expected):
    engine, draw = engine_of(model, **scenario.settings), random.Random(seed)
    order = draw.sample(range(len(prompts)), len(prompts))
    arrivals = sorted(draw.randrange(scenario.spread) for _ in order)
    requests = {}
    for step in range(1000):
        while len(requests) < len(order) and arrivals[len(requests)] <= step:
            index = order[len(requests)]
            requests[index] = engine.submit(prompts[index], Sampling(max_new_tokens=NEW))
        prefilled = engine.counts["prefill_tokens"]
        engine.step()
        assert engine.counts["prefill_tokens"] - prefilled <= engine.settings.prefill_tokens
        assert_in_order(engine)
        if len(requests) == len(order) and not engine.running and not engine.waiting:
            break
    assert [requests[index].generated for index in range(len(prompts))] == expected
    assert {request.finish_reason for request in requests.values()} == {"length"}
    assert (engine.counts["preemptions"] > 0) == scenario.preempts, engine.counts
    assert_idle(engine)


def test_a_sample_depends_on_its_request_alone(model, prompts):
    """Greedy and sampled requests together, preempted or not, as each alone; another seed is another sample."""
    options = [Sampling(max_new_tokens=NEW, temperature=0.9 * (i % 3), top_p=1 - i / 10, seed=i) for i in range(8)]
    alone = []
    for prompt, sampling in zip(prompts, options):
        alone += engine_of(model).generate([prompt], sampling)
    for num_pages in (100, 13):
        engine = engine_of(model, num_pages=num_pages)
        requests = [engine.submit(prompt, sampling) for prompt, sampling in zip(prompts, options)]
        list(engine.stream())
        assert [request.generated for request in requests] == alone
        assert (engine.counts["preemptions"] > 0) == (num_pages == 13)
    sampled = next(i for i, sampling in enumerate(options) if sampling.temperature)
    assert engine.generate([prompts[sampled]], replace(options[sampled], seed=99)) != [alone[sampled]]


def test_a_sample_is_drawn_from_seed_and_index(model, prompts):
    """As by a loop of whole prefills: token i is what the number of (seed, i) picks from the model's distribution."""
    prompt, sampling = prompts[1], Sampling(max_new_tokens=NEW, temperature=1.2, top_p=0.95, seed=6)
    tokens = list(prompt)
    for index in range(NEW):
        dim = model.config.attention.cache_dim
        cache = PagedCache(len(model.layers), [len(tokens)], 16, dim, dtype=torch.float32, device="cpu")
        with torch.inference_mode():
            logits = prefill(model, [tokens], cache)
        tokens += sample(logits, [(1.2, 0.95, uniform(6, index))]).tolist()
    assert engine_of(model).generate([prompt], sampling) == [tokens[len(prompt) :]]


def test_stop_conditions(model, prompts, expected, monkeypatch):
    """A request ends with its first stop token or end-of-sequence token, that of another request notwithstanding."""
    ends = [{expected[i][4]} if i % 2 else set() for i in range(len(prompts))]
    eos = expected[2][6]
    monkeypatch.setattr(model, "config", replace(model.config, eos_token_ids=(eos,)))
    engine = engine_of(model)
    requests = [
        engine.submit(prompt, Sampling(max_new_tokens=NEW, stop_token_ids=tuple(own)))
        for prompt, own in zip(prompts, ends)
    ]
    list(engine.stream())
    for request, tokens, own in zip(requests, expected, ends):
        stop = next((i for i, token in enumerate(tokens) if token in own | {eos}), None)
        assert request.generated == (tokens if stop is None else tokens[: stop + 1])
        assert request.finish_reason == ("length" if stop is None else "stop")
    assert {request.finish_reason for request in requests} == {"length", "stop"}
    assert_idle(engine)


def test_streaming(model, prompts, expected):
    """Tokens come in each request's order, requests alternate, and one that is submitted meanwhile joins."""
    engine = engine_of(model)
    first = [engine.submit(prompt, Sampling(max_new_tokens=NEW)) for prompt in prompts[:2]]
    seen, late = {}, None
    owners = []
    for request_id, token in engine.stream():
        seen.setdefault(request_id, []).append(token)
        owners.append(request_id)
        if len(owners) == 10:
            late = engine.submit(prompts[2], Sampling(max_new_tokens=NEW))
    requests = [*first, late]
    assert [request.id for request in requests] == [0, 1, 2]
    assert [seen[request.id] for request in requests] == [request.generated for request in requests] == expected[:3]
    turns = sum(a != b for a, b in zip(owners, owners[1:]))
    assert turns > NEW, "requests were served one after the other"


def test_decoding_goes_on_while_a_long_prompt_is_prefilled(model, prompts, monkeypatch):
    """... in pieces within the budget, and a request that has all its tokens yields one each step."""
    engine, sizes = engine_of(model, prefill_tokens=6), []
    whole = model.prefill
    monkeypatch.setattr(model, "prefill", lambda tokens, *rest: sizes.append(len(tokens)) or whole(tokens, *rest))
    engine.submit(prompts[2], Sampling(max_new_tokens=NEW))
    engine.step()
    engine.submit(prompts[5], Sampling(max_new_tokens=2))  # of 64 tokens
    events = [engine.step() for _ in range(11)]
    assert [event[0][0] for event in events] == [0] * 11, "a step without a token of the first request"
    assert events[-1][1][0] == 1 and all(len(event) == 1 for event in events[:-1])
    assert sizes == [5, *[6] * 10, 4]


def test_the_youngest_makes_room(model, prompts, expected):
    """The oldest request never waits: from its first token on it gets one each step."""
    engine = engine_of(model, num_pages=25, page_size=4)
    requests = [engine.submit(prompts[index], Sampling(max_new_tokens=NEW)) for index in (3, 1, 6)]
    steps = []
    while not requests[0].finish_reason:
        steps.append([request_id for request_id, _ in engine.step()])
    first = next(index for index, ids in enumerate(steps) if 0 in ids)
    assert len(steps) - first == NEW and all(0 in ids for ids in steps[first:])
    assert engine.counts["preemptions"] > 0 and not requests[2].finish_reason
    list(engine.stream())
    assert [request.generated for request in requests] == [expected[index] for index in (3, 1, 6)]


def test_what_was_just_prefilled_is_not_preempted(model, prompts):
    """A request is admitted only if there is room for a decode step of all, or its prefill might be for nothing."""
    engine = engine_of(model, num_pages=13, prefill_tokens=1000)
    admitted, lasted, before, preempt = {}, [], set(), engine._preempt

    def record(request):
        lasted.append(engine.counts["steps"] - admitted[request.id])
        before.discard(request.id)
        preempt(request)

    engine._preempt = record
    for prompt in prompts:
        engine.submit(prompt, Sampling(max_new_tokens=NEW))
    while engine.running or engine.waiting:
        before |= {request.id for request in engine.running}
        engine.step()
        admitted |= {request.id: engine.counts["steps"] for request in engine.running if request.id not in before}
    assert lasted and min(lasted) > 1


def test_padding_stores_nothing(model, prompts):
    """Of a batch of 4 with one request: what no request owns stays as it was, the null page included."""
    engine = engine_of(model, batch_sizes=(4,), num_pages=20, draft_tokens=3)
    request = engine.submit(prompts[1], Sampling(max_new_tokens=NEW))
    owned = set()
    while not request.finish_reason:
        owned |= set(request.pages)
        engine.step()
    for layer in engine.caches:
        written = layer.pages.flatten(1).any(dim=1).nonzero().flatten().tolist()
        assert set(written) == owned and 0 not in owned


@pytest.mark.parametrize(("prompt", "options", "message"), [
    ([], {}, "prompt is empty"),
    ([1, 97], {}, r"prompt has the id 97, outside the vocabulary \[0, 97\)"),
    ([-1], {}, "prompt has the id -1, outside"),
    ([1.5], {}, "prompt has the id 1.5, outside"),
    ([1], {"stop_token_ids": (97,)}, "stop_token_ids has the id 97, outside"),
    ([1], {"max_new_tokens": 0}, "max_new_tokens must be at least 1, got 0"),
    ([1], {"temperature": -0.5}, "temperature must be at least 0, got -0.5"),
    ([1], {"temperature": float("nan")}, "temperature must be at least 0, got nan"),
    ([1], {"top_p": 0.0}, "top_p must be above 0 and at most 1, got 0.0"),
    ([1] * 500, {"max_new_tokens": 13}, "500 tokens, which with 13 new ones exceeds the model's 512 positions"),
    ([1] * 90, {"max_new_tokens": 7}, "with 7 new ones needs 13 pages of 8 tokens; there are 12: raise num_pages"),
])  # fmt: skip
def test_refusals(prompt, options, message, model, prompts, expected):
    """By name, at once, and without an effect on the request that is running."""
    engine = engine_of(model, num_pages=13)
    running = engine.submit(prompts[0], Sampling(max_new_tokens=NEW))
    engine.step()
    with pytest.raises(Refused, match=message):
        engine.submit(prompt, Sampling(**options))
    assert not engine.waiting
    list(engine.stream())
    assert running.generated == expected[0]
    assert engine.submit(prompts[1], Sampling()).id == 1


def test_the_largest_request_that_fits_is_served(model):
    engine = engine_of(model, num_pages=13)
    [tokens] = engine.generate([[1] * 90], Sampling(max_new_tokens=6))
    assert len(tokens) == 6
    assert_idle(engine)


@pytest.mark.parametrize(("name", "value"), [
    ("num_pages", 1), ("prefill_tokens", 0), ("chunk_tokens", 0), ("draft_tokens", -1), ("batch_sizes", ()),
])  # fmt: skip
def test_settings_are_checked(name, value):
    with pytest.raises(ValueError, match=f"^{name} must be"):
        EngineSettings(**{"num_pages": 2} | {name: value})


def test_page_allocator():
    pages = PageAllocator(4)
    taken = pages.take(3)
    assert sorted(taken) == [1, 2, 3] and pages.free == 0
    pages.give(taken[:1])
    with pytest.raises(ValueError, match="2 pages were asked for and 1 are free"):
        pages.take(2)
    assert pages.take(1) == taken[:1]


def test_fp8_output_does_not_depend_on_earlier_requests(saved, prompts):
    """The scales come from tokens of the engine's own, not from the first request; pieces do not matter either."""
    model = load_model(saved(DENSE))
    alone = [engine_of(model, kv_dtype=FP8).generate([prompt], Sampling(max_new_tokens=NEW))[0] for prompt in prompts]
    engine = engine_of(model, kv_dtype=FP8, prefill_tokens=5, chunk_tokens=7)
    scales = [layer.k_scale.item() for layer in engine.caches]
    assert min(scales) > 0
    assert engine.generate(prompts[::-1], Sampling(max_new_tokens=NEW)) == alone[::-1]
    assert scales == [layer.k_scale.item() for layer in engine.caches]
    assert len({tuple(tokens) for tokens in alone}) == len(alone)


def test_compiled_decode(model, prompts, expected, monkeypatch):
    """A ladder of batch sizes takes few graphs: one for batch 1, one for the first other, one for all sizes."""
    torch._dynamo.reset()
    counter, compiler = CompileCounterWithBackend("eager"), torch.compile
    monkeypatch.setattr(torch, "compile", lambda function, **options: compiler(function, backend=counter, **options))
    engine = engine_of(model, batch_sizes=(1, 2, 4, 6, 8), compile=True)
    assert engine.generate(prompts, Sampling(max_new_tokens=NEW)) == expected
    for count in (1, 2, 5):
        engine.generate(prompts[:count], Sampling(max_new_tokens=4))
    assert 1 < counter.frame_count <= 3


@pytest.fixture(scope="module")
def served(saved):
    return ["--engine", "--model", str(saved(MIXTURE)), "--device", "cpu", "--page-size", "8"]


def test_command(served, prompts, expected, capsys):
    ids = [argument for prompt in prompts[:3] for argument in ("--prompt-ids", ",".join(map(str, prompt)))]
    assert command.main([*served, *ids, "--max-new-tokens", str(NEW), "--pages", "7"]) == 0
    printed = capsys.readouterr().out
    for number, (prompt, tokens) in enumerate(zip(prompts[:3], expected), start=1):
        text = f"[{number}] {len(prompt)} prompt tokens, {NEW} new (length): {' '.join(map(str, tokens))}\n"
        assert text in printed
    assert re.search(r"\d+ tokens prefilled, \d+ decoded in \d+ calls, [1-9]\d* preemptions\n", printed)


@pytest.fixture
def interruptible():
    """Python's own handler, which a process that a shell started in the background does not have."""
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, handler)


@pytest.mark.usefixtures("interruptible")
def test_ctrl_c_prints_what_there_is(served, prompts, expected, monkeypatch, capsys):
    step, steps = Engine.step, []

    def interrupted(engine):
        steps.append(None)
        if len(steps) == 6:
            signal.raise_signal(signal.SIGINT)
        return step(engine)

    monkeypatch.setattr(Engine, "step", interrupted)
    ids = ["--prompt-ids", ",".join(map(str, prompts[2]))]
    assert command.main([*served, *ids, "--max-new-tokens", str(NEW)]) == 130
    assert f"5 new (interrupted): {' '.join(map(str, expected[2][:5]))}\n" in capsys.readouterr().out


@pytest.mark.parametrize(("arguments", "message"), [
    (["--pages", "2", "--max-new-tokens", "8"], "needs 2 pages of 8 tokens; there are 1: raise num_pages"),
    (["--top-p", "1.5"], "top_p must be above 0 and at most 1, got 1.5"),
    (["--draft-tokens", "-1"], "--draft-tokens must be at least 0, got -1"),
    (["--pages", "1"], "--pages must be at least 2, got 1"),
])  # fmt: skip
def test_command_refuses_in_a_sentence(arguments, message, served, capsys):
    assert command.main([*served, "--prompt-ids", "1", *arguments]) == 2
    assert re.fullmatch(f"generate.py: error: .*{message}", capsys.readouterr().err.splitlines()[-1])


def test_engine_options_need_the_engine(saved, capsys):
    assert command.main(["--model", str(saved(MIXTURE)), "--device", "cpu", "--prompt-ids", "1", "--top-p", "0.5"]) == 2
    assert capsys.readouterr().err == "generate.py: error: --top-p goes with --engine\n"


@gpu
@pytest.mark.parametrize("draft_tokens", [0, 3])
@pytest.mark.parametrize("kv_dtype", [torch.bfloat16, FP8], ids=["bf16", "fp8"])
def test_graphs_have_the_bits_of_eager_calls(kv_dtype, draft_tokens, saved, prompts, monkeypatch):
    """One graph a batch size and q_len, captured before the first request and none later; pages run out meanwhile."""
    model = load_model(saved(MIXTURE), dtype=torch.bfloat16, device="cuda")
    options = dict(num_pages=55, page_size=2, kv_dtype=kv_dtype, draft_tokens=draft_tokens, batch_sizes=(1, 2, 3, 8))
    results = []
    for cuda_graphs in (False, True):
        engine = engine_of(model, **options, cuda_graphs=cuda_graphs)
        captured = dict(engine.decoder.graphs)
        sizes = {(batch, q_len) for batch in (1, 2, 3, 8) for q_len in {1, 1 + draft_tokens}}
        assert set(captured) == (sizes if cuda_graphs else set())
        logits, draw = [], engine._sample
        engine._sample = lambda requests, rows: logits.append(rows.clone()) or draw(requests, rows)
        with monkeypatch.context() as patched:
            patched.setattr(torch.cuda, "graph", None)
            tokens = engine.generate(prompts * 2, Sampling(max_new_tokens=NEW, temperature=0.5))
        assert engine.decoder.graphs == captured and engine.counts["preemptions"] > 0
        results.append((tokens, logits, engine.counts))
    (tokens, logits, counts), (other_tokens, other_logits, other_counts) = results
    assert tokens == other_tokens and counts == other_counts and counts["decode_calls"] > NEW
    assert len(logits) == len(other_logits)
    assert all(torch.equal(rows, other) for rows, other in zip(logits, other_logits))


def test_tokens_are_those_of_transformers(saved, prompts, expected):
    """One prompt, lest all of the above agree on something else."""
    theirs = build(MIXTURE).generate(torch.tensor([prompts[3]]), max_new_tokens=NEW, do_sample=False)
    assert theirs[0, len(prompts[3]) :].tolist() == expected[3]
