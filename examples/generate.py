"""Text from a DeepSeek V2 or V3 checkpoint, or from a tiny random one where none is given.

    python examples/generate.py --model DIR --prompt "Once upon a time" --prompt "Another" --max-new-tokens 64
    python examples/generate.py --prompt-ids 1,2,3 --kv-dtype fp8 --no-compile
"""

import argparse
import sys
import tempfile
from pathlib import Path

import torch

from checkpoint import load_model
from deepseek_config import CheckpointError, DeepSeekConfig, read_config
from generation import Generation, Settings, generate
from tiny_checkpoint import write_tiny_checkpoint

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
KV_DTYPES = {"auto": None, "bf16": torch.bfloat16, "fp8": torch.float8_e4m3fn}
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json")


class BadInput(ValueError):
    """What the caller asked for cannot be done; the message is one sentence."""


class ByteTokenizer:
    """Stands in for the tokenizer that the tiny checkpoint lacks: a token is a byte."""

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, tokens: list[int], skip_special_tokens: bool = True) -> str:
        return repr(bytes(tokens))


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="generate.py", description=__doc__.split("\n")[0])
    parser.add_argument("--model", type=Path, metavar="DIR", help="Hugging Face folder (default: a tiny random one)")
    parser.add_argument("--prompt", action="append", default=[], help="text; may be given several times")
    parser.add_argument("--prompt-ids", action="append", default=[], metavar="1,2,3", help="token ids; likewise")
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--dtype", choices=("auto", *DTYPES), default="auto", help="auto: as stored")
    parser.add_argument("--kv-dtype", choices=tuple(KV_DTYPES), default="auto", help="auto: as the model")
    parser.add_argument("--fp8-query", action="store_true", help="with --kv-dtype fp8, pack queries to FP8 as well")
    parser.add_argument("--page-size", type=int, default=64, help="tokens a cache page: a power of two up to 128")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, default=True, help="compile decode steps")
    parser.add_argument("--temperature", type=float, default=0.0, help="0: the likeliest token each time")
    parser.add_argument("--seed", type=int, default=0, help="of sampling, and of the tiny checkpoint's weights")
    arguments = parser.parse_args(argv)
    if not arguments.prompt and not arguments.prompt_ids:
        arguments.prompt = ["Hello"]
    return arguments


def main(argv: list[str] | None = None) -> int:
    arguments = parse_arguments(argv)
    try:
        check_arguments(arguments)
        if arguments.model is not None:
            run(arguments, arguments.model)
            return 0
        with tempfile.TemporaryDirectory() as folder:
            try:
                write_tiny_checkpoint(Path(folder), seed=arguments.seed)
            except ImportError as error:
                raise BadInput("without --model, transformers must be installed to write a tiny checkpoint") from error
            run(arguments, Path(folder), ByteTokenizer())
        return 0
    except (BadInput, CheckpointError) as error:
        print(f"generate.py: error: {error}", file=sys.stderr)
        return 2


def check_arguments(arguments: argparse.Namespace) -> None:
    if arguments.max_new_tokens < 1:
        raise BadInput(f"--max-new-tokens must be at least 1, got {arguments.max_new_tokens}")
    if arguments.page_size not in (1, 2, 4, 8, 16, 32, 64, 128):
        raise BadInput(f"--page-size must be a power of two up to 128, got {arguments.page_size}")
    if not 0 <= arguments.temperature < float("inf"):
        raise BadInput(f"--temperature must be at least 0, got {arguments.temperature}")
    if arguments.fp8_query and arguments.kv_dtype != "fp8":
        raise BadInput(f"--fp8-query goes with --kv-dtype fp8, got {arguments.kv_dtype}")
    if arguments.model is not None and not arguments.model.is_dir():
        raise BadInput(f"--model {arguments.model} is not a folder")
    try:
        device = torch.device(arguments.device)
    except RuntimeError as error:
        raise BadInput(f"--device {arguments.device} is not a device that torch knows") from error
    if device.type not in ("cpu", "cuda"):
        raise BadInput(f"--device must be cpu or cuda, got {arguments.device}")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise BadInput(f"--device {arguments.device} is not there: torch sees {torch.cuda.device_count()} CUDA devices")


def run(arguments: argparse.Namespace, folder: Path, tokenizer=None) -> None:
    config = read_config(folder)
    if tokenizer is None and any((folder / name).is_file() for name in TOKENIZER_FILES):
        tokenizer = load_tokenizer(folder)
    # All that can be wrong with the request is found before weights are read, which may take minutes.
    prompts = read_prompts(arguments, config, tokenizer, folder)
    if isinstance(tokenizer, ByteTokenizer):
        print("no --model: a tiny random DeepSeek-V3 without a tokenizer; a token is a byte", flush=True)
    elif tokenizer is None:
        print(f"{folder} has no tokenizer; tokens are printed as ids", flush=True)
    model = load_model(folder, dtype=DTYPES.get(arguments.dtype), device=arguments.device, progress=True)
    settings = Settings(
        max_new_tokens=arguments.max_new_tokens,
        page_size=arguments.page_size,
        kv_dtype=KV_DTYPES[arguments.kv_dtype],
        fp8_query=arguments.fp8_query,
        compile=arguments.compile,
        temperature=arguments.temperature,
        seed=arguments.seed,
        progress=True,
    )
    report(prompts, generate(model, prompts, settings), tokenizer)


def load_tokenizer(folder: Path):
    try:
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except Exception as error:  # transformers raises many kinds for a damaged or unknown tokenizer
        reason = str(error).strip().split("\n")[0]
        raise BadInput(f"the tokenizer in {folder} cannot be loaded: {type(error).__name__}: {reason}") from error


def read_prompts(arguments: argparse.Namespace, config: DeepSeekConfig, tokenizer, folder: Path) -> list[list[int]]:
    if arguments.prompt and tokenizer is None:
        raise BadInput(f"{folder} has no tokenizer ({', '.join(TOKENIZER_FILES)}): give --prompt-ids, not --prompt")
    prompts = [tokenizer.encode(text) if text else [] for text in arguments.prompt]
    for text in arguments.prompt_ids:
        try:
            prompts.append([int(part) for part in text.split(",")] if text.strip() else [])
        except ValueError as error:
            raise BadInput(f"--prompt-ids must be whole numbers separated by commas, got {text!r}") from error
    for number, prompt in enumerate(prompts, start=1):
        if not prompt:
            raise BadInput(f"prompt {number} is empty; it must have at least one token")
        outside = [token for token in prompt if not 0 <= token < config.vocab_size]
        if outside:
            raise BadInput(f"prompt {number} has the id {outside[0]}, outside the vocabulary [0, {config.vocab_size})")
        if len(prompt) + arguments.max_new_tokens > config.max_position_embeddings:
            raise BadInput(
                f"prompt {number} has {len(prompt)} tokens, which with {arguments.max_new_tokens} new ones exceeds the "
                f"model's {config.max_position_embeddings} positions"
            )
    return prompts


def report(prompts: list[list[int]], result: Generation, tokenizer) -> None:
    for number, (prompt, tokens) in enumerate(zip(prompts, result.tokens), start=1):
        text = tokenizer.decode(tokens, skip_special_tokens=True) if tokenizer else " ".join(map(str, tokens))
        print(f"[{number}] {len(prompt)} prompt tokens, {len(tokens)} new: {text}")
    count = sum(map(len, prompts))
    print(f"prefill: {count} tokens in {result.prefill_seconds:.3f} s, {count / result.prefill_seconds:.1f} tokens/s")
    if result.steps > 1:
        decoded, seconds = (result.steps - 1) * len(prompts), result.later_steps_seconds
        print(
            f"decode: {decoded} tokens in {seconds:.3f} s, {decoded / seconds:.1f} tokens/s "
            f"(after a first step of {result.first_step_seconds:.2f} s, compilation included)"
        )


if __name__ == "__main__":
    sys.exit(main())
