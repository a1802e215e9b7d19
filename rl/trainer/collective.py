"""Small agreements between the ranks of a group (all ranks by default)."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch.distributed as dist

T = TypeVar("T")


def gather_objects(mine: T, group: dist.ProcessGroup | None = None) -> list[T]:
    """Every rank's object, by rank, on every rank."""
    if dist.get_world_size(group) == 1:
        return [mine]
    gathered: list[T | None] = [None] * dist.get_world_size(group)
    dist.all_gather_object(gathered, mine, group=group)
    return gathered  # type: ignore[return-value]


def on_rank_zero(action: Callable[[], T], group: dist.ProcessGroup | None = None) -> T:
    """Run ``action`` on rank 0 alone; every rank gets its result, or raises its exception.

    Without the second half, the other ranks would wait for a rank that has failed already.
    """
    outcome: list[tuple[T | None, Exception | None]] = [(None, None)]
    if dist.get_rank() == 0:
        try:
            outcome = [(action(), None)]
        except Exception as error:  # noqa: BLE001  (raised again below, on every rank)
            outcome = [(None, error)]
    dist.broadcast_object_list(outcome, src=0, group=group)
    result, failure = outcome[0]
    if failure is not None:
        raise failure
    return result  # type: ignore[return-value]


def on_every_rank(action: Callable[[], T], group: dist.ProcessGroup | None = None) -> list[T]:
    """Run ``action`` on every rank; every rank gets all results, by rank, or raises the first rank's exception."""
    outcome: tuple[T | None, Exception | None]
    try:
        outcome = (action(), None)
    except Exception as error:  # noqa: BLE001  (raised again below, on every rank)
        outcome = (None, error)
    outcomes = gather_objects(outcome, group)
    for _, failure in outcomes:
        if failure is not None:
            raise failure
    return [result for result, _ in outcomes]  # type: ignore[misc]
