"""Rotary positions of DeepSeek: plain or stretched by yarn, rotating interleaved pairs or halves."""

import math

import torch
from torch import Tensor, nn

from deepseek_config import RopeConfig, YarnConfig, yarn_magnitude


class Rope(nn.Module):
    """Positions to the cosines and sines of their rotation, yarn's magnitude included."""

    def __init__(self, config: RopeConfig):
        super().__init__()
        # The device is named so that a model built on "meta" has frequencies all the same.
        steps = torch.arange(0, config.dim, 2, dtype=torch.float32, device="cpu") / config.dim
        frequencies = 1.0 / config.theta**steps
        if config.yarn is not None:
            ramp = _ramp(config, config.yarn)
            frequencies = frequencies * (1 - ramp) + frequencies / config.yarn.factor * ramp
        self.magnitude = _magnitude(config.yarn)
        self.register_buffer("frequencies", frequencies, persistent=False)

    def forward(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """[T] -> cosines and sines, [T, dim / 2] fp32."""
        angles = positions.unsqueeze(-1).float() * self.frequencies
        return angles.cos() * self.magnitude, angles.sin() * self.magnitude


def rotate(x: Tensor, cos: Tensor, sin: Tensor, interleave: bool) -> Tensor:
    """[..., dim], with cos and sin [..., dim / 2]. The result lists first all the pairs' first parts, then the second.

    An interleaved checkpoint means pairs (x0, x1), (x2, x3), …; leaving them apart permutes query and key alike, so
    their products are unchanged, and one form serves both.
    """
    first, second = (x[..., 0::2], x[..., 1::2]) if interleave else x.chunk(2, dim=-1)
    first, second = first.float(), second.float()
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)


def _ramp(config: RopeConfig, yarn: YarnConfig) -> Tensor:
    """[dim / 2]: 0 where a pair turns fast and is left alone, 1 where it is slowed by `factor` (YaRN, section 3.2)."""

    def pair_of(rotations: float) -> float:
        """The (fractional) pair that turns this often within the context of the pretraining."""
        wavelength = yarn.original_max_position_embeddings / (rotations * 2 * math.pi)
        return config.dim * math.log(wavelength) / (2 * math.log(config.theta))

    low, high = pair_of(yarn.beta_fast), pair_of(yarn.beta_slow)
    if yarn.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, config.dim - 1)
    pairs = torch.arange(config.dim // 2, dtype=torch.float32, device="cpu")
    # DeepSeek's own code steps over an empty ramp with the same 0.001.
    return ((pairs - low) / ((high - low) or 0.001)).clamp(0, 1)


def _magnitude(yarn: YarnConfig | None) -> float:
    """The factor on cosines and sines; what applies to all dimensions is in the softmax scale instead."""
    if yarn is None:
        return 1.0
    if yarn.attention_factor is not None:
        return yarn.attention_factor
    if yarn.mscale and yarn.mscale_all_dim:
        return yarn_magnitude(yarn.factor, yarn.mscale) / yarn_magnitude(yarn.factor, yarn.mscale_all_dim)
    return yarn_magnitude(yarn.factor)
