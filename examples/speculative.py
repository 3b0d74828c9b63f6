"""Speculative decoding by prompt lookup: drafts from a request's own tokens, verified in one decode call.

    python examples/speculative.py --model DIR --prompt "..." --draft-tokens 4

Text repeats itself: code, quotations, names. Where the last n-gram of a request has occurred before, what followed it
then is the draft of what follows now, and costs nothing to make. A decode call with q_len = 1 + drafts scores it all,
and drafts are kept as long as each is the token that is sampled there. As a number drawn from (seed, index) alone
decides what is sampled, the output is that of plain decoding, greedy or not. The command runs both and compares.
"""

import random
import sys
import time

import torch
from torch import Tensor

LONGEST = 3  # n-grams are tried from this length down


class PromptLookup:
    """Where each n-gram of one request's tokens was last followed by another token."""

    def __init__(self):
        self._followers: dict[tuple[int, ...], int] = {}
        self._indexed = 1

    def propose(self, tokens: list[int], count: int) -> list[int]:
        """`count` tokens that may come next; none if no n-gram at the end has occurred before.

        `tokens` are those of the last call and more: only what is new is indexed.
        """
        for follower in range(self._indexed, len(tokens)):
            for size in range(1, min(LONGEST, follower) + 1):
                self._followers[tuple(tokens[follower - size : follower])] = follower
        self._indexed = len(tokens)
        for size in range(min(LONGEST, len(tokens)), 0, -1):
            first = self._followers.get(tuple(tokens[-size:]))
            if first is not None:
                # A draft that reaches the end of the tokens goes on as if what it copies repeated.
                period = len(tokens) - first
                return [tokens[first + index % period] for index in range(count)]
        return []


def uniform(seed: int, index: int) -> float:
    """A number in [0, 1) for one token of one request, whatever else runs and on whatever device."""
    return random.Random(f"{seed}/{index}").random()


def sample(logits: Tensor, options: list[tuple[float, float, float]]) -> Tensor:
    """Logits [T, vocab], and temperature, top_p and a uniform number for each row -> tokens [T].

    The number picks from the cumulative distribution of the likeliest tokens that together have the probability top_p.
    """
    greedy = logits.argmax(dim=-1)
    if all(temperature == 0 for temperature, _, _ in options):
        return greedy
    temperature, top_p, number = torch.tensor(options, device=logits.device).T.unsqueeze(-1)  # [T, 1] each
    # Taken from the largest, what a tiny temperature makes infinite is only ever a -inf.
    scaled = (logits - logits.amax(dim=-1, keepdim=True)) / temperature
    ordered, tokens = scaled.softmax(dim=-1).sort(dim=-1, descending=True, stable=True)
    kept = ordered.cumsum(dim=-1) - ordered < top_p  # the likeliest always
    cumulative = (ordered * kept).cumsum(dim=-1)
    choice = (cumulative <= number * cumulative[:, -1:]).sum(dim=-1, keepdim=True)
    # Where rounding puts the number at the very end, the last that is kept.
    choice = torch.minimum(choice, kept.sum(dim=-1, keepdim=True) - 1).clamp(min=0)
    return torch.where(temperature == 0, greedy.unsqueeze(-1), tokens.gather(1, choice)).squeeze(1)


def main(argv: list[str] | None = None) -> int:
    import generate  # which imports the engine, which imports this file
    from engine import Engine

    def compare(arguments, folder, tokenizer=None) -> None:
        arguments.draft_tokens = arguments.draft_tokens or 4
        model, prompts, _ = generate.prepare(arguments, folder, tokenizer)
        sampling, outputs, seconds = generate.sampling_of(arguments), [], []
        for draft_tokens in (0, arguments.draft_tokens):
            arguments.draft_tokens = draft_tokens
            engine = Engine(model, generate.engine_settings(arguments, prompts))
            engine.generate(prompts, sampling)  # a first time, for what is compiled or allocated then
            engine.counts.clear()
            start = time.perf_counter()
            outputs.append(engine.generate(prompts, sampling, progress=True))
            seconds.append(time.perf_counter() - start)
            print(f"{draft_tokens} draft tokens: {seconds[-1]:.3f} s, {generate.describe(engine.counts)}")
        same = sum(plain == drafted for plain, drafted in zip(*outputs))
        print(f"speed-up {seconds[0] / seconds[1]:.2f}, {same} of {len(prompts)} outputs the same")

    return generate.main(["--engine", *(sys.argv[1:] if argv is None else argv)], run=compare)


if __name__ == "__main__":
    sys.exit(main())
