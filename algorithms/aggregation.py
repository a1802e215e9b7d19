"""The denominators of the loss, over the whole global batch, so that splitting it changes nothing."""

from __future__ import annotations

from enum import StrEnum

import torch
from jaxtyping import Float32
from torch import Tensor

from algorithms.filters import Trained
from algorithms.packed import group_sums, rollout_sums, spread
from algorithms.types import RolloutBatch


class Aggregation(StrEnum):
    SEQUENCE_MEAN = "sequence_mean"  # mean over prompts of 1/G Σ_i 1/|y_i| Σ_t
    TOKEN_MEAN = "token_mean"


def token_weights(batch: RolloutBatch, trained: Trained, aggregation: Aggregation) -> Float32[Tensor, " tokens"]:
    """Weight of each token's loss; 0 off ``trained.mask``. The weights of all tokens sum to 1.

    |y_i| and G count what is trained on: tokens of all samples of rollout i, and rollouts with such a token.
    """
    if aggregation is Aggregation.TOKEN_MEAN:
        return trained.mask / trained.per_sample.sum().clamp(min=1).to(torch.float32)
    length = rollout_sums(trained.per_sample, batch.rollout, batch.rollouts)
    trains = (length > 0).double()
    group_size = group_sums(trains, batch.group)
    prompts = (group_size > 0).sum()
    per_rollout = trains / (prompts * group_size[batch.group.long()] * length).clamp(min=1)
    return spread(per_rollout[batch.rollout.long()].float(), batch.cu_seqlens) * trained.mask
