"""Which server a request goes to. Pure bookkeeping.

A session stays on its server, where its prefix is cached. A new session goes to the server that has seen the longest
beginning of its prompt, unless that server has more than ``MAX_IMBALANCE`` requests more than the idlest, or nothing
worth mentioning is shared; then to the one with least to do.
"""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from collections.abc import Iterator, Sequence

REMEMBERED_SESSIONS = 100_000
"""Sessions beyond this are forgotten, the least recently used first; it costs them their cached prefix."""
REMEMBERED_BLOCKS = 500_000
BLOCK = 64
"""Tokens; prefixes are compared in whole blocks."""
MAX_IMBALANCE = 16
"""A cached prompt saves a prefill; a longer queue costs every token of the reply."""


class PrefixIndex:
    """Which servers have seen which beginnings of prompts, by a hash of each whole block and all before it."""

    def __init__(self, block: int = BLOCK, remembered: int = REMEMBERED_BLOCKS) -> None:
        self._block = block
        self._remembered = remembered
        self._seen: OrderedDict[int, set[int]] = OrderedDict()

    def add(self, token_ids: Sequence[int], server: int) -> None:
        for key in self._keys(token_ids):
            self._seen.setdefault(key, set()).add(server)
            self._seen.move_to_end(key)
        while len(self._seen) > self._remembered:
            self._seen.popitem(last=False)

    def shared(self, token_ids: Sequence[int]) -> dict[int, int]:
        """Tokens of the longest beginning that each server has seen; servers that have seen none are left out."""
        found: dict[int, int] = {}
        for blocks, key in enumerate(self._keys(token_ids), start=1):
            servers = self._seen.get(key)
            if not servers:
                break
            found |= dict.fromkeys(servers, blocks * self._block)
        return found

    def forget(self, server: int) -> None:
        """Its cache is gone."""
        for servers in self._seen.values():
            servers.discard(server)

    def _keys(self, token_ids: Sequence[int]) -> Iterator[int]:
        key = 0
        for end in range(self._block, len(token_ids) + 1, self._block):
            key = hash((key, *token_ids[end - self._block : end]))
            yield key


class Router:
    """Servers are known by index, and healthy until ``set_healthy`` says otherwise. ``request`` is called around each
    request."""

    def __init__(
        self, servers: int, remembered: int = REMEMBERED_SESSIONS, prefixes: PrefixIndex | None = None
    ) -> None:
        self._in_flight = [0] * servers
        self._sessions = [0] * servers
        self._healthy = [True] * servers
        self._assigned: OrderedDict[str, int] = OrderedDict()
        self._remembered = remembered
        self._prefixes = prefixes or PrefixIndex()

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

    def forget_cache(self, server: int) -> None:
        """The server was started anew, or its prefixes were flushed."""
        self._prefixes.forget(server)

    def pick(self, session: str, token_ids: Sequence[int] = ()) -> int | None:
        """The session's server; None where no server is healthy."""
        server = self._assigned.get(session)
        if server is None or not self._healthy[server]:
            candidates = [index for index, healthy in enumerate(self._healthy) if healthy]
            if not candidates:
                return None
            self.end_session(session)
            server = self._best(candidates, token_ids)
            self._assigned[session] = server
            self._sessions[server] += 1
            if len(self._assigned) > self._remembered:
                _, oldest = self._assigned.popitem(last=False)
                self._sessions[oldest] -= 1
        self._assigned.move_to_end(session)
        self._prefixes.add(token_ids, server)
        return server

    def _best(self, candidates: Sequence[int], token_ids: Sequence[int]) -> int:
        idlest = min(candidates, key=lambda index: (self._in_flight[index], self._sessions[index], index))
        shared = self._prefixes.shared(token_ids)
        holders = [index for index in candidates if shared.get(index, 0) * 2 >= max(len(token_ids), 1)]
        near = [i for i in holders if self._in_flight[i] - self._in_flight[idlest] <= MAX_IMBALANCE]
        return max(near, key=lambda i: (shared[i], -self._in_flight[i], -i)) if near else idlest

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


class Routes:
    """The routers of a fleet: one of the servers that generate, one of those that only prefill, where these are apart.
    Servers are known by their index in the fleet."""

    def __init__(self, generating: Sequence[int], prefill: Sequence[int] = ()) -> None:
        self.generating, self.prefill = tuple(generating), tuple(prefill)
        self._kinds = [(kind, Router(len(kind))) for kind in (self.generating, self.prefill) if kind]

    @property
    def kinds(self) -> Sequence[Sequence[int]]:
        """Of servers; a request needs one of each."""
        return [kind for kind, _ in self._kinds]

    def pick(self, session: str, token_ids: Sequence[int] = ()) -> tuple[int, ...] | None:
        """The session's server of each kind; None where one kind has no healthy one."""
        picked = []
        for kind, router in self._kinds:
            if (slot := router.pick(session, token_ids)) is None:
                return None
            picked.append(kind[slot])
        return tuple(picked)

    def end_session(self, session: str) -> None:
        for _, router in self._kinds:
            router.end_session(session)

    def set_healthy(self, server: int, healthy: bool) -> None:
        """See ``Router.set_healthy``."""
        router, slot = self._of(server)
        router.set_healthy(slot, healthy)

    def forget_cache(self, server: int) -> None:
        """See ``Router.forget_cache``."""
        router, slot = self._of(server)
        router.forget_cache(slot)

    def in_flight(self, server: int) -> int:
        """Requests that it has now."""
        router, slot = self._of(server)
        return router.in_flight[slot]

    def request(self, server: int) -> contextlib.AbstractContextManager[None]:
        """See ``Router.request``."""
        router, slot = self._of(server)
        return router.request(slot)

    def _of(self, server: int) -> tuple[Router, int]:
        kind, router = next(each for each in self._kinds if server in each[0])
        return router, kind.index(server)
