"""Which server a session's requests go to. Pure bookkeeping."""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from collections.abc import Iterator, Sequence

REMEMBERED_SESSIONS = 100_000
"""Sessions beyond this are forgotten, the least recently used first; it costs them their cached prefix."""


class Router:
    """A session stays on its server, where its prefix is cached; a new one goes to the server with least to do.

    Servers are known by index. ``request`` is called around each request, ``set_healthy`` by the health check.
    """

    def __init__(self, servers: int, remembered: int = REMEMBERED_SESSIONS) -> None:
        self._in_flight = [0] * servers
        self._sessions = [0] * servers
        self._healthy = [True] * servers
        self._assigned: OrderedDict[str, int] = OrderedDict()
        self._remembered = remembered

    @property
    def healthy(self) -> Sequence[bool]:
        return tuple(self._healthy)

    @property
    def in_flight(self) -> Sequence[int]:
        """Requests that each server has now."""
        return tuple(self._in_flight)

    def set_healthy(self, server: int, healthy: bool) -> None:
        """Take a server out of routing, or put it back."""
        self._healthy[server] = healthy

    def pick(self, session: str) -> int | None:
        """The session's server; None where no server is healthy."""
        server = self._assigned.get(session)
        if server is None or not self._healthy[server]:
            candidates = [index for index, healthy in enumerate(self._healthy) if healthy]
            if not candidates:
                return None
            self.end_session(session)
            server = min(candidates, key=lambda index: (self._in_flight[index], self._sessions[index], index))
            self._assigned[session] = server
            self._sessions[server] += 1
            if len(self._assigned) > self._remembered:
                _, oldest = self._assigned.popitem(last=False)
                self._sessions[oldest] -= 1
        self._assigned.move_to_end(session)
        return server

    def end_session(self, session: str) -> None:
        """Forget a session; nothing happens where it is unknown."""
        server = self._assigned.pop(session, None)
        if server is not None:
            self._sessions[server] -= 1

    @contextlib.contextmanager
    def request(self, server: int) -> Iterator[None]:
        """Count a request as in flight on a server."""
        self._in_flight[server] += 1
        try:
            yield
        finally:
            self._in_flight[server] -= 1
