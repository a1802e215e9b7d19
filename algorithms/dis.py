"""REINFORCE with double-sided importance sampling (GLM-5, arXiv 2602.15763 §4.1 Eq. 3–5), for asynchronous RL.

    r_t = exp(log π_θ(y_t) − log π_inf(y_t))
    f(r) = r  if 1−ε_low < r < 1+ε_high  else 0                   strict on both sides
    Â_i = R_i − mean R                                           over the valid rollouts of the prompt
    L = −Σ_t m_t · sg[f(r_t)] · Â_i · log π_θ(y_t) / Σ_t m_t      tokens that f zeroes count in the denominator

Needs nothing beside the rollout: π_inf is the only behaviour policy.
"""

from __future__ import annotations

from pydantic import Field

from algorithms.aggregation import Aggregation
from algorithms.group import GroupAlgorithm, GroupConfig
from algorithms.ratios import double_sided
from algorithms.tokens import TokenLoss
from algorithms.types import LossInputs


class Config(GroupConfig):
    normalize_std: bool = False
    aggregation: Aggregation = Aggregation.TOKEN_MEAN
    filter_zero_variance: bool = False
    """Such a group trains nothing, but asynchronous batches are not held up for another (default, ours)."""
    mask_truncated: bool = False
    """(default, ours: the paper is silent.)"""
    epsilon_low: float = Field(0.3, gt=0, le=1)
    """ε_low (default, ours: not published for GLM-5; SAO, arXiv 2607.07508, uses 0.3 for reasoning, 0.8 for agents)."""
    epsilon_high: float = Field(5.0, gt=0)
    """ε_high (default, ours: not published for GLM-5; SAO uses 5.0 and 3.0)."""


class DIS(GroupAlgorithm[Config]):
    def objective(self, t: LossInputs) -> TokenLoss:
        return double_sided(t, self.config.epsilon_low, self.config.epsilon_high)


def build(config: Config) -> DIS:
    return DIS(config)
