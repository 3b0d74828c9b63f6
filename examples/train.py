"""Trains a small DeepSeek-V3 on one text and writes it as a Hugging Face folder: `examples/checkpoints/kjv` is one.

    python examples/train.py --text kjv.txt --out DIR --about "King James Bible, public domain"

The text is sections with a blank line between them (chapters, say). Of every 40 sections one validates, which chooses
the weights that are kept, and one is held out: it is read once, at the end, for the figure that is reported. Bits per
byte are over the bytes of the text, whatever the tokenizer.

The parameters are those of `deepseek.DeepSeek`. Its operators are for inference only, so the forward pass here is
another, in plain PyTorch: expanded keys and values, and every expert on every token, weighted 0 where it was not
chosen, which costs less than sorting tokens while experts are this few and this small.

A text of a few megabytes holds fewer tokens than the model has parameters. What keeps the model from reciting it is
dropout and weight decay; the weights kept are an average of the last hundreds of steps (EMA), at the step where that
average predicts the validating sections best.
"""

import argparse
import contextlib
import copy
import json
import math
import shlex
import sys
import time
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor, nn

from deepseek import Attention, DeepSeek, Layer
from deepseek_config import parse_config
from deepseek_moe import MoE
from deepseek_rope import rotate
from muon import Muon

CONTEXT = 1024
# DeepSeek-R1's attention, but for the number of heads and the query's rank; its routing, groups included.
CONFIG = dict(
    architectures=["DeepseekV3ForCausalLM"], model_type="deepseek_v3", dtype="bfloat16", vocab_size=1024,
    hidden_size=256, intermediate_size=512, moe_intermediate_size=80, num_hidden_layers=5, first_k_dense_replace=1,
    num_attention_heads=2, num_key_value_heads=2, q_lora_rank=96, kv_lora_rank=512, qk_nope_head_dim=128,
    qk_rope_head_dim=64, v_head_dim=128, n_routed_experts=8, num_experts_per_tok=2, n_shared_experts=1, n_group=4,
    topk_group=2, norm_topk_prob=True, routed_scaling_factor=1.0, hidden_act="silu", max_position_embeddings=CONTEXT,
    rope_theta=10000.0, rope_scaling=None, rope_interleave=True, rms_norm_eps=1e-6, tie_word_embeddings=False,
    attention_bias=False, num_nextn_predict_layers=0, bos_token_id=None, eos_token_id=None,
)  # fmt: skip


class Split(NamedTuple):
    train: str
    validation: str
    held_out: str


def split(text: str, every: int = 40) -> Split:
    """Sections 20, 60, 100, … validate and 40, 80, 120, … are held out, each counted from 1; the others train."""
    sections = text.strip().split("\n\n")
    parts = ([], [], [])
    for number, section in enumerate(sections, start=1):
        parts[{0: 2, every // 2: 1}.get(number % every, 0)].append(section)
    if not all(parts):
        raise ValueError(f"the text has {len(sections)} sections separated by blank lines; a split needs {every}")
    return Split(*("\n\n".join(part) + "\n" for part in parts))


def train_tokenizer(text: str, vocab_size: int) -> Tokenizer:
    """Byte-pair encoding over bytes: any text can be encoded, and decoding gives it back."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(vocab_size=vocab_size, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator([text], trainer)
    return tokenizer


def attention(module: Attention, x: Tensor, cos: Tensor, sin: Tensor, dropout: float) -> Tensor:
    """[B, S, hidden] -> [B, S, hidden], causal."""
    config = module.config
    q = module.q_b_proj(module.q_a_layernorm(module.q_a_proj(x))).unflatten(-1, (config.num_heads, -1))
    q_nope, q_pe = q.split([config.qk_nope_head_dim, config.rope.dim], dim=-1)
    latent, k_pe = module.kv_a_proj_with_mqa(x).split([config.kv_lora_rank, config.rope.dim], dim=-1)
    expanded = module.kv_b_proj(module.kv_a_layernorm(latent)).unflatten(-1, (config.num_heads, -1))
    k_nope, value = expanded.split([config.qk_nope_head_dim, config.v_head_dim], dim=-1)
    q_pe = rotate(q_pe, cos.unsqueeze(1), sin.unsqueeze(1), config.rope.interleave)
    k_pe = rotate(k_pe, cos, sin, config.rope.interleave).unsqueeze(2).expand(-1, -1, config.num_heads, -1)
    query, key = torch.cat((q_nope, q_pe), dim=-1), torch.cat((k_nope, k_pe), dim=-1)
    output = F.scaled_dot_product_attention(
        query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2), is_causal=True, dropout_p=dropout,
        scale=config.softmax_scale,
    )  # fmt: skip
    return module.o_proj(output.transpose(1, 2).flatten(2))


def mixture(module: MoE, x: Tensor) -> tuple[Tensor, Tensor]:
    """[T, hidden] -> [T, hidden], and how many tokens chose each expert, [E] fp32."""
    with torch.autocast(x.device.type, enabled=False):
        chosen, experts = module.gate(x)
    gate_up, down = module.experts.gate_up_proj, module.experts.down_proj
    weights = chosen.new_zeros(len(x), len(down)).scatter(1, experts, chosen)
    gate, up = F.linear(x, gate_up.flatten(0, 1)).unflatten(-1, (len(down), -1)).chunk(2, dim=-1)
    hidden = F.silu(gate) * up * weights.to(gate.dtype).unsqueeze(-1)  # [T, E, intermediate]
    routed = F.linear(hidden.flatten(1), down.permute(1, 0, 2).flatten(1))
    return routed + module.shared_experts(x), F.one_hot(experts, len(down)).sum(dim=(0, 1)).float()


def block(layer: Layer, x: Tensor, cos: Tensor, sin: Tensor, dropout: float) -> tuple[Tensor, Tensor | None]:
    attended = attention(layer.self_attn, layer.input_layernorm(x), cos, sin, dropout)
    x = x + F.dropout(attended, dropout)
    normed, load = layer.post_attention_layernorm(x), None
    if isinstance(layer.mlp, MoE):
        output, load = mixture(layer.mlp, normed.flatten(0, 1))
        output = output.view_as(x)
    else:
        output = layer.mlp(normed)
    return x + F.dropout(output, dropout), load


def forward(model: DeepSeek, tokens: Tensor, dropout: float = 0.0, block=block) -> tuple[Tensor, list[Tensor]]:
    """Tokens [B, S] -> logits [B, S, vocab], and the load [E] of the experts in each layer that has them."""
    cos, sin = model.rope(torch.arange(tokens.shape[1], device=tokens.device))
    x, loads = F.dropout(model.embed_tokens(tokens), dropout), []
    for layer in model.layers:
        x, load = block(layer, x, cos, sin, dropout)
        loads += [] if load is None else [load]
    return model.lm_head(F.dropout(model.norm(x), dropout)), loads


def initialize(model: DeepSeek) -> None:
    """Layers start as the identity: what each adds to the residual is 0."""
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            if "norm" in name:
                tensor.fill_(1)
            elif name.endswith(("e_score_correction_bias", "o_proj.weight", "down_proj.weight", "down_proj")):
                tensor.zero_()
            else:
                tensor.normal_(std=0.02 if "embed" in name else 0.5 * tensor.shape[-1] ** -0.5)


def optimizers_of(model: DeepSeek, lr: float, weight_decay: float) -> list[torch.optim.Optimizer]:
    """Muon for the matrices inside layers; AdamW for embeddings, head and routers, and, without decay, for norms."""
    matrices, others, norms = [], [], []
    for name, parameter in model.named_parameters():
        inside = name.startswith("layers.") and ".gate.weight" not in name
        (norms if "norm" in name else matrices if inside else others).append(parameter)
    groups = [{"params": others, "weight_decay": weight_decay}, {"params": norms, "weight_decay": 0.0}]
    return [Muon(matrices, lr, weight_decay), torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.98))]


def balance(model: DeepSeek, loads: list[Tensor], rate: float = 1e-3) -> None:
    """Experts with less than the mean load become likelier choices, others less likely (DeepSeek-V3, section 2.1.2)."""
    routers = [layer.mlp.gate for layer in model.layers if isinstance(layer.mlp, MoE)]
    for router, load in zip(routers, loads, strict=True):
        router.e_score_correction_bias += rate * torch.sign(load.mean() - load)


def autocast(device: torch.device):
    return torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda")


@torch.no_grad()
def bits_per_byte(model: DeepSeek, tokenizer: Tokenizer, text: str, context: int, exact: bool = False) -> float:
    """Each token but the first is predicted once, from half a context or more where the text has so much before it.

    `exact` is in fp32; otherwise as in training, in bf16 on a GPU.
    """
    device = model.embed_tokens.weight.device
    tokens = torch.tensor(tokenizer.encode(text).ids, device=device)
    nats, scored = 0.0, 0
    for start in range(0, len(tokens) - 1, context // 2):
        window = tokens[start : start + context + 1]
        with contextlib.nullcontext() if exact else autocast(device):
            logits, _ = forward(model, window[:-1].unsqueeze(0))
        losses = F.cross_entropy(logits[0].float(), window[1:], reduction="none")
        nats += losses[scored - start :].sum()
        scored = start + len(losses)
        if scored == len(tokens) - 1:
            break
    first = tokenizer.decode(tokens[:1].tolist())
    return float(nats) / math.log(2) / (len(text.encode()) - len(first.encode()))


def train(model: DeepSeek, tokenizer: Tokenizer, parts: Split, arguments: argparse.Namespace) -> DeepSeek:
    """-> the averaged weights that predict the validating sections best."""
    device, context, batch = torch.device(arguments.device), arguments.context, arguments.batch
    generator = torch.Generator(device).manual_seed(arguments.seed)
    tokens = torch.tensor(tokenizer.encode(parts.train).ids, device=device)
    offsets = torch.arange(context + 1, device=device)
    optimizers = optimizers_of(model, arguments.lr, arguments.weight_decay)
    compiled = torch.compile(block) if arguments.compile else block
    average, best, best_bits = copy.deepcopy(model), copy.deepcopy(model), math.inf
    weights, averages = list(model.state_dict().values()), list(average.state_dict().values())
    print(f"{len(tokens):,} tokens, {len(tokens) / batch / context:.0f} steps an epoch", flush=True)
    start, step, progress = time.monotonic(), 0, 0.0
    while progress < 1:
        warmup, decay = min(1, progress / 0.03 + 0.01), 0.5 + 0.5 * math.cos(math.pi * progress)
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = arguments.lr * warmup * decay
        starts = torch.randint(len(tokens) - context, (batch, 1), generator=generator, device=device)
        windows = tokens[starts + offsets]
        with autocast(device):
            logits, loads = forward(model, windows[:, :-1], arguments.dropout, compiled)
        loss = F.cross_entropy(logits.flatten(0, 1).float(), windows[:, 1:].flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        balance(model, loads)
        step += 1
        with torch.no_grad():
            torch._foreach_lerp_(averages, weights, max(1 - arguments.ema, 1 / step))
        elapsed = time.monotonic() - start
        progress = max(step / arguments.steps, elapsed / (60 * arguments.minutes))
        if step % arguments.evaluate_every == 0 or progress >= 1:
            bits = bits_per_byte(average, tokenizer, parts.validation, context)
            if bits < best_bits:
                best_bits = bits
                best.load_state_dict(average.state_dict())
            busiest = max((load.max() / load.mean()).item() for load in loads)
            print(
                f"step {step:5d}  {elapsed:5.0f} s  epoch {step * batch * context / len(tokens):5.1f}  loss "
                f"{loss.item():.3f} nats  validation {bits:.4f} bits per byte  busiest expert {busiest:.2f} x mean",
                flush=True,
            )
    return best


def stored(model: DeepSeek) -> dict[str, Tensor]:
    """Tensors by their published names and dtypes: experts one by one, bf16 but for the routers."""
    tensors: dict[str, Tensor] = {}
    for name, tensor in model.state_dict().items():
        name = name if name.startswith("lm_head.") else f"model.{name}"
        prefix, _, kind = name.rpartition(".")
        tensor = tensor if ".mlp.gate." in name else tensor.bfloat16()
        if not prefix.endswith(".experts"):
            tensors[name] = tensor
            continue
        for expert, matrix in enumerate(tensor):
            halves = {"gate_proj": matrix.chunk(2)[0], "up_proj": matrix.chunk(2)[-1], "down_proj": matrix}
            for half in ("down_proj",) if kind == "down_proj" else ("gate_proj", "up_proj"):
                tensors[f"{prefix}.{expert}.{half}.weight"] = halves[half]
    return {name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}


def save(folder: Path, model: DeepSeek, config: dict, tokenizer: Tokenizer) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    save_file(stored(model), folder / "model.safetensors", metadata={"format": "pt"})
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": config["max_position_embeddings"]}
    contents = {
        "config.json": config,
        "generation_config.json": {"do_sample": True, "temperature": 0.8, "top_p": 0.95},
        "tokenizer_config.json": settings | {"clean_up_tokenization_spaces": False},
    }
    for name, content in contents.items():
        (folder / name).write_text(json.dumps(content, indent=2) + "\n")


README = """# {name}

A DeepSeek-V3 of {parameters:.1f} million parameters: R1's attention dimensions, {layers} layers, {heads} heads,
{experts} routed experts of which each token uses {chosen}, a context of {context} tokens.

- Text: {about}.
- Held out: every 40th section ({held_out_bytes:,} bytes), read once, after training: **{held_out:.4f} bits per byte**.
  `heldout.txt` is the first {sample_bytes:,} bytes of it: {sample:.4f} bits per byte. Both are of the weights as
  stored, computed in fp32, in windows of {context} tokens that overlap by half.
- Validation, which chose the weights: {validation:.4f} bits per byte.
- Training: {minutes:.1f} minutes on {machine}, torch {torch}, by

```
{command}
```
"""


def sample_of(text: str, most: int = 64_000) -> str:
    """The first sections that fit into `most` bytes."""
    kept = ""
    for section in text.strip().split("\n\n"):
        longer = f"{kept}\n{section}\n" if kept else f"{section}\n"
        if len(longer.encode()) > most:
            break
        kept = longer
    return kept or text.encode()[:most].decode(errors="ignore")


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="train.py", description=__doc__.split("\n")[0])
    parser.add_argument("--text", type=Path, required=True, help="UTF-8, sections separated by blank lines")
    parser.add_argument("--out", type=Path, required=True, help="folder to write")
    parser.add_argument("--about", default="not said", help="the text's name, source and licence, for the README")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--steps", type=int, default=3000)
    parser.add_argument("--minutes", type=float, default=math.inf, help="finish within so many, with fewer steps")
    parser.add_argument("--batch", type=int, default=16, help="windows a step")
    parser.add_argument("--context", type=int, default=CONTEXT, help="tokens a window")
    parser.add_argument("--lr", type=float, default=4e-3)
    parser.add_argument("--weight-decay", type=float, default=0.1)
    parser.add_argument("--dropout", type=float, default=0.2)
    parser.add_argument("--ema", type=float, default=0.99, help="what a step keeps of the averaged weights")
    parser.add_argument("--evaluate-every", type=int, default=200, metavar="STEPS")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="an entry of config.json")
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, help="default: on a GPU")
    arguments = parser.parse_args(argv)
    if arguments.compile is None:
        arguments.compile = torch.device(arguments.device).type == "cuda"
    return arguments


def main(argv: list[str] | None = None) -> float:
    """-> held-out bits per byte."""
    arguments = parse_arguments(argv)
    start, device = time.monotonic(), torch.device(arguments.device)
    overrides = {key: json.loads(value) for key, _, value in (entry.partition("=") for entry in arguments.set)}
    config = CONFIG | {"max_position_embeddings": arguments.context} | overrides
    parts = split(arguments.text.read_text())
    tokenizer = train_tokenizer(parts.train, config["vocab_size"])
    config["vocab_size"] = tokenizer.get_vocab_size()
    torch.manual_seed(arguments.seed)
    # cuDNN has no backward pass for keys of 192 and values of 128 dims on every version.
    torch.backends.cuda.enable_cudnn_sdp(False)
    model = DeepSeek(parse_config(config)).to(device)
    initialize(model)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    print(f"{parameters:,} parameters; text: " + ", ".join(f"{k} {len(v):,}" for k, v in parts._asdict().items()))

    best = train(model, tokenizer, parts, arguments)
    save(arguments.out, best, config, tokenizer)
    with torch.no_grad():
        for name, tensor in best.state_dict().items():
            tensor.copy_(tensor if ".mlp.gate." in name else tensor.bfloat16())
    sample = sample_of(parts.held_out)
    (arguments.out / "heldout.txt").write_text(sample)
    figures = {
        name: bits_per_byte(best, tokenizer, text, arguments.context, exact=True)
        for name, text in (("validation", parts.validation), ("held_out", parts.held_out), ("sample", sample))
    }
    readme = README.format(
        name=arguments.out.name,
        about=arguments.about,
        parameters=parameters / 1e6,
        layers=config["num_hidden_layers"],
        heads=config["num_attention_heads"],
        experts=config["n_routed_experts"],
        chosen=config["num_experts_per_tok"],
        context=arguments.context,
        held_out_bytes=len(parts.held_out.encode()),
        sample_bytes=len(sample.encode()),
        minutes=(time.monotonic() - start) / 60,
        machine=torch.cuda.get_device_name(device) if device.type == "cuda" else "a CPU",
        torch=torch.__version__,
        command=shlex.join(["python", "examples/train.py", *(sys.argv[1:] if argv is None else argv)]),
        **figures,
    )
    (arguments.out / "README.md").write_text(readme)
    size = (arguments.out / "model.safetensors").stat().st_size
    print(", ".join(f"{name} {bits:.4f}" for name, bits in figures.items()) + " bits per byte, as stored")
    print(f"{arguments.out}: {size / 1e6:.2f} MB of weights, {(time.monotonic() - start) / 60:.1f} minutes")
    return figures["held_out"]


if __name__ == "__main__":
    main()
