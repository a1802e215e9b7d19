"""A tier never exceeds its budget, evicts nothing that is in use, and loads as seldom as is possible."""

from __future__ import annotations

import functools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from teachers.errors import TierFullError
from teachers.residency import Admission, Residency

NAMES = "abcde"
TRACES = st.lists(st.sampled_from(NAMES), min_size=1, max_size=12)


def play(trace, slots, scheduled):
    tier = Residency(slots, dict.fromkeys(NAMES, 1))
    if scheduled:
        tier.schedule(trace)
    for teacher in trace:
        tier.need(teacher)
        assert tier.used_bytes <= slots
    return tier.loads


def fewest_loads(trace, slots):
    """By trying every choice of a victim."""

    @functools.cache
    def best(at, resident):
        if at == len(trace):
            return 0
        teacher = trace[at]
        if teacher in resident:
            return best(at + 1, resident)
        if len(resident) < slots:
            return 1 + best(at + 1, resident | {teacher})
        return 1 + min(best(at + 1, resident - {victim} | {teacher}) for victim in resident)

    return best(0, frozenset())


@settings(max_examples=200, deadline=None)
@given(trace=TRACES, slots=st.integers(1, 4))
def test_on_a_known_schedule_it_loads_as_seldom_as_possible_and_never_more_than_lru(trace, slots):
    scheduled = play(trace, slots, scheduled=True)
    assert scheduled == fewest_loads(trace, slots)
    assert scheduled <= play(trace, slots, scheduled=False)


@settings(max_examples=200, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 60), min_size=5, max_size=5),
    trace=TRACES,
    leases=st.lists(st.booleans(), min_size=12, max_size=12),
)
def test_budget_and_leases_hold_for_any_sizes(sizes, trace, leases):
    tier = Residency(100, dict(zip(NAMES, sizes, strict=True)))
    tier.schedule(trace)
    held: list[str] = []
    for teacher, lease in zip(trace, leases, strict=False):
        before = tier.resident
        try:
            moved = tier.need(teacher)
        except TierFullError:
            assert tier.resident == before
            while held:
                tier.release(held.pop())
            continue
        assert not set(moved.evict) & set(held)
        assert tier.resident == (before - set(moved.evict)) | {teacher}
        assert tier.used_bytes <= 100
        if lease:
            tier.lease(teacher)
            held.append(teacher)


def test_the_farthest_next_use_goes_first_and_a_schedule_replaces_recency():
    tier = Residency(2, dict.fromkeys(NAMES, 1))
    tier.schedule("abcab")
    assert tier.need("a") == Admission(load=True)
    assert tier.need("b") == Admission(load=True)
    assert tier.need("c") == Admission(load=True, evict=("b",))  # a comes sooner, though it was used longer ago
    assert tier.need("a") == Admission(load=False)


def test_what_does_not_fit_is_refused_by_name():
    tier = Residency(10, {"large": 11, "a": 6, "b": 6})
    with pytest.raises(TierFullError, match="teacher large has 11 bytes, the tier holds 10"):
        tier.need("large")
    tier.need("a")
    tier.lease("a")
    with pytest.raises(TierFullError, match=r"teacher b needs 6 bytes, 4 are free, and \['a'\] are in use"):
        tier.need("b")
    tier.release("a")
    assert tier.need("b").evict == ("a",)
    with pytest.raises(KeyError, match="unknown teachers: \\['x'\\]"):
        tier.schedule("ax")


@settings(max_examples=200, deadline=None)
@given(sizes=st.lists(st.integers(1, 10), min_size=5, max_size=5), trace=TRACES, slots=st.integers(10, 25))
def test_with_unequal_sizes_it_loads_no_more_bytes_than_lru_on_its_schedule(sizes, trace, slots):
    """Belady's rule alone does not hold this: the better of both rules on the schedule is taken."""
    loaded = []
    for scheduled in (True, False):
        tier = Residency(slots, dict(zip(NAMES, sizes, strict=True)))
        if scheduled:
            tier.schedule(trace)
        for teacher in trace:
            tier.need(teacher)
        loaded.append(tier.loaded_bytes)
    assert loaded[0] <= loaded[1]


@settings(max_examples=200, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 60), min_size=5, max_size=5),
    trace=TRACES,
    ahead=st.lists(st.sampled_from(NAMES), max_size=12),
)
def test_fetching_ahead_never_displaces_what_is_used_sooner(sizes, trace, ahead):
    tier = Residency(100, dict(zip(NAMES, sizes, strict=True)))
    tier.schedule(trace)
    for teacher in ahead:
        upcoming = tier.upcoming
        admission = tier.ahead(teacher)
        assert tier.used_bytes <= 100
        for victim in admission.evict if admission else ():
            assert victim not in upcoming or (teacher in upcoming and upcoming.index(victim) > upcoming.index(teacher))


def test_what_is_kept_or_cheap_decides_before_worth():
    tier = Residency(2, dict.fromkeys(NAMES, 1))
    tier.schedule("abcd")
    for teacher in "ab":
        assert tier.ahead(teacher) == Admission(load=True)
    assert tier.ahead("c") is None
    assert tier.ahead("c", cheap="a", keep="b") == Admission(load=True, evict=("a",))
    with pytest.raises(TierFullError, match=r"\['b', 'c'\] are in use"):
        tier.fetch("d", keep="bc")


@settings(max_examples=300, deadline=None)
@given(
    trace=st.lists(st.sampled_from(NAMES), min_size=1, max_size=8),
    resident=st.sets(st.sampled_from(NAMES), max_size=3),
    leased=st.sets(st.sampled_from(NAMES)),
    cheap=st.sets(st.sampled_from(NAMES)),
    teacher=st.sampled_from(NAMES),
)
def test_a_spare_place_is_one_that_no_load_before_takes(trace, resident, leased, cheap, teacher):
    tier = Residency(3, dict.fromkeys(NAMES, 1))
    for name in resident:
        tier.need(name)
    for name in leased & resident:
        tier.lease(name)
    tier.schedule(trace)
    upcoming = [*tier.upcoming, teacher]
    sooner = [name for name in upcoming[: upcoming.index(teacher)] if name not in resident]
    free = 3 - len(resident)
    without = tier.resident
    admission = tier.spare(teacher, sooner, cheap)
    if admission is None:
        assert tier.resident == without
        return
    assert not set(admission.evict) & leased
    tier.lease(teacher)
    # as many places are left for the others as they can take: all that were free or might be evicted for them, less one
    worse = [name for name in resident - leased - {teacher} if name in cheap or name not in trace]
    wanted = min(len(sooner), free + len(worse) - (teacher not in without))
    assert sum(tier.ahead(name, cheap) is not None for name in sooner) >= max(0, wanted)
