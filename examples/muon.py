"""The optimiser Muon, for matrices of any shape and for stacks of them."""

import math

import torch
from torch import Tensor


class Muon(torch.optim.Optimizer):
    """Momentum, with the singular values of each matrix's update set to about 1 (Jordan et al. 2024).

    Updates are scaled to the root mean square 0.2 that AdamW's have, so that one learning rate serves both (Liu et al.
    2025, arXiv 2502.16982). Matrices of one shape, experts among them, are orthogonalised together.
    """

    def __init__(self, matrices: list[Tensor], lr: float, weight_decay: float, momentum: float = 0.95):
        shapes: dict[tuple[int, ...], list[Tensor]] = {}
        for matrix in matrices:
            shapes.setdefault(tuple(matrix.shape), []).append(matrix)
        groups = [{"params": alike} for alike in shapes.values()]
        super().__init__(groups, dict(lr=lr, weight_decay=weight_decay, momentum=momentum))

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            matrices, momentum = group["params"], group["momentum"]
            gradients = torch.stack([matrix.grad for matrix in matrices])
            average = self.state[matrices[0]].setdefault("average", torch.zeros_like(gradients))
            average.lerp_(gradients, 1 - momentum)
            rows, columns = gradients.shape[-2:]
            updates = self._orthogonal(gradients.lerp(average, momentum).view(-1, rows, columns)).view_as(gradients)
            torch._foreach_mul_(matrices, 1 - group["lr"] * group["weight_decay"])
            torch._foreach_add_(matrices, list(updates), alpha=-0.2 * group["lr"] * math.sqrt(max(rows, columns)))

    @staticmethod
    def _orthogonal(x: Tensor) -> Tensor:
        """[N, rows, columns]: five Newton-Schulz steps of degree 5, with the coefficients of Muon's authors."""
        x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-12)
        wide = x.shape[-2] <= x.shape[-1]
        y = (x if wide else x.mT).bfloat16() if x.is_cuda else (x if wide else x.mT)
        for _ in range(5):
            gram = y @ y.mT
            y = 3.4445 * y + (-4.7750 * gram + 2.0315 * gram @ gram) @ y
        return (y if wide else y.mT).to(x.dtype)
