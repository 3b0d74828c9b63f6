"""A Hugging Face folder into a DeepSeek model: config.json, and safetensors in one file or in indexed shards.

Names, shapes and dtypes of all tensors are checked against the model before the first byte of data is read. Experts may
be stored one by one (what DeepSeek publishes and transformers saves) or fused (as transformers holds them in memory);
either way they end up in the two fused tensors of `deepseek_moe.Experts`, with no second copy in memory.
"""

import json
import re
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from tqdm import tqdm

from deepseek import DeepSeek
from deepseek_config import CheckpointError, DeepSeekConfig, read_config

_STORED = ("BF16", "F16", "F32")
_FP32 = re.compile(r"\.mlp\.gate\.")  # the router's weights, whatever the model's dtype
_EXPERTS = re.compile(r"(layers\.\d+\.mlp\.experts)\.(gate_up_proj|down_proj)$")


class Part(NamedTuple):
    """Where one stored tensor goes: into a parameter, or into a part of it."""

    parameter: str
    shape: tuple[int, ...]
    select: Callable[[Tensor], Tensor]


def load_model(
    folder: Path, *, dtype: torch.dtype | None = None, device: str = "cpu", progress: bool = False
) -> DeepSeek:
    """The model in `folder`, in `dtype` (default: as its configuration says); CheckpointError says what is wrong."""
    folder = Path(folder)
    config = read_config(folder)
    dtype = dtype or getattr(torch, config.dtype)
    with torch.device("meta"):
        model = DeepSeek(config)
    parameters = model.state_dict()
    with ExitStack() as opened:
        files = {path: _open(path, opened) for path in _shards(folder)}
        stored = _locate(folder, files)
        parts = _parts(parameters, stored)
        _check(config, folder, parts, stored)
        loaded: dict[str, Tensor] = {}
        for name, part in tqdm(parts.items(), desc="loading", unit="tensor", disable=not progress):
            if part.parameter not in loaded:
                wanted = torch.float32 if _FP32.search(part.parameter) else dtype
                loaded[part.parameter] = torch.empty(parameters[part.parameter].shape, dtype=wanted, device=device)
            try:
                part.select(loaded[part.parameter]).copy_(stored[name].get_tensor(name))
            except SafetensorError as error:
                raise CheckpointError(f"{folder}: tensor {name} cannot be read: {error}") from error
    model.load_state_dict(loaded, assign=True)
    # What is still to move are the rotary frequencies, which no checkpoint stores.
    return model.to(device).eval().requires_grad_(False)


def _shards(folder: Path) -> list[Path]:
    """The safetensors files that make up the model: those that the index names, or the one there is."""
    index, single = folder / "model.safetensors.index.json", folder / "model.safetensors"
    if not index.is_file():
        if not single.is_file():
            raise CheckpointError(f"{folder} holds neither model.safetensors nor model.safetensors.index.json")
        return [single]
    try:
        names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
    except (ValueError, KeyError, AttributeError) as error:
        raise CheckpointError(f"{index} is not a safetensors index: {type(error).__name__} {error}") from error
    missing = [name for name in names if not (folder / name).is_file()]
    if missing:
        raise CheckpointError(f"{index} names {len(missing)} file(s) that do not exist: {_some(missing)}")
    return [folder / name for name in names]


def _open(path: Path, opened: ExitStack) -> safe_open:
    try:
        return opened.enter_context(safe_open(path, framework="pt"))
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path} is not a readable safetensors file: {error}") from error


def _locate(folder: Path, files: dict[Path, safe_open]) -> dict[str, safe_open]:
    """Tensor name -> open file that holds it. What is in the files counts; the index only names the files."""
    stored: dict[str, safe_open] = {}
    for path, file in files.items():
        for name in file.keys():
            if name in stored:
                raise CheckpointError(f"{folder}: tensor {name} is stored twice, the second time in {path.name}")
            stored[name] = file
    return stored


def _parts(parameters: dict[str, Tensor], stored: dict[str, safe_open]) -> dict[str, Part]:
    """Stored name -> where it goes, for all that the model needs."""
    parts: dict[str, Part] = {}
    for parameter, value in parameters.items():
        name = parameter if parameter.startswith("lm_head.") else f"model.{parameter}"
        shape = tuple(value.shape)
        experts = _EXPERTS.search(name)
        if experts is None or name in stored:
            parts[name] = Part(parameter, shape, lambda whole: whole)
            continue
        prefix, kind = f"model.{experts[1]}", experts[2]
        for expert in range(shape[0]):
            if kind == "down_proj":
                parts[f"{prefix}.{expert}.down_proj.weight"] = Part(
                    parameter, shape[1:], lambda whole, e=expert: whole[e]
                )
                continue
            rows, columns = shape[1] // 2, shape[2]
            for offset, half in ((0, "gate_proj"), (rows, "up_proj")):
                parts[f"{prefix}.{expert}.{half}.weight"] = Part(
                    parameter, (rows, columns), lambda whole, e=expert, o=offset, r=rows: whole[e, o : o + r]
                )
    return parts


def _check(config: DeepSeekConfig, folder: Path, parts: dict[str, Part], stored: dict[str, safe_open]) -> None:
    missing = [name for name in parts if name not in stored]
    if missing:
        raise CheckpointError(f"{folder}: {len(missing)} tensor(s) are not in the checkpoint: {_some(missing)}")
    unexpected = [name for name in stored if name not in parts and not _ignorable(config, name)]
    if unexpected:
        raise CheckpointError(
            f"{folder}: {len(unexpected)} tensor(s) have no place in the model that config.json describes: "
            f"{_some(unexpected)}"
        )
    for name, part in parts.items():
        tensor = stored[name].get_slice(name)
        if (shape := tuple(tensor.get_shape())) != part.shape:
            raise CheckpointError(
                f"{folder}: tensor {name} has shape {list(shape)}, the model that config.json describes needs "
                f"{list(part.shape)}"
            )
        if (dtype := tensor.get_dtype()) not in _STORED:
            raise CheckpointError(f"{folder}: tensor {name} is stored as {dtype}, not as {', '.join(_STORED)}")


def _ignorable(config: DeepSeekConfig, name: str) -> bool:
    """Multi-token-prediction layers after the last one, rotary frequencies of old checkpoints, a head that is tied."""
    layer = re.match(r"model\.layers\.(\d+)\.", name)
    past_the_last = layer is not None and int(layer[1]) >= config.num_layers
    tied = config.tie_word_embeddings and name == "lm_head.weight"
    return past_the_last or tied or name.endswith("rotary_emb.inv_freq")


def _some(names: list[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
