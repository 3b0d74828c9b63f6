"""An MLA decode layer under torch.compile: 32 steps on one graph, compared with eager mode.

Run: python examples/torch_compile.py [--device cuda] [--mode reduce-overhead]
"""

import argparse

import torch
from torch import Tensor, nn

import ts_ops

BATCH, STEPS, PAGES, PAGE_SIZE = 3, 32, 2, 16
HIDDEN, HEADS, NOPE, ROPE, RANK, VALUE = 256, 8, 128, 64, 512, 128


class Attention(nn.Module):  # without rope and norms; examples/deepseek.py is the whole model
    def __init__(self):
        super().__init__()
        self.query = nn.Linear(HIDDEN, HEADS * (NOPE + ROPE), bias=False)
        self.latent = nn.Linear(HIDDEN, RANK + ROPE, bias=False)
        self.w_uk, self.w_uv = (nn.Parameter(torch.randn(HEADS, n, RANK) * RANK**-0.5) for n in (NOPE, VALUE))
        self.output = nn.Linear(HEADS * VALUE, HIDDEN, bias=False)

    def forward(self, x: Tensor, cache: Tensor, block_tables: Tensor, seq_lens: Tensor) -> Tensor:
        """One new token a request, [B, hidden] -> [B, hidden]; seq_lens [B] counts it."""
        page, offset = (seq_lens - 1) // PAGE_SIZE, (seq_lens - 1) % PAGE_SIZE
        slots = block_tables.gather(1, page[:, None].long()).squeeze(1).long() * PAGE_SIZE + offset
        latent, k_pe = self.latent(x).split([RANK, ROPE], dim=-1)
        ts_ops.mla_kv_cache_write(cache, latent, k_pe, slots)  # in place: one tensor a layer, written once a graph
        q_nope, q_pe = self.query(x).unflatten(-1, (HEADS, NOPE + ROPE)).split([NOPE, ROPE], dim=-1)
        q_latent = torch.einsum("bhn,hnl->bhl", q_nope, self.w_uk)  # absorbed: q · (W_UK c) = (W_UKᵀ q) · c
        query = torch.cat((q_latent, q_pe), dim=-1).unsqueeze(1)  # [B, 1, H, RANK + ROPE]
        latents = ts_ops.mla_decode(query, cache, block_tables, seq_lens, (NOPE + ROPE) ** -0.5).squeeze(1)
        return self.output(torch.einsum("bhl,hvl->bhv", latents, self.w_uv).flatten(1))


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--mode", default="default", choices=("default", "reduce-overhead"))
    arguments = parser.parse_args(argv)
    with torch.device(arguments.device):
        layer = Attention().bfloat16().requires_grad_(False)  # the operators are inference only
        caches = [ts_ops.allocate_kv_cache(1 + BATCH * PAGES, PAGE_SIZE, RANK + ROPE) for _ in range(2)]
        block_tables = torch.arange(1, 1 + BATCH * PAGES, dtype=torch.int32).view(BATCH, PAGES)
        seq_lens = torch.zeros(BATCH, dtype=torch.int32)
    compiled, largest = torch.compile(layer, fullgraph=True, mode=arguments.mode), 0.0
    for _ in range(STEPS):
        x = torch.randn(BATCH, HIDDEN, dtype=torch.bfloat16, device=arguments.device)
        seq_lens += 1  # lengths are data on the device: new ones compile nothing
        outputs = [f(x, cache, block_tables, seq_lens).float() for f, cache in zip((compiled, layer), caches)]
        largest = max(largest, (outputs[0] - outputs[1]).abs().max().item())
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    print(f"{STEPS} steps, graphs: {graphs}, largest difference from eager: {largest:.1e}")


if __name__ == "__main__":
    main()
