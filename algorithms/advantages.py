"""Advantages of a rollout against the others of its prompt."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum

import torch
from jaxtyping import Bool, Float64, Int
from torch import Tensor

from algorithms.metrics import Max, Mean, Metric, Std
from algorithms.packed import group_sums


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


def moments(advantages: Float64[Tensor, " n"]) -> Mapping[str, Metric]:
    """Mean, standard deviation and largest size."""
    x = advantages
    mean = float(x.mean()) if len(x) else 0.0
    return {
        "advantage/mean": Mean(float(x.sum()), len(x)),
        "advantage/std": Std(len(x), mean, float((x - mean).square().sum())),
        "advantage/max_abs": Max(float(x.abs().max()) if len(x) else None),
    }
