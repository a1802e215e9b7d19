"""How large the benchmark's teachers are when they have to be done in time, and what it may say of short waits."""

import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.teachers import __main__ as benchmark
from benchmarks.teachers import codecs
from benchmarks.teachers.__main__ import STEP, WIDEST, widest
from benchmarks.teachers.summary import LEAST_SHARE, Wait

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


seconds = st.floats(-5.0, 5.0)


@given(st.lists(seconds, min_size=1, max_size=7), st.floats(0.1, 100.0), st.floats(0.0, 2.0), st.floats(0.1, 100.0))
def test_no_multiple_says_more_than_the_rounds_can_tell(waits, scoring, spread, other):
    wait = Wait.of(waits, scoring, spread)
    most = other / max(LEAST_SHARE * scoring, spread, -min(waits))
    assert 0 < wait.multiple(other) <= 1.0001 * most
    cautious = wait.seconds <= wait.resolution
    assert wait.times(other).startswith("≥ ") == wait.said(scoring).startswith("< ") == cautious
    assert cautious or wait.seconds > 0


def test_waits_seen_on_the_h200():
    at_one = Wait.of([-0.0129, 0.0170, 0.0262, -0.0160, -0.0031], 10.532, 0.0)
    assert at_one.times(10.154) == "≥ 635×"
    assert at_one.said(10.532) == "< 0.016 s (< 0.2% of S)"
    at_half = Wait.of([2.738, 3.569, 3.514, 4.370, 4.077], 5.2405, 0.01)
    assert (at_half.times(10.154), at_half.said(5.2405)) == ("2.8×", "3.569 s (68.1% of S)")


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("main", [benchmark.main, codecs.main])
def test_what_else_lies_in_the_folder_to_measure_stays(tmp_path, monkeypatch, main, fails):
    """It may be a whole disk's."""
    (tmp_path / "mine").write_text("")

    def measure(options):
        (options.root / "made").write_text("")
        if fails:
            raise RuntimeError("no space")
        return []

    monkeypatch.setattr(benchmark.Bench, "run", lambda bench: measure(bench.options))
    monkeypatch.setattr(codecs, "measure", measure)
    monkeypatch.setattr(sys, "argv", ["benchmark", "--device", "cpu", "--root", str(tmp_path)])
    if fails:
        with pytest.raises(RuntimeError, match="no space"):
            main()
    else:
        assert main() == 0
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]
