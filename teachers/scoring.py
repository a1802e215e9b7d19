"""In which order a batch's teachers score. Pure.

A batch's rollouts are grouped by teacher, so that each teacher is switched to once a batch. Groups are ordered to start
with what is in GPU memory, then what is in pinned memory, then what is on disk: loads run while others score. All
data-parallel ranks have to load the same teacher at the same time (their collectives meet), so they share one order,
made from the counts of all ranks and from what the first rank holds.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence


def group_by_teacher(teachers: Sequence[str | Sequence[str]]) -> dict[str, list[int]]:
    """Places in the batch of each teacher's rollouts; a rollout may have several teachers."""
    groups: dict[str, list[int]] = {}
    for place, names in enumerate(teachers):
        for name in (names,) if isinstance(names, str) else names:
            groups.setdefault(name, []).append(place)
    return groups


def scoring_order(
    counts: Mapping[str, int], in_hbm: Collection[str] = (), in_pinned: Collection[str] = ()
) -> list[str]:
    """Nearest first. Within a tier larger groups come first, since they hide more of the next load; ties by name."""

    def key(teacher: str) -> tuple[int, int, str]:
        tier = 0 if teacher in in_hbm else 1 if teacher in in_pinned else 2
        return tier, -counts[teacher], teacher

    return sorted((name for name, count in counts.items() if count), key=key)


def shared_order(
    counts_by_rank: Iterable[Mapping[str, int]], in_hbm: Collection[str] = (), in_pinned: Collection[str] = ()
) -> list[str]:
    """One order for all data-parallel ranks: a rank without rollouts for a teacher takes its turn all the same."""
    total: Counter[str] = Counter()
    for counts in counts_by_rank:
        total.update(counts)
    return scoring_order(total, in_hbm, in_pinned)
