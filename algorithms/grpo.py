"""GRPO with IcePop and clip-higher (GLM-5, arXiv 2602.15763 §3.2 Eq. 1), for synchronous RL.

    r_t = π_θ(y_t) / π_old(y_t)                         ρ_t = π_old(y_t) / π_inf(y_t)
    Â_i = (R_i − mean R) / std R                        over the G rollouts of one prompt
    L = −E[ 1/G Σ_i 1/|y_i| Σ_t pop(ρ_t) · min(r_t Â_i, clip(r_t, 1−ε_low, 1+ε_high) Â_i) ]

Needs the log-probs of the trainer's policy at the start of the update (π_old). The samples of a rollout share its Â and
one |y_i|; a token that pop zeroes stays in |y_i|.
"""

from __future__ import annotations

from pydantic import Field

from algorithms.group import GroupAlgorithm
from algorithms.icepop import IcePopConfig, pop
from algorithms.ratios import clipped, ratio
from algorithms.tokens import TokenLoss, needed
from algorithms.types import LossInputs, Need


class Config(IcePopConfig):
    group_size: int = Field(32, ge=2)
    """G (GLM-5 §3.2)."""
    epsilon_low: float = Field(0.2, ge=0, le=1)
    """ε_low (GLM-5 §3.2)."""
    epsilon_high: float = Field(0.28, ge=0)
    """ε_high (GLM-5 §3.2, as DAPO's clip-higher)."""


class GRPO(GroupAlgorithm[Config]):
    needs = frozenset({Need.OLD_LOGPROBS})

    def objective(self, t: LossInputs) -> TokenLoss:
        r = ratio(t.logprobs, needed(Need.OLD_LOGPROBS, t.old_logprobs))
        return pop(
            t,
            clipped(r, t.advantages, self.config.epsilon_low, self.config.epsilon_high),
            self.config.beta,
            self.config.pop_low,
        )


def build(config: Config) -> GRPO:
    return GRPO(config)
