"""The order in which teachers score: nearest first, the same on every rank."""

from __future__ import annotations

from teachers.scoring import group_by_teacher, scoring_order, shared_order


def test_resident_teachers_score_first_then_pinned_ones_and_ties_are_the_same_on_every_rank():
    counts = {"d": 3, "a": 3, "b": 9, "c": 1, "e": 2, "none": 0}
    assert scoring_order(counts, in_hbm="cd", in_pinned="e") == ["d", "c", "e", "b", "a"]


def test_a_rank_without_rollouts_of_a_teacher_takes_its_turn():
    ranks = [{"a": 1, "b": 4}, {"c": 5}, {"a": 1}]
    assert shared_order(ranks) == ["c", "b", "a"]
    assert shared_order(reversed(ranks)) == ["c", "b", "a"]


def test_a_rollout_may_have_several_teachers():
    assert group_by_teacher(["a", ("b", "a"), "b"]) == {"a": [0, 1], "b": [1, 2]}
