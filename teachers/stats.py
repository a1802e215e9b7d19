"""What the tiers did: counts, bytes, seconds, and who was doing what when."""

from __future__ import annotations

import copy
import time
from collections import deque
from dataclasses import dataclass, field

_KEPT_SPANS = 4096


@dataclass(frozen=True)
class Span:
    """``kind``: read (disk to pinned), copy (to the device), demote (back to pinned), wait (a lease), lease.

    The copies of a teacher that is still being read are one span, as long as all of them took.
    """

    kind: str
    teacher: str
    start: float
    stop: float


@dataclass
class TierStats:
    """Since the manager was made.

    A lease is a hit of the tier that held the teacher when it was asked for, or a disk load.
    ``exposed_seconds`` are what leases waited.
    """

    leases: int = 0
    hbm_hits: int = 0
    pinned_hits: int = 0
    disk_loads: int = 0
    read_bytes: int = 0
    read_seconds: float = 0.0
    copies: int = 0
    copied_bytes: int = 0
    copy_seconds: float = 0.0
    demotions: int = 0
    exposed_seconds: float = 0.0
    exposed_by_teacher: dict[str, float] = field(default_factory=dict)
    spans: deque[Span] = field(default_factory=lambda: deque(maxlen=_KEPT_SPANS))

    def span(self, kind: str, teacher: str, start: float) -> float:
        """Note what began at ``start`` and ends now; returns its seconds."""
        now = time.perf_counter()
        self.spans.append(Span(kind, teacher, start, now))
        return now - start

    def waited(self, teacher: str, start: float) -> None:
        seconds = self.span("wait", teacher, start)
        self.exposed_seconds += seconds
        self.exposed_by_teacher[teacher] = self.exposed_by_teacher.get(teacher, 0.0) + seconds

    def snapshot(self) -> TierStats:
        return copy.deepcopy(self)
