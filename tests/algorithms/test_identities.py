"""Gradients that must agree, and bounds at their exact edges."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from algorithms.kl import KLEstimator, reference_kl
from algorithms.opd import mix_teachers
from algorithms.ratios import clipped, inside, strictly_inside
from algorithms.registry import build
from tests.algorithms.batches import loss_inputs, make_case, run

VOCABULARY = 5


def test_detached_and_undetached_dis_have_the_same_gradient():
    case = make_case([[[9, 8], [9], [7]], [[9], [9]]], 0, spoil=False)
    _, gradient, _, targets = run(build("dis", {"max_staleness": 9}), case)
    logprobs = case.logprobs.clone().requires_grad_()
    r = (logprobs - case.batch.rollout_logprobs).exp()
    kept = ((r > 0.7) & (r < 6)).detach()
    loss = -(targets.weights * kept * r * targets.advantages).sum()
    (undetached,) = torch.autograd.grad(loss, logprobs, retain_graph=True)
    torch.testing.assert_close(gradient, undetached)
    # Without the stop-gradient on the weight of log π the sign flips where log π < −1.
    loss = -(targets.weights * kept * r * targets.advantages * logprobs).sum()
    (wrong,) = torch.autograd.grad(loss, logprobs)
    flipped = (gradient != 0) & (logprobs < -1)
    assert flipped.any()
    assert (wrong[flipped].sign() == -gradient[flipped].sign()).all()


def neighbours(x: float) -> tuple[float, float, float]:
    """x in fp32 and the floats just below and above."""
    at = np.float32(x)
    return float(np.nextafter(at, np.float32(-1e9))), float(at), float(np.nextafter(at, np.float32(1e9)))


@pytest.mark.parametrize(("low", "high"), [(0.5, 2.0), (1 / 3, 3.0), (0.2, 5.0), (1.0, 1.0)])
def test_pop_keeps_both_bounds(low, high):
    below, at_low, above_low = neighbours(low)
    below_high, at_high, above = neighbours(high)
    r = torch.tensor([below, at_low, above_low, below_high, at_high, above])
    kept = [0, at_low, above_low, below_high, at_high, 0]
    if low == high:
        kept = [0, at_low, 0, 0, at_high, 0]
    assert inside(r, low, high).tolist() == kept


@pytest.mark.parametrize(("low", "high"), [(0.7, 6.0), (0.2, 4.0), (0.0, 1.3)])
def test_dis_keeps_neither_bound(low, high):
    below, at_low, above_low = neighbours(low)
    below_high, at_high, above = neighbours(high)
    r = torch.tensor([below, at_low, above_low, below_high, at_high, above])
    assert strictly_inside(r, low, high).tolist() == [0, 0, above_low, below_high, 0, 0]


def test_pop_multiplies_by_the_ratio_and_leaves_the_token_in_the_denominator():
    case = make_case([[[4], [4]]], 0, spoil=False)
    _, gradient, _, targets = run(build("grpo", {"max_staleness": 9, "epsilon_high": 9.0, "epsilon_low": 1.0}), case)
    rho = (case.batch.old_logprobs - case.batch.rollout_logprobs).exp()
    r = (case.logprobs - case.batch.old_logprobs).exp()
    pop = torch.where((rho >= 0.5) & (rho <= 2), rho, 0.0)
    assert ((pop == 0) & (targets.weights != 0)).any()
    torch.testing.assert_close(gradient, -targets.weights * pop * r * targets.advantages)


@pytest.mark.parametrize("advantage", [1.0, -1.0, 0.0])
def test_clip_at_its_edges(advantage):
    """The slope is r Â up to and with the bound that Â moves towards, and 0 past it."""
    r = torch.tensor([0.5, 0.79, 0.8, 1.0, 1.28, 1.3, 2.0])
    token = clipped(r, torch.full_like(r, advantage), 0.2, 0.28)
    passes = r <= 1.28 if advantage > 0 else r >= 0.8
    torch.testing.assert_close(token.slope, torch.where(passes, -r * advantage, 0.0))
    torch.testing.assert_close(token.value, -torch.minimum(r * advantage, r.clamp(0.8, 1.28) * advantage))


def policy_and_others(seed: int, others: int) -> list[torch.Tensor]:
    rng = torch.Generator().manual_seed(seed)
    return [torch.randn(VOCABULARY, generator=rng).log_softmax(0) for _ in range(1 + others)]


def expected_gradient(logits: torch.Tensor, slope: torch.Tensor) -> torch.Tensor:
    """E over y ~ π_θ of slope(y)·∇_logits log π_θ(y), exactly."""
    p = logits.softmax(0)
    return sum(p[y] * slope[y] * (torch.eye(len(p))[y] - p) for y in range(len(p)))


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("teachers", [1, 3])
def test_sampled_opd_in_expectation_is_full_vocabulary_opd(seed, teachers):
    logits, *others = policy_and_others(seed, teachers)
    weights = torch.rand(teachers, generator=torch.Generator().manual_seed(seed)) + 0.1
    case = make_case([[[VOCABULARY]]], 0, spoil=False)
    logp = logits.log_softmax(0)
    # Token v of the batch stands for the outcome y = v, sampled by the policy itself.
    mixed = mix_teachers(torch.stack(others), weights[:, None].expand(-1, VOCABULARY))
    inputs = loss_inputs(
        case.batch,
        build("opd", {}).prepare(case.batch),
        logp.clone().requires_grad_(),
        rollout_logprobs=logp,
        old_logprobs=logp,
        teacher_logprobs=mixed,
        weights=torch.ones(VOCABULARY),
    )
    variable = logits.clone().requires_grad_()
    log_policy = variable.log_softmax(0)
    kl = sum(
        w * (log_policy.exp() * (log_policy - other)).sum()
        for w, other in zip(weights / weights.sum(), others, strict=True)
    )
    (full,) = torch.autograd.grad(kl, variable)
    for correction in ("bounded", "clipped"):
        (slope,) = torch.autograd.grad(build("opd", {"correction": correction}).loss(inputs).loss, inputs.logprobs)
        torch.testing.assert_close(expected_gradient(logits, slope), full)


@pytest.mark.parametrize("seed", range(3))
def test_gradients_of_the_kl_to_a_reference(seed):
    logits, ref = policy_and_others(seed, 1)
    variable = logits.clone().requires_grad_()
    logp = variable.log_softmax(0)
    (reverse,) = torch.autograd.grad((logp.exp() * (logp - ref)).sum(), variable, retain_graph=True)
    (forward,) = torch.autograd.grad((ref.exp() * (ref - logp)).sum(), variable)
    wanted = {KLEstimator.K1: reverse, KLEstimator.K2: reverse, KLEstimator.K3: forward}
    p, value = logits.softmax(0), (logits.log_softmax(0).exp() * (logits.log_softmax(0) - ref)).sum()
    for estimator, gradient in wanted.items():
        token = reference_kl(logits.log_softmax(0), ref, estimator, 1.0)
        torch.testing.assert_close(expected_gradient(logits, token.slope), gradient)
        if estimator is not KLEstimator.K2:
            torch.testing.assert_close((p * token.value).sum(), value)


def test_a_ratio_past_fp32_does_not_make_the_loss_infinite():
    case = make_case([[[6], [6]]], 0, spoil=False)
    far = torch.full_like(case.logprobs, -0.1)
    for name in ("grpo", "dis", "cispo", "gspo", "opd"):
        inputs = loss_inputs(
            case.batch,
            build(name, {"max_staleness": 9}).prepare(case.batch),
            far.requires_grad_(),
            rollout_logprobs=torch.full_like(far, -300.0),
            old_logprobs=torch.full_like(far, -300.0),
        )
        loss = build(name, {}).loss(inputs).loss
        assert math.isfinite(loss.detach())
        assert torch.autograd.grad(loss, far)[0].isfinite().all()
