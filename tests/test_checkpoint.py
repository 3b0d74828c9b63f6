"""The loader reads every layout of a DeepSeek checkpoint alike, and names what it cannot load."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from checkpoint import load_model
from deepseek_config import CheckpointError, read_config
from paged_cache import FP8
from tiny_models import CASES, YARN


def corrupt(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


def shard(folder: Path, drop: str | None = None) -> None:
    """One file into two and an index, optionally without the second of them."""
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(tensors)
    weight_map = {}
    for number, part in enumerate((names[::2], names[1::2]), start=1):
        file = f"model-0000{number}-of-00002.safetensors"
        save_file({name: tensors[name] for name in part}, folder / file)
        weight_map |= dict.fromkeys(part, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    if drop:
        (folder / drop).unlink()


def edit(folder: Path, change) -> None:
    """Rewrite the tensors of a folder: `change(tensors)` works in place."""
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def configure(folder: Path, **values) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def published(folder: Path) -> None:
    """As DeepSeek publishes: the old names for rope, shards, a multi-token-prediction layer, its fixed keys."""
    path = folder / "config.json"
    values = json.loads(path.read_text())
    rope = values.pop("rope_parameters")
    rope["type"] = rope.pop("rope_type")
    values["rope_theta"] = rope.pop("rope_theta")
    values |= {"rope_scaling": rope, "torch_dtype": values.pop("dtype"), "moe_layer_freq": 1, "ep_size": 1}
    values |= {"scoring_func": "sigmoid", "topk_method": "noaux_tc", "aux_loss_alpha": 0.001, "seq_aux": True}
    for key in ("head_dim", "qk_head_dim", "rope_interleave", "output_router_logits"):
        values.pop(key, None)
    path.write_text(json.dumps(values))
    edit(folder, lambda tensors: tensors.update({
        "model.layers.3.eh_proj.weight": torch.zeros(2, 2),
        "model.layers.3.mlp.experts.0.up_proj.weight": torch.zeros(2, 2),
        "model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(8),
    }))  # fmt: skip
    shard(folder)


def fuse(folder: Path) -> None:
    """Experts in two tensors a layer, as transformers holds them."""

    def change(tensors):
        for layer in (1, 2):
            prefix = f"model.layers.{layer}.mlp.experts"
            parts = {
                kind: torch.stack([tensors.pop(f"{prefix}.{expert}.{kind}.weight") for expert in range(8)])
                for kind in ("gate_proj", "up_proj", "down_proj")
            }
            tensors[f"{prefix}.gate_up_proj"] = torch.cat((parts["gate_proj"], parts["up_proj"]), dim=1)
            tensors[f"{prefix}.down_proj"] = parts["down_proj"]

    edit(folder, change)


@pytest.fixture
def folder(saved, tmp_path) -> Path:
    """A copy of the first case's checkpoint, to be spoilt."""
    for path in saved(CASES[0]).iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    return tmp_path


@pytest.mark.parametrize("rearrange", [published, fuse], ids=["published", "fused-experts"])
def test_every_layout_of_a_checkpoint_loads_alike(rearrange, folder, saved):
    rearrange(folder)
    expected, loaded = load_model(saved(CASES[0])), load_model(folder)
    assert loaded.config == expected.config
    for (name, value), other in zip(loaded.state_dict().items(), expected.state_dict().values(), strict=True):
        assert torch.equal(value, other), name


QUERY = "model.layers.1.self_attn.q_b_proj.weight"


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda f: edit(f, lambda t: t.pop(QUERY)), rf"1 tensor\(s\).* not in the checkpoint: {QUERY}"),
        (lambda f: edit(f, lambda t: t.update(extra=torch.zeros(1))), r"1 tensor\(s\) have no place .*: extra"),
        (lambda f: edit(f, lambda t: t.update({QUERY: torch.ones(5, 24)})), r"q_b_proj.* shape \[5, 24\].*\[160, 24\]"),
        (lambda f: edit(f, lambda t: t.update({QUERY: t[QUERY].to(FP8)})), rf"{QUERY} is stored as F8_E4M3"),
        (corrupt, "model.safetensors is not a readable safetensors file"),
        (lambda f: shard(f, drop="model-00002-of-00002.safetensors"), "do not exist: model-00002-of-00002.safetensors"),
        (lambda f: (f / "model.safetensors").unlink(), "holds neither model.safetensors nor"),
        (lambda f: (f / "config.json").unlink(), "config.json does not exist"),
        (lambda f: (f / "config.json").write_text("{"), "config.json is not valid JSON"),
        (lambda f: configure(f, num_hidden_layers=4), "layers.3"),
        (lambda f: configure(f, model_type="llama"), "model_type is 'llama'"),
        (lambda f: configure(f, quantization_config={"quant_method": "fp8"}), r"quantised \(fp8\)"),
        (lambda f: configure(f, hidden_act="gelu"), "'hidden_act' is 'gelu'"),
        (lambda f: configure(f, rope_parameters=YARN | {"rope_type": "longrope"}), "rope type 'longrope'"),
        (lambda f: configure(f, rope_parameters=YARN | {"long_factor": 1}), "'long_factor' not known"),
        (lambda f: configure(f, moe_layer_freq=2), "'moe_layer_freq' is 2"),
        (lambda f: configure(f, topk_method="greedy"), "'topk_method' is 'greedy'"),
        (lambda f: configure(f, num_key_value_heads=2), "'num_key_value_heads' is 2"),
        (lambda f: configure(f, index_topk=2048), "'index_topk' not known"),
        (lambda f: configure(f, kv_lora_rank=None), "has no 'kv_lora_rank'"),
        (lambda f: configure(f, kv_lora_rank="32"), "'kv_lora_rank' must be of type int, got '32'"),
        (lambda f: configure(f, num_experts_per_tok=7), "7 experts a token cannot be chosen from 2 of 4 groups"),
    ],
)
def test_what_cannot_be_loaded_is_named(spoil, message, folder):
    spoil(folder)
    with pytest.raises(CheckpointError, match=message):
        load_model(folder)


def test_v2_refuses_what_its_two_implementations_do_differently(folder):
    configure(folder, model_type="deepseek_v2", rope_interleave=True, norm_topk_prob=True)
    with pytest.raises(CheckpointError, match="'norm_topk_prob' is True"):
        read_config(folder)
