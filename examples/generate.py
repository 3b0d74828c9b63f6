"""Text from a DeepSeek V2 or V3 checkpoint, or from a tiny random one where none is given.

    python examples/generate.py --model DIR --prompt "Once upon a time" --prompt "Another" --max-new-tokens 64
    python examples/generate.py --prompt-ids 1,2,3 --kv-dtype fp8 --no-compile
    python examples/generate.py --engine --temperature 0.8 --top-p 0.9 --draft-tokens 4 --prompt "Hello"

With --engine, prompts go through the serving engine (engine.py), and Ctrl-C prints what there is so far.
"""

import argparse
import sys
import tempfile
from pathlib import Path

import torch

from checkpoint import load_model
from deepseek_config import CheckpointError, DeepSeekConfig, read_config
from engine import Engine, EngineSettings, Refused, Sampling
from generation import Generation, Settings, generate
from tiny_checkpoint import write_tiny_checkpoint

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
KV_DTYPES = {"auto": None, "bf16": torch.bfloat16, "fp8": torch.float8_e4m3fn}
ENGINE_OPTIONS = {"top_p": 1.0, "pages": None, "prefill_tokens": 2048, "chunk_tokens": 4096, "draft_tokens": 0}
INTERRUPTED = 130  # what shells report of a program that Ctrl-C ended
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
    parser.add_argument(
        "--compile", action=argparse.BooleanOptionalAction, help="compile decode steps (default: without --engine)"
    )
    parser.add_argument("--temperature", type=float, default=0.0, help="0: the likeliest token each time")
    parser.add_argument("--seed", type=int, default=0, help="of sampling, and of the tiny checkpoint's weights")
    parser.add_argument("--engine", action="store_true", help="continuous batching; what follows goes with it")
    parser.add_argument("--top-p", type=float, help="sample from the likeliest tokens that sum to this")
    parser.add_argument("--pages", type=int, help="of the cache (default: enough for all prompts at once)")
    parser.add_argument("--prefill-tokens", type=int, help="prompt tokens in one step")
    parser.add_argument("--chunk-tokens", type=int, help="context tokens expanded at once in a prefill")
    parser.add_argument("--draft-tokens", type=int, help="speculate so many by prompt lookup")
    parser.set_defaults(**ENGINE_OPTIONS)
    arguments = parser.parse_args(argv)
    if arguments.compile is None:
        arguments.compile = not arguments.engine
    if not arguments.prompt and not arguments.prompt_ids:
        arguments.prompt = ["Hello"]
    return arguments


def main(argv: list[str] | None = None, run=None) -> int:
    arguments = parse_arguments(argv)
    run = run or (serve if arguments.engine else generate_all)
    try:
        check_arguments(arguments)
        if arguments.model is not None:
            return run(arguments, arguments.model) or 0
        with tempfile.TemporaryDirectory() as folder:
            try:
                write_tiny_checkpoint(Path(folder), seed=arguments.seed)
            except ImportError as error:
                raise BadInput("without --model, transformers must be installed to write a tiny checkpoint") from error
            return run(arguments, Path(folder), ByteTokenizer()) or 0
    except (BadInput, CheckpointError) as error:
        print(f"generate.py: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return INTERRUPTED


def check_arguments(arguments: argparse.Namespace) -> None:
    if arguments.max_new_tokens < 1:
        raise BadInput(f"--max-new-tokens must be at least 1, got {arguments.max_new_tokens}")
    if arguments.page_size not in (1, 2, 4, 8, 16, 32, 64, 128):
        raise BadInput(f"--page-size must be a power of two up to 128, got {arguments.page_size}")
    if not 0 <= arguments.temperature < float("inf"):
        raise BadInput(f"--temperature must be at least 0, got {arguments.temperature}")
    if arguments.fp8_query and arguments.kv_dtype != "fp8":
        raise BadInput(f"--fp8-query goes with --kv-dtype fp8, got {arguments.kv_dtype}")
    for name, default in ENGINE_OPTIONS.items():
        option, value = f"--{name.replace('_', '-')}", getattr(arguments, name)
        if value != default and not arguments.engine:
            raise BadInput(f"{option} goes with --engine")
        lowest = {"pages": 2, "draft_tokens": 0}.get(name, 1)
        if isinstance(value, int) and value < lowest:
            raise BadInput(f"{option} must be at least {lowest}, got {value}")
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


def prepare(arguments: argparse.Namespace, folder: Path, tokenizer=None) -> tuple:
    """The model, the prompts and the tokenizer, None if there is none."""
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
    return model, prompts, tokenizer


def generate_all(arguments: argparse.Namespace, folder: Path, tokenizer=None) -> None:
    model, prompts, tokenizer = prepare(arguments, folder, tokenizer)
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


def engine_settings(arguments: argparse.Namespace, prompts: list[list[int]]) -> EngineSettings:
    page_size, kv_dtype = arguments.page_size, KV_DTYPES[arguments.kv_dtype]
    pages = arguments.pages or 1 + sum(-(-(len(prompt) + arguments.max_new_tokens) // page_size) for prompt in prompts)
    names = ("page_size", "fp8_query", "prefill_tokens", "chunk_tokens", "draft_tokens", "compile")
    options = {name: getattr(arguments, name) for name in names}
    return EngineSettings(num_pages=pages, kv_dtype=kv_dtype, progress=True, **options)


def sampling_of(arguments: argparse.Namespace) -> Sampling:
    names = ("max_new_tokens", "temperature", "top_p", "seed")
    return Sampling(**{name: getattr(arguments, name) for name in names})


def serve(arguments: argparse.Namespace, folder: Path, tokenizer=None) -> int:
    model, prompts, tokenizer = prepare(arguments, folder, tokenizer)
    engine = Engine(model, engine_settings(arguments, prompts))
    try:
        requests = [engine.submit(prompt, sampling_of(arguments)) for prompt in prompts]
    except Refused as error:
        raise BadInput(str(error)) from error
    status = 0
    try:
        for _ in engine.stream(progress=True):
            pass
    except KeyboardInterrupt:
        status = INTERRUPTED
    for number, request in enumerate(requests, start=1):
        count = f"{len(request.generated)} new ({request.finish_reason or 'interrupted'})"
        print(f"[{number}] {request.prompt_tokens} prompt tokens, {count}: {as_text(request.generated, tokenizer)}")
    print(describe(engine.counts))
    return status


def describe(counts: dict[str, int]) -> str:
    text = "{prefill_tokens} tokens prefilled, {decode_tokens} decoded in {decode_calls} calls".format_map(counts)
    if counts["drafted"]:
        text += f", {counts['accepted'] / counts['drafted']:.0%} of {counts['drafted']} drafts accepted"
    return text + f", {counts['preemptions']} preemptions" * (counts["preemptions"] > 0)


def as_text(tokens: list[int], tokenizer) -> str:
    return tokenizer.decode(tokens, skip_special_tokens=True) if tokenizer else " ".join(map(str, tokens))


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
        print(f"[{number}] {len(prompt)} prompt tokens, {len(tokens)} new: {as_text(tokens, tokenizer)}")
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
