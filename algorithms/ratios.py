"""Probability ratios, the ways of cutting them, and the two forms of loss that are built on them."""

from __future__ import annotations

import numpy as np
import torch
from jaxtyping import Float32
from torch import Tensor
from torch.nn.functional import threshold

from algorithms.tokens import Marks, TokenLoss
from algorithms.types import LossInputs

MAX_LOG_RATIO = 20.0
"""e^20 is far past every bound, and neither it nor its square overflows in fp32."""

Tokens = Float32[Tensor, " tokens"]


def ratio(logprobs: Tokens, other: Tokens) -> Tokens:
    return (logprobs - other).clamp_(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp_()


def strictly_inside(r: Tokens, low: float, high: float) -> Tokens:
    """r where low < r < high, else 0. (``threshold`` is one vectorised pass; comparing to bool and back takes four.)"""
    return threshold(threshold(r, low, 0.0).neg_(), -high, 0.0).neg_()


def inside(r: Tokens, low: float, high: float) -> Tokens:
    """r where low ≤ r ≤ high in fp32, else 0."""
    below, above = (
        np.nextafter(np.float32(low), np.float32(-np.inf)),
        np.nextafter(np.float32(high), np.float32(np.inf)),
    )
    return strictly_inside(r, float(below), float(above))


def clipped(r: Tokens, advantages: Tokens, epsilon_low: float, epsilon_high: float) -> TokenLoss:
    """PPO's −min(r Â, clip(r, 1−ε_low, 1+ε_high) Â), whose slope in log π is −r Â where the first is the smaller."""
    raw = r * advantages
    cut = r.clamp(1 - epsilon_low, 1 + epsilon_high).mul_(advantages)
    kept = torch.le(raw, cut, out=torch.empty_like(raw))  # as 1.0 and 0.0
    return TokenLoss(
        torch.minimum(raw, cut).neg_(),
        kept.mul_(raw).neg_(),
        lambda: {
            "clip/low": (r < 1 - epsilon_low) & (advantages < 0),
            "clip/high": (r > 1 + epsilon_high) & (advantages > 0),
        },
    )


def reinforce(weight: Tokens, advantages: Tokens, logprobs: Tokens, marks: Marks = dict) -> TokenLoss:
    """−sg[weight]·Â·log π_θ."""
    slope = (weight * advantages).neg_()
    return TokenLoss(slope * logprobs, slope, marks)


def double_sided(t: LossInputs, epsilon_low: float, epsilon_high: float) -> TokenLoss:
    """DIS: REINFORCE weighed by r = π_θ/π_inf, with 0 for a token outside of 1−ε_low < r < 1+ε_high."""
    low, high = 1 - epsilon_low, 1 + epsilon_high
    r = ratio(t.logprobs, t.rollout_logprobs)
    weight = strictly_inside(r, low, high)
    return reinforce(
        weight, t.advantages, t.logprobs, lambda: {"dis/masked_low": r <= low, "dis/masked_high": r >= high}
    )
