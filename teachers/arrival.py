"""A teacher on its way from disk, for whoever copies it on before all of it is there."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence

from teachers.device import Source
from teachers.errors import TeacherError


class Arrival:
    """What of one image has been read, and is as it was written.

    Args:
        changed: the tiers' lock.
        source: where it is read to. Whoever copies it on may begin when that read has failed, and its memory is no
            longer booked.
    """

    def __init__(self, changed: threading.Condition, source: Source) -> None:
        self.source = source
        self._changed = changed
        self._spans: list[tuple[int, int]] = []
        self._followed = self._over = False
        self.error: TeacherError | None = None
        """Why the rest can't be read."""

    def add(self, begin: int, end: int) -> None:
        with self._changed:
            self._spans.append((begin, end))
            if self._followed:
                self._changed.notify_all()

    def end(self, error: TeacherError | None = None) -> None:
        """No more will come: all of it is there, or it could not be read. Under the lock."""
        self._over, self.error = True, error
        self._changed.notify_all()

    def pieces(self) -> Iterator[Sequence[tuple[int, int]]]:
        """Spans as they come, all of the image in the end.

        Raises:
            TeacherError: the rest can't be read.
        """
        taken = 0
        while True:
            with self._changed:
                self._followed = True
                while taken == len(self._spans) and not self._over:
                    self._changed.wait()
                if self.error is not None:
                    raise self.error
                fresh = self._spans[taken:]
            if not fresh:
                return
            taken += len(fresh)
            yield fresh
