"""Distillation from distributions: full vocabulary, top-k with a tail, mixes; and value loss."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from algorithms import divergence
from algorithms.divergence import reverse_kl
from algorithms.registry import build
from algorithms.types import TeacherView, ValueInputs
from algorithms.value import value_loss
from tests.algorithms import reference
from tests.algorithms.batches import SEEDS, loss_inputs, make_case


@pytest.fixture(autouse=True, scope="module")
def few_rows_at_a_time():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(divergence, "CPU_ELEMENTS", 20)
        yield


def make_views(rng: torch.Generator, tokens: int, vocabulary: int, ks: list[int | None]) -> list[TeacherView]:
    views = []
    for k in ks:
        logprobs = torch.randn(tokens, vocabulary, generator=rng).log_softmax(1)
        weight = torch.rand(tokens, generator=rng) + 0.1
        ids = None
        if k is not None:
            logprobs, ids = logprobs.topk(k, dim=1)
        views.append(TeacherView(logprobs, weight, ids))
    return views


@settings(max_examples=40, deadline=None)
@given(
    tokens=st.integers(0, 9),
    vocabulary=st.integers(4, 9),
    ks=st.lists(st.none() | st.integers(1, 3), min_size=1, max_size=3),
    seed=SEEDS,
)
def test_against_loops(tokens, vocabulary, ks, seed):
    rng = torch.Generator().manual_seed(seed)
    views = make_views(rng, tokens, vocabulary, ks)
    trained = torch.rand(tokens, generator=rng) < 0.7
    above = torch.randn(tokens, generator=rng)
    logits = torch.randn(tokens, vocabulary, generator=rng).requires_grad_()
    got = reverse_kl(logits, views, trained)
    (gradient,) = torch.autograd.grad((got * above).sum(), logits)

    exact = logits.detach().double().requires_grad_()
    expected = torch.zeros(tokens, dtype=torch.float64)
    for t in trained.nonzero().flatten().tolist():
        teachers = [
            (float(v.weight[t]), v.logprobs[t].double(), None if v.token_ids is None else v.token_ids[t].tolist())
            for v in views
        ]
        expected[t] = reference.reverse_kl(exact[t], teachers)
    (expected_gradient,) = torch.autograd.grad((expected * above).sum() + 0 * exact.sum(), exact)
    torch.testing.assert_close(got.double(), expected.detach(), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(gradient.double(), expected_gradient, rtol=1e-4, atol=1e-5)


def test_top_k_over_all_but_one_token_is_the_full_vocabulary():
    rng = torch.Generator().manual_seed(0)
    (full,) = make_views(rng, 6, 5, [None])
    top, ids = full.logprobs.topk(4, dim=1)
    logits, trained = torch.randn(6, 5, generator=rng), torch.ones(6, dtype=torch.bool)
    got = reverse_kl(logits, [TeacherView(top, full.weight, ids)], trained)
    torch.testing.assert_close(got, reverse_kl(logits, [full], trained), rtol=1e-4, atol=1e-5)


def test_a_teacher_of_other_prompts_does_not_count():
    rng = torch.Generator().manual_seed(0)
    one, other = make_views(rng, 6, 5, [None, 2])
    other = TeacherView(other.logprobs, torch.zeros(6), other.token_ids)
    logits, trained = torch.randn(6, 5, generator=rng), torch.ones(6, dtype=torch.bool)
    torch.testing.assert_close(reverse_kl(logits, [one, other], trained), reverse_kl(logits, [one], trained))


@pytest.mark.parametrize(("mode", "k"), [("full_vocab", None), ("top_k", 3)])
@pytest.mark.parametrize("alpha", [0.0, 0.5])
def test_opd_from_distributions(mode, k, alpha):
    case = make_case([[[5], [0], [4]], [[6], [3]]], 5)
    rng = torch.Generator().manual_seed(0)
    tokens = len(case.logprobs)
    views = make_views(rng, tokens, 7, [k])
    algorithm = build("opd", {"mode": mode, "coefficient": 2.0, "group_size": 3, "outcome_coefficient": alpha})
    logits = torch.randn(tokens, 7, generator=rng).requires_grad_()
    targets, logprobs = algorithm.prepare(case.batch), case.logprobs.clone().requires_grad_()
    output = algorithm.loss(loss_inputs(case.batch, targets, logprobs, logits=logits, teacher_views=views))
    kl = reverse_kl(logits, views, torch.ones(tokens, dtype=torch.bool))
    r = (logprobs - case.batch.rollout_logprobs).exp().detach()
    outcome = torch.where((r >= 0.5) & (r <= 2), r, 0.0) * targets.advantages * logprobs
    torch.testing.assert_close(output.loss, (targets.weights * (2 * kl - outcome)).sum())
    for variable, expected in ((logits, 2 * kl), (logprobs, -outcome)):
        (got,) = torch.autograd.grad(output.loss, variable, retain_graph=True)
        (wanted,) = torch.autograd.grad((targets.weights * expected).sum(), variable, retain_graph=True)
        torch.testing.assert_close(got, wanted)
    assert bool(targets.advantages.any()) == bool(alpha)


@pytest.mark.parametrize("clip", [None, 0.2, 0.5])
def test_value_loss(clip):
    rng = torch.Generator().manual_seed(0)
    old, returns = torch.randn(50, generator=rng), torch.randn(50, generator=rng)
    weights = torch.rand(50, generator=rng) * (torch.rand(50, generator=rng) < 0.7)
    values = (old + torch.randn(50, generator=rng) / 2).requires_grad_()
    output = value_loss(ValueInputs(values, old, returns, weights), clip)
    errors = (values - returns) ** 2
    if clip is not None:
        errors = torch.maximum(errors, (old + (values - old).clamp(-clip, clip) - returns) ** 2)
    expected = (weights * errors / 2).sum()
    torch.testing.assert_close(output.loss, expected)
    (got,), (wanted,) = torch.autograd.grad(output.loss, values), torch.autograd.grad(expected, values)
    torch.testing.assert_close(got, wanted)
