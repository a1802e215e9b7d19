"""What an algorithm is given and what it gives.

Layout: samples are packed without padding. Token ``t`` of sample ``s`` lies at
``cu_seqlens[s] <= t < cu_seqlens[s+1]``. A log-prob, value or advantage stands at the position of the token it is
about: ``logprobs[t]`` is that of token ``t`` given the tokens of its sample before it, and the first token of a sample
has 0.

The trainer calls, for each update: ``prepare`` once with the whole global batch, then ``loss`` once a micro-batch
(whole samples, in any order and split). Every denominator is in ``Targets.weights``, computed before the split, so
that ``sum(loss over micro-batches)`` does not depend on the split.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol

import numpy as np
import torch
from jaxtyping import Bool, Float, Float32, Float64, Int
from pydantic import BaseModel, ConfigDict
from torch import Tensor

from algorithms.host import spread
from algorithms.metrics import Metrics


class Need(StrEnum):
    """What an algorithm needs beside the rollout itself; the trainer computes it before ``prepare``."""

    OLD_LOGPROBS = "old_logprobs"  # the trainer's policy at the start of this update
    REF_LOGPROBS = "ref_logprobs"  # a frozen reference policy, for a KL term
    VALUES = "values"
    TEACHER_LOGPROBS = "teacher_logprobs"
    LOGITS = "logits"  # the policy's own, in ``LossInputs``, with gradient
    ROLLOUT_TOP_LOGPROBS = "rollout_top_logprobs"  # of the ``rollout_top_k`` likeliest tokens, from the engine
    TEACHER_VIEWS = "teacher_views"  # the teachers' distributions over (a part of) the vocabulary, in ``LossInputs``


@dataclass(frozen=True)
class RolloutBatch:
    """One update's samples (the whole global batch), all constant in θ; on the CPU."""

    cu_seqlens: Int[Tensor, " samples+1"]
    action_mask: Bool[Tensor, " tokens"]
    rollout_logprobs: Float32[Tensor, " tokens"]
    """log π_inf at the sampling temperature; 0 off the mask."""
    weight_versions: Int[Tensor, " tokens"]
    """-1 off the mask."""
    current_version: int
    rollout: Int[Tensor, " samples"]
    """Index of the rollout that a sample is a segment of."""
    segment: Int[Tensor, " samples"]
    group: Int[Tensor, " rollouts"]
    """Index of the rollout's group (the rollouts of one prompt), 0..groups-1."""
    reward: Float64[Tensor, " rollouts"]
    valid: Bool[Tensor, " rollouts"]
    """False where the environment failed: no loss, and no part in the baseline."""
    truncated: Bool[Tensor, " rollouts"]
    dropped: Bool[Tensor, " rollouts"]
    """True where it is only kept for its group's baseline (it was too stale): no loss."""
    repeated: Bool[Tensor, " rollouts"] | None = None
    """True where it is a copy in the place of a failed rollout: it trains, its group's baseline leaves it out."""
    old_logprobs: Float32[Tensor, " tokens"] | None = None
    ref_logprobs: Float32[Tensor, " tokens"] | None = None
    values: Float32[Tensor, " tokens"] | None = None
    teacher_logprobs: Float32[Tensor, " tokens"] | None = None
    top_ids: Int[Tensor, "tokens k"] | None = None
    """The engine's likeliest tokens at each position of the action mask, the likeliest first; -1 off the mask."""
    top_logprobs: Float32[Tensor, "tokens k"] | None = None
    """Their log π_inf; 0 off the mask."""

    @property
    def samples(self) -> int:
        return len(self.cu_seqlens) - 1

    @property
    def rollouts(self) -> int:
        return len(self.group)

    def lengths(self) -> Int[Tensor, " samples"]:
        return self.cu_seqlens.diff()

    def sample_of_token(self) -> Int[Tensor, " tokens"]:
        return torch.from_numpy(spread(np.arange(self.samples), self.cu_seqlens.numpy()))


@dataclass(frozen=True)
class Targets:
    """What ``prepare`` gives: constants of the update, aligned with the batch's tokens."""

    advantages: Float32[Tensor, " tokens"]
    weights: Float32[Tensor, " tokens"]
    """The loss is Σ_t weights[t]·ℓ_t over the global batch; 0 where a token is not trained on."""
    returns: Float32[Tensor, " tokens"] | None = None
    """Targets of a value model."""
    metrics: Metrics = field(default_factory=dict)


RowFunction = Callable[
    [Float[Tensor, "rows vocab"], Int[Tensor, " rows"]], tuple[Float32[Tensor, " rows"], Float32[Tensor, "rows vocab"]]
]
"""``(logits of these tokens, tokens) → (values, their slopes in the logits)``."""


class LogitRows(Protocol):
    """Logits that are computed a few tokens at a time, so that tokens × vocabulary never exist."""

    def mapped(self, function: RowFunction, rows: Int[Tensor, " rows"]) -> Float32[Tensor, " rows"]:
        """The function's values of these tokens, with the gradient that its slopes say."""
        ...


class LogprobRows(Protocol):
    """Log-probs over the vocabulary, computed for the tokens that are asked for."""

    def __getitem__(self, rows: Int[Tensor, " rows"]) -> Float32[Tensor, "rows vocab"]: ...


@dataclass(frozen=True)
class TeacherView:
    """What one teacher says of the next token, at every token of a micro-batch."""

    logprobs: Float32[Tensor, "tokens k"] | LogprobRows
    """log π_T at the sampling temperature."""
    weight: Float32[Tensor, " tokens"]
    """Its share in the mix; 0 where the prompt is not its own. A token's shares are normalised by their sum."""
    token_ids: Int[Tensor, "tokens k"] | None = None
    """The teacher's k most likely tokens; None where ``logprobs`` covers the whole vocabulary in order."""


@dataclass(frozen=True)
class LossInputs:
    """One micro-batch of whole samples. ``logprobs`` (and ``logits``) carry the gradient, all else is constant.

    Every value is finite, also off the action mask.
    """

    cu_seqlens: Int[Tensor, " samples+1"]
    logprobs: Float32[Tensor, " tokens"]
    """log π_θ of the batch's tokens at the sampling temperature."""
    entropy: Float32[Tensor, " tokens"] | None
    """Entropy of the distribution that predicts the token, when the trainer computes it (no gradient)."""
    action_mask: Bool[Tensor, " tokens"]
    rollout_logprobs: Float32[Tensor, " tokens"]
    advantages: Float32[Tensor, " tokens"]
    weights: Float32[Tensor, " tokens"]
    old_logprobs: Float32[Tensor, " tokens"] | None = None
    ref_logprobs: Float32[Tensor, " tokens"] | None = None
    teacher_logprobs: Float32[Tensor, " tokens"] | None = None
    logits: Float[Tensor, "tokens vocab"] | LogitRows | None = None
    """Divided by the temperature; row t predicts token t."""
    teacher_views: Sequence[TeacherView] = ()
    sequence_log_ratio: Float32[Tensor, " tokens"] | None = None
    """Filled in by an algorithm whose ratio is a sequence's, not by the trainer."""
    observe: bool = True
    """False leaves out the metrics, which cost more than the loss."""


@dataclass(frozen=True)
class ValueInputs:
    """One micro-batch for a value model. ``values`` carries the gradient."""

    values: Float32[Tensor, " tokens"]
    old_values: Float32[Tensor, " tokens"]
    """Those that ``prepare`` was given."""
    returns: Float32[Tensor, " tokens"]
    weights: Float32[Tensor, " tokens"]


@dataclass(frozen=True)
class LossOutput:
    loss: Float[Tensor, ""]
    metrics: Metrics


class GroupVerdict(StrEnum):
    """What becomes of a finished group of rollouts before it is put into a batch."""

    KEEP = "keep"
    ZERO_VARIANCE = "zero_variance"  # dropped and replaced by another prompt (dynamic sampling)
    ENVIRONMENT = "environment"  # dropped: half of its rollouts or more failed


@dataclass(frozen=True)
class GroupDecision:
    verdict: GroupVerdict
    repeat: Sequence[int] = ()
    """Rollouts, by index within the group, to repeat in place of those that failed, in the failed ones' order."""


class AlgorithmConfig(BaseModel):
    """Base of every algorithm's options: frozen, unknown keys refused by name."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class Algorithm(ABC):
    """An objective. ``algorithms.NAME`` holds one, as ``Config`` (its options) and ``build(config) -> Algorithm``."""

    needs: frozenset[Need] = frozenset()
    group_size: int = 1
    """Rollouts a prompt."""
    max_staleness: int | None = None
    """``prepare`` leaves out what lags the current weights by more versions; None where it takes everything."""
    teacher_top_k: int | None = None
    """k of the teachers' views; None where they cover the whole vocabulary."""
    rollout_top_k: int | None = None
    """k of the engine's likeliest tokens; None where it needs none."""
    drops_stale: bool = True
    """A rollout with one such token is left out whole; False where only those tokens are."""

    @abstractmethod
    def prepare(self, batch: RolloutBatch) -> Targets: ...

    @abstractmethod
    def loss(self, inputs: LossInputs) -> LossOutput: ...

    def value_loss(self, inputs: ValueInputs) -> LossOutput:
        raise NotImplementedError(f"{type(self).__name__} trains no value model")

    def decide_group(self, rewards: Float64[Tensor, " rollouts"], valid: Bool[Tensor, " rollouts"]) -> GroupDecision:
        """What becomes of one prompt's finished rollouts; an algorithm without groups keeps every one that is valid."""
        return GroupDecision(GroupVerdict.KEEP if bool(valid.any()) else GroupVerdict.ENVIRONMENT)
