"""Training computes the model that transformers computes, learns, and writes a folder that others load.

The held-out sections never reach the training; bits per byte count every token once, whatever the window.
"""

import json
import math
import re
from pathlib import Path

import pytest
import torch

transformers = pytest.importorskip("transformers")
pytest.importorskip("tokenizers")

import generate as command  # noqa: E402
import train  # noqa: E402
from checkpoint import load_model  # noqa: E402
from deepseek import DeepSeek  # noqa: E402
from deepseek_config import parse_config  # noqa: E402
from muon import Muon  # noqa: E402

CHECKPOINTS = sorted((Path(__file__).parents[1] / "examples" / "checkpoints").glob("*/config.json"))
TINY = dict(
    hidden_size=32, intermediate_size=64, moe_intermediate_size=16, num_hidden_layers=2, q_lora_rank=16,
    kv_lora_rank=32, qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=16, vocab_size=300,
)  # fmt: skip

pytestmark = pytest.mark.usefixtures("one_thread")


def sections(count: int) -> str:
    """Text with something to learn, a different number in each section."""
    return "\n\n".join(
        f"Chapter {n}\nAnd it came to pass that the {n} went up, and the {n} came down." for n in range(count)
    )


def wide_model() -> DeepSeek:
    """Weights as in `tiny_models`: wide enough that logits differ by units and routing depends on the token."""
    torch.manual_seed(0)
    model = DeepSeek(parse_config(train.CONFIG | TINY | {"n_routed_experts": 8}))
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            tensor.uniform_(0.5, 1.5) if "norm" in name else tensor.normal_(std=0.2)
    return model


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A checkpoint of wide random weights, as training writes it."""
    path = tmp_path_factory.mktemp("wide")
    tokenizer = train.train_tokenizer(sections(50), 300)
    train.save(path, wide_model(), train.CONFIG | TINY | {"vocab_size": 300}, tokenizer)
    return path


def test_logits_are_those_of_transformers(folder):
    """fp32: the same sums in another order, on logits of about 1; a wrong route, scale or rotation shows at 1e-1."""
    theirs, loading = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, output_loading_info=True
    )
    assert not loading["missing_keys"] and not loading["unexpected_keys"]
    ours, tokens = load_model(folder, dtype=torch.float32), torch.randint(0, 300, (3, 40))
    with torch.no_grad():
        expected, (logits, loads) = theirs(tokens).logits, train.forward(ours, tokens)
    assert expected.std() > 0.5, "logits so flat would hide errors"
    assert (logits - expected).abs().max() < 1e-5
    assert [load.sum() for load in loads] == [tokens.numel() * train.CONFIG["num_experts_per_tok"]]


def test_weights_are_stored_as_they_are_read(folder):
    """All of them, under names that the strict loader knows; the router's unrounded."""
    read = load_model(folder).state_dict()
    for name, tensor in wide_model().state_dict().items():
        assert torch.equal(read[name], tensor if ".mlp.gate." in name else tensor.bfloat16()), name


def test_an_expert_that_nobody_chose_learns_nothing():
    model = wide_model()
    model.layers[1].mlp.gate.e_score_correction_bias[:2] = -100
    logits, (load,) = train.forward(model, torch.randint(0, 300, (2, 16)))
    logits.square().sum().backward()
    learns = model.layers[1].mlp.experts.down_proj.grad.abs().amax(dim=(1, 2)) > 0
    assert not learns[:2].any() and torch.equal(learns, load > 0)


def test_balancing_evens_the_load():
    model, tokens = wide_model(), torch.randint(0, 300, (8, 64))
    with torch.no_grad():
        _, before = train.forward(model, tokens)
        for _ in range(300):
            train.balance(model, train.forward(model, tokens)[1], rate=1e-2)
        _, after = train.forward(model, tokens)
    assert after[0].max() / after[0].mean() < 1.2 < before[0].max() / before[0].mean()


def test_sections_are_split_once_and_for_all():
    parts = train.split(sections(100))
    found = [[int(n) for n in re.findall(r"Chapter (\d+)", part)] for part in parts]
    assert found[1:] == [[19, 59, 99], [39, 79]]
    assert sorted(sum(found, [])) == list(range(100))
    with pytest.raises(ValueError, match="12 sections"):
        train.split(sections(12))


def test_any_text_comes_back_from_the_tokenizer(folder):
    text = "In the beginning\n\n  \tnaïve 漢字 \N{GRINNING FACE} don't 1234 "
    for tokenizer in (train.Tokenizer.from_file(str(folder / "tokenizer.json")), command.load_tokenizer(folder)):
        encoded = tokenizer.encode(text)
        assert tokenizer.decode(getattr(encoded, "ids", encoded)) == text


@pytest.mark.parametrize("shape", [(4, 24, 64), (64, 24), (3, 16, 16)], ids=str)
def test_muon_steps_are_nearly_orthogonal(shape):
    """Five Newton-Schulz steps leave singular values between about 0.7 and 1.2, whatever the gradient's."""
    matrix = torch.nn.Parameter(torch.zeros(shape))
    matrix.grad = torch.randn(shape)
    Muon([matrix], lr=1.0, weight_decay=0.0).step()
    values = torch.linalg.svdvals(matrix.detach() / (0.2 * max(shape[-2:]) ** 0.5))
    assert values.min() > 0.5 and values.max() < 1.3
    assert (matrix * matrix.grad).sum() < 0, "downhill"


@pytest.mark.parametrize("context", [8, 32, 10_000])
def test_bits_per_byte_count_every_token_once(context, folder):
    """A model that finds all tokens equally likely spends log2(vocab) on each, whatever the windows."""
    model = load_model(folder, dtype=torch.float32)
    model.lm_head.weight.zero_()
    text, tokenizer = sections(3), train.Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokens = tokenizer.encode(text).ids
    expected = (len(tokens) - 1) * math.log2(300) / (len(text) - len(tokenizer.decode(tokens[:1])))
    assert train.bits_per_byte(model, tokenizer, text, context) == pytest.approx(expected, rel=1e-5)


def test_training_learns_repeats_and_writes_a_folder_that_generates(tmp_path, capsys):
    (tmp_path / "text.txt").write_text(sections(200))
    arguments = ["--text", str(tmp_path / "text.txt"), "--device", "cpu", "--batch", "4", "--context", "32"]
    arguments += ["--lr", "1e-2", "--evaluate-every", "1000", "--about", "Two hundred sentences", "--ema", "0.9"]
    arguments += [part for key, value in TINY.items() for part in ("--set", f"{key}={value}")]
    short = train.main([*arguments, "--out", str(tmp_path / "short"), "--steps", "1"])
    first, again = (train.main([*arguments, "--out", str(tmp_path / name), "--steps", "60"]) for name in ("a", "b"))
    assert first == again < short / 3
    for name in ("model.safetensors", "config.json", "tokenizer.json", "heldout.txt"):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()
    readme = (tmp_path / "a" / "README.md").read_text()
    assert f"{first:.4f} bits per byte" in readme and "Two hundred sentences" in readme
    capsys.readouterr()
    prompt = ["--prompt", "Chapter 7\nAnd it came", "--max-new-tokens", "6", "--no-compile", "--device", "cpu"]
    assert command.main(["--model", str(tmp_path / "a"), *prompt]) == 0
    assert "to pass that the" in capsys.readouterr().out


@pytest.mark.parametrize("config", CHECKPOINTS, ids=lambda path: path.parent.name)
def test_a_shipped_checkpoint_predicts_its_sample_as_it_says(config):
    """On the first 4 KB of the sample, which may be harder or easier than all of it."""
    folder = config.parent
    stated = float(re.search(r"\*\*([\d.]+) bits per byte\*\*", (folder / "README.md").read_text())[1])
    assert stated < 1.7
    assert (folder / "model.safetensors").stat().st_size < 12e6
    tokenizer, context = train.Tokenizer.from_file(str(folder / "tokenizer.json")), json.loads(config.read_text())
    sample = (folder / "heldout.txt").read_text()[:4096]
    model = load_model(folder, dtype=torch.float32)
    bits = train.bits_per_byte(model, tokenizer, sample, context["max_position_embeddings"])
    assert abs(bits - stated) < 0.3
