"""Advantages of a rollout against the others of its prompt."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum

import numpy as np
from jaxtyping import Bool, Float64, Int

from algorithms.host import sums
from algorithms.metrics import Max, Mean, Metric, Std


class Baseline(StrEnum):
    MEAN = "mean"
    LEAVE_ONE_OUT = "leave_one_out"  # the mean of the others (RLOO, arXiv 2402.14740)


def group_advantages(
    reward: Float64[np.ndarray, " rollouts"],
    group: Int[np.ndarray, " rollouts"],
    valid: Bool[np.ndarray, " rollouts"],
    repeated: Bool[np.ndarray, " rollouts"] | None = None,
    *,
    baseline: Baseline = Baseline.MEAN,
    normalize_std: bool,
    unbiased_std: bool = True,
    std_epsilon: float = 1e-6,
) -> Float64[np.ndarray, " rollouts"]:
    """Â_i = (R_i − mean R) [/ (std R + ε)] over the valid rollouts of i's group, copies left out. 0 if there is none.

    In float64 and from deviations: E[x²]−E[x]² in float32 loses rewards that differ in the fifth digit.
    """
    counts = valid if repeated is None else valid & ~repeated
    size = sums(counts, group)
    # Shifted by one of the group's own rewards, so that equal rewards deviate by exactly 0.
    largest = np.full(len(size), -np.inf)
    np.maximum.at(largest, group, np.where(counts, reward, -np.inf))
    compared = valid & (size > 0)[group]
    shifted = np.where(compared, reward - largest[group], 0.0)
    mean = sums(shifted * counts, group) / np.maximum(size, 1)
    deviation = np.where(compared, shifted - mean[group], 0.0)
    advantage = deviation
    if baseline == Baseline.LEAVE_ONE_OUT:  # R_i − mean of the others = (R_i − mean)·G/(G−1)
        advantage = advantage * (size / np.maximum(size - 1, 1))[group]
    if normalize_std:
        squares = sums(np.square(deviation) * counts, group)
        std = np.sqrt(squares / np.maximum(size - unbiased_std, 1))
        advantage = advantage / (std + std_epsilon)[group]
    return advantage


def overlong_penalty(
    length: Float64[np.ndarray, " rollouts"], max_length: int, buffer: int
) -> Float64[np.ndarray, " rollouts"]:
    """0 up to ``max_length − buffer`` tokens, then falling linearly to −1 (DAPO, arXiv 2503.14476 Eq. 13)."""
    return np.clip((max_length - buffer - length) / buffer, -1, 0)


def moments(advantages: Float64[np.ndarray, " n"]) -> Mapping[str, Metric]:
    """Mean, standard deviation and largest size."""
    count, total = len(advantages), float(advantages.sum())
    mean = total / max(count, 1)
    return {
        "advantage/mean": Mean(total, count),
        "advantage/std": Std(count, mean, float(np.square(advantages - mean).sum())),
        "advantage/max_abs": Max(float(np.abs(advantages).max()) if count else None),
    }
