"""Decode steps in one CUDA graph: captured once, replayed while lengths, block tables, slots and data change in place.

Run: python examples/cuda_graph.py. Every step is compared, bit by bit, with eager calls on a cache of their own.
"""

import argparse

import torch

import ts_ops

STEPS, REQUESTS, PAGES, PAGE_SIZE, HEADS, RANK, ROPE = 40, 4, 3, 16, 16, 512, 64  # a request has up to PAGES pages


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    device = torch.device(parser.parse_args(argv).device)
    on_gpu = device.type == "cuda" and torch.cuda.is_available()
    print("One graph on the GPU." if on_gpu else "No CUDA device, so no graph to capture: the same steps run eagerly.")
    torch.set_default_device(device if on_gpu else "cpu")
    cache, eager_cache = (ts_ops.allocate_kv_cache(1 + REQUESTS * PAGES, PAGE_SIZE, RANK + ROPE) for _ in range(2))
    # A graph holds addresses. All that a replay reads lies in tensors that live as long and are written in place.
    query = torch.zeros(REQUESTS, 1, HEADS, RANK + ROPE, dtype=torch.bfloat16)
    latent, k_pe = query.new_zeros(REQUESTS, RANK), query.new_zeros(REQUESTS, ROPE)
    # Slot -1 and length 0 make an empty row, so that one graph serves any number of requests up to REQUESTS.
    slots, seq_lens = torch.full((REQUESTS,), -1), torch.zeros(REQUESTS, dtype=torch.int32)
    block_tables = torch.zeros(REQUESTS, PAGES, dtype=torch.int32)  # page 0 is nobody's: unused entries name it

    def step(cache: torch.Tensor) -> torch.Tensor:
        ts_ops.mla_kv_cache_write(cache, latent, k_pe, slots)
        return ts_ops.mla_decode(query, cache, block_tables, seq_lens, 192**-0.5)

    output = step(cache)  # the first call compiles kernels, which should be done before a capture
    if on_gpu:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            output = step(cache)  # computes nothing yet: each replay writes the cache and this tensor

    lengths, free_pages = [0] * REQUESTS, list(range(1, 1 + REQUESTS * PAGES))
    for number in range(STEPS):
        for request in range(min(REQUESTS, 1 + number // 3)):  # another request joins every third step
            page, offset = divmod(lengths[request], PAGE_SIZE)
            if offset == 0:
                block_tables[request, page] = free_pages.pop()
            slots[request] = block_tables[request, page] * PAGE_SIZE + offset
            seq_lens[request] = lengths[request] = lengths[request] + 1
        for tensor in (query, latent, k_pe):
            tensor.normal_()
        if on_gpu:
            graph.replay()
        else:
            output = step(cache)
        assert torch.equal(output, step(eager_cache)), f"step {number} differs"
    print(f"{STEPS} steps, to lengths {lengths}: the same bits as eager calls")


if __name__ == "__main__":
    main()
