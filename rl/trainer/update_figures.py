"""Figures of an update's passes. They stay on the device until the passes are over and the host has nothing else to
give it: reading them earlier would hold up the backward pass."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float64
from torch import Tensor

from algorithms.metrics import Max, Mean, Metric, Metrics, Sum, merge_metrics
from algorithms.types import LossInputs, LossOutput
from rl.trainer import platform

platform.install()

# ruff: noqa: E402  (Megatron needs the platform installed first)
from megatron.core import parallel_state

from rl.trainer.collective import gather_objects

LOSS, GAP_MAX, GAP_MEAN = "_loss", "_gap_max", "_gap_mean"
"""Metrics that are merged with the algorithm's and become fields of the figures."""


@dataclass(frozen=True)
class PassFigures:
    """Of all micro-batches and ranks. None where no micro-batch had any."""

    loss: float | None
    gap_max: float | None
    """See ``UpdateResult.logprob_gap_max``."""
    gap_mean: float | None
    metrics: dict[str, Metric]
    """The algorithm's, and ``entropy`` over the trained tokens."""


class Unread:
    """What this rank's passes leave on the device."""

    def __init__(self) -> None:
        self._metrics: list[Metrics] = []
        """Of each micro-batch; the algorithm's."""
        self._numbers: list[Float64[Tensor, " 6"]] = []
        """Likewise; see ``_numbers_of``."""

    def note(self, output: LossOutput, inputs: LossInputs, own: Tensor) -> None:
        """Take a micro-batch's.

        Args:
            own: tokens that the current weights sampled.
        """
        self._metrics.append(output.metrics)
        self._numbers.append(_numbers_of(output.loss, inputs, own))

    def loss(self) -> Float64[Tensor, ""] | None:
        """This rank's part."""
        return torch.stack(self._numbers)[:, 0].sum() if self._numbers else None

    def read(self) -> PassFigures:
        """A collective of all ranks."""
        parts = list(self._metrics)
        if self._numbers:
            parts += [_metrics_of(*row) for row in torch.stack(self._numbers).tolist()]
        # The ranks of one tensor- and context-parallel group computed the same numbers; only the last stage has any.
        speaks = parallel_state.get_tensor_model_parallel_rank() == parallel_state.get_context_parallel_rank() == 0
        merged = merge_metrics(gather_objects(merge_metrics(parts) if speaks else {}))
        loss, gap_max, gap_mean = (merged.pop(name).value() for name in (LOSS, GAP_MAX, GAP_MEAN))
        return PassFigures(loss, gap_max, gap_mean, merged)


def _numbers_of(loss: Tensor, inputs: LossInputs, own: Tensor) -> Float64[Tensor, " 6"]:
    """Of one micro-batch, the arguments of ``_metrics_of``."""
    gap = (inputs.logprobs.detach() - inputs.rollout_logprobs).abs().where(own, 0.0)
    trained = inputs.weights != 0
    entropy = torch.zeros_like(gap) if inputs.entropy is None else inputs.entropy.where(trained, 0.0)
    numbers = [loss.detach(), gap.max(), gap.sum(), own.sum(), entropy.sum(), trained.sum()]
    return torch.stack([x.double() for x in numbers])


def _metrics_of(
    loss: float, gap_max: float, gap_sum: float, sampled: float, entropy_sum: float, tokens: float
) -> dict[str, Metric]:
    return {
        LOSS: Sum(loss),
        GAP_MAX: Max(gap_max if sampled else None),
        GAP_MEAN: Mean(gap_sum, sampled),
        "entropy": Mean(entropy_sum, tokens),
    }
