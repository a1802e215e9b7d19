"""What is left out of a batch, and why: unrewarding groups, failed environments, stale or truncated rollouts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

import torch
from jaxtyping import Bool, Float64, Int
from torch import Tensor

from algorithms.metrics import Metric, Sum
from algorithms.packed import rollout_sums, sample_sums
from algorithms.types import GroupDecision, GroupVerdict, RolloutBatch


class Stale(StrEnum):
    """What becomes of a rollout with a token that lags the current weights by more than ``max_staleness`` versions."""

    DROP = "drop"  # none of it is trained on; it stays in its group's baseline
    MASK = "mask"  # only its stale tokens are left out, so that episodes longer than ``max_staleness`` updates train


def stale_tokens(
    versions: Int[Tensor, " tokens"], action_mask: Bool[Tensor, " tokens"], current_version: int, max_staleness: int
) -> Bool[Tensor, " tokens"]:
    """Action tokens that lag by more than ``max_staleness`` versions; works on NumPy arrays too."""
    return action_mask & (versions < current_version - max_staleness)


def oldest_version(versions: Int[Tensor, " tokens"]) -> int:
    """Of the action tokens; all others have −1, which is the largest number when it is read as unsigned."""
    if not len(versions):
        return 0
    if versions.device.type != "cpu":
        return int(torch.where(versions < 0, torch.iinfo(versions.dtype).max, versions).min())
    array = versions.numpy()
    return int(array.view(f"u{array.itemsize}").min())


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

    mask: Bool[Tensor, " tokens"]
    """Tokens that may train, if their sample does."""
    count: Float64[Tensor, " samples"]
    """Trained tokens of each sample: 0 where its rollout is left out."""
    action_count: Float64[Tensor, " samples"]
    metrics: Mapping[str, Metric]


def trained_tokens(batch: RolloutBatch, *, mask_truncated: bool, max_staleness: int | None, stale: Stale) -> Trained:
    """Action tokens of rollouts that are valid and not dropped, truncated (when masked) or stale."""
    mask, rollout = batch.action_mask, batch.rollout.long()
    dropped = batch.dropped
    stale_count = torch.zeros(batch.rollouts, dtype=torch.float64, device=mask.device)
    action_count = count = sample_sums(mask, batch.cu_seqlens)
    if max_staleness is not None and oldest_version(batch.weight_versions) < batch.current_version - max_staleness:
        late = stale_tokens(batch.weight_versions, mask, batch.current_version, max_staleness)
        late_count = sample_sums(late, batch.cu_seqlens)
        stale_count = rollout_sums(late_count, rollout, batch.rollouts)
        if stale == Stale.DROP:
            dropped = dropped | (stale_count > 0)
        else:
            mask, count = mask & ~late, count - late_count
    truncated = batch.truncated if mask_truncated else torch.zeros_like(batch.truncated)
    keep = batch.valid & ~dropped & ~truncated
    count = count * keep[rollout]
    reasons = {
        "environment": ~batch.valid,
        "stale": batch.valid & dropped,
        "truncated": batch.valid & ~dropped & truncated,
        "no_action": keep & (rollout_sums(count, rollout, batch.rollouts) == 0),
    }
    metrics: dict[str, Metric] = {f"dropped/{reason}": Sum(float(which.sum())) for reason, which in reasons.items()}
    metrics["dropped/stale_tokens"] = Sum(float(stale_count.sum()))
    return Trained(mask, count, action_count, metrics)
