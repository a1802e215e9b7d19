"""What is left out of a batch, and why: unrewarding groups, failed environments, stale or truncated rollouts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

import numpy as np
import torch
from jaxtyping import Bool, Float64, Int
from torch import Tensor

from algorithms.host import sample_counts, sums
from algorithms.metrics import Metric, Sum
from algorithms.types import GroupDecision, GroupVerdict, RolloutBatch


class Stale(StrEnum):
    """What becomes of a rollout with a token that lags the current weights by more than ``max_staleness`` versions."""

    DROP = "drop"  # none of it is trained on; it stays in its group's baseline
    MASK = "mask"  # only its stale tokens are left out, so that episodes longer than ``max_staleness`` updates train


def stale_tokens(
    versions: Int[np.ndarray, " tokens"],
    action_mask: Bool[np.ndarray, " tokens"],
    current_version: int,
    max_staleness: int,
) -> Bool[np.ndarray, " tokens"]:
    """Action tokens that lag by more than ``max_staleness`` versions."""
    return action_mask & (versions < current_version - max_staleness)


def oldest_version(versions: Int[np.ndarray, " tokens"]) -> int:
    """Of the action tokens; all others have −1, which is the largest number when it is read as unsigned."""
    return int(versions.view(f"u{versions.itemsize}").min()) if len(versions) else 0


def decide_group(
    rewards: Float64[Tensor, " rollouts"], valid: Bool[Tensor, " rollouts"], *, filter_zero_variance: bool
) -> GroupDecision:
    """Drop the group when half of it or more failed, else repeat valid rollouts in the failed ones' places.

    GLM-5 (arXiv 2602.15763 §4.1) pads a group of which more than half is valid. A group of equal rewards has no
    advantage; DAPO (arXiv 2503.14476 §3.2) samples another prompt in its place.
    """
    rewards, valid = torch.as_tensor(rewards, dtype=torch.float64), torch.as_tensor(valid, dtype=torch.bool)
    kept = valid.nonzero().flatten().tolist()
    failed = len(valid) - len(kept)
    if len(kept) <= failed:
        return GroupDecision(GroupVerdict.ENVIRONMENT)
    if filter_zero_variance and bool((rewards[valid] == rewards[kept[0]]).all()):
        return GroupDecision(GroupVerdict.ZERO_VARIANCE)
    return GroupDecision(GroupVerdict.KEEP, tuple(kept[i % len(kept)] for i in range(failed)))


@dataclass(frozen=True)
class Trained:
    """The tokens that are trained on, and how many rollouts are not, by reason."""

    mask: Bool[np.ndarray, " tokens"]
    """Tokens that may train, if their sample does."""
    count: Float64[np.ndarray, " samples"]
    """Trained tokens of each sample: 0 where its rollout is left out."""
    action_count: Float64[np.ndarray, " samples"]
    metrics: Mapping[str, Metric]


def trained_tokens(batch: RolloutBatch, *, mask_truncated: bool, max_staleness: int | None, stale: Stale) -> Trained:
    """Action tokens of rollouts that are valid and not dropped, truncated (when masked) or stale."""
    mask, rollout, edges = batch.action_mask.numpy(), batch.rollout.numpy(), batch.cu_seqlens.numpy()
    valid, dropped, versions = batch.valid.numpy(), batch.dropped.numpy(), batch.weight_versions.numpy()
    stale_count = np.zeros(batch.rollouts)
    action_count = count = sample_counts(mask, edges)
    if max_staleness is not None and oldest_version(versions) < batch.current_version - max_staleness:
        late = stale_tokens(versions, mask, batch.current_version, max_staleness)
        late_count = sample_counts(late, edges)
        stale_count = sums(late_count, rollout, batch.rollouts)
        if stale == Stale.DROP:
            dropped = dropped | (stale_count > 0)
        else:
            mask, count = mask & ~late, count - late_count
    live = valid & ~dropped
    truncated = batch.truncated.numpy() & mask_truncated
    keep = live & ~truncated
    count = count * keep[rollout]
    reasons = {
        "environment": ~valid,
        "stale": valid & dropped,
        "truncated": live & truncated,
        "no_action": keep & (sums(count, rollout, batch.rollouts) == 0),
    }
    metrics: dict[str, Metric] = {
        f"dropped/{reason}": Sum(float(np.count_nonzero(which))) for reason, which in reasons.items()
    }
    metrics["dropped/stale_tokens"] = Sum(float(stale_count.sum()))
    return Trained(mask, count, action_count, metrics)
