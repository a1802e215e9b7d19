"""Which teachers' weights are in a tier (GPU memory, pinned memory): a pure policy within a byte budget.

    need(t):  t resident            -> nothing moves
              else evict, until t fits, the resident teacher that is not leased and whose next use lies farthest ahead
              on the schedule (never used again: first of all; without a schedule: least recently used)

With teachers of one size this is Belady's rule, so no policy loads less often (Belady, IBM Systems Journal 5(2), 1966).

Who calls: whoever moves the bytes. ``need`` decides and books the move at once, ``lease`` and ``release`` frame the use
of a teacher's weights, ``schedule`` says what is needed next. Nothing here does I/O.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from teachers.errors import TierFullError


@dataclass(frozen=True)
class Admission:
    """What has to be moved so that a teacher is resident."""

    load: bool
    evict: Sequence[str] = ()


class Residency:
    """Books of one tier.

    Args:
        capacity_bytes: what the tier may hold; never exceeded.
        sizes: bytes of each teacher's weights in this tier.
    """

    def __init__(self, capacity_bytes: int, sizes: Mapping[str, int]) -> None:
        self.capacity_bytes = capacity_bytes
        self.sizes = dict(sizes)
        self.loads = 0
        self._last_use: dict[str, int] = {}
        """Resident teachers, and when each was needed last."""
        self._leases: Counter[str] = Counter()
        self._schedule: deque[str] = deque()
        self._clock = 0

    @property
    def resident(self) -> frozenset[str]:
        return frozenset(self._last_use)

    @property
    def used_bytes(self) -> int:
        return sum(self.sizes[teacher] for teacher in self._last_use)

    def schedule(self, uses: Iterable[str]) -> None:
        """The teachers that will be needed, in order; replaces what was said before.

        Raises:
            KeyError: one of them is unknown.
        """
        self._schedule = deque(uses)
        unknown = set(self._schedule) - self.sizes.keys()
        if unknown:
            raise KeyError(f"the schedule names unknown teachers: {sorted(unknown)}")

    def need(self, teacher: str) -> Admission:
        """Make a teacher resident, and move on in the schedule when it is the one that is due.

        Raises:
            KeyError: the teacher is unknown.
            TierFullError: it can't be made to fit; nothing has changed.
        """
        size = self.sizes[teacher]
        evict = [] if teacher in self._last_use else self._victims(teacher, size)
        load = teacher not in self._last_use
        for victim in evict:
            del self._last_use[victim]
        if self._schedule and self._schedule[0] == teacher:
            self._schedule.popleft()
        self._clock += 1
        self._last_use[teacher] = self._clock
        self.loads += load
        return Admission(load, tuple(evict))

    def _victims(self, teacher: str, size: int) -> list[str]:
        if size > self.capacity_bytes:
            raise TierFullError(f"teacher {teacher} has {size} bytes, the tier holds {self.capacity_bytes}")
        candidates = [name for name in self._last_use if not self._leases[name]]
        candidates.sort(key=self._keep_worth)
        free = self.capacity_bytes - self.used_bytes
        victims: list[str] = []
        while free < size:
            if not candidates:
                leased = sorted(name for name in self._last_use if self._leases[name])
                raise TierFullError(f"teacher {teacher} needs {size} bytes, {free} are free, and {leased} are in use")
            victims.append(candidates.pop(0))
            free += self.sizes[victims[-1]]
        return victims

    def _keep_worth(self, teacher: str) -> tuple[int, int]:
        """The least goes first: the farthest next use, then the longest since the last."""
        ahead = next((place for place, name in enumerate(self._schedule) if name == teacher), len(self._schedule))
        return -ahead, self._last_use[teacher]

    def lease(self, teacher: str) -> None:
        """Its weights are being read: it can't be evicted until ``release``.

        Raises:
            KeyError: it is not resident.
        """
        if teacher not in self._last_use:
            raise KeyError(f"teacher {teacher} is not resident")
        self._leases[teacher] += 1

    def release(self, teacher: str) -> None:
        if not self._leases[teacher]:
            raise KeyError(f"teacher {teacher} is not leased")
        self._leases[teacher] -= 1
