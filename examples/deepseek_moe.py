"""DeepSeek's MLP and mixture of experts, without a shape that depends on data, so that a step compiles as one graph."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from deepseek_config import MoEConfig


class MLP(nn.Module):
    def __init__(self, hidden_size: int, intermediate_size: int):
        super().__init__()
        self.gate_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.up_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Router(nn.Module):
    """Chooses `experts_per_token` experts for each token. Its weights and scores are fp32 in every model dtype."""

    def __init__(self, hidden_size: int, config: MoEConfig):
        super().__init__()
        self.config = config
        self.weight = nn.Parameter(torch.empty(config.num_experts, hidden_size, dtype=torch.float32))
        if config.sigmoid:
            self.register_buffer("e_score_correction_bias", torch.empty(config.num_experts, dtype=torch.float32))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """[T, hidden] -> weights [T, k] fp32, expert ids [T, k] int64."""
        config = self.config
        logits = F.linear(x.float(), self.weight)
        scores = logits.sigmoid() if config.sigmoid else logits.softmax(dim=-1)
        # The correction balances the load: it decides who is chosen, not how much the chosen count.
        choice = scores + self.e_score_correction_bias if config.sigmoid else scores
        if config.num_groups > 1:
            choice = self._limit_groups(choice)
        experts = choice.topk(config.experts_per_token, dim=-1).indices
        weights = scores.gather(1, experts)
        if config.normalize:
            weights = weights / (weights.sum(dim=-1, keepdim=True) + 1e-20)
        return weights * config.routed_scaling_factor, experts

    def _limit_groups(self, choice: Tensor) -> Tensor:
        """Leaves only the experts of the best `topk_groups` groups: by a group's two best (V3) or its best (V2)."""
        groups = choice.unflatten(1, (self.config.num_groups, -1))
        group_scores = groups.topk(2, dim=-1).values.sum(dim=-1) if self.config.sigmoid else groups.amax(dim=-1)
        best = group_scores.topk(self.config.topk_groups, dim=-1).indices
        kept = torch.zeros_like(group_scores, dtype=torch.bool).scatter(1, best, True)
        return groups.masked_fill(~kept.unsqueeze(-1), float("-inf")).flatten(1)


class Experts(nn.Module):
    """E gated MLPs in two tensors, applied to the tokens that were routed to each."""

    def __init__(self, num_experts: int, hidden_size: int, intermediate_size: int):
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.empty(num_experts, 2 * intermediate_size, hidden_size))
        self.down_proj = nn.Parameter(torch.empty(num_experts, hidden_size, intermediate_size))

    def forward(self, x: Tensor, weights: Tensor, experts: Tensor) -> Tensor:
        """x [T, hidden], weights and experts [T, k] -> [T, hidden]."""
        per_expert = self._grouped(x, experts) if self._can_group(x) else self._gathered(x, experts)
        return (per_expert * weights.unsqueeze(-1)).sum(dim=1).to(x.dtype)

    def _can_group(self, x: Tensor) -> bool:
        # grouped_mm takes rows of whole 16 bytes, and its fake, which compiling runs, takes bfloat16 alone.
        aligned = all(size * x.element_size() % 16 == 0 for size in self.down_proj.shape[1:])
        return aligned and (x.dtype == torch.bfloat16 or not torch.compiler.is_compiling())

    def _grouped(self, x: Tensor, experts: Tensor) -> Tensor:
        """[T, k, hidden]: rows sorted by expert, one matrix product a group; reads each expert's weights once."""
        num_experts, k = len(self.down_proj), experts.shape[1]
        flat = experts.flatten()
        order = flat.argsort(stable=True)
        counts = (flat.unsqueeze(1) == torch.arange(num_experts, device=x.device)).sum(dim=0)
        ends = counts.cumsum(0).to(torch.int32)
        gate, up = F.grouped_mm(x[order // k], self.gate_up_proj.mT, offs=ends).chunk(2, dim=-1)
        rows = F.grouped_mm(F.silu(gate) * up, self.down_proj.mT, offs=ends)
        return torch.empty_like(rows).index_copy(0, order, rows).unflatten(0, (-1, k))

    def _gathered(self, x: Tensor, experts: Tensor) -> Tensor:
        """[T, k, hidden]: copies the weights of each token's experts, so it is for few tokens."""
        gate, up = torch.einsum("th,tkih->tki", x, self.gate_up_proj[experts]).chunk(2, dim=-1)
        return torch.einsum("tki,tkhi->tkh", F.silu(gate) * up, self.down_proj[experts])


class MoE(nn.Module):
    def __init__(self, hidden_size: int, config: MoEConfig):
        super().__init__()
        self.gate = Router(hidden_size, config)
        self.experts = Experts(config.num_experts, hidden_size, config.intermediate_size)
        self.shared_experts = MLP(hidden_size, config.intermediate_size * config.num_shared_experts)

    def forward(self, x: Tensor) -> Tensor:
        return self.experts(x, *self.gate(x)) + self.shared_experts(x)
