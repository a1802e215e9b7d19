"""What the algorithms with a group baseline share: their options, and advantages and denominators for a batch."""

from __future__ import annotations

from typing import Generic, TypeVar

import torch
from jaxtyping import Bool, Float64
from pydantic import Field
from torch import Tensor

from algorithms import filters
from algorithms.advantages import Baseline, group_advantages
from algorithms.aggregation import Aggregation, token_weights
from algorithms.filters import Stale, trained_tokens
from algorithms.packed import spread
from algorithms.types import Algorithm, AlgorithmConfig, GroupDecision, RolloutBatch, Targets


class GroupConfig(AlgorithmConfig):
    group_size: int = Field(8, ge=2)
    """G, the rollouts of a prompt. A baseline needs two at least."""
    filter_zero_variance: bool = True
    """Replace a prompt whose rollouts all have one reward (dynamic sampling, DAPO arXiv 2503.14476)."""
    baseline: Baseline = Baseline.MEAN
    normalize_std: bool = True
    """Divide by the group's standard deviation; off is Dr. GRPO (arXiv 2503.20783)."""
    unbiased_std: bool = True
    std_epsilon: float = Field(1e-6, gt=0)
    aggregation: Aggregation = Aggregation.SEQUENCE_MEAN
    mask_truncated: bool = True
    """Leave truncated rollouts out of the loss; they stay in the baseline (DAPO's overlong filtering)."""
    max_staleness: int = Field(4, ge=0)
    """τ: a token may lag the current weights by so many versions (default, ours)."""
    stale: Stale = Stale.DROP


C = TypeVar("C", bound=GroupConfig)


class GroupAlgorithm(Algorithm, Generic[C]):
    """Group advantages; a subclass gives the loss."""

    def __init__(self, config: C) -> None:
        self.config = config
        self.group_size = config.group_size
        self.max_staleness = config.max_staleness

    def decide_group(self, rewards: Float64[Tensor, " rollouts"], valid: Bool[Tensor, " rollouts"]) -> GroupDecision:
        return filters.decide_group(rewards, valid, filter_zero_variance=self.config.filter_zero_variance)

    def prepare(self, batch: RolloutBatch) -> Targets:
        config = self.config
        trained = trained_tokens(
            batch, mask_truncated=config.mask_truncated, max_staleness=config.max_staleness, stale=config.stale
        )
        counts = batch.valid if batch.repeated is None else batch.valid & ~batch.repeated
        per_rollout = group_advantages(
            batch.reward,
            batch.group,
            counts,
            baseline=config.baseline,
            normalize_std=config.normalize_std,
            unbiased_std=config.unbiased_std,
            std_epsilon=config.std_epsilon,
        )
        advantages = spread(per_rollout[batch.rollout.long()].to(torch.float32), batch.cu_seqlens)
        weights = token_weights(batch, trained, config.aggregation)
        return Targets(advantages, weights, metrics=trained.metrics)
