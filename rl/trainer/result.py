"""What an update gives back, and how it fails. Light: the driver unpickles these without Megatron."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from algorithms.metrics import Metric
from algorithms.types import Need


@dataclass(frozen=True)
class UpdateResult:
    """One optimizer step, the same on every rank."""

    step: int
    """Number of updates made so far, this one included."""
    loss: float
    metrics: Mapping[str, Metric]
    """Of the algorithm, merged over micro-batches and ranks, and ``entropy`` over the trained tokens."""
    grad_norm: float
    """L2 norm of the whole gradient before clipping."""
    lr: float
    samples: int
    """Samples with at least one trained token."""
    tokens: int
    """Tokens of those samples that went through the model."""
    trained_tokens: int
    """Tokens with a weight in the loss."""
    micro_batches: int
    """Of each data-parallel rank."""
    logprob_gap_max: float | None
    """Largest |trainer − rollout log-prob| over the action tokens, of samples with a trained token, that the trainer's
    own weights sampled (weight version = current version); None without such tokens."""
    logprob_gap_mean: float | None
    gradient_digest: int | None
    """Hash of the reduced gradient before clipping, over all ranks, below 2^53; None unless ``digest_gradients``."""
    seconds: Mapping[str, float]
    """Wall time of rank 0 by part."""


COMPUTED_NEEDS = frozenset({Need.OLD_LOGPROBS, Need.TEACHER_LOGPROBS, Need.TEACHER_VIEWS, Need.LOGITS})
"""What an update computes for an algorithm; the teachers' part where teachers are loaded."""
RECORDED_NEEDS = frozenset({Need.ROLLOUT_TOP_LOGPROBS})
"""What the rollouts' records hold, since the gateway asks the engine for what the algorithm needs."""


class NonFiniteUpdateError(ArithmeticError):
    """The loss or the gradient of an update is NaN or infinite; the weights were not touched."""


class MissingInputError(ValueError):
    """An algorithm needs something that this trainer does not compute."""
