"""The denominators of the loss, over the whole global batch, so that splitting it changes nothing."""

from __future__ import annotations

from enum import StrEnum

import numpy as np
import torch
from jaxtyping import Float32, Float64
from torch import Tensor

from algorithms.filters import Trained
from algorithms.host import mask_, spread, sums
from algorithms.types import RolloutBatch


class Aggregation(StrEnum):
    SEQUENCE_MEAN = "sequence_mean"  # the mean over prompts of 1/G Σ_i 1/|y_i| Σ_t
    TOKEN_MEAN = "token_mean"  # Σ_t over the number of tokens in the batch


def token_weights(batch: RolloutBatch, trained: Trained, aggregation: Aggregation) -> Float32[Tensor, " tokens"]:
    """Weight of each token's loss, 0 where it is not trained on. The weights of all tokens sum to 1.

    |y_i| and G count what is trained on: the tokens of all samples of rollout i, and the rollouts with such a token.
    """
    if aggregation == Aggregation.TOKEN_MEAN:
        per_sample = np.full(batch.samples, 1 / max(trained.count.sum(), 1))
    else:
        rollout, group = batch.rollout.numpy(), batch.group.numpy()
        length = sums(trained.count, rollout, batch.rollouts)
        size = sums(length > 0, group)
        prompts = np.count_nonzero(size)
        per_sample = (1 / np.maximum(prompts * size[group] * length, 1))[rollout]
    return spread_over_trained(per_sample, batch, trained)


def spread_over_trained(
    per_sample: Float64[np.ndarray, " samples"], batch: RolloutBatch, trained: Trained
) -> Float32[Tensor, " tokens"]:
    """A sample's value at its trained tokens, 0 at all others."""
    values = np.where(trained.count > 0, per_sample, 0.0).astype(np.float32)
    return torch.from_numpy(mask_(spread(values, batch.cu_seqlens.numpy()), trained.mask))
