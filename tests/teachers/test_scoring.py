"""The order in which teachers score: nearest first, and the same for the same figures."""

from __future__ import annotations

from teachers.scoring import scoring_order


def test_resident_teachers_score_first_then_pinned_ones_and_ties_go_by_name():
    counts = {"d": 3, "a": 3, "b": 9, "c": 1, "e": 2, "none": 0}
    assert scoring_order(counts, in_hbm="cd", in_pinned="e") == ["d", "c", "e", "b", "a"]
