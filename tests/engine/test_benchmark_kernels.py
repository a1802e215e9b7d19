"""Timing kernels alone: what is selected misses as often as asked for, and what follows from the seconds."""

import pytest

from benchmarks.engine.kernels import alternating, fetching


def test_selections_differ_in_as_many_positions_as_asked_for():
    first, second = alternating(3, 5_000, 2_048, 107)
    for before, after in zip(first.tolist(), second.tolist(), strict=True):
        assert len(set(before)) == len(set(after)) == 2_048
        assert len(set(after) - set(before)) == 107
        assert max(before + after) < 5_000


def test_seconds_part_into_a_call_and_its_bytes():
    calls = [
        {"requests": n, "misses": m, "seconds": 3e-5 + n * m * 1_152 / 5e10} for n in (8, 256) for m in (0, 107, 1_056)
    ]
    assert fetching(calls, 1_152) == pytest.approx({"swap_in_bytes_per_s": 5e10, "swap_overhead_s": 3e-5})
