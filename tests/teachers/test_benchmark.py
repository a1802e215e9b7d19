"""How large the benchmark's teachers are when they have to be done in time."""

from hypothesis import given
from hypothesis import strategies as st

from benchmarks.teachers.__main__ import STEP, WIDEST, widest

speeds = st.floats(0.1, 10.0)


@given(st.floats(1.0, 2000.0), st.integers(1, 9), speeds, speeds, st.floats(1.0, 3.0))
def test_more_time_and_faster_disks_make_larger_teachers_up_to_a_billion_parameters(seconds, rounds, read, write, more):
    width = widest(seconds, rounds, read, write)
    assert STEP <= width <= WIDEST
    assert width % STEP == 0
    assert width <= widest(more * seconds, rounds, read, write)
    assert width <= widest(seconds, rounds, more * read, write)
    assert width <= widest(seconds, rounds, read, more * write)
    assert width >= widest(seconds, rounds + 1, read, write)


def test_at_the_speeds_seen_on_the_h200():
    assert widest(600.0, 5, 1.66, 0.6) == WIDEST
    assert 1408 <= widest(245.0, 5, 1.2, 0.6) < widest(245.0, 5, 1.66, 0.6) < WIDEST
