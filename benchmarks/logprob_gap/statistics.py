"""What two computations of the same tokens' log-probs differ by."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from jaxtyping import Float32

from algorithms.dis import Config as DisConfig
from algorithms.icepop import IcePopConfig
from algorithms.ratios import inside, ratio, strictly_inside


def gap_statistics(
    trainer: Float32[np.ndarray, " tokens"], rollout: Float32[np.ndarray, " tokens"]
) -> dict[str, float | int]:
    """How far the first log-probs are from the second, and what the objectives' default bounds mask."""
    difference = trainer - rollout
    distance = np.abs(difference)
    ratios = ratio(torch.from_numpy(trainer), torch.from_numpy(rollout))
    icepop, dis = IcePopConfig(), DisConfig()
    assert icepop.beta is not None
    popped = inside(ratios, 1 / icepop.beta, icepop.beta) == 0
    cut = strictly_inside(ratios, 1 - dis.epsilon_low, 1 + dis.epsilon_high) == 0
    return {
        "tokens": len(difference),
        "mean": float(difference.mean()),
        "mean_abs": float(distance.mean()),
        "p50_abs": float(np.quantile(distance, 0.5)),
        "p99_abs": float(np.quantile(distance, 0.99)),
        "max_abs": float(distance.max()),
        "kl": float((ratios - 1 - ratios.log()).mean()),
        "icepop_masked": float(popped.float().mean()),
        "dis_masked": float(cut.float().mean()),
    }


def all_pairs(sides: dict[str, Float32[np.ndarray, " tokens"]]) -> dict[str, dict[str, Any]]:
    """``gap_statistics`` of each side against each one before it; ``rollout-trainer`` is trainer minus rollout."""
    names = list(sides)
    return {
        f"{first}-{second}": gap_statistics(sides[second], sides[first])
        for index, second in enumerate(names)
        for first in names[:index]
    }
