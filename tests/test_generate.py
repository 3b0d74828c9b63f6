"""Generation serves a ragged batch as it serves each prompt alone; the command says in a sentence what is wrong."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers")
EXAMPLES = Path(__file__).parents[1] / "examples"

import transformers  # noqa: E402
from torch._dynamo.utils import ReinplaceCounters, counters  # noqa: E402

import generate as command  # noqa: E402
from checkpoint import load_model  # noqa: E402
from generation import Settings, generate  # noqa: E402
from tiny_checkpoint import write_tiny_checkpoint  # noqa: E402

PROMPTS = [[1, 2, 3, 4, 5], [6], [7, 8, 9] * 9]


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """One dense layer with DeepSeek-R1's attention dimensions: the least that compiles in a few seconds."""
    transformers.utils.logging.disable_progress_bar()
    path = tmp_path_factory.mktemp("tiny")
    write_tiny_checkpoint(path, num_hidden_layers=1, max_position_embeddings=128)
    return path


@pytest.fixture(scope="module")
def model(folder):
    return load_model(folder)


def tokens_of(model, prompts, **settings):
    return generate(model, prompts, Settings(**{"max_new_tokens": 20, "compile": False} | settings)).tokens


def test_a_batch_gives_each_prompt_what_it_gets_alone(model):
    assert tokens_of(model, PROMPTS) == [tokens_of(model, [prompt])[0] for prompt in PROMPTS]


@pytest.mark.parametrize("page_size", [1, 16, 128])
def test_page_size_does_not_matter(model, page_size):
    assert tokens_of(model, PROMPTS, page_size=page_size) == tokens_of(model, PROMPTS)


def test_a_seed_repeats_a_sample(model):
    first, again, other = (tokens_of(model, PROMPTS, temperature=1.0, seed=seed) for seed in (1, 1, 2))
    assert first == again != other


def test_each_sequence_ends_at_its_first_end_token(model, monkeypatch):
    free = tokens_of(model, PROMPTS)
    ends = (free[0][3], free[1][7])
    monkeypatch.setattr(model, "config", type(model.config)(**vars(model.config) | {"eos_token_ids": ends}))
    for ended, whole in zip(tokens_of(model, PROMPTS), free, strict=True):
        stop = next((index for index, token in enumerate(whole) if token in ends), len(whole) - 1)
        assert ended == whole[: stop + 1]


def test_a_single_new_token_needs_no_decode_step(model):
    result = generate(model, PROMPTS, Settings(max_new_tokens=1))
    assert [len(tokens) for tokens in result.tokens] == [1, 1, 1] and result.steps == 0


def run(*arguments: str) -> subprocess.CompletedProcess:
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    command_line = [sys.executable, EXAMPLES / "generate.py", "--device", "cpu", *arguments]
    return subprocess.run(command_line, capture_output=True, text=True, env=environment, timeout=300)


def test_command_without_a_model():
    prompts = ["--prompt", "Hello", "--prompt", "a longer prompt", "--prompt-ids", "0,255"]
    result = run(*prompts, "--max-new-tokens", "8", "--kv-dtype", "fp8", "--dtype", "bf16", "--no-compile")
    assert result.returncode == 0, result.stderr
    assert "a tiny random DeepSeek-V3 without a tokenizer; a token is a byte" in result.stdout
    for number, length in ((1, 5), (2, 15), (3, 2)):
        assert f"[{number}] {length} prompt tokens, 8 new: b" in result.stdout
    assert re.search(r"prefill: 22 tokens in .* tokens/s", result.stdout)
    assert re.search(r"decode: 18 tokens in .* tokens/s", result.stdout)
    assert "decoding: 100%" in result.stderr


def test_command_compiles_one_graph_over_an_fp8_cache(folder, capsys):
    """64 decode steps through Inductor, whose caches are off, for a graph that comes from one reports no misses."""
    torch._dynamo.reset()
    counters.clear()
    ReinplaceCounters.clear()
    arguments = ["--model", str(folder), "--device", "cpu", "--dtype", "bf16", "--kv-dtype", "fp8", "--fp8-query"]
    with torch._inductor.config.patch(force_disable_caches=True):
        assert command.main([*arguments, "--prompt-ids", "1,2,3", "--prompt-ids", "6", "--max-new-tokens", "65"]) == 0
    printed = capsys.readouterr().out
    assert "has no tokenizer; tokens are printed as ids" in printed
    assert "decode: 126 tokens in" in printed
    assert counters["stats"]["unique_graphs"] == 1 and not counters["graph_break"]
    assert ReinplaceCounters.get_total_missed_bytes() == 0


def test_command_uses_the_tokenizer_of_the_folder(folder, tmp_path, capsys):
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = {f"w{index}": index for index in range(256)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    for path in folder.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(tmp_path)
    arguments = ["--model", str(tmp_path), "--device", "cpu", "--no-compile", "--max-new-tokens", "4"]
    assert command.main([*arguments, "--prompt", "w1 w2 w3"]) == 0
    assert re.search(r"3 prompt tokens, 4 new: w\d+ w\d+ w\d+ w\d+\n", capsys.readouterr().out)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model", "nowhere"], "--model nowhere is not a folder"),
        (["--model", "{folder}", "--prompt", "hi"], "has no tokenizer .* give --prompt-ids"),
        (["--model", "{folder}", "--prompt-ids", ""], "prompt 1 is empty"),
        (["--model", "{folder}", "--prompt-ids", "1,2", "--prompt-ids", "256"], "prompt 2 has the id 256, outside the"),
        (["--model", "{folder}", "--prompt-ids", "-1"], "prompt 1 has the id -1, outside the"),
        (["--model", "{folder}", "--prompt-ids", "1,b"], "whole numbers separated by commas, got '1,b'"),
        (
            ["--model", "{folder}", "--prompt-ids", "1,2", "--max-new-tokens", "127"],
            "2 tokens, which with 127 new ones exceeds the model's 128 positions",
        ),
        (["--prompt", ""], "prompt 1 is empty"),
        (["--max-new-tokens", "0"], "--max-new-tokens must be at least 1"),
        (["--page-size", "48"], "--page-size must be a power of two up to 128, got 48"),
        (["--temperature", "-1"], "--temperature must be at least 0"),
        (["--fp8-query"], "--fp8-query goes with --kv-dtype fp8"),
        (["--device", "cuda:99"], "--device cuda:99 is not there"),
        (["--device", "gpu"], "--device gpu is not a device"),
        (["--model", str(EXAMPLES), "--prompt-ids", "1"], "config.json does not exist"),
    ],
)
def test_bad_input_is_one_sentence_and_a_failure(arguments, message, folder, capsys):
    arguments = [argument.format(folder=folder) for argument in arguments]
    assert command.main(["--device", "cpu", *arguments]) == 2
    printed = capsys.readouterr()
    assert re.search(f"^generate.py: error: .*{message}", printed.err) and printed.err.count("\n") == 1
    assert not printed.out


def test_a_damaged_tokenizer_is_one_sentence(folder, tmp_path, capsys):
    for path in folder.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    (tmp_path / "tokenizer.json").write_text("{")
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    assert command.main(["--model", str(tmp_path), "--prompt", "hi", "--device", "cpu"]) == 2
    assert re.fullmatch(r"generate.py: error: the tokenizer in .* cannot be loaded: .*\n", capsys.readouterr().err)


def test_the_exit_status_is_that_of_main():
    result = run("--max-new-tokens", "0")
    assert result.returncode == 2
    assert result.stderr == "generate.py: error: --max-new-tokens must be at least 1, got 0\n"
