"""Supervised fine-tuning: weighted negative log-likelihood of the action tokens.

    L = −Σ_t m_t · w_i · log π_θ(y_t) / Σ_t m_t · w_i       w_i = 1, or the reward of the sample (``weight_by_reward``)

Needs nothing beside the tokens.
"""

from __future__ import annotations

import torch

from algorithms.filters import Stale, trained_tokens
from algorithms.metrics import Mean
from algorithms.packed import spread
from algorithms.types import Algorithm, AlgorithmConfig, LossInputs, LossOutput, RolloutBatch, Targets


class Config(AlgorithmConfig):
    weight_by_reward: bool = False
    """Weigh a sample by its reward (filtered or weighted imitation); negative rewards are refused."""


class SFT(Algorithm):
    def __init__(self, config: Config) -> None:
        self.config = config

    def prepare(self, batch: RolloutBatch) -> Targets:
        trained = trained_tokens(batch, mask_truncated=False, max_staleness=None, stale=Stale.DROP)
        weight = batch.reward if self.config.weight_by_reward else torch.ones_like(batch.reward)
        if bool((weight < 0).any()):
            raise ValueError("algorithm.weight_by_reward: a sample has a negative reward, it cannot be its weight")
        per_sample = weight[batch.rollout.long()]
        total = (per_sample * trained.per_sample).sum()
        weights = spread((per_sample / torch.where(total > 0, total, 1.0)).float(), batch.cu_seqlens) * trained.mask
        return Targets(torch.ones_like(weights), weights, metrics=trained.metrics)

    def loss(self, inputs: LossInputs) -> LossOutput:
        trained = inputs.weights != 0
        nll = torch.where(trained, -inputs.logprobs, 0.0)
        return LossOutput(
            (inputs.weights * nll).sum(), {"sft/nll": Mean(float(nll.detach().sum()), float(trained.sum()))}
        )


def build(config: Config) -> SFT:
    return SFT(config)
