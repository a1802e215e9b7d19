"""Advantages of a rollout against the others of its prompt."""

from __future__ import annotations

from enum import StrEnum

import torch
from jaxtyping import Bool, Float64, Int
from torch import Tensor

from algorithms.packed import group_sums


class Baseline(StrEnum):
    MEAN = "mean"
    LEAVE_ONE_OUT = "leave_one_out"  # the mean of the others (RLOO, arXiv 2402.14740)


def group_advantages(
    reward: Float64[Tensor, " rollouts"],
    group: Int[Tensor, " rollouts"],
    counts: Bool[Tensor, " rollouts"],
    *,
    baseline: Baseline = Baseline.MEAN,
    normalize_std: bool,
    unbiased_std: bool = True,
    std_epsilon: float = 1e-6,
) -> Float64[Tensor, " rollouts"]:
    """Â_i = (R_i − mean R) [/ (std R + ε)] with the statistics of those rollouts of i's group that ``counts`` names.

    In float64, from deviations: E[x²]−E[x]² in float32 loses rewards that differ in the fifth digit.
    """
    group = group.long()
    one = counts.double()
    size = group_sums(one, group)
    # Shifted by one of the group's own rewards, equal rewards have a deviation of exactly 0.
    origin = torch.full_like(size, -torch.inf).scatter_reduce_(
        0, group, torch.where(counts, reward, -torch.inf), "amax"
    )
    shifted = torch.where(counts, reward - origin[group], 0.0)
    mean = group_sums(shifted, group) / size.clamp(min=1)
    deviation = torch.where(size[group] > 0, reward - origin[group] - mean[group], 0.0)
    advantage = deviation
    if baseline is Baseline.LEAVE_ONE_OUT:
        # R_i − mean of the others = (R_i − mean)·G/(G−1)
        advantage = advantage * (size / (size - 1).clamp(min=1))[group]
    if normalize_std:
        squares = group_sums(torch.where(counts, deviation.square(), 0.0), group)
        std = (squares / (size - unbiased_std).clamp(min=1)).sqrt()
        advantage = advantage / (std + std_epsilon)[group]
    return advantage
