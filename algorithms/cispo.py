"""CISPO (MiniMax-M1, arXiv 2506.13585 Eq. 4–5): the ratio is clipped as a weight, so that no token loses its gradient.

    r_t = π_θ(y_t) / π_old(y_t)
    L = −Σ_i Σ_t sg[clip(r_t, 1−ε_low, 1+ε_high)] · Â_i · log π_θ(y_t) / Σ_i |y_i|

Needs the log-probs of the trainer's policy at the start of the update (π_old). pop(ρ_t), ``algorithms.icepop``,
corrects for the engine's mismatch (ours: the paper has none; ``beta: null`` leaves it out).
"""

from __future__ import annotations

from pydantic import Field

from algorithms.aggregation import Aggregation
from algorithms.group import GroupAlgorithm
from algorithms.icepop import IcePopConfig, pop
from algorithms.ratios import ratio, reinforce
from algorithms.tokens import TokenLoss, needed
from algorithms.types import LossInputs, Need


class Config(IcePopConfig):
    aggregation: Aggregation = Aggregation.TOKEN_MEAN
    epsilon_low: float = Field(1.0, ge=0, le=1)
    """ε_low: 1 is no lower bound, as in the paper."""
    epsilon_high: float = Field(4.0, ge=0)
    """ε_high (default, ours: MiniMax-M1 does not give it; ScaleRL, arXiv 2510.13786, clips at 5)."""


class CISPO(GroupAlgorithm[Config]):
    needs = frozenset({Need.OLD_LOGPROBS})

    def objective(self, t: LossInputs) -> TokenLoss:
        low, high = 1 - self.config.epsilon_low, 1 + self.config.epsilon_high
        r = ratio(t.logprobs, needed(Need.OLD_LOGPROBS, t.old_logprobs))
        token = reinforce(
            r.clamp(low, high), t.advantages, t.logprobs, lambda: {"clip/low": r < low, "clip/high": r > high}
        )
        return pop(t, token, self.config.beta, self.config.pop_low)


def build(config: Config) -> CISPO:
    return CISPO(config)
