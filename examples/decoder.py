"""`model.decode` for a batch padded to one of a ladder of sizes; on a GPU, in one CUDA graph of each size."""

from collections.abc import Iterable

import torch
from torch import Tensor
from tqdm import tqdm

from deepseek import DeepSeek
from paged_cache import LayerCache


class Decoder:
    """Decodes `q_lens` tokens of each of up to `batch_sizes[-1]` sequences, of `table_width` pages at most."""

    def __init__(
        self, model: DeepSeek, caches: list[LayerCache], table_width: int, *, batch_sizes: Iterable[int],
        q_lens: Iterable[int], fp8_query: bool = False, compile: bool = False,
    ):  # fmt: skip
        self.batch_sizes, self.q_lens = sorted(batch_sizes), sorted(q_lens)
        self._caches, self._fp8_query = caches, fp8_query
        self._decode = torch.compile(model.decode, fullgraph=True) if compile else model.decode
        most, device = self.batch_sizes[-1], model.embed_tokens.weight.device
        # Graphs hold addresses, so all sizes read the first rows of the same tensors.
        self._tokens = {q_len: torch.zeros(most, q_len, dtype=torch.int64, device=device) for q_len in self.q_lens}
        self._seq_lens = torch.zeros(most, dtype=torch.int32, device=device)
        self._tables = torch.zeros(most, table_width, dtype=torch.int32, device=device)
        self.graphs: dict[tuple[int, int], tuple[torch.cuda.CUDAGraph, Tensor]] = {}

    def capture(self, progress: bool) -> None:
        """Largest first: the smaller graphs then fit in the memory of the pool that they share."""
        sizes = [(batch, q_len) for batch in reversed(self.batch_sizes) for q_len in reversed(self.q_lens)]
        pool = torch.cuda.graph_pool_handle()
        for batch, q_len in tqdm(sizes, desc="capturing", unit="graph", disable=not progress):
            self._run(batch, q_len)  # what is compiled or allocated at a first call must be so before the capture
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool):
                logits = self._run(batch, q_len)
            self.graphs[batch, q_len] = graph, logits

    def __call__(self, tokens: Tensor, seq_lens: Tensor, tables: Tensor) -> Tensor:
        """CPU tensors [B, q_len], [B], [B, max_pages] -> logits [B, q_len, vocab], valid until the next call."""
        count, q_len = tokens.shape
        batch = next(size for size in self.batch_sizes if size >= count)
        for buffer, rows in ((self._tokens[q_len], tokens), (self._seq_lens, seq_lens), (self._tables, tables)):
            buffer[:count] = rows
            buffer[count:batch] = 0  # an empty row: seq_len 0 and, as its pages are the null page, slot -1
        if (batch, q_len) not in self.graphs:
            return self._run(batch, q_len)[:count]
        graph, logits = self.graphs[batch, q_len]
        graph.replay()
        return logits[:count]

    def _run(self, batch: int, q_len: int) -> Tensor:
        inputs = self._tokens[q_len][:batch], self._seq_lens[:batch], self._tables[:batch]
        return self._decode(*inputs, self._caches, self._fp8_query)
