"""What the algorithms with a group baseline share: their options, and advantages and denominators for a batch."""

from __future__ import annotations

from typing import Generic, Self, TypeVar

import numpy as np
import torch
from jaxtyping import Bool, Float64
from pydantic import Field, model_validator
from torch import Tensor

from algorithms import filters
from algorithms.advantages import Baseline, group_advantages, moments, overlong_penalty
from algorithms.aggregation import Aggregation, token_weights
from algorithms.filters import Stale, trained_tokens
from algorithms.host import spread, sums
from algorithms.kl import KLEstimator, reference_kl
from algorithms.rollout_distribution import SampledConfig, distribution_metrics
from algorithms.tokens import TokenLoss, needed, token_loss
from algorithms.types import (
    Algorithm,
    GroupDecision,
    LossInputs,
    LossOutput,
    Need,
    RolloutBatch,
    Targets,
)


class GroupConfig(SampledConfig):
    """Options of every algorithm with a group baseline. Where a source is silent, the default is ours and says so."""

    group_size: int = Field(8, ge=2)
    """G, the rollouts of a prompt. A group baseline needs two at least."""
    filter_zero_variance: bool = True
    """Replace a prompt whose rollouts all have one reward (dynamic sampling, DAPO arXiv 2503.14476 §3.2)."""
    baseline: Baseline = Baseline.MEAN
    """Or leave_one_out (RLOO, arXiv 2402.14740)."""
    normalize_std: bool = True
    """Divide by the group's standard deviation (GRPO, arXiv 2402.03300); off is Dr. GRPO (arXiv 2503.20783)."""
    unbiased_std: bool = True
    """Divide the squares by G−1, as ``torch.std`` and most frameworks do (default, ours)."""
    std_epsilon: float = Field(1e-6, gt=0)
    """Added to the standard deviation (default, ours)."""
    aggregation: Aggregation = Aggregation.SEQUENCE_MEAN
    """Or token_mean (DAPO, arXiv 2503.14476 §3.3)."""
    mask_truncated: bool = True
    """Leave truncated rollouts out of the loss, not out of the baseline (DAPO's overlong filtering)."""
    overlong_buffer: int | None = Field(None, gt=0)
    """Subtract from the reward up to 1 over the last so many tokens before ``overlong_length`` (DAPO Eq. 13)."""
    overlong_length: int | None = Field(None, gt=0)
    """The length of a rollout, in action tokens, at which that penalty is full."""
    max_staleness: int = Field(4, ge=0)
    """τ: a token may lag the current weights by so many versions (default, ours)."""
    stale: Stale = Stale.DROP
    """Drop a rollout that has an older token (GLM-5 §4.1), or mask its older tokens."""
    kl_coefficient: float = Field(0.0, ge=0)
    """Weight of the KL to the reference policy; 0 (GLM-5 §3.2 uses no such term) needs no reference."""
    kl_estimator: KLEstimator = KLEstimator.K3
    """See ``algorithms.kl``; k3 is that of GRPO (arXiv 2402.03300)."""

    @model_validator(mode="after")
    def _overlong(self) -> Self:
        if (self.overlong_buffer is None) != (self.overlong_length is None):
            raise ValueError("overlong_buffer and overlong_length go together: set both or neither")
        if self.overlong_buffer and self.overlong_length and self.overlong_buffer > self.overlong_length:
            raise ValueError(f"overlong_buffer={self.overlong_buffer} exceeds overlong_length={self.overlong_length}")
        return self


C = TypeVar("C", bound=GroupConfig)


class GroupAlgorithm(Algorithm, Generic[C]):
    """Group advantages, global denominators and the KL term; a subclass gives ``objective``, and what it needs."""

    def __init__(self, config: C) -> None:
        self.config = config
        self.group_size = config.group_size
        self.max_staleness = config.max_staleness
        self.drops_stale = config.stale is Stale.DROP
        self.rollout_top_k = config.rollout_top_k or None
        self.needs = self.needs | config.top_k_needs()
        if config.kl_coefficient:
            self.needs = self.needs | {Need.REF_LOGPROBS}

    def objective(self, t: LossInputs) -> TokenLoss:
        """ℓ_t and its slope, elementwise; ``t`` is a chunk of a micro-batch."""
        raise NotImplementedError

    def decide_group(self, rewards: Float64[Tensor, " rollouts"], valid: Bool[Tensor, " rollouts"]) -> GroupDecision:
        return filters.decide_group(rewards, valid, filter_zero_variance=self.config.filter_zero_variance)

    def prepare(self, batch: RolloutBatch) -> Targets:
        config, rollout = self.config, batch.rollout.numpy()
        trained = trained_tokens(
            batch, mask_truncated=config.mask_truncated, max_staleness=config.max_staleness, stale=config.stale
        )
        reward = batch.reward.numpy()
        if config.overlong_buffer and config.overlong_length:
            length = sums(trained.action_count, rollout, batch.rollouts)
            reward = reward + overlong_penalty(length, config.overlong_length, config.overlong_buffer)
        per_rollout = group_advantages(
            reward,
            batch.group.numpy(),
            batch.valid.numpy(),
            None if batch.repeated is None else batch.repeated.numpy(),
            baseline=config.baseline,
            normalize_std=config.normalize_std,
            unbiased_std=config.unbiased_std,
            std_epsilon=config.std_epsilon,
        )
        trains = sums(trained.count, rollout, batch.rollouts) > 0
        advantages = spread(per_rollout[rollout].astype(np.float32), batch.cu_seqlens.numpy())
        return Targets(
            advantages=torch.from_numpy(advantages),
            weights=token_weights(batch, trained, config.aggregation),
            metrics={**trained.metrics, **moments(per_rollout[trains]), **distribution_metrics(batch, config)},
        )

    def loss(self, inputs: LossInputs) -> LossOutput:
        return token_loss(self.objective if not self.config.kl_coefficient else self._with_kl, inputs)

    def _with_kl(self, t: LossInputs) -> TokenLoss:
        ref_logprobs = needed(Need.REF_LOGPROBS, t.ref_logprobs)
        kl = reference_kl(t.logprobs, ref_logprobs, self.config.kl_estimator, self.config.kl_coefficient)
        return self.objective(t) + kl
