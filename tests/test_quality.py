"""Promise: every path predicts held-out text as well as transformers does, and quality.py fails if one does not.

On the shipped checkpoint. Texts here are short; `python examples/quality.py` is for the whole sample.
"""

import math

import pytest
import torch

pytest.importorskip("transformers")
Tokenizer = pytest.importorskip("tokenizers").Tokenizer

import quality  # noqa: E402
from quality import Run, Text  # noqa: E402

CPU = torch.device("cpu")
# Tokens of a text, which runs of 64 requests read in pieces of 24, and one request in pieces of 1024.
TOKENS = {"decode": 64 * 24, "prefill": 2000, "chunked": 2000}
# fp32 is held to quality.py's 0.01 %; it was never found above 0.00005 %. What rounding does to a mean falls with the
# root of its tokens. Over six parts of the sample of these sizes, differences in bf16 spread by 0.025 %, up to 0.046 %;
# over FP8 caches by 0.05 %, up to 0.11 %. Bounds are four and six times the spread: another CPU rounds otherwise.
BOUNDS = {"fp32": 1e-4, "bf16": 1e-3, "fp8": 3e-3, "fp8 and query": 3e-3}
RUNS = [
    *(Run("decode", 64, cache) for cache in BOUNDS),
    Run("chunked", 1, "fp32"), Run("prefill", 1, "fp32"),
    *(Run(path, 64, cache) for path in ("prefill", "chunked") for cache in ("fp32", "bf16", "fp8")),
]  # fmt: skip

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def sample() -> Text:
    tokenizer = Tokenizer.from_file(str(quality.MODEL / "tokenizer.json"))
    return quality.read_text(quality.MODEL / "heldout.txt", tokenizer)


@pytest.mark.parametrize("path", ["prefill", "chunked", "decode"])
def test_bits_per_byte_are_those_of_transformers(path, sample):
    runs = [run for run in RUNS if run.path == path]
    rows = quality.evaluate(quality.MODEL, sample.first(TOKENS[path]), CPU, runs)
    compared = [row for row in rows if row.bound is not None]
    for run, row in zip(runs, compared, strict=True):
        print(quality.line(row))
        assert 0.9 < row.bits < 1.6, "not text that the model knows"
        assert abs(row.difference) < BOUNDS[run.cache], row


def test_one_request_decodes_what_it_prefills(sample):
    model = quality.load_model(quality.MODEL, dtype=torch.float32)
    batch = [sample.tokens[:65]]
    with torch.inference_mode():
        found = [float(quality.score(model, batch, Run(path, 1, "fp32"))) for path in ("prefill", "decode")]
    assert found[1] == pytest.approx(found[0], rel=1e-5)


@pytest.mark.parametrize("requests", [1, 3, 64])
@pytest.mark.parametrize("count", [2, 65, 2500, 70_000])
def test_each_token_but_the_first_is_predicted_once(requests, count):
    batches = quality.batches(list(range(count)), requests)
    pieces = [piece for batch in batches for piece in batch]
    assert [token for piece in pieces for token in piece[1:]] == list(range(1, count))
    assert all(piece[0] == piece[1] - 1 and len(piece) <= quality.LONGEST + 1 for piece in pieces)
    assert all(len(batch) <= requests for batch in batches)


def test_bytes_are_those_of_the_text(tmp_path, sample):
    assert sample.ends[-1] == (quality.MODEL / "heldout.txt").stat().st_size
    (tmp_path / "text").write_text("naïve 漢字, and it came to pass")
    text = quality.read_text(tmp_path / "text", Tokenizer.from_file(str(quality.MODEL / "tokenizer.json")))
    assert text.ends == sorted(text.ends) and text.ends[-1] == len("naïve 漢字, and it came to pass".encode())


def test_uniform_predictions_cost_the_logarithm_of_the_vocabulary(sample):
    text = sample.first(500)
    row = quality.measure("uniform", text, 3, lambda batch: sum(
        quality.nats(torch.zeros(len(piece) - 1, 1024), piece[1:]) for piece in batch
    ))  # fmt: skip
    assert row.perplexity == pytest.approx(1024)
    assert row.bits == pytest.approx(500 * 10 / (text.ends[-1] - text.ends[0]))


@pytest.mark.parametrize("cache, factor, status", [
    ("bf16", 1.0, 0), ("bf16", 1.01, 1), ("bf16", 0.99, 1), ("fp8", 1.005, 0), ("fp8", 1.02, 1), ("fp8", math.nan, 1),
    ("fp32", 1.001, 1),
])  # fmt: skip
def test_the_status_says_whether_a_figure_is_off(cache, factor, status, monkeypatch, capsys):
    """A path whose nats are wrong by a factor."""
    score = quality.score
    monkeypatch.setattr(quality, "runs", lambda device: [Run("prefill", 1, cache)])
    monkeypatch.setattr(quality, "score", lambda *args: factor * score(*args))
    assert quality.main(["--tokens", "300", "--device", "cpu"]) == status
    printed = capsys.readouterr().out.splitlines()
    assert len(printed) == 5 and printed[3].startswith(f"prefill, 1 request(s), cache {cache}")
    assert ("beyond" in printed[3]) == bool(status)
    assert printed[4] == ("1 figure(s) beyond their bounds" if status else "all figures are within their bounds")


def test_only_chooses_among_the_runs(capsys, monkeypatch):
    chosen = []
    monkeypatch.setattr(quality, "evaluate", lambda folder, text, device, runs, report: chosen.extend(runs) or [])
    assert quality.main(["--device", "cpu", "--only", "decode, 64 request(s), cache fp8 and"]) == 0
    assert [(run.cache, run.mode) for run in chosen] == [("fp8 and query", mode) for mode in ("eager", "compiled")]
    with pytest.raises(SystemExit):
        quality.main(["--device", "cpu", "--only", "decode, 65"])
    assert "--only: no path has a name with 'decode, 65'" in capsys.readouterr().err


def test_runs_cover_paths_caches_and_modes():
    def names(device):
        return {(run.path, run.requests, run.cache, run.mode) for run in quality.runs(torch.device(device))}

    assert ("decode", 1, "fp8", "captured") in names("cuda") and ("decode", 64, "bf16", "captured") in names("cuda")
    assert names("cuda") - names("cpu") == {run for run in names("cuda") if run[3] == "captured"}
    for path in ("prefill", "chunked", "decode"):
        assert {(path, n, c, "eager") for n in (1, 64) for c in ("fp32", "bf16", "fp8")} <= names("cpu")
