"""Advantages of a rollout against the others of its prompt."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum

import torch
from jaxtyping import Bool, Float, Float64, Int
from torch import Tensor

from algorithms.metrics import Max, Mean, Metric, Std
from algorithms.packed import chunks, group_sums


class Baseline(StrEnum):
    MEAN = "mean"
    LEAVE_ONE_OUT = "leave_one_out"  # the mean of the others (RLOO, arXiv 2402.14740)


def group_advantages(
    reward: Float64[Tensor, " rollouts"],
    group: Int[Tensor, " rollouts"],
    valid: Bool[Tensor, " rollouts"],
    repeated: Bool[Tensor, " rollouts"] | None = None,
    *,
    baseline: Baseline = Baseline.MEAN,
    normalize_std: bool,
    unbiased_std: bool = True,
    std_epsilon: float = 1e-6,
) -> Float64[Tensor, " rollouts"]:
    """Â_i = (R_i − mean R) [/ (std R + ε)] over the valid rollouts of i's group, copies left out. 0 if there is none.

    In float64 and from deviations: E[x²]−E[x]² in float32 loses rewards that differ in the fifth digit.
    """
    group = group.long()
    counts = valid if repeated is None else valid & ~repeated
    size = group_sums(counts.double(), group)
    # Shifted by one of the group's own rewards, so that equal rewards deviate by exactly 0.
    largest = torch.full_like(size, -torch.inf).scatter_reduce_(
        0, group, torch.where(counts, reward, -torch.inf), "amax"
    )
    compared = valid & (size[group] > 0)
    shifted = torch.where(compared, reward - largest[group], 0.0)
    mean = group_sums(shifted * counts, group) / size.clamp(min=1)
    deviation = torch.where(compared, shifted - mean[group], 0.0)
    advantage = deviation
    if baseline == Baseline.LEAVE_ONE_OUT:  # R_i − mean of the others = (R_i − mean)·G/(G−1)
        advantage = advantage * (size / (size - 1).clamp(min=1))[group]
    if normalize_std:
        squares = group_sums(deviation.square() * counts, group)
        std = (squares / (size - int(unbiased_std)).clamp(min=1)).sqrt()
        advantage = advantage / (std + std_epsilon)[group]
    return advantage


def overlong_penalty(
    length: Float64[Tensor, " rollouts"], max_length: int, buffer: int
) -> Float64[Tensor, " rollouts"]:
    """0 up to ``max_length − buffer`` tokens, then falling linearly to −1 (DAPO, arXiv 2503.14476 Eq. 13)."""
    return ((max_length - buffer - length) / buffer).clamp(-1, 0)


def moments(advantages: Float[Tensor, " n"], weights: Float[Tensor, " n"] | None = None) -> Mapping[str, Metric]:
    """Mean, standard deviation and largest size, of the entries with a weight (all without ``weights``)."""
    total, std, largest = 0.0, Std(0, 0, 0), 0.0
    for where in chunks(len(advantages), advantages.device):
        x = advantages[where]
        chosen = torch.ones_like(x) if weights is None else torch.ne(weights[where], 0, out=torch.empty_like(x))
        count, part = float(chosen.sum()), float(chosen.dot(x))
        mean = part / max(count, 1)
        deviation = (x - mean).mul_(chosen)
        total, std = total + part, std.merge(Std(count, mean, float(deviation.dot(deviation))))
        low, high = torch.mul(x, chosen, out=deviation).aminmax()
        largest = max(largest, float(high), -float(low))
    return {
        "advantage/mean": Mean(total, std.count),
        "advantage/std": std,
        "advantage/max_abs": Max(largest if std.count else None),
    }
