"""Where the wall time goes: every second belongs to exactly one phase."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager


class Stopwatch:
    """Counts seconds by phase. Phases don't nest; time outside any phase is ``other``."""

    def __init__(
        self, earlier: Mapping[str, float] | None = None, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        """``earlier``: seconds that a run spent before it was resumed."""
        self.clock = clock
        self.totals: defaultdict[str, float] = defaultdict(float, earlier or {})
        self._since = clock()
        self._phase = "other"

    def _switch(self, phase: str) -> str:
        now = self.clock()
        self.totals[self._phase] += now - self._since
        before, self._phase, self._since = self._phase, phase, now
        return before

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        if self._phase != "other":
            raise ValueError(f"phase {name} begins inside phase {self._phase}")
        self._switch(name)
        try:
            yield
        finally:
            self._switch("other")

    def move(self, source: str, target: str, seconds: float) -> None:
        """Reassign seconds of a phase once it is known what they were spent on."""
        self.totals[source] -= seconds
        self.totals[target] += seconds

    def read(self) -> dict[str, float]:
        """Seconds by phase up to now; their sum is the wall time since the start."""
        self._switch(self._phase)
        return dict(self.totals)
