"""Groups and tokens that are left out, and how they are counted."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from algorithms.filters import decide_group, stale_tokens
from algorithms.metrics import metric_values
from algorithms.registry import build
from algorithms.types import GroupDecision, GroupVerdict
from tests.algorithms.batches import make_case


def decide(rewards, valid=None, filter_zero_variance=True):
    valid = np.ones(len(rewards), dtype=bool) if valid is None else np.array(valid, dtype=bool)
    return decide_group(np.array(rewards, dtype=np.float64), valid, filter_zero_variance=filter_zero_variance)


@pytest.mark.parametrize(
    ("rewards", "valid", "decision"),
    [
        ([1, 0, 1, 0], [1, 1, 1, 1], GroupDecision(GroupVerdict.KEEP)),
        ([1, 1, 1, 1], [1, 1, 1, 1], GroupDecision(GroupVerdict.ZERO_VARIANCE)),
        ([1, 0, 1, 0], [1, 1, 1, 0], GroupDecision(GroupVerdict.KEEP, (0,))),
        ([1, 9, 0, 9, 1], [1, 0, 1, 0, 1], GroupDecision(GroupVerdict.KEEP, (0, 2))),
        ([1, 0, 9, 9], [1, 1, 0, 0], GroupDecision(GroupVerdict.ENVIRONMENT)),  # half is not more than half
        ([1, 1, 9], [1, 1, 0], GroupDecision(GroupVerdict.ZERO_VARIANCE)),  # a failed one's reward means nothing
        ([9, 9], [0, 0], GroupDecision(GroupVerdict.ENVIRONMENT)),
        ([float("nan"), 0, 1], [0, 1, 1], GroupDecision(GroupVerdict.KEEP, (1,))),
        ([1], [1], GroupDecision(GroupVerdict.ZERO_VARIANCE)),
    ],
)
def test_groups(rewards, valid, decision):
    assert decide(rewards, valid) == decision


def test_equal_rewards_are_kept_when_not_filtered():
    assert decide([1, 1], filter_zero_variance=False) == GroupDecision(GroupVerdict.KEEP)
    assert decide([1, 1.00001]) == GroupDecision(GroupVerdict.KEEP)


def test_rewards_as_tensors_and_lists():
    assert decide_group([1.0, 0.0], [True, True], filter_zero_variance=True) == GroupDecision(GroupVerdict.KEEP)
    tensors = torch.tensor([1.0, 0.0], dtype=torch.float64), torch.tensor([True, True])
    assert decide_group(*tensors, filter_zero_variance=True) == GroupDecision(GroupVerdict.KEEP)


def test_stale_tokens():
    versions, mask = np.array([-1, 5, 6, 10, 0]), np.array([False, True, True, True, False])
    assert stale_tokens(versions, mask, 10, 4).tolist() == [False, True, False, False, False]


@pytest.mark.parametrize(
    ("options", "weights"),
    [
        ({"stale": "drop"}, [0, 0, 0, 0, 1 / 2, 1 / 2]),
        ({"stale": "mask"}, [0, 1 / 5, 1 / 5, 1 / 5, 1 / 5, 1 / 5]),
        ({"max_staleness": 5}, [1 / 6] * 6),
        ({"max_staleness": 3}, [0, 0, 0, 0, 1 / 2, 1 / 2]),
        ({"max_staleness": 3, "stale": "mask"}, [0, 0, 0, 1 / 3, 1 / 3, 1 / 3]),
    ],
)
def test_a_stale_rollout_is_dropped_whole_or_only_its_stale_tokens(options, weights):
    case = make_case([[[2, 2], [2]]], 0, spoil=False)
    batch = dataclasses.replace(
        case.batch,
        action_mask=torch.ones(6, dtype=torch.bool),
        weight_versions=torch.tensor([5, 6, 6, 7, 10, 10], dtype=torch.int32),
        current_version=10,
        reward=torch.tensor([1.0, 0.0], dtype=torch.float64),
    )
    targets = build("dis", options).prepare(batch)
    torch.testing.assert_close(targets.weights, torch.tensor(weights, dtype=torch.float32))
    assert targets.advantages.tolist() == [0.5] * 4 + [-0.5] * 2, "the baseline keeps the dropped one"
    dropped = options.get("stale") != "mask" and weights[0] == 0
    assert metric_values(targets.metrics)["dropped/stale"] == dropped


@pytest.mark.parametrize("name", ["grpo", "dis", "sao"])
def test_whoever_masks_stale_tokens_lets_the_rollouts_that_have_some_be_kept(name):
    assert build(name, {}).drops_stale
    assert not build(name, {"stale": "mask"}).drops_stale


@pytest.mark.parametrize(("mask_truncated", "trained"), [(True, [1, 0]), (False, [1, 1])])
def test_truncated_rollouts(mask_truncated, trained):
    case = make_case([[[2], [2]]], 0, spoil=False)
    batch = dataclasses.replace(
        case.batch,
        action_mask=torch.ones(4, dtype=torch.bool),
        current_version=0,
        truncated=torch.tensor([False, True]),
        reward=torch.tensor([1.0, 0.0], dtype=torch.float64),
    )
    targets = build("grpo", {"mask_truncated": mask_truncated, "normalize_std": False}).prepare(batch)
    assert (targets.weights[::2] != 0).int().tolist() == trained
    assert targets.advantages[::2].tolist() == [0.5, -0.5]
    assert metric_values(targets.metrics)["dropped/truncated"] == mask_truncated


def test_overlong_rewards_enter_the_baseline():
    case = make_case([[[10], [5]]], 0, spoil=False)
    batch = dataclasses.replace(
        case.batch,
        action_mask=torch.ones(15, dtype=torch.bool),
        current_version=0,
        reward=torch.tensor([1.0, 1.0], dtype=torch.float64),
    )
    options = {"normalize_std": False, "overlong_length": 12, "overlong_buffer": 4}
    assert build("grpo", options).prepare(batch).advantages[[0, 14]].tolist() == [-0.25, 0.25]


def test_sft_weighs_samples_by_reward():
    case = make_case([[[2]], [[3]]], 0, spoil=False)
    batch = dataclasses.replace(
        case.batch, action_mask=torch.ones(5, dtype=torch.bool), reward=torch.tensor([3.0, 1.0], dtype=torch.float64)
    )
    weights = build("sft", {"weight_by_reward": True}).prepare(batch).weights
    torch.testing.assert_close(weights, torch.tensor([3, 3, 1, 1, 1]) / 9)
    torch.testing.assert_close(build("sft", {}).prepare(batch).weights, torch.ones(5) / 5)
    negative = dataclasses.replace(batch, reward=-batch.reward)
    with pytest.raises(ValueError, match="weight_by_reward"):
        build("sft", {"weight_by_reward": True}).prepare(negative)
