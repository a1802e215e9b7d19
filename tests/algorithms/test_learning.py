"""Learning from an engine that is not the trainer's policy.

A language model of one token and three arms, blind to its prompt: under one prompt the arms pay 1, 0 and 0.6, under
the other 0, 1 and 0.6, so the third is the best it can do. The engine adds to the logits before it samples: at each
prompt it leans towards the arm that pays there, and it is noisy. Who takes its samples for the policy's own sees the
first two arms succeed more often than they do when the policy itself chooses, and unlearns the third.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from algorithms.registry import build
from algorithms.types import Algorithm, RolloutBatch
from tests.algorithms.batches import loss_inputs

PAYS = torch.tensor([[1.0, 0.0, 0.6], [0.0, 1.0, 0.6]], dtype=torch.float64)
LEANING = torch.tensor([[0.45, -0.45, 0.0], [-0.45, 0.45, 0.0]])
NOISE, GROUP, STEPS, LEARNING_RATE = 0.1, 32, 400, 1.0


def sample(policy: Tensor, engine: Tensor, rng: torch.Generator) -> tuple[RolloutBatch, Tensor]:
    """Two groups, one a prompt; a sample is a prompt token and the arm."""
    arms = torch.multinomial(engine.exp(), GROUP, replacement=True, generator=rng)
    samples = 2 * GROUP
    action = torch.tensor([False, True]).repeat(samples)

    def at_actions(x: Tensor) -> Tensor:
        return torch.stack([torch.zeros(samples), x.flatten()], 1).flatten()

    no = torch.zeros(samples, dtype=torch.bool)
    batch = RolloutBatch(
        cu_seqlens=torch.arange(samples + 1) * 2,
        action_mask=action,
        rollout_logprobs=at_actions(engine.gather(1, arms)),
        weight_versions=torch.where(action, 0, -1).int(),
        current_version=0,
        rollout=torch.arange(samples),
        segment=torch.zeros(samples, dtype=torch.long),
        group=torch.arange(samples) // GROUP,
        reward=PAYS.gather(1, arms).flatten(),
        valid=~no,
        truncated=no,
        dropped=no,
        old_logprobs=at_actions(policy.detach()[arms]),
    )
    return batch, at_actions(policy[arms])


def train(algorithm: Algorithm, seed: int) -> float:
    """The expected reward of the trainer's policy in the end."""
    rng = torch.Generator().manual_seed(seed)
    logits = torch.zeros(3, requires_grad=True)
    for _ in range(STEPS):
        noise = LEANING + NOISE * torch.randn(2, 3, generator=rng)
        engine = (logits.detach() + noise).log_softmax(1)
        batch, logprobs = sample(logits.log_softmax(0), engine, rng)
        targets = algorithm.prepare(batch)
        loss = algorithm.loss(loss_inputs(batch, targets, logprobs, observe=False)).loss
        (gradient,) = torch.autograd.grad(loss, logits)
        with torch.no_grad():
            logits -= LEARNING_RATE * gradient
    return float((PAYS @ logits.detach().double().softmax(0)).mean())


# Without the deviation, which would make a rare success and a rare failure weigh the same.
OPTIONS = {"group_size": GROUP, "normalize_std": False}
CORRECTED = [("grpo", {}), ("dis", {}), ("cispo", {}), ("gspo", {"epsilon_low": 0.2, "epsilon_high": 0.28})]


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_corrected_for_the_engine_the_best_arm_is_found_and_plain_grpo_is_worse(seed):
    plain = train(build("grpo", {**OPTIONS, "beta": None}), seed)
    assert plain < 0.53
    for name, options in CORRECTED:
        assert train(build(name, {**OPTIONS, **options}), seed) > 0.58, name
