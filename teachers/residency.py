"""Which teachers' weights are in a tier (GPU memory, pinned memory): a pure policy within a byte budget.

    worth(t) = (−distance to t's next use on the schedule, time of its last use)      compared in this order
    need(t):   t is used now: evict what is not leased and worth least until it fits
    ahead(t):  t will be used: the same, but only for victims that are worth less than t, else not yet
    spare(t, sooner): t may stay: the same, but only in a place that none of those to be loaded sooner takes

A teacher that is not on the schedule lies behind all that are. Fetching ahead keeps the rules of Cao, Felten, Karlin
and Li (SIGMETRICS 1995): what is missing next first, in the place of what is used last, and never in the place of what
is used sooner.

With teachers of one size ``need`` is Belady's rule, so no policy loads less often (Belady, IBM Systems Journal 5(2),
1966). With unequal sizes no such rule is known (the problem is NP-hard) and farthest-first can load more bytes than
least recently used: so both are tried on the schedule when it is set, and the better one is kept. For the uses of that
schedule, made by ``need`` in its order and without leases, no more bytes are loaded than by LRU whatever the sizes.

Who calls: whoever moves the bytes. The books are changed at once, ``lease`` and ``release`` frame the time in which a
teacher's weights are read or still written. Nothing here does I/O.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
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
        self.loaded_bytes = 0
        self._resident: dict[str, None] = {}
        self._last_use: dict[str, int] = {}
        self._leases: Counter[str] = Counter()
        self._schedule: list[str] = []
        self._by_distance = True
        self._clock = 0

    @property
    def resident(self) -> frozenset[str]:
        return frozenset(self._resident)

    @property
    def used_bytes(self) -> int:
        return sum(self.sizes[teacher] for teacher in self._resident)

    @property
    def leased(self) -> frozenset[str]:
        return frozenset(name for name in self._resident if self._leases[name])

    @property
    def upcoming(self) -> tuple[str, ...]:
        """The schedule from here on, each teacher once."""
        return tuple(dict.fromkeys(self._schedule))

    def schedule(self, uses: Iterable[str]) -> None:
        """The teachers that will be used, in order; replaces what was said before.

        Raises:
            KeyError: one of them is unknown.
        """
        schedule = list(uses)
        unknown = set(schedule) - self.sizes.keys()
        if unknown:
            raise KeyError(f"the schedule names unknown teachers: {sorted(unknown)}")
        self._schedule = schedule
        self._by_distance = True
        if len({self.sizes[teacher] for teacher in schedule} | {self.sizes[name] for name in self._resident}) > 1:
            self._by_distance = self._bytes_to_load(by_distance=True) <= self._bytes_to_load(by_distance=False)

    def _bytes_to_load(self, by_distance: bool) -> int:
        """What the schedule will load by one of the rules, from here, if nothing is leased then."""
        trial = self._copy()
        trial._leases.clear()
        trial._by_distance, trial.loaded_bytes = by_distance, 0
        for teacher in self._schedule:
            if self.sizes[teacher] <= self.capacity_bytes:
                trial.need(teacher)
        return trial.loaded_bytes

    def _copy(self) -> Residency:
        """To try on what would happen."""
        trial = Residency(self.capacity_bytes, self.sizes)
        trial._resident, trial._last_use, trial._leases = (
            dict(self._resident),
            dict(self._last_use),
            self._leases.copy(),
        )
        trial._schedule, trial._by_distance, trial._clock = list(self._schedule), self._by_distance, self._clock
        return trial

    def need(self, teacher: str, cheap: Collection[str] = ()) -> Admission:
        """Make a teacher resident and use it.

        Raises:
            KeyError: the teacher is unknown.
            TierFullError: it can't be made to fit; nothing has changed.
        """
        admission = self.fetch(teacher, cheap)
        self.use(teacher)
        return admission

    def fetch(self, teacher: str, cheap: Collection[str] = (), keep: Collection[str] = ()) -> Admission:
        """Make a teacher resident at any cost.

        Args:
            cheap: these go first: there is another copy of them.
            keep: these stay, as if leased.

        Raises:
            KeyError: the teacher is unknown.
            TierFullError: it can't be made to fit; nothing has changed.
        """
        return self._admit(teacher, self._victims(teacher, cheap, keep))

    def ahead(self, teacher: str, cheap: Collection[str] = (), keep: Collection[str] = ()) -> Admission | None:
        """Make a teacher resident before its use, if that costs nothing that is worth more; else None."""
        try:
            victims = self._victims(teacher, cheap, keep)
        except TierFullError:
            return None
        worth = self._worth(teacher)
        if any(self._worth(victim) >= worth for victim in victims if victim not in cheap):
            return None
        return self._admit(teacher, victims)

    def spare(
        self, teacher: str, sooner: Iterable[str], cheap: Collection[str] = (), keep: Collection[str] = ()
    ) -> Admission | None:
        """``ahead``, if there is a place that none of those that will be loaded ``sooner`` takes; they are told of in
        the order in which they will be."""
        trial = self._copy()
        for other in sooner:
            if trial.ahead(other, cheap, keep) is not None:
                trial.lease(other)
        return None if trial.ahead(teacher, cheap, keep) is None else self.ahead(teacher, cheap, keep)

    def use(self, teacher: str) -> None:
        """Its time has come: it is taken off the schedule, where it stands first."""
        if teacher in self._schedule:
            self._schedule.remove(teacher)
        self._clock += 1
        self._last_use[teacher] = self._clock

    def drop(self, teacher: str) -> None:
        """Its weights are gone (a load failed, for one)."""
        del self._resident[teacher]

    def _admit(self, teacher: str, evict: Sequence[str]) -> Admission:
        if teacher in self._resident:
            return Admission(False)
        for victim in evict:
            del self._resident[victim]
        self._resident[teacher] = None
        self.loads += 1
        self.loaded_bytes += self.sizes[teacher]
        return Admission(True, tuple(evict))

    def _victims(self, teacher: str, cheap: Collection[str], keep: Collection[str]) -> list[str]:
        size = self.sizes[teacher]
        if teacher in self._resident:
            return []
        if size > self.capacity_bytes:
            raise TierFullError(f"teacher {teacher} has {size} bytes, the tier holds {self.capacity_bytes}")
        candidates = [name for name in self._resident if not self._leases[name] and name not in keep]
        candidates.sort(key=lambda name: (name not in cheap, self._rank(name)))
        free = self.capacity_bytes - self.used_bytes
        victims: list[str] = []
        while free < size:
            if not candidates:
                leased = sorted(name for name in self._resident if self._leases[name] or name in keep)
                raise TierFullError(f"teacher {teacher} needs {size} bytes, {free} are free, and {leased} are in use")
            victims.append(candidates.pop(0))
            free += self.sizes[victims[-1]]
        return victims

    def _rank(self, teacher: str) -> tuple[int, int]:
        """The least goes first."""
        distance, last_use = self._worth(teacher)
        return (distance if self._by_distance else 0), last_use

    def _worth(self, teacher: str) -> tuple[int, int]:
        try:
            distance = self._schedule.index(teacher)
        except ValueError:
            distance = len(self._schedule)
        return -distance, self._last_use.get(teacher, 0)

    def lease(self, teacher: str) -> None:
        """Its weights are being read or written: it can't be evicted until ``release``.

        Raises:
            KeyError: it is not resident.
        """
        if teacher not in self._resident:
            raise KeyError(f"teacher {teacher} is not resident")
        self._leases[teacher] += 1

    def release(self, teacher: str) -> None:
        if not self._leases[teacher]:
            raise KeyError(f"teacher {teacher} is not leased")
        self._leases[teacher] -= 1
