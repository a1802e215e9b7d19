"""Small agreements between all ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch.distributed as dist

T = TypeVar("T")


def gather_objects(mine: T) -> list[T]:
    """Every rank's object, by rank, on every rank."""
    gathered: list[T | None] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, mine)
    return gathered  # type: ignore[return-value]


def on_rank_zero(action: Callable[[], T]) -> T:
    """Run ``action`` on rank 0 alone; every rank gets its result, or raises its exception.

    Without the second half, the other ranks would wait for a rank that has failed already.
    """
    outcome: list[tuple[T | None, Exception | None]] = [(None, None)]
    if dist.get_rank() == 0:
        try:
            outcome = [(action(), None)]
        except Exception as error:  # noqa: BLE001  (raised again below, on every rank)
            outcome = [(None, error)]
    dist.broadcast_object_list(outcome, src=0)
    result, failure = outcome[0]
    if failure is not None:
        raise failure
    return result  # type: ignore[return-value]
