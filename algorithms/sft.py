"""Supervised fine-tuning: weighted negative log-likelihood of the action tokens.

    L = −Σ_t m_t · w_i · log π_θ(y_t) / Σ_t m_t · w_i       w_i = 1, or the reward of the sample (``weight_by_reward``)

Needs nothing beside the tokens.
"""

from __future__ import annotations

import numpy as np
import torch

from algorithms.aggregation import spread_over_trained
from algorithms.filters import Stale, trained_tokens
from algorithms.tokens import TokenLoss, token_loss
from algorithms.types import Algorithm, AlgorithmConfig, LossInputs, LossOutput, RolloutBatch, Targets


class Config(AlgorithmConfig):
    weight_by_reward: bool = False
    """Weigh a sample by its reward (filtered or weighted imitation); negative rewards are refused."""


class SFT(Algorithm):
    def __init__(self, config: Config) -> None:
        self.config = config

    def prepare(self, batch: RolloutBatch) -> Targets:
        trained = trained_tokens(batch, mask_truncated=False, max_staleness=None, stale=Stale.DROP)
        reward = batch.reward.numpy() if self.config.weight_by_reward else np.ones(batch.rollouts)
        weight = np.where(trained.count > 0, reward[batch.rollout.numpy()], 0.0)
        if (weight < 0).any():
            raise ValueError("algorithm.weight_by_reward: a sample has a negative reward, it cannot be its weight")
        total = (weight * trained.count).sum()
        weights = spread_over_trained(weight / (total if total > 0 else 1.0), batch, trained)
        return Targets(torch.ones_like(weights), weights, metrics=trained.metrics)

    def loss(self, inputs: LossInputs) -> LossOutput:
        return token_loss(_objective, inputs, mismatch=False)


def _objective(t: LossInputs) -> TokenLoss:
    nll = -t.logprobs
    return TokenLoss(nll, torch.full_like(nll, -1.0), lambda: {"sft/nll": nll})


def build(config: Config) -> SFT:
    return SFT(config)
