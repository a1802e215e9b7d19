"""GSPO (arXiv 2507.18071 Eq. 5–7): one ratio and one clip for a whole sequence.

    s_i = ( π_θ(y_i) / π_old(y_i) )^(1/|y_i|) = exp( 1/|y_i| Σ_t log π_θ(y_t)/π_old(y_t) )
    L = −E[ 1/G Σ_i min(s_i Â_i, clip(s_i, 1−ε_low, 1+ε_high) Â_i) ]

Needs the log-probs of the trainer's policy at the start of the update (π_old). A sequence is a sample: a rollout that
its harness forked has one ratio for each of its samples. pop(ρ_t), ``algorithms.icepop``, weighs each token's share of
s_i by the engine's mismatch there, in the manner of GSPO-token (§4.3; ours: the paper has none; ``beta: null`` leaves
it out).
"""

from __future__ import annotations

import dataclasses

import torch
from pydantic import Field

from algorithms.group import GroupAlgorithm
from algorithms.icepop import IcePopConfig, pop
from algorithms.packed import chunks, empty_like, sample_sums, to_tokens
from algorithms.ratios import MAX_LOG_RATIO, clipped
from algorithms.tokens import TokenLoss, needed
from algorithms.types import LossInputs, LossOutput, Need


class Config(IcePopConfig):
    epsilon_low: float = Field(3e-4, ge=0, le=1)
    """ε_low (§5.1)."""
    epsilon_high: float = Field(4e-4, ge=0)
    """ε_high (§5.1)."""


class GSPO(GroupAlgorithm[Config]):
    needs = frozenset({Need.OLD_LOGPROBS})

    def loss(self, inputs: LossInputs) -> LossOutput:
        old_logprobs, edges = needed(Need.OLD_LOGPROBS, inputs.old_logprobs), inputs.cu_seqlens
        weighted = empty_like(old_logprobs)  # a sample's trained tokens have one weight, so that its mean is theirs
        for at in chunks(len(weighted), weighted.device):
            torch.sub(inputs.logprobs.detach()[at], old_logprobs[at], out=weighted[at]).mul_(inputs.weights[at])
        total = sample_sums(inputs.weights, edges)
        log_s = sample_sums(weighted, edges) / torch.where(total > 0, total, 1.0)
        sequence_log_ratio = to_tokens(log_s.to(weighted.dtype), edges)
        return super().loss(dataclasses.replace(inputs, sequence_log_ratio=sequence_log_ratio))

    def objective(self, t: LossInputs) -> TokenLoss:
        # Each token carries its sequence's s_i. The slope of s_i in one token's log-prob is s_i/|y_i|: the weights have
        # the 1/|y_i|.
        s = needed("sequence_log_ratio", t.sequence_log_ratio).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
        return pop(
            t,
            clipped(s, t.advantages, self.config.epsilon_low, self.config.epsilon_high),
            self.config.beta,
            self.config.pop_low,
        )


def build(config: Config) -> GSPO:
    return GSPO(config)
