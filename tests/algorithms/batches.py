"""Random ragged batches, and the calls that the trainer makes."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from hypothesis import strategies as st
from torch import Tensor

from algorithms.types import Algorithm, LossInputs, LossOutput, RolloutBatch, Targets

LAYOUTS = st.lists(  # groups of rollouts of samples' lengths; a sample may be empty
    st.lists(st.lists(st.integers(0, 9), min_size=1, max_size=3), min_size=1, max_size=4), min_size=1, max_size=4
)
SEEDS = st.integers(0, 2**32 - 1)


@dataclass(frozen=True)
class Case:
    batch: RolloutBatch
    logprobs: Tensor


def make_case(layout: Sequence[Sequence[Sequence[int]]], seed: int, *, version: int = 3, spoil: bool = True) -> Case:
    """``spoil``: some rollouts are failed, truncated, dropped or copies, and some tokens are stale."""
    rng = torch.Generator().manual_seed(seed)
    lengths = torch.tensor([n for group in layout for rollout in group for n in rollout])
    rollout = torch.tensor([i for i, r in enumerate(r for group in layout for r in group) for _ in r])
    segment = torch.tensor([s for group in layout for r in group for s in range(len(r))])
    group = torch.tensor([g for g, members in enumerate(layout) for _ in members])
    tokens, rollouts = int(lengths.sum()), len(group)

    def uniform(low: float, high: float, size: int = tokens) -> Tensor:
        return torch.rand(size, generator=rng) * (high - low) + low

    mask = uniform(0, 1) < 0.7
    old = -uniform(0.05, 3)
    inference = torch.where(mask, old + uniform(-1, 1), 0.0)
    rare = 0.15 if spoil else 0.0
    valid = uniform(0, 1, rollouts) >= rare
    reward = torch.where(valid, (uniform(0, 1, rollouts) * 4).round().double() / 4, torch.nan)
    repeated = uniform(0, 1, rollouts) < rare
    for copy in repeated.nonzero().flatten():  # a copy has the reward of a valid rollout of its group
        originals = ((group == group[copy]) & valid & ~repeated).nonzero().flatten()
        repeated[copy] = len(originals) > 0
        if len(originals):
            valid[copy], reward[copy] = True, reward[originals[0]]
    batch = RolloutBatch(
        cu_seqlens=torch.cat([torch.zeros(1, dtype=torch.long), lengths.cumsum(0)]),
        action_mask=mask,
        rollout_logprobs=inference,
        weight_versions=torch.where(mask, (uniform(0, 1) * (version + 1)).int(), -1).int(),
        current_version=version,
        rollout=rollout,
        segment=segment,
        group=group,
        reward=reward,
        valid=valid,
        truncated=uniform(0, 1, rollouts) < rare,
        dropped=uniform(0, 1, rollouts) < rare,
        repeated=repeated,
        old_logprobs=old,
        ref_logprobs=-uniform(0.05, 3),
        values=uniform(-1, 1),
        teacher_logprobs=-uniform(0.05, 3),
    )
    return Case(batch, old + uniform(-0.5, 0.5))


def loss_inputs(batch: RolloutBatch, targets: Targets, logprobs: Tensor, **changes: object) -> LossInputs:
    inputs = LossInputs(
        cu_seqlens=batch.cu_seqlens,
        logprobs=logprobs,
        entropy=None,
        action_mask=batch.action_mask,
        rollout_logprobs=batch.rollout_logprobs,
        advantages=targets.advantages,
        weights=targets.weights,
        old_logprobs=batch.old_logprobs,
        ref_logprobs=batch.ref_logprobs,
        teacher_logprobs=batch.teacher_logprobs,
    )
    return dataclasses.replace(inputs, **changes)


def run(algorithm: Algorithm, case: Case, **changes: object) -> tuple[Tensor, Tensor, LossOutput, Targets]:
    """Loss, its gradient in the log-probs, and what they came from, with the whole batch as one micro-batch."""
    targets = algorithm.prepare(case.batch)
    logprobs = case.logprobs.clone().requires_grad_()
    output = algorithm.loss(loss_inputs(case.batch, targets, logprobs, **changes))
    (gradient,) = torch.autograd.grad(output.loss, logprobs)
    return output.loss.detach(), gradient, output, targets


def take(batch: RolloutBatch, targets: Targets, logprobs: Tensor, samples: Sequence[int]) -> LossInputs:
    """Some samples as a micro-batch, as the trainer cuts it."""
    spans = [torch.arange(int(batch.cu_seqlens[s]), int(batch.cu_seqlens[s + 1])) for s in samples]
    index = torch.cat([torch.empty(0, dtype=torch.long), *spans])
    whole = loss_inputs(batch, targets, logprobs)
    parts = {
        f.name: x[index] if isinstance(x := getattr(whole, f.name), Tensor) else x
        for f in dataclasses.fields(whole)
        if f.name != "cu_seqlens"
    }
    edges = torch.tensor([0, *[len(span) for span in spans]]).cumsum(0)
    return LossInputs(cu_seqlens=edges, **parts)
