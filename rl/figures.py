"""Figures of one step, from its trajectories alone."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence

import numpy as np

from rl.tracking import Sample
from rollout.orchestrator import Batch
from rollout.scheduler import DroppedGroup
from rollout.trajectory import Trajectory


def rollout_figures(batch: Batch, dropped: Sequence[DroppedGroup], version: int) -> dict[str, float]:
    """Rewards, lengths, staleness (weight versions between sampling and training), stop reasons and the tasks' own
    metrics of a batch.

    Args:
        version: weight version that the batch is trained on.
    """
    rollouts = {(t.group_id, t.sample_id): t for t in batch.trajectories}
    rewards: dict[str, list[float]] = defaultdict(list)
    for t in rollouts.values():
        rewards[t.task].append(t.reward)
    everything = [reward for values in rewards.values() for reward in values]
    figures = {"reward": float(np.mean(everything)), "rollouts": float(len(rollouts))}
    figures |= {f"reward/{task}": float(np.mean(values)) for task, values in sorted(rewards.items())}
    lags = np.concatenate([version - t.weight_versions[t.action_mask] for t in batch.trajectories])
    if len(lags):
        figures |= {"staleness_max": float(lags.max()), "staleness_mean": float(lags.mean())}
    figures["action_tokens"] = float(len(lags))
    figures["sequence_tokens_mean"] = float(np.mean([len(t) for t in batch.trajectories]))
    figures |= _task_metrics(list(rollouts.values()))
    figures["mixed_version_share"] = float(np.mean([_is_mixed(t) for t in batch.trajectories]))
    stops = Counter(t.stop_reason for t in rollouts.values())
    figures |= {f"stop/{reason}": count / len(rollouts) for reason, count in sorted(stops.items())}
    figures["stale_rollouts"] = float(sum(member.stale for group in batch.groups for member in group.members))
    reasons = Counter(group.reason for group in dropped)
    figures |= {f"dropped_groups/{reason}": float(count) for reason, count in sorted(reasons.items())}
    figures |= {f"failed_episodes/{task}": float(count) for task, count in sorted(batch.failures.items())}
    return figures


def _task_metrics(rollouts: Sequence[Trajectory]) -> dict[str, float]:
    """Mean of each metric that a task's episodes report, as ``episode/TASK/NAME``."""
    values: dict[str, list[float]] = defaultdict(list)
    for t in rollouts:
        for name, value in t.metrics.items():
            values[f"episode/{t.task}/{name}"].append(value)
    return {name: float(np.mean(numbers)) for name, numbers in sorted(values.items())}


def _is_mixed(trajectory: Trajectory) -> bool:
    versions = trajectory.weight_versions[trajectory.action_mask]
    return bool(len(versions) and versions.min() != versions.max())


def readable_samples(
    trajectories: Sequence[Trajectory], count: int, decode: Callable[[list[int]], str]
) -> list[Sample]:
    """The first trajectories, spread over the batch, as text."""
    picks = np.linspace(0, len(trajectories) - 1, num=min(count, len(trajectories)), dtype=int)
    return [
        Sample(t.task, t.prompt_id, decode(t.token_ids.tolist()), t.reward, len(t))
        for t in (trajectories[index] for index in picks)
    ]
