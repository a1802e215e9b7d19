"""What the engine's distribution looked like where it sampled, from its k likeliest tokens.

With p the probabilities of the k at a sampled position, m = Σp and t = 1 − m what is left for all others:
``rollout/top_k_mass`` mean(m); ``rollout/entropy_bound`` mean(−Σ p log p − t log t), a lower bound of the entropy,
exact where one token holds all of t; ``rollout/greedy_share`` how often the sampled token was (one of) the likeliest;
``rollout/outside_share`` how often it was none of the k. They need no pass of the trainer's model, and cover every
sampled token, also those that are left out of the loss.
"""

from __future__ import annotations

import torch
from pydantic import Field
from torch import Tensor

from algorithms.metrics import Mean, Metrics
from algorithms.tokens import needed
from algorithms.types import AlgorithmConfig, Need, RolloutBatch


class SampledConfig(AlgorithmConfig):
    """Options of every algorithm that trains on what an engine sampled."""

    rollout_top_k: int = Field(0, ge=0, le=1024)
    """Have the engine return so many of the likeliest tokens at each position that it samples, and log what it was
    like there (``algorithms.rollout_distribution``); 0 (default, ours) asks for none."""

    def top_k_needs(self) -> frozenset[Need]:
        return frozenset({Need.ROLLOUT_TOP_LOGPROBS}) if self.rollout_top_k else frozenset()


def distribution_metrics(batch: RolloutBatch, config: SampledConfig) -> Metrics:
    """Over the action mask; empty unless they were asked for.

    Raises:
        ValueError: the batch lacks them, or has another number of them.
    """
    if not config.rollout_top_k:
        return {}
    top = needed(Need.ROLLOUT_TOP_LOGPROBS, batch.top_logprobs)
    if top.shape[1] != config.rollout_top_k:
        raise ValueError(f"rollout_top_k={config.rollout_top_k}, but the rollouts were recorded with {top.shape[1]}")
    logprobs, sampled = top[batch.action_mask].double(), batch.rollout_logprobs[batch.action_mask].double()
    p = logprobs.exp()
    mass = p.sum(-1).clamp(max=1)
    entropy = -(p * logprobs).sum(-1) - torch.special.xlogy(1 - mass, 1 - mass)
    marks = {
        "top_k_mass": mass,
        "entropy_bound": entropy,
        "greedy_share": sampled >= logprobs[:, 0],
        "outside_share": sampled < logprobs[:, -1],
    }
    return {f"rollout/{name}": _mean(mark) for name, mark in marks.items()}


def _mean(mark: Tensor) -> Mean:
    return Mean(float(mark.sum()), float(len(mark)))
