"""Which servers take requests, and what becomes of one that dies or hangs: a pure state machine, no I/O and no clock.

    STARTING --generates--> JOINING --has v--> SERVING <--suspected / heartbeat--> SUSPECT
        ^                      |                  |                                   |
        | due                  | died             | died                              | died, or heartbeats missed
        '------- DOWN <--------'------------------'-----------------------------------'
                   '-- the restarts are spent --> LOST

The law, for the fleet's version v (that of the last publication that succeeded):

1. A server takes requests (SERVING) only if it has said, since its last start and since the last publication, that it
   holds v.
2. While a publication runs, no server joins and none is told to load; those that were SERVING or SUSPECT when it began
   are its participants and hold what it left (v, the version before, or, where it failed half-way, nothing known). All
   others load v afterwards.
3. A server that died starts again after min(backoff_s · 2^(n−1), backoff_max_s), n being its starts that failed or
   died in a row; one that served for ``stable_s`` has n = 0 again. After ``max_restarts`` in a row it is LOST for good,
   with the last reason.
4. A server that missed ``missed_heartbeats`` in a row is as dead as one whose process ended: it is killed and started
   again. After one miss, or a broken connection, it takes no requests until its next heartbeat.

The fleet reports events (the methods) with the time, carries out the actions that they return, and reports what came of
those.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from pydantic import Field

from rollout.engine.settings import Settings

UNKNOWN = -1
"""Version of a server that has not said any, or that a publication left half-loaded."""


class RecoveryConfig(Settings):
    """When a server counts as dead, and how often it is started again."""

    heartbeat_interval_s: float = Field(default=5.0, gt=0)
    heartbeat_timeout_s: float = Field(default=30.0, gt=0)
    """A heartbeat generates a token, which a long prefill may hold up; SGLang itself gives up after 20 s."""
    missed_heartbeats: int = Field(default=2, gt=0)
    """In a row, until a server is killed."""
    max_restarts: int = Field(default=5, ge=0)
    """In a row, until a server is lost for good."""
    backoff_s: float = Field(default=1.0, ge=0)
    backoff_max_s: float = Field(default=60.0, ge=0)
    stable_s: float = Field(default=300.0, ge=0)
    """After so long in service a server's earlier restarts are forgotten."""


class Phase(enum.StrEnum):
    """Where a server stands."""

    STARTING = "starting"  # its process runs and has not generated yet
    JOINING = "joining"  # it generates; its weights are not the fleet's yet, or it has not said so
    SERVING = "serving"  # it takes requests
    SUSPECT = "suspect"  # it takes none until it answers again
    DOWN = "down"  # killed; it starts again when its time comes
    LOST = "lost"  # given up


class Do(enum.StrEnum):
    """What the fleet has to do with a server."""

    ROUTE = "route"
    UNROUTE = "unroute"  # also: break its connections, so that what it had in flight goes elsewhere
    KILL = "kill"
    START = "start"
    LOAD = "load"  # the fleet's version, then report ``joined``
    GIVE_UP = "give up"


@dataclass(frozen=True)
class Action:
    do: Do
    server: int
    reason: str = ""


@dataclass
class _Server:
    phase: Phase = Phase.STARTING
    version: int = UNKNOWN
    missed: int = 0
    failures: int = 0
    loading: bool = False
    due: float = 0.0
    serving_since: float = 0.0
    reason: str = ""


class FleetRecovery:
    """The state of ``servers`` servers, all of which were just started with weights of ``version``."""

    def __init__(self, config: RecoveryConfig, servers: int, version: int) -> None:
        self.config = config
        self.version = version
        self._servers = [_Server() for _ in range(servers)]
        self._participants: frozenset[int] | None = None

    def phase(self, server: int) -> Phase:
        return self._servers[server].phase

    def reason(self, server: int) -> str:
        """Why it last died; empty where it never did."""
        return self._servers[server].reason

    def restarts(self, server: int) -> int:
        """Starts that failed or died in a row."""
        return self._servers[server].failures

    @property
    def serving(self) -> Sequence[int]:
        return [index for index, server in enumerate(self._servers) if server.phase is Phase.SERVING]

    def hopeful(self, indexes: Iterable[int]) -> bool:
        """Whether any of these takes requests, or may do so again."""
        return any(self._servers[index].phase is not Phase.LOST for index in indexes)

    def generates(self, index: int) -> list[Action]:
        """A started server generated its first token."""
        server = self._servers[index]
        if server.phase is not Phase.STARTING:
            return []
        server.phase = Phase.JOINING
        return self._load(index)

    def joined(self, index: int, version: int, now: float) -> list[Action]:
        """A server that was told to load says which version it has."""
        server = self._servers[index]
        server.loading = False
        if server.phase is not Phase.JOINING:
            return []
        server.version = version
        if self._participants is not None or version != self.version:
            return self._load(index)
        server.phase = Phase.SERVING
        server.missed = 0
        server.serving_since = now
        return [Action(Do.ROUTE, index)]

    def heartbeat(self, index: int, answered: bool, now: float) -> list[Action]:
        """A server in service did or did not generate in time."""
        server = self._servers[index]
        if server.phase not in (Phase.SERVING, Phase.SUSPECT):
            return []
        if not answered:
            server.missed += 1
            if server.missed >= self.config.missed_heartbeats:
                return self.died(index, f"it missed {server.missed} heartbeats in a row", now)
            return self.suspected(index)
        server.missed = 0
        if server.phase is Phase.SERVING:
            if now - server.serving_since >= self.config.stable_s:
                server.failures = 0
            return []
        if index not in (self._participants or ()) and server.version != self.version:
            server.phase = Phase.JOINING
            return self._load(index)
        if self._participants is not None:
            return []  # its version is known when the publication has ended
        server.phase = Phase.SERVING
        return [Action(Do.ROUTE, index)]

    def suspected(self, index: int) -> list[Action]:
        """A connection to the server broke, or it missed a heartbeat."""
        server = self._servers[index]
        if server.phase is not Phase.SERVING:
            return []
        server.phase = Phase.SUSPECT
        return [Action(Do.UNROUTE, index)]

    def died(self, index: int, reason: str, now: float) -> list[Action]:
        """Its process ended, it hangs, it did not start in time, or it could not load the weights."""
        server = self._servers[index]
        if server.phase in (Phase.DOWN, Phase.LOST):
            return []
        server.version, server.missed, server.loading, server.reason = UNKNOWN, 0, False, reason
        actions = [Action(Do.UNROUTE, index, reason), Action(Do.KILL, index, reason)]
        if server.failures >= self.config.max_restarts:
            server.phase = Phase.LOST
            return [*actions, Action(Do.GIVE_UP, index, reason)]
        server.failures += 1
        server.phase = Phase.DOWN
        server.due = now + min(self.config.backoff_s * 2 ** (server.failures - 1), self.config.backoff_max_s)
        return actions

    def tick(self, now: float) -> list[Action]:
        """Time passes."""
        actions: list[Action] = []
        for index, server in enumerate(self._servers):
            if server.phase is Phase.DOWN and now >= server.due:
                server.phase = Phase.STARTING
                actions.append(Action(Do.START, index))
        return actions

    def publish_begun(self) -> Sequence[int]:
        """A publication begins; returns its participants.

        Raises:
            ValueError: another runs.
        """
        if self._participants is not None:
            raise ValueError("a publication runs already")
        taking = [i for i, server in enumerate(self._servers) if server.phase in (Phase.SERVING, Phase.SUSPECT)]
        self._participants = frozenset(taking)
        return taking

    def publish_ended(self, holds: int) -> list[Action]:
        """It ended, and its participants hold this version: the new one, the one before, or ``UNKNOWN``.

        Those that died meanwhile, and those that stood apart, load the fleet's version, which a success changed.
        """
        participants, self._participants = self._participants, None
        if participants is None:
            raise ValueError("no publication runs")
        if holds != UNKNOWN:
            self.version = holds
        actions: list[Action] = []
        for index, server in enumerate(self._servers):
            if index in participants and server.phase in (Phase.SERVING, Phase.SUSPECT):
                server.version = holds
                if holds == UNKNOWN:
                    if server.phase is Phase.SERVING:
                        actions.append(Action(Do.UNROUTE, index, "a publication left its weights half-loaded"))
                    server.phase = Phase.JOINING
            if server.phase is Phase.JOINING and not server.loading:
                actions += self._load(index)
        return actions

    def _load(self, index: int) -> list[Action]:
        if self._participants is not None:
            return []
        self._servers[index].loading = True
        return [Action(Do.LOAD, index)]
