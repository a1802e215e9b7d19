"""IcePop: the mismatch of the inference engine, for objectives whose ratio is π_θ/π_old (GLM-5 §3.2; Ring-1T).

ρ_t = π_old(y_t) / π_inf(y_t)                       constant in θ
pop(ρ) = ρ  if 1/β ≤ ρ ≤ β  else 0                  it multiplies by ρ, it is not a 0/1 mask
"""

from __future__ import annotations

from typing import Self

from pydantic import Field, model_validator

from algorithms.group import GroupConfig
from algorithms.ratios import inside, ratio
from algorithms.tokens import TokenLoss, needed
from algorithms.types import LossInputs, Need


class IcePopConfig(GroupConfig):
    beta: float | None = Field(2.0, ge=1)
    """β (GLM-5 §3.2: 2); null trusts the engine's log-probs to be the trainer's."""
    pop_low: float | None = Field(None, gt=0, le=1)
    """A lower bound of its own in place of 1/β."""

    @model_validator(mode="after")
    def _bounds(self) -> Self:
        if self.pop_low is not None and self.beta is None:
            raise ValueError(f"pop_low={self.pop_low} is a bound of pop, and beta=null turns pop off")
        return self


def pop(t: LossInputs, token: TokenLoss, beta: float | None, low: float | None = None) -> TokenLoss:
    """pop(ρ_t) times the token's loss."""
    if beta is None:
        return token
    low = low or 1 / beta
    rho = ratio(needed(Need.OLD_LOGPROBS, t.old_logprobs), t.rollout_logprobs)
    kept = inside(rho, low, beta)
    return TokenLoss(kept * token.value, kept * token.slope, token.marks).marked(
        lambda: {"icepop/masked_low": rho < low, "icepop/masked_high": rho > beta}
    )
