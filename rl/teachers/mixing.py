"""What several teachers say of a batch, put together: each token's weighted mix, and figures of each teacher. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from jaxtyping import Bool, Float32
from torch import Tensor

from algorithms.metrics import Mean, Metric, Sum
from algorithms.opd import mix_teachers
from rl.batch import TrainBatch
from rl.teachers.passes import NOWHERE, Scores, TeacherViews
from rl.teachers.teaching import Teaching
from rollout.trajectory import Trajectory


@dataclass(frozen=True)
class Scored:
    """What the teachers say of a batch; the same on every rank."""

    logprobs: Float32[Tensor, " tokens"]
    """The weighted mix of each token's teachers; 0 where it has none."""
    views: TeacherViews | None
    metrics: Mapping[str, Metric]


@dataclass(frozen=True)
class Said:
    """What one teacher says, of its own samples' tokens."""

    logprobs: Float32[Tensor, " tokens"]
    scores: Scores | None = None
    metrics: Mapping[str, Metric] = field(default_factory=dict)


def usable(batch: TrainBatch) -> Bool[Tensor, " tokens"]:
    """Action tokens of the rollouts that were scored."""
    rollout = batch.rollout
    live = rollout.valid & ~rollout.dropped
    return rollout.action_mask & live[rollout.rollout][rollout.sample_of_token()]


def elsewhere(
    values: Sequence[np.ndarray | None], trajectories: Sequence[Trajectory], members: Sequence[int]
) -> Float32[Tensor, " tokens"]:
    """Log-probs that another server gave, joined."""
    parts = []
    for index in members:
        found = values[index]
        if found is None or len(found) != len(trajectories[index]):
            raise ValueError(f"trajectory {index}: a teacher elsewhere gave no log-prob for each of its tokens")
        parts.append(torch.from_numpy(np.asarray(found, dtype=np.float32)))
    return torch.cat(parts) if parts else torch.zeros(0)


def mixed(
    parts: Mapping[str, Said],
    groups: Mapping[str, Sequence[int]],
    batch: TrainBatch,
    teaching: Teaching,
    vocabulary: int | None,
    metrics: Mapping[str, Metric],
) -> Scored:
    """The teachers' parts put together, each in the places of its own tokens."""
    starts, tokens = batch.rollout.cu_seqlens, len(batch.token_ids)
    mask, ours = usable(batch), batch.rollout.rollout_logprobs
    logprobs, weights, places, all_metrics = [], [], [], dict(metrics)
    for teacher, part in sorted(parts.items()):
        members = groups[teacher]
        lengths = [int(starts[index + 1] - starts[index]) for index in members]
        where = torch.cat([torch.arange(int(starts[i]), int(starts[i + 1])) for i in members])
        logprobs.append(torch.zeros(tokens).index_copy(0, where, part.logprobs))
        shares = torch.tensor([teaching.shares[index][teacher] for index in members], dtype=torch.float32)
        weights.append(torch.zeros(tokens).index_copy(0, where, shares.repeat_interleave(torch.tensor(lengths))))
        places.append(torch.full((tokens,), NOWHERE).index_copy(0, where, torch.arange(len(where))))
        gap = (ours[where] - part.logprobs)[mask[where]]
        found: dict[str, Metric] = {
            "kl": Mean(float(gap.sum()), float(len(gap))),
            "prompts": Sum(float(len(members))),
            **part.metrics,
        }
        all_metrics |= {f"teacher/{teacher}/{name}": metric for name, metric in found.items()}
    views = None
    if vocabulary is not None:
        scores = [part.scores for _, part in sorted(parts.items()) if part.scores is not None]
        views = TeacherViews(scores, places, weights, vocabulary)
    return Scored(mix_teachers(torch.stack(logprobs), torch.stack(weights)), views, all_metrics)
