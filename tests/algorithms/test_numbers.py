"""The cases that other implementations got wrong, with their numbers."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from algorithms.advantages import Baseline, group_advantages
from algorithms.gae import skip_observation_gae
from algorithms.registry import build
from algorithms.sao import tokens_after
from tests.algorithms import reference
from tests.algorithms.batches import Case, make_case, run


def f64(*x: float) -> torch.Tensor:
    return torch.tensor(x, dtype=torch.float64)


def advantages_of(reward: list[float], group: list[int], **options: object) -> torch.Tensor:
    valid = np.ones(len(group), dtype=bool)
    return torch.from_numpy(group_advantages(np.array(reward), np.array(group), valid, **options))


def gae(values, mask, reward, lam):
    lengths = torch.tensor([0, len(values)])
    got = skip_observation_gae(
        torch.tensor(values), torch.tensor(mask, dtype=torch.bool), lengths, f64(reward), 1.0, f64(lam)
    )
    return got.tolist()


def test_ragged_groups_are_normalised_inside_themselves():
    reward = [1.0, 0, 0, 1, 5, 5, 5, 3, 1, 2, 2]
    advantage = advantages_of(reward, [0] * 4 + [1] * 3 + [2] * 4, normalize_std=True)
    for members in (slice(0, 4), slice(7, 11)):
        r = f64(*reward[members])
        torch.testing.assert_close(advantage[members], (r - r.mean()) / (r.std() + 1e-6))
    assert advantage[4:7].tolist() == [0, 0, 0]


def test_equal_rewards_that_are_no_binary_fraction_have_no_advantage():
    assert advantages_of([0.1, 0.1, 0.1], [0, 0, 0], normalize_std=True).tolist() == [0, 0, 0]


def test_the_baseline_is_over_rollouts_not_over_the_samples_that_one_was_forked_into():
    case = make_case([[[3, 3, 3], [3]]], 0, spoil=False)
    batch = dataclasses.replace(
        case.batch, reward=f64(1, 0), action_mask=torch.ones(12, dtype=torch.bool), current_version=0
    )
    targets = build("grpo", {"normalize_std": False}).prepare(batch)
    assert targets.advantages[::3].tolist() == [0.5, 0.5, 0.5, -0.5]
    # G = 2 rollouts, and the three samples have one common |y| of 9 tokens.
    torch.testing.assert_close(targets.weights[[0, 9]], torch.tensor([1 / 2 / 9, 1 / 2 / 3]))


def test_rewards_that_differ_in_the_fifth_digit():
    advantage = advantages_of([1, 1.00001, 2, 2.00001], [0, 0, 1, 1], normalize_std=True)
    torch.testing.assert_close(advantage[:2], advantage[2:], rtol=1e-9, atol=0)
    assert float(advantage[1]) == pytest.approx(5e-6 / (1e-5 / 2**0.5 + 1e-6), rel=1e-6)


def test_leave_one_out_baseline():
    advantage = advantages_of([1, 0, 0.5], [0, 0, 0], baseline=Baseline.LEAVE_ONE_OUT, normalize_std=False)
    assert advantage.tolist() == [1 - 0.25, 0 - 0.75, 0.5 - 0.5]


@pytest.mark.parametrize("name", ["grpo", "dis", "gspo", "cispo", "sao", "opd", "sft"])
def test_a_sample_without_action_token_contributes_nothing_and_makes_nothing_nan(name):
    case = make_case([[[0], [4], [3]]], 1, spoil=False)
    mask = case.batch.action_mask.clone()
    mask[4:] = False
    loss, gradient, _, targets = run(
        build(name, {}), Case(dataclasses.replace(case.batch, action_mask=mask), case.logprobs)
    )
    assert loss.isfinite()
    assert gradient.isfinite().all()
    assert (gradient[4:] == 0).all()
    assert float(targets.weights.sum()) == pytest.approx(1)


@pytest.mark.parametrize("name", ["grpo", "dis", "gspo", "cispo", "sao", "opd", "sft"])
@pytest.mark.parametrize("layout", [[[[0], [0]]], [[[4], [3]]]])
def test_a_batch_without_any_trained_token_has_loss_0(name, layout):
    case = make_case(layout, 1, spoil=False)
    batch = dataclasses.replace(case.batch, action_mask=torch.zeros_like(case.batch.action_mask))
    loss, gradient, _, _ = run(build(name, {}), Case(batch, case.logprobs))
    assert loss == 0
    assert (gradient == 0).all()


def test_dropped_members_stay_in_the_baseline_and_failed_ones_and_copies_do_not():
    case = make_case([[[2], [2], [2], [2]]], 0, spoil=False)
    no = torch.zeros(4, dtype=torch.bool)
    batch = dataclasses.replace(
        case.batch,
        action_mask=torch.ones(8, dtype=torch.bool),
        current_version=0,
        reward=f64(1, 0, float("nan"), 1),
        valid=torch.tensor([True, True, False, True]),
        dropped=torch.tensor([False, True, False, False]),
        truncated=no,
        repeated=torch.tensor([False, False, False, True]),
    )
    targets = build("dis", {}).prepare(batch)
    assert targets.advantages[::2].tolist() == [0.5, -0.5, 0, 0.5]
    assert targets.weights.tolist() == [0.25, 0.25, 0, 0, 0, 0, 0.25, 0.25]
    dropped = {name.removeprefix("dropped/"): metric.value() for name, metric in targets.metrics.items()}
    assert (dropped["environment"], dropped["stale"], dropped["truncated"]) == (1, 1, 0)


def test_gae_skips_observations():
    got = gae([0.5, 0.5, 9.0, 9.0, 0.2], [1, 1, 0, 0, 1], 1.0, 0.95)
    assert [round(x, 3) for x in got] == [0.437, 0.46, 0, 0, 0.8]
    assert gae([0.0, 0.0, 100.0], [1, 1, 0], 1.0, 0.95) == pytest.approx([0.95, 1.0, 0.0])


def test_segments_after_a_compaction():
    case = make_case([[[2, 3]]], 0, spoil=False)
    batch = dataclasses.replace(
        case.batch,
        action_mask=torch.ones(5, dtype=torch.bool),
        values=torch.zeros(5),
        reward=f64(1),
        current_version=0,
    )
    assert tokens_after(np.array([2.0, 3.0]), batch.rollout.numpy(), batch.segment.numpy()).tolist() == [3, 0]
    targets = build("sao", {"lambda_policy": 0.95}).prepare(batch)
    assert targets.advantages.tolist() == pytest.approx([0.81450625, 0.857375, 0.9025, 0.95, 1.0])
    assert targets.returns.tolist() == [1, 1, 1, 1, 1]


def test_segments_may_come_in_any_order():
    rollout, segment = np.array([1, 0, 1, 1, 0]), np.array([2, 1, 0, 1, 0])
    assert tokens_after(np.array([1.0, 2, 4, 8, 16]), rollout, segment).tolist() == [0, 0, 9, 1, 2]


def test_length_adaptive_lambda():
    case = make_case([[[6]]], 0, spoil=False)
    batch = dataclasses.replace(
        case.batch, action_mask=torch.ones(6, dtype=torch.bool), values=torch.zeros(6), reward=f64(1), current_version=0
    )
    lam = 1 - 1 / (1.5 * 6)
    expected = [lam**n for n in range(5, -1, -1)]
    assert build("sao", {}).prepare(batch).advantages.tolist() == pytest.approx(expected)


@pytest.mark.parametrize("lam", [0.0, 0.3, 0.95, 0.9999, 1.0])
def test_gae_does_not_underflow_over_long_sequences(lam):
    rng = torch.Generator().manual_seed(0)
    lengths = [1, 40_000, 300_000, 7]  # the third spans several tiles
    edges = torch.tensor([0, *lengths]).cumsum(0)
    values, mask = torch.randn(int(edges[-1]), generator=rng), torch.rand(int(edges[-1]), generator=rng) < 0.9
    rewards = torch.randn(4, generator=rng, dtype=torch.float64)
    got = skip_observation_gae(values, mask, edges, rewards, 0.999, torch.full((4,), lam, dtype=torch.float64))
    for s, reward in enumerate(rewards.tolist()):
        span = slice(int(edges[s]), int(edges[s + 1]))
        on = mask[span]
        value = values[span][on].tolist()
        expected = reference.gae(value, [0.0] * (len(value) - 1) + [reward] * bool(value), 0.999, lam)
        torch.testing.assert_close(got[span][on], torch.tensor(expected), rtol=1e-5, atol=1e-5)
        assert not got[span][~on].any()
