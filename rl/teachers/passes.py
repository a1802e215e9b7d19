"""Passes of the teachers and of a student that is compared to whole distributions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Float32, Int
from torch import Tensor

from algorithms.types import TeacherView
from rl.batch import SampleTokens, TrainBatch
from rl.trainer import platform
from rl.trainer.config import TrainerConfig
from rl.trainer.distributions import PolicyLogits, head_logits
from rl.trainer.forward import Modules, collected, put_tokens, run_schedule
from rl.trainer.head import scored_hidden, to_tokens, token_logprobs
from rl.trainer.packing import Layout
from rl.trainer.topk import token_topk

DistributionLoss = Callable[[SampleTokens, Tensor, Tensor, PolicyLogits], Tensor]
"""``(samples, log-probs, entropies, logits) → scalar loss``."""
NOWHERE = -1


@dataclass(frozen=True)
class View:
    """What is kept of a teacher's distributions beside the log-probs of the sampled tokens."""

    top_k: int | None
    """None: the whole vocabulary, as hidden states and head."""


@dataclass(frozen=True)
class Scores:
    """What one teacher says of the tokens of its own samples, in their order; on the CPU of every rank."""

    logprobs: Float32[Tensor, " tokens"]
    entropy: Float32[Tensor, " tokens"]
    inverse_temperature: Float32[Tensor, " tokens"]
    top: tuple[Float32[Tensor, "tokens k"], Int[Tensor, "tokens k"]] | None = None
    hidden: Float[Tensor, "tokens hidden"] | None = None
    """That predict the tokens."""
    head: Float[Tensor, "vocab_part hidden"] | None = None
    """On the last pipeline stage."""


def score(
    stages: Modules,
    batch: TrainBatch,
    micro_batches: Sequence[Sequence[int]],
    config: TrainerConfig,
    view: View | None,
) -> Scores:
    """Forward passes of a model over a batch, for the tokens that it marks as scored. A collective of all ranks."""
    device, tokens, model = platform.device(), len(batch.token_ids), stages[-1].module
    whole = torch.zeros(tokens, 2, device=device)
    top = states = None
    if view is not None and view.top_k is not None:
        top_logprobs = torch.zeros(tokens, view.top_k, device=device)
        top = top_logprobs, torch.zeros_like(top_logprobs, dtype=torch.int32)
    elif view is not None:
        states = torch.zeros(tokens, model.config.hidden_size, dtype=model.config.params_dtype, device=device)

    def finish(taken: SampleTokens, layout: Layout, hidden: Tensor) -> Tensor:
        logprobs, entropy = token_logprobs(model, hidden, layout, config.logits_chunk_tokens)
        if not layout.tokens:
            return logprobs.sum()
        put_tokens(whole, taken, torch.stack([logprobs, entropy], dim=-1))
        if top is not None:
            best = token_topk(model, hidden, layout, top[0].size(1), config.logits_chunk_tokens)
            for kept, part in zip(top, best, strict=True):
                put_tokens(kept, taken, part)
        if states is not None:
            put_tokens(states, taken, to_tokens(scored_hidden(model, hidden, layout), layout))
        return logprobs.sum()

    run_schedule(stages, batch, micro_batches, config, finish, backward=False)
    logprobs, entropy = collected(whole).unbind(-1)
    keeps_head = states is not None and model.post_process
    return Scores(
        logprobs,
        entropy,
        inverse_temperature=(1.0 / batch.temperature)[batch.rollout.sample_of_token()],
        top=None if top is None else (collected(top[0]), collected(top[1])),
        hidden=None if states is None else collected(states),
        # A copy: the weights leave the tier's buffer before the student is compared to them.
        head=model.output_weight().detach().to("cpu", copy=True) if keeps_head else None,
    )


@dataclass(frozen=True)
class _HeadRows:
    """A teacher's log-probs over the vocabulary, from its hidden states and head."""

    scores: Scores
    place: Int[Tensor, " tokens"]
    """Of a micro-batch's tokens in the scores; on the CPU."""
    head: Float[Tensor, "vocab_part hidden"]
    """On the device."""
    vocabulary: int

    def __getitem__(self, rows: Int[Tensor, " rows"]) -> Float32[Tensor, "rows vocab"]:
        assert self.scores.hidden is not None
        places = self.place[rows.cpu()]
        hidden = self.scores.hidden[places].to(self.head.device)
        inverse = self.scores.inverse_temperature[places].to(self.head.device)
        return head_logits(hidden, self.head, inverse, self.vocabulary).log_softmax(1)


@dataclass(frozen=True)
class TeacherViews:
    """All teachers' views of a batch, cut to micro-batches on demand."""

    scores: Sequence[Scores]
    places: Sequence[Int[Tensor, " tokens"]]
    """For each teacher, of the batch's tokens in its scores; ``NOWHERE`` where a token is not its own."""
    weights: Sequence[Float32[Tensor, " tokens"]]
    vocabulary: int

    def of(self, taken: SampleTokens) -> list[TeacherView]:
        """Of a micro-batch's tokens, without the teachers that have none of them."""
        device, views = platform.device(), []
        for scores, place, weight in zip(self.scores, self.places, self.weights, strict=True):
            own = place[taken.index]
            if not (own != NOWHERE).any():
                continue
            share = weight[taken.index].to(device)
            if scores.top is not None:
                logprobs, ids = (part[own.clamp(min=0)].to(device) for part in scores.top)
                views.append(TeacherView(logprobs, share, ids))
            else:
                assert scores.head is not None
                rows = _HeadRows(scores, own.clamp(min=0), scores.head.to(device), self.vocabulary)
                views.append(TeacherView(rows, share))
        return views


def run_distribution_passes(
    modules: Modules,
    batch: TrainBatch,
    micro_batches: Sequence[Sequence[int]],
    config: TrainerConfig,
    loss: DistributionLoss,
    backward: bool,
) -> None:
    """``run_passes`` with a loss that also gets the policy's logits."""

    def finish(taken: SampleTokens, layout: Layout, hidden: Tensor) -> Tensor:
        model: Any = modules[-1].module
        logprobs, entropy = token_logprobs(model, hidden, layout, config.logits_chunk_tokens)
        if not layout.tokens:
            return logprobs.sum() * 0.0
        logits = PolicyLogits(model, hidden, layout, config.logits_chunk_tokens)
        return loss(taken, logprobs, entropy, logits)

    run_schedule(modules, batch, micro_batches, config, finish, backward)
