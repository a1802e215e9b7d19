"""What must not change, does not."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from algorithms.metrics import merge_metrics, metric_values
from algorithms.registry import build
from algorithms.types import Algorithm, RolloutBatch
from tests.algorithms.batches import LAYOUTS, SEEDS, Case, loss_inputs, make_case, run, take

ALL = ["grpo", "dis", "gspo", "cispo", "sao", "opd", "sft"]
GROUPED = ["grpo", "dis", "gspo", "cispo"]
CLOSE = {"rtol": 1e-5, "atol": 1e-6}
PER_TOKEN = (
    *("action_mask", "rollout_logprobs", "weight_versions", "old_logprobs", "ref_logprobs"),
    *("values", "teacher_logprobs"),
)
PER_ROLLOUT = ("group", "reward", "valid", "truncated", "dropped", "repeated")


def algorithm(name: str, **options: object) -> Algorithm:
    return build(name, options)


def check_equal(name: str, case: Case, other: Case, index: Tensor) -> None:
    """Token ``index[t]`` of the one batch is token t of the other."""
    loss, gradient, _, _ = run(algorithm(name), case)
    other_loss, other_gradient, _, _ = run(algorithm(name), other)
    torch.testing.assert_close(other_loss, loss, **CLOSE)
    torch.testing.assert_close(other_gradient[index], gradient, **CLOSE)


def split_run(name: str, case: Case, micro_batches: list[list[int]]) -> tuple[Tensor, Tensor, dict[str, float]]:
    algo, logprobs = algorithm(name), case.logprobs.clone().requires_grad_()
    targets = algo.prepare(case.batch)
    outputs = [algo.loss(take(case.batch, targets, logprobs, samples)) for samples in micro_batches]
    loss = torch.stack([output.loss for output in outputs]).sum()
    (gradient,) = torch.autograd.grad(loss, logprobs)
    return loss.detach(), gradient, metric_values(merge_metrics(output.metrics for output in outputs))


def permuted(case: Case, order: list[int]) -> tuple[Case, Tensor]:
    """Samples in another order, rollouts and groups renumbered at random too."""
    batch = case.batch
    rng = torch.Generator().manual_seed(len(order))
    spans = [torch.arange(int(batch.cu_seqlens[s]), int(batch.cu_seqlens[s + 1])) for s in order]
    tokens = torch.cat([torch.empty(0, dtype=torch.long), *spans])
    rollout_order = torch.randperm(batch.rollouts, generator=rng)
    new_number = rollout_order.argsort()
    groups = torch.randperm(int(batch.group.max()) + 1, generator=rng)
    changes: dict[str, object] = {name: getattr(batch, name)[tokens] for name in PER_TOKEN}
    changes |= {name: getattr(batch, name)[rollout_order] for name in PER_ROLLOUT}
    changes["group"] = groups[batch.group[rollout_order]]
    changes["rollout"] = new_number[batch.rollout[order]]
    changes["segment"] = batch.segment[order]
    changes["cu_seqlens"] = torch.tensor([0, *[len(span) for span in spans]]).cumsum(0)
    return Case(dataclasses.replace(batch, **changes), case.logprobs[tokens]), tokens.argsort()


def padded(case: Case, pads: list[int]) -> tuple[Case, Tensor]:
    """Tokens off the mask, with arbitrary finite values, after each sample."""
    batch = case.batch
    lengths = batch.lengths()
    shift = torch.tensor([0, *pads[:-1]]).cumsum(0)[: batch.samples]
    index = torch.arange(len(case.logprobs)) + shift[batch.sample_of_token()]
    total = int(lengths.sum()) + sum(pads)

    def widen(x: Tensor, fill: float) -> Tensor:
        return torch.full((total,), fill, dtype=x.dtype).index_copy_(0, index, x)

    fill = {"action_mask": False, "weight_versions": -1, "rollout_logprobs": 0.0}
    changes = {name: widen(getattr(batch, name), fill.get(name, -37.0)) for name in PER_TOKEN}
    edges = torch.cat([torch.zeros(1, dtype=torch.long), (lengths + torch.tensor(pads)).cumsum(0)])
    return Case(dataclasses.replace(batch, cu_seqlens=edges, **changes), widen(case.logprobs, -41.0)), index


def with_reward(batch: RolloutBatch, reward: Tensor) -> RolloutBatch:
    return dataclasses.replace(batch, reward=reward)


@pytest.mark.parametrize("name", ALL)
@settings(max_examples=15, deadline=None)
@given(layout=LAYOUTS, seed=SEEDS, data=st.data())
def test_order_of_samples_rollouts_and_groups(name, layout, seed, data):
    case = make_case(layout, seed)
    order = data.draw(st.permutations(range(case.batch.samples)))
    other, index = permuted(case, order)
    check_equal(name, case, other, index)


@pytest.mark.parametrize("name", ALL)
@settings(max_examples=15, deadline=None)
@given(layout=LAYOUTS, seed=SEEDS, data=st.data())
def test_micro_batches_and_data_parallel_ranks(name, layout, seed, data):
    case = make_case(layout, seed)
    samples = list(range(case.batch.samples))
    whole = split_run(name, case, [samples])
    order = data.draw(st.permutations(samples))
    cut = data.draw(st.integers(0, len(samples)))
    for micro_batches in ([[s] for s in order], [order[:cut], order[cut:]], [order[0::2], order[1::2], []]):
        loss, gradient, metrics = split_run(name, case, micro_batches)
        torch.testing.assert_close(loss, whole[0], **CLOSE)
        torch.testing.assert_close(gradient, whole[1], **CLOSE)
        assert metrics == pytest.approx(whole[2], rel=1e-4, abs=1e-5)


@pytest.mark.parametrize("name", ALL)
@settings(max_examples=15, deadline=None)
@given(layout=LAYOUTS, seed=SEEDS, data=st.data())
def test_padding(name, layout, seed, data):
    case = make_case(layout, seed)
    pads = data.draw(st.lists(st.integers(0, 5), min_size=case.batch.samples, max_size=case.batch.samples))
    other, index = padded(case, pads)
    check_equal(name, case, other, index)


@pytest.mark.parametrize("name", ALL)
@settings(max_examples=15, deadline=None)
@given(layout=LAYOUTS, seed=SEEDS, length=st.integers(0, 4), data=st.data())
def test_another_sample_without_action_tokens(name, layout, seed, length, data):
    case = make_case(layout, seed)
    batch, n = case.batch, len(case.logprobs)
    rollout = data.draw(st.integers(0, batch.rollouts - 1))
    changes = {name: torch.cat([x := getattr(batch, name), torch.zeros(length, dtype=x.dtype)]) for name in PER_TOKEN}
    changes["cu_seqlens"] = torch.cat([batch.cu_seqlens, batch.cu_seqlens[-1:] + length])
    changes["rollout"] = torch.cat([batch.rollout, torch.tensor([rollout])])
    changes["segment"] = torch.cat([batch.segment, torch.tensor([7])])
    other = Case(dataclasses.replace(batch, **changes), torch.cat([case.logprobs, torch.full((length,), -1.0)]))
    check_equal(name, case, other, torch.arange(n))


@pytest.mark.parametrize("name", GROUPED)
@settings(max_examples=15, deadline=None)
@given(layout=LAYOUTS, seed=SEEDS, shift=st.sampled_from([-3.0, 0.25, 1000.0]))
def test_a_constant_added_to_all_rewards(name, layout, seed, shift):
    case = make_case(layout, seed)
    other = Case(with_reward(case.batch, case.batch.reward + shift), case.logprobs)
    check_equal(name, case, other, torch.arange(len(case.logprobs)))


@pytest.mark.parametrize("name", GROUPED)
@settings(max_examples=15, deadline=None)
@given(layout=LAYOUTS, seed=SEEDS, scale=st.sampled_from([0.01, 0.5, 100.0]))
def test_rewards_scaled(name, layout, seed, scale):
    """No change when divided by the deviation; without it the policy's loss scales along."""
    case = make_case(layout, seed)
    other = Case(with_reward(case.batch, case.batch.reward * scale), case.logprobs)
    for normalize, factor in ((True, 1.0), (False, scale)):
        algo = algorithm(name, normalize_std=normalize, std_epsilon=1e-12)
        loss, gradient, _, _ = run(algo, case)
        other_loss, other_gradient, _, _ = run(algo, other)
        torch.testing.assert_close(other_loss, factor * loss, rtol=1e-5, atol=1e-5 * factor)
        torch.testing.assert_close(other_gradient, factor * gradient, rtol=1e-5, atol=1e-5 * factor)


@pytest.mark.parametrize("name", ALL)
def test_metrics_change_neither_loss_nor_gradient(name):
    case = make_case([[[9, 3], [5]], [[8], [2]]], 3)
    with_metrics, without = run(algorithm(name), case), run(algorithm(name), case, observe=False)
    assert torch.equal(with_metrics[0], without[0])
    assert torch.equal(with_metrics[1], without[1])
    assert not without[2].metrics


@pytest.mark.parametrize("name", ALL)
def test_gradient_scales_with_what_comes_from_above(name):
    case = make_case([[[9, 3], [5]], [[8], [2]]], 3)
    targets = algorithm(name).prepare(case.batch)
    gradients = []
    for factor in (1.0, -3.0):
        logprobs = case.logprobs.clone().requires_grad_()
        (factor * algorithm(name).loss(loss_inputs(case.batch, targets, logprobs)).loss).backward()
        gradients.append(logprobs.grad)
    torch.testing.assert_close(gradients[1], -3 * gradients[0])
