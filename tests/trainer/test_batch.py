import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from algorithms.types import Targets
from rl.batch import LossConstants, build_batch, plan_micro_batches, sample_cost, take_samples
from rollout.trajectory import StopReason
from tests.trainer.common import make_trajectories, make_trajectory

BALANCE = st.sampled_from([math.inf, 1000.0, 20.0])


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(0, 60), max_size=40), st.integers(1, 80), st.integers(1, 5), BALANCE, st.integers(1, 3))
def test_plan_loses_nothing_and_keeps_the_budget(lengths, budget, ranks, balance, multiple):
    plan = plan_micro_batches(lengths, budget, ranks, balance, multiple)
    assert len(plan) == ranks
    assert len({len(micro_batches) for micro_batches in plan}) == 1
    assert len(plan[0]) >= 1
    assert len(plan[0]) % multiple == 0
    members = [sample for micro_batches in plan for micro_batch in micro_batches for sample in micro_batch]
    assert sorted(members) == list(range(len(lengths)))
    for micro_batches in plan:
        for micro_batch in micro_batches:
            assert micro_batch == sorted(micro_batch)
            assert sum(lengths[s] for s in micro_batch) <= budget or len(micro_batch) == 1
    if len(lengths) >= ranks * len(plan[0]):
        assert all(micro_batch for micro_batches in plan for micro_batch in micro_batches)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(1, 60), min_size=20, max_size=60), st.integers(60, 200), st.integers(2, 4), BALANCE)
def test_plan_balances_ranks(lengths, budget, ranks, balance):
    plan = plan_micro_batches(lengths, budget, ranks, balance)
    costs = [
        [sum(sample_cost(lengths[s], balance) for s in micro_batch) for micro_batch in micro_batches]
        for micro_batches in plan
    ]
    loads = [sum(of_rank) for of_rank in costs]
    assert max(loads) - min(loads) <= max(max(of_rank) for of_rank in costs) + 1e-6


def test_long_samples_weigh_more_than_their_tokens():
    # With attention the long one (800 + 1600) outweighs all the short ones (16 · (100 + 25)).
    lengths = [800, *[100] * 16]
    by_tokens = plan_micro_batches(lengths, 10_000, 2)
    by_cost = plan_micro_batches(lengths, 10_000, 2, balance_length=400.0)
    assert sorted(sum(lengths[s] for s in m) for (m,) in by_tokens) == [1200, 1200]
    assert sorted(len(m) for (m,) in by_cost) == [1, 16]
    assert sample_cost(400, 400.0) == 800


def test_segments_share_a_rollout():
    batch = build_batch(
        [
            make_trajectory(6, 7, 0, reward=1.0, segment=1, stop_reason=StopReason.LENGTH),
            make_trajectory(4, 3, 1, reward=2.0, repeated=True),
            make_trajectory(5, 7, 0, reward=1.0, segment=0),
            make_trajectory(3, 3, 0, reward=0.5, stop_reason=StopReason.FAILED),
        ],
        current_version=2,
        dropped={(3, 1)},
    ).rollout
    assert batch.rollout.tolist() == [2, 1, 2, 0]
    assert batch.segment.tolist() == [1, 0, 0, 0]
    assert batch.group.tolist() == [0, 0, 1]
    assert batch.reward.tolist() == [0.5, 2.0, 1.0]
    assert batch.valid.tolist() == [False, True, True]
    assert batch.truncated.tolist() == [False, False, True]
    assert batch.dropped.tolist() == [False, True, False]
    assert batch.repeated.tolist() == [False, True, False]
    assert batch.cu_seqlens.tolist() == [0, 6, 10, 15, 18]
    assert batch.reward.dtype == torch.float64


def test_the_engines_likeliest_tokens_go_with_their_tokens():
    plain, recorded = make_trajectory(5, 0, 0), make_trajectory(7, 0, 1)
    mask = recorded.action_mask[:, None]
    ids = np.where(mask, np.arange(14, dtype=np.int32).reshape(7, 2), -1)
    recorded = recorded.replace(top_ids=ids, top_logprobs=np.where(mask, -ids / 10, 0).astype(np.float32))
    batch = build_batch([plain, recorded], 0).rollout
    assert batch.top_ids.dtype == torch.int32
    assert batch.top_ids.tolist() == [[-1, -1]] * 5 + ids.tolist()
    assert batch.top_logprobs.dtype == torch.float32
    np.testing.assert_array_equal(batch.top_logprobs[5:], recorded.top_logprobs)
    assert build_batch([plain], 0).rollout.top_ids is None
    with pytest.raises(ValueError, match=r"rows of top_ids have different shapes: \[\(1,\), \(2,\)\]"):
        build_batch(
            [recorded, recorded.replace(sample_id=2, top_ids=ids[:, :1], top_logprobs=recorded.top_logprobs[:, :1])], 0
        )


def test_taken_samples_are_slices_of_the_batch():
    trajectories = make_trajectories()
    batch = build_batch(trajectories, 0)
    order = [5, 0, 3]
    taken = take_samples(batch, order)
    assert taken.token_ids.tolist() == np.concatenate([trajectories[s].token_ids for s in order]).tolist()
    assert taken.cu_seqlens.diff().tolist() == [len(trajectories[s]) for s in order]
    tokens = len(batch.token_ids)
    targets = Targets(torch.arange(tokens).float(), torch.ones(tokens))
    inputs, own = LossConstants.of(batch.rollout, targets).inputs(taken, torch.zeros(len(taken.token_ids)), None)
    assert own.tolist() == inputs.action_mask.tolist() == batch.rollout.action_mask[taken.index].tolist()
    assert inputs.advantages.tolist() == taken.index.tolist()
    assert inputs.rollout_logprobs.tolist() == [x for s in order for x in trajectories[s].rollout_logprobs.tolist()]
    assert inputs.old_logprobs is None
    assert take_samples(batch, []).cu_seqlens.tolist() == [0]


@pytest.mark.parametrize(
    ("trajectories", "dropped", "message"),
    [
        ([], (), "at least one"),
        ([make_trajectory(4), make_trajectory(4)], (), "more than once"),
        ([make_trajectory(4, segment=0), make_trajectory(4, segment=1, reward=2.0)], (), "different rewards"),
        ([make_trajectory(4, version=3)], (), "version 3, newer than the current version 2"),
        ([make_trajectory(4, temperature=0.0)], (), "temperature 0.0 must be above 0"),
        ([make_trajectory(4)], {(9, 9)}, r"\(9, 9\)"),
    ],
)
def test_malformed_batches_are_refused(trajectories, dropped, message):
    with pytest.raises(ValueError, match=message):
        build_batch(trajectories, 2, dropped)
