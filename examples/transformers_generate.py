"""A transformers model of DeepSeek's family that decodes through ts_ops, from a paged latent cache: one added line.

Run: python examples/transformers_generate.py [--model DIR] [--prompt TEXT] [--device cuda] [--cache-dtype fp8]

On a GPU `generate()` compiles the decode step and replays it as a CUDA graph. Without --model, a tiny random
DeepSeek-V3 is made, whose output is noise. Without a tokenizer a token of the prompt is a byte, and new ones are ids.
"""

import argparse
import tempfile
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tiny_checkpoint import write_tiny_checkpoint
from ts_ops.integrations.transformers import prepare

DTYPES = {"auto": None, "bf16": torch.bfloat16, "fp32": torch.float32, "fp8": torch.float8_e4m3fn}


def load(folder: Path, device: str):
    """The model, in the dtype it is stored in, and its tokenizer or None."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto").to(device).eval()
    has_tokenizer = any(folder.glob("tokenizer*"))
    return model, AutoTokenizer.from_pretrained(folder) if has_tokenizer else None


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, metavar="DIR", help="Hugging Face folder (default: a tiny random one)")
    parser.add_argument("--prompt", default="In the beginning", help="text to go on from")
    parser.add_argument("--max-new-tokens", type=int, default=32)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--cache-dtype", choices=DTYPES, default="auto", help="auto: the model's")
    parser.add_argument("--fp8-query", action="store_true", help="with an fp8 cache: quantise the query too")
    arguments = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        if arguments.model is None:
            write_tiny_checkpoint(Path(folder))
        model, tokenizer = load(arguments.model or Path(folder), arguments.device)

    prepare(model, cache_dtype=DTYPES[arguments.cache_dtype], fp8_query=arguments.fp8_query)  # the added line

    ids = tokenizer.encode(arguments.prompt) if tokenizer else list(arguments.prompt.encode())
    inputs = torch.tensor([ids], device=arguments.device)
    tokens = model.generate(inputs, max_new_tokens=arguments.max_new_tokens, do_sample=False)[0, len(ids) :].tolist()
    print(tokenizer.decode(tokens, skip_special_tokens=True) if tokenizer else tokens)


if __name__ == "__main__":
    main()
