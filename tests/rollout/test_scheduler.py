"""The scheduler admits within its law, retries, drops by reason, keeps shares, and accounts for each prompt once."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollout.prompts import PromptRef, PromptStream
from rollout.scheduler import RolloutResult, Scheduler, SchedulerConfig, SchedulerState, Verdict


def keep_all(rewards, valid):
    return Verdict(repeat=[valid.index(True)] * valid.count(False)) if any(valid) else Verdict(drop="environment")


def scheduler(tasks=("a",), prompts=50, judge=keep_all, seed=0, **changes):
    values = {
        "group_size": 2,
        "groups_per_step": 3,
        "steps_ahead": 1,
        "total_steps": 1000,
        "max_lag": None,
        "max_rollouts": 1000,
        "max_attempts": 2,
        "max_refusals": 3,
        "shares": dict.fromkeys(tasks, 1.0),
        "slots": dict.fromkeys(tasks, 1000),
    } | changes
    streams = {task: PromptStream(task, [f"{task}{i}" for i in range(prompts)], seed) for task in tasks}
    return Scheduler(SchedulerConfig(**values), streams, judge)


def good(version=0, reward=1.0):
    return RolloutResult(valid=True, reward=reward, oldest_version=version)


def test_synchronous_admits_exactly_one_step_and_waits_for_the_weights():
    s = scheduler(steps_ahead=0)
    started = s.starts(0.0)
    assert len(started) == 6
    assert s.starts(0.0) == []
    for start in started:
        s.ended(start.rollout_id, good(), 0.0)
    batch, _ = s.take_batch()
    assert len(batch) == 3
    assert s.starts(0.0) == []  # the batch is being trained: nothing may be sampled with the old weights
    s.trained()
    assert s.starts(0.0) == []
    s.published(1)
    assert len(s.starts(0.0)) == 6


def test_asynchronous_generation_runs_ahead_by_the_staleness_and_no_further():
    s = scheduler(steps_ahead=2)
    assert len(s.starts(0.0)) == 3 * 3 * 2
    assert s.starts(0.0) == []


def test_the_next_batchs_prompts_are_known_when_they_are_admitted():
    s = scheduler(steps_ahead=1)
    assert s.ahead() == []
    started = s.starts(0.0)
    refs = [start.ref for start in started[::2]]  # two rollouts a group
    assert s.ahead() == refs[:3]
    for start in started:
        s.ended(start.rollout_id, good(), 0.0)
    batch, _ = s.take_batch()
    assert s.ahead() == [ref for ref in refs if ref not in [group.ref for group in batch]]


def test_nothing_is_generated_for_steps_after_the_last():
    s = scheduler(steps_ahead=5, total_steps=2)
    assert len(s.starts(0.0)) == 2 * 3 * 2


def test_limits_of_rollouts_and_slots_hold():
    s = scheduler(tasks=("a", "b"), steps_ahead=5, max_rollouts=7, slots={"a": 3, "b": 100})
    started = s.starts(0.0)
    by_task = Counter(start.ref.task for start in started)
    assert by_task["a"] == 3
    assert sum(by_task.values()) == 7


def test_a_failed_rollout_is_tried_again_after_a_delay_then_counts_as_failed():
    s = scheduler(groups_per_step=1, steps_ahead=0)
    first, second = s.starts(0.0)
    s.ended(first.rollout_id, good(), 0.0)
    assert s.ended(second.rollout_id, RolloutResult(valid=False), 0.0) is None
    assert s.starts(0.1) == []
    assert s.wake_at() == 0.25
    (again,) = s.starts(0.25)
    assert (again.rollout_id, again.attempt) == (second.rollout_id, 1)
    s.ended(again.rollout_id, RolloutResult(valid=False), 1.0)
    (group,), _ = s.take_batch()
    assert [m.rollout_id for m in group.members] == [first.rollout_id, first.rollout_id]  # stands in for the failed one


def test_refusals_delay_without_costing_an_attempt_and_are_bounded():
    s = scheduler(groups_per_step=1, group_size=1, steps_ahead=0)
    (start,) = s.starts(0.0)
    assert s.refused(start.rollout_id, 0.0) is None
    (start,) = s.starts(10.0)
    assert start.attempt == 0
    assert s.refused(start.rollout_id, 10.0) is None
    (start,) = s.starts(30.0)
    dropped = s.refused(start.rollout_id, 30.0)
    assert dropped is not None
    assert dropped.reason == "environment"


def test_a_dropped_group_is_replaced_by_the_next_prompt():
    s = scheduler(groups_per_step=1, steps_ahead=0, judge=lambda rewards, valid: Verdict(drop="zero_variance"))
    started = s.starts(0.0)
    s.ended(started[0].rollout_id, good(), 0.0)
    dropped = s.ended(started[1].rollout_id, good(), 0.0)
    assert (dropped.ref, dropped.reason) == (started[0].ref, "zero_variance")
    replacement = s.starts(0.0)
    assert len(replacement) == 2
    assert replacement[0].ref != started[0].ref
    assert s.dropped == {"zero_variance": 1}


def test_stale_members_are_marked_and_a_group_of_them_is_dropped():
    s = scheduler(groups_per_step=1, steps_ahead=3, max_lag=1)
    started = s.starts(0.0)
    groups = {}
    for start in started:
        groups.setdefault(start.group_id, []).append(start.rollout_id)
    all_old, half_old, *_ = groups.values()
    s.published(2)
    s.ended(all_old[0], good(0), 0.0)
    s.ended(all_old[1], good(0), 0.0)
    s.ended(half_old[0], good(0), 0.0)
    s.ended(half_old[1], good(2), 0.0)
    (taken,), dropped = s.take_batch()
    assert [group.reason for group in dropped] == ["stale"]
    assert [m.stale for m in taken.members] == [True, False]


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 10_000), eta=st.integers(0, 3), share=st.sampled_from([1.0, 2.0, 5.0]))
def test_whatever_happens_each_prompt_is_trained_once_or_dropped_also_across_a_resume(seed, eta, share):
    """Random ends, failures, refusals, drops; a crash in the middle goes back to a random earlier checkpoint."""
    chance = random.Random(seed)

    def judge(rewards, valid):
        if chance.random() < 0.2 or not any(valid):
            return Verdict(drop="zero_variance")
        return Verdict(repeat=[valid.index(True)] * valid.count(False))

    def build():
        return scheduler(("a", "b"), 7, judge, steps_ahead=eta, shares={"a": share, "b": 1.0}, max_rollouts=9)

    def handed_out(state):
        """Every prompt that the streams gave up to a state, from their seeds alone."""
        refs = set()
        for task, at in state.streams.items():
            stream = PromptStream(task, [f"{task}{i}" for i in range(7)], 0)
            refs |= {stream.next() for _ in range(at.epoch * 7 + at.position)}
        return refs

    def check(s, fates):
        """Handed out = in the ledger + outstanding, each once."""
        state = s.snapshot()
        outstanding = [PromptRef(p.task, p.epoch, p.prompt_id) for p in state.outstanding]
        counts = Counter([ref for _, ref in fates] + outstanding)
        assert set(counts) == handed_out(state)
        assert max(counts.values()) == 1
        return state

    s = build()
    fates: list[tuple[int, object]] = []
    saved: SchedulerState | None = None
    saved_fates: list = []
    saved_step = 0
    crashes, step, now, flying = 3, 0, 0.0, []
    drops = []
    while step < 12:
        flying += s.starts(now)
        assert len(flying) <= 9
        assert s._taken_groups + s._outstanding() <= (s.version + 1 + eta) * 3
        now += 0.5
        chance.shuffle(flying)
        for start in [flying.pop() for _ in range(min(len(flying), chance.randint(1, 6)))]:
            draw = chance.random()
            if draw < 0.1:
                dropped = s.refused(start.rollout_id, now)
            else:
                dropped = s.ended(start.rollout_id, RolloutResult(draw > 0.25, draw, s.version), now)
            if dropped:
                drops.append((step + 1, dropped.ref))
        batch, stale = s.take_batch()
        assert not stale
        if batch is None:
            continue
        step += 1
        s.trained()
        s.published(step)
        fates += [(step, group.ref) for group in batch] + drops
        drops = []
        state = check(s, fates)
        if chance.random() < 0.4:
            saved, saved_fates, saved_step = state, list(fates), step
        if saved and crashes and chance.random() < 0.3:
            crashes -= 1
            s = build()
            s.restore(SchedulerState.model_validate_json(saved.model_dump_json()))
            fates, step, flying, drops = list(saved_fates), saved_step, [], []
            check(s, fates)


def test_shares_hold_among_what_is_trained_though_one_task_is_slow():
    s = scheduler(("fast", "slow"), 1000, shares={"fast": 3.0, "slow": 1.0}, groups_per_step=4, steps_ahead=0)
    trained: Counter[str] = Counter()
    for step in range(1, 26):
        flying = s.starts(0.0)
        for start in sorted(flying, key=lambda x: x.ref.task):
            s.ended(start.rollout_id, good(), 0.0)
        batch, _ = s.take_batch()
        trained.update(group.ref.task for group in batch)
        s.trained()
        s.published(step)
    assert trained == {"fast": 75, "slow": 25}


def test_prompts_come_in_an_order_given_by_the_seed_each_epoch_anew():
    def order(seed):
        stream = PromptStream("a", list("abcdef"), seed)
        return [stream.next() for _ in range(12)]

    assert order(1) == order(1)
    assert order(1) != order(2)
    first, second = order(1)[:6], order(1)[6:]
    assert {ref.prompt_id for ref in first} == {ref.prompt_id for ref in second} == set("abcdef")
    assert [ref.epoch for ref in second] == [1] * 6


def test_restoring_onto_other_tasks_is_refused_by_name():
    state = scheduler(("a",)).snapshot()
    with pytest.raises(ValueError, match=r"\['a'\].*\['a', 'b'\]"):
        scheduler(("a", "b")).restore(state)
