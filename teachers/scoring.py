"""In which order a batch's teachers score. Pure.

Each teacher scores all of its rollouts at once, so that it is switched to once a batch. What is in GPU memory comes
first, then what is in pinned memory, then what is on disk: loads run while others score. All data-parallel ranks have
to use the same teacher at the same time (their collectives meet), so one rank's tiers decide for all.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping


def scoring_order(
    counts: Mapping[str, int], in_hbm: Collection[str] = (), in_pinned: Collection[str] = ()
) -> list[str]:
    """Nearest first. Within a tier larger groups come first, since they hide more of the next load; ties by name."""

    def key(teacher: str) -> tuple[int, int, str]:
        tier = 0 if teacher in in_hbm else 1 if teacher in in_pinned else 2
        return tier, -counts[teacher], teacher

    return sorted((name for name, count in counts.items() if count), key=key)
