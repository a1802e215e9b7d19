"""Single-rollout asynchronous optimisation (SAO, arXiv 2607.07508; GLM-5.2): one rollout a prompt, with a value model.

    L = −Σ_t m_t · sg[f(r_t)] · Â_t · log π_θ(y_t) / Σ_t m_t      f, r: ``algorithms.dis``
    Â: GAE over action tokens alone (``algorithms.gae``), γ = 1, λ = 1 − 1/(α·l), l action tokens in the rollout
    segment s of a rollout (context compaction, arXiv 2607.05378): Â · (γλ)^(action tokens after the segment)
    value targets: the return at λ_critic = 1; value loss ½(V − R)², ``algorithms.value``

Needs values, V(s_t) read from the hidden state that predicts token t: that of the first token after an observation has
seen the observation. They are taken before the update's value steps. Observations have no policy and no value loss.
"""

from __future__ import annotations

import numpy as np
import torch
from jaxtyping import Float32, Float64, Int
from pydantic import Field
from torch import Tensor

from algorithms.aggregation import Aggregation, token_weights
from algorithms.filters import Stale, Trained, trained_tokens
from algorithms.gae import skip_observation_gae
from algorithms.host import spread, sums
from algorithms.ratios import double_sided
from algorithms.rollout_distribution import SampledConfig, distribution_metrics
from algorithms.tokens import TokenLoss, needed, token_loss
from algorithms.types import (
    Algorithm,
    LossInputs,
    LossOutput,
    Need,
    RolloutBatch,
    Targets,
    ValueInputs,
)
from algorithms.value import value_loss


class Config(SampledConfig):
    epsilon_low: float = Field(0.3, gt=0, le=1)
    """ε_low: 0.3 for reasoning, 0.8 for coding agents."""
    epsilon_high: float = Field(5.0, gt=0)
    """ε_high: 5 for reasoning, 3 for coding agents."""
    gamma: float = Field(1.0, gt=0, le=1)
    """γ, the discount of a token."""
    lambda_alpha: float = Field(1.5, ge=1)
    """α of the length-adaptive λ of the policy."""
    lambda_policy: float | None = Field(None, ge=0, le=1)
    """A fixed λ in place of the length-adaptive one."""
    lambda_critic: float = Field(1.0, ge=0, le=1)
    """λ of the value targets; 1 is the Monte-Carlo return."""
    whiten: bool = False
    """Shift and scale the batch's advantages to mean 0 and deviation 1 (default off, ours)."""
    value_clip: float | None = Field(0.2, gt=0)
    """How far V may move from its value before the update; null for no clip."""
    mask_truncated: bool = False
    """(default, ours: the paper is silent.)"""
    max_staleness: int = Field(4, ge=0)
    """τ, as in ``algorithms.dis`` (default, ours)."""
    stale: Stale = Stale.DROP


class SAO(Algorithm):
    needs = frozenset({Need.VALUES})

    def __init__(self, config: Config) -> None:
        self.config = config
        self.max_staleness = config.max_staleness
        self.drops_stale = config.stale is Stale.DROP
        self.rollout_top_k = config.rollout_top_k or None
        self.needs = self.needs | config.top_k_needs()

    def prepare(self, batch: RolloutBatch) -> Targets:
        config, rollout = self.config, batch.rollout.numpy()
        trained = trained_tokens(
            batch, mask_truncated=config.mask_truncated, max_staleness=config.max_staleness, stale=config.stale
        )
        values = needed(Need.VALUES, batch.values)
        reward = np.where(batch.valid.numpy(), batch.reward.numpy(), 0.0)[rollout]
        after = tokens_after(trained.action_count, rollout, batch.segment.numpy())
        lam = self._lambda(sums(trained.action_count, rollout, batch.rollouts))[rollout]
        advantages = self._gae(batch, values, reward, lam)
        if after.any():
            later = ((config.gamma * lam) ** after).astype(np.float32)
            advantages *= torch.from_numpy(spread(later, batch.cu_seqlens.numpy()))
        returns = self._returns(batch, values, reward * config.gamma**after)
        if config.whiten:
            advantages = whitened(advantages, trained, batch)
        weights = token_weights(batch, trained, Aggregation.TOKEN_MEAN)
        return Targets(advantages, weights, returns, {**trained.metrics, **distribution_metrics(batch, config)})

    def loss(self, inputs: LossInputs) -> LossOutput:
        return token_loss(self._objective, inputs)

    def value_loss(self, inputs: ValueInputs) -> LossOutput:
        return value_loss(inputs, self.config.value_clip)

    def _objective(self, t: LossInputs) -> TokenLoss:
        token = double_sided(t, self.config.epsilon_low, self.config.epsilon_high)
        return token.marked(lambda: {"advantage/mean": t.advantages, "advantage/mean_square": t.advantages.square()})

    def _lambda(self, length: Float64[np.ndarray, " rollouts"]) -> Float64[np.ndarray, " rollouts"]:
        if self.config.lambda_policy is not None:
            return np.full(len(length), self.config.lambda_policy)
        return 1 - 1 / (self.config.lambda_alpha * np.maximum(length, 1))

    def _returns(
        self, batch: RolloutBatch, values: Float32[Tensor, " tokens"], reward: Float64[np.ndarray, " samples"]
    ) -> Float32[Tensor, " tokens"]:
        if self.config.gamma == 1 and self.config.lambda_critic == 1:
            return torch.from_numpy(spread(reward.astype(np.float32), batch.cu_seqlens.numpy()))
        return values + self._gae(batch, values, reward, np.full(len(reward), self.config.lambda_critic))

    def _gae(
        self,
        batch: RolloutBatch,
        values: Float32[Tensor, " tokens"],
        reward: Float64[np.ndarray, " samples"],
        lam: Float64[np.ndarray, " samples"],
    ) -> Float32[Tensor, " tokens"]:
        terminal = torch.from_numpy(reward)
        return skip_observation_gae(
            values, batch.action_mask, batch.cu_seqlens, terminal, self.config.gamma, torch.from_numpy(lam)
        )


def tokens_after(
    count: Float64[np.ndarray, " samples"], rollout: Int[np.ndarray, " samples"], segment: Int[np.ndarray, " samples"]
) -> Float64[np.ndarray, " samples"]:
    """Action tokens in later segments of the same rollout."""
    order = np.lexsort((segment, rollout))
    through = np.empty_like(count)
    through[order] = count[order].cumsum()
    return sums(count, rollout).cumsum()[rollout] - through


def whitened(
    advantages: Float32[Tensor, " tokens"], trained: Trained, batch: RolloutBatch
) -> Float32[Tensor, " tokens"]:
    """Mean 0 and deviation 1 over the batch's trained tokens, in float64."""
    chosen = spread(trained.count > 0, batch.cu_seqlens.numpy()) & trained.mask
    x = advantages[torch.from_numpy(chosen)].double()
    if len(x) < 2:
        return advantages
    return ((advantages - x.mean()) / (x.std() + 1e-8)).to(advantages.dtype)


def build(config: Config) -> SAO:
    return SAO(config)
