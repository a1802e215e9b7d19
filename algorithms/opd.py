"""On-policy distillation: the student samples, its teachers say how likely each token was.

    sampled:     Â_t = sg[log π_T(y_t) − log π_θ(y_t)]  (+ α·Â of an outcome reward), and one of
      bounded    L = −E[1/|y| Σ_t w_t Â_t log π_θ(y_t)],  w_t = sg[π_θ/π_inf] inside [low, high], else 0
                 (parallel OPD of many teachers: MOPD, arXiv 2601.02780 Eq. 7–9)
      clipped    GRPO's objective with IcePop and G = 1 (cross-stage: GLM-5, arXiv 2602.15763 §3.5 Eq. 2)
    top_k, full_vocab:  L = E[1/|y| Σ_t KL(π_θ ‖ π_T)], see ``algorithms.divergence``

T is the teacher (or the weighted mix) that the prompt belongs to. ``sampled`` needs the teachers' log-probs of the
tokens at the sampling temperature (``mix_teachers``), ``clipped`` π_old's too; the others need logits and teacher
views.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Self

import torch
from jaxtyping import Float32
from pydantic import Field, model_validator
from torch import Tensor

from algorithms.divergence import reverse_kl
from algorithms.group import GroupAlgorithm, GroupConfig
from algorithms.icepop import pop
from algorithms.metrics import Mean
from algorithms.ratios import clipped, inside, ratio, reinforce
from algorithms.tokens import TokenLoss, needed
from algorithms.types import LossInputs, LossOutput, Need, RolloutBatch, Targets


class Mode(StrEnum):
    SAMPLED = "sampled"
    TOP_K = "top_k"
    FULL_VOCAB = "full_vocab"


class Correction(StrEnum):
    BOUNDED = "bounded"
    CLIPPED = "clipped"


class Config(GroupConfig):
    group_size: int = Field(1, ge=1)
    filter_zero_variance: bool = False
    normalize_std: bool = False
    mask_truncated: bool = False
    """A truncated response was scored by its teacher like any other (default, ours)."""
    mode: Mode = Mode.SAMPLED
    """What is compared to the teachers: the sampled tokens, their top-k and a tail, or the whole vocabulary."""
    top_k: int = Field(32, ge=1)
    """k of the mode ``top_k`` (default, ours)."""
    correction: Correction = Correction.BOUNDED
    """How the sampled terms are corrected for the engine's policy: MOPD's bounded weight, or GRPO's clip and pop."""
    coefficient: float = Field(1.0, gt=0)
    """Of the teachers' term (GLM-5 §3.5: 1)."""
    outcome_coefficient: float = Field(0.0, ge=0)
    """α of the outcome reward's group advantage (MOPD Eq. 9)."""
    bound_low: float = Field(0.5, ge=0, le=1)
    """Absolute bounds of ``bounded`` (default, ours)."""
    bound_high: float = Field(2.0, ge=1)
    beta: float | None = Field(2.0, ge=1)
    """β of ``clipped``, as in ``algorithms.icepop``."""
    epsilon_low: float = Field(0.2, ge=0, le=1)
    """ε_low of ``clipped``, as in ``algorithms.grpo``."""
    epsilon_high: float = Field(0.28, ge=0)
    """ε_high of ``clipped``, as in ``algorithms.grpo``."""

    @model_validator(mode="after")
    def _outcome(self) -> Self:
        if self.group_size == 1 and (self.outcome_coefficient or self.filter_zero_variance):
            raise ValueError("group_size=1 has no group baseline for outcome_coefficient or filter_zero_variance")
        return self


class OPD(GroupAlgorithm[Config]):
    def __init__(self, config: Config) -> None:
        super().__init__(config)
        needs = {Need.TEACHER_LOGPROBS} if config.mode == Mode.SAMPLED else {Need.LOGITS, Need.TEACHER_VIEWS}
        self.needs = self.needs | needs
        self.teacher_top_k = config.top_k if config.mode == Mode.TOP_K else None
        if config.correction == Correction.CLIPPED:
            self.needs = self.needs | {Need.OLD_LOGPROBS}

    def prepare(self, batch: RolloutBatch) -> Targets:
        targets = super().prepare(batch)
        targets.advantages.mul_(self.config.outcome_coefficient)
        return targets

    def loss(self, inputs: LossInputs) -> LossOutput:
        sampled = super().loss(inputs)
        if self.config.mode == Mode.SAMPLED:
            return sampled
        trained = inputs.weights != 0
        kl = reverse_kl(needed(Need.LOGITS, inputs.logits), inputs.teacher_views, trained)
        loss = sampled.loss + self.config.coefficient * (inputs.weights * kl).sum()
        divergence = Mean(float(kl.detach().sum()), float(trained.sum()))
        return LossOutput(loss, {**sampled.metrics, "opd/reverse_kl": divergence})

    def objective(self, t: LossInputs) -> TokenLoss:
        config, advantages, gap = self.config, t.advantages, None
        if config.mode == Mode.SAMPLED:
            gap = needed(Need.TEACHER_LOGPROBS, t.teacher_logprobs) - t.logprobs
            advantages = advantages + config.coefficient * gap
        if config.correction == Correction.CLIPPED:
            r = ratio(t.logprobs, needed(Need.OLD_LOGPROBS, t.old_logprobs))
            token = pop(t, clipped(r, advantages, config.epsilon_low, config.epsilon_high), config.beta)
        else:
            r = ratio(t.logprobs, t.rollout_logprobs)
            weight = inside(r, config.bound_low, config.bound_high)
            token = reinforce(weight, advantages, t.logprobs).marked(
                lambda: {"opd/masked_low": r < config.bound_low, "opd/masked_high": r > config.bound_high}
            )
        if gap is None:
            return token
        return token.marked(lambda: {"opd/reverse_kl": -gap})


def mix_teachers(
    logprobs: Float32[Tensor, "teachers tokens"], weights: Float32[Tensor, "teachers tokens"]
) -> Float32[Tensor, " tokens"]:
    """The log-probs whose ``sampled`` term is the weighted mean of the teachers' terms; 0 where none has a weight.

    A teacher with weight 0 has not scored the token: what stands in its place is not read.
    """
    total = weights.sum(0)
    return torch.where(weights > 0, weights * logprobs, 0.0).sum(0) / torch.where(total > 0, total, 1.0)


def build(config: Config) -> OPD:
    return OPD(config)
