"""A fleet's servers from start to stop: started, watched, and started again when they die or hang.

What happens to a server is decided in ``recovery``; here it is carried out. ``routing`` hears which take requests.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeVar

from rollout.engine.config import EngineConfig
from rollout.engine.pd import Half, hand_over, pairs
from rollout.engine.protocol import EngineError
from rollout.engine.recovery import UNKNOWN, Action, Do, FleetRecovery, Phase
from rollout.engine.routing import Routes
from rollout.engine.server import Server
from rollout.engine.sglang import SGLangEngine
from rollout.engine.sglang_router import NAME as ROUTER
from rollout.engine.sglang_router import SGLangRouter
from rollout.processes import ProcessError, ProcessRegistry

log = logging.getLogger(__name__)

T = TypeVar("T")

DEATH_POLL_S = 0.25
"""How often it is looked whether a server's process still runs."""


class CurrentWeights(Protocol):
    """How a server that was started again from its model directory gets what the others have. Whoever publishes
    provides it (``EngineFleet.current``)."""

    async def load(self, engine: SGLangEngine) -> None:
        """Put exactly the fleet's version into one engine that takes no requests, and have it say so.

        It may be called long after the publication, and on several engines at once: weights that live in buffers which
        the next training step overwrites must not be read from there.

        Raises:
            EngineError: it could not be loaded; the server is then started again.
        """
        ...


class Supervisor:
    """The servers of one fleet, and the router in front of them if there is one."""

    def __init__(
        self,
        config: EngineConfig,
        servers: Sequence[Server],
        routes: Routes,
        registry: ProcessRegistry,
        log_dir: Path,
        say: Callable[[str], None],
    ) -> None:
        self.servers = servers
        self.current: CurrentWeights | None = None
        """None while the servers' model directory holds the weights."""
        self._config = config
        self._routes = routes
        self._say = say
        self._recovery = FleetRecovery(config.recovery, len(servers), 0)
        self._tasks: set[asyncio.Task[None]] = set()
        self._kills: set[asyncio.Task[None]] = set()
        """Of the tasks, those that are ended by nobody."""
        self._changed = asyncio.Event()
        self.in_front = (
            None
            if config.sglang_router is None
            else SGLangRouter(config, config.sglang_router, registry, log_dir, say, self._changed.set, self.spawn)
        )
        self._model_dir = Path()
        self._model_version = 0
        self.running = False
        self._failed = ""
        """Which of its own tasks ended by an error that none of them expects, and by which."""

    # What is known of the servers

    @property
    def version(self) -> int:
        """Of the last publication."""
        return self._recovery.version

    @property
    def serving(self) -> Sequence[int]:
        """Those that take requests, by index."""
        return self._recovery.serving

    def engines_in(self, indexes: Sequence[int]) -> Sequence[SGLangEngine]:
        """Of these servers, those that have not died."""
        alive = (Phase.SERVING, Phase.SUSPECT)
        return [self.servers[index].engine for index in indexes if self._recovery.phase(index) in alive]

    @property
    def lost(self) -> dict[str, str]:
        """Why servers take no requests, in a line each, by server name; empty where all do."""
        told = {}
        for index, server in enumerate(self.servers):
            phase = self._recovery.phase(index)
            if phase is not Phase.SERVING:
                reason = self._recovery.reason(index).splitlines()
                told[server.name] = f"{phase}: {reason[0]}" if reason else str(phase)
        if self.in_front is not None and (phase := self.in_front.state[0]) is not Phase.SERVING:
            told[ROUTER] = f"{phase}: {(self.in_front.reason.splitlines() or ['it has not begun'])[0]}"
        return told if self.running else {}

    def states(self) -> Mapping[str, tuple[Phase, int]]:
        """Phase and restarts in a row of each server, by name."""
        states = {s.name: (self._recovery.phase(i), self._recovery.restarts(i)) for i, s in enumerate(self.servers)}
        return states if self.in_front is None else states | {ROUTER: self.in_front.state}

    def require_hope(self) -> None:
        """Raises:
        EngineError: no request will be taken any more: the fleet does not run, it failed, or all servers of a kind that
            is needed are given up."""
        if self._failed:
            raise EngineError(self._failed)
        routed = self.in_front is None or self.in_front.hopeful
        if not (self.running and routed and all(map(self._recovery.hopeful, self._routes.kinds))):
            raise EngineError(f"no inference server is left: {self.lost or 'none was started'}")

    async def first(self, choose: Callable[[], T | None]) -> T:
        """What ``choose`` says as soon as it says something, while there is hope."""
        deadline = time.monotonic() + self._config.request_timeout_s
        while True:
            self._changed.clear()
            self.require_hope()
            found = choose()
            if found is not None:
                return found
            try:
                await asyncio.wait_for(self._changed.wait(), min(1.0, max(deadline - time.monotonic(), 0.0)))
            except TimeoutError as error:
                if time.monotonic() >= deadline:
                    waited = f"{self._config.request_timeout_s:g} s"
                    raise EngineError(f"no inference server took requests for {waited}: {self.lost}") from error

    # From start to stop

    async def start(self, model_dir: Path, weight_version: int = 0) -> None:
        """See ``EngineFleet.start``."""
        if self.in_front is not None:
            self.in_front.check()
        self._model_dir, self._model_version = model_dir, weight_version
        self._recovery = FleetRecovery(self._config.recovery, len(self.servers), weight_version)
        self.running = True
        try:
            routers = [] if self.in_front is None else [self.in_front.start()]
            await _all([*routers, *(server.bring_up(model_dir, weight_version) for server in self.servers)])
            await _all(self._hand_over(*pair) for pair in pairs(self._routes.prefill, self._routes.generating))
            for server in self.servers:
                self._apply(self._recovery.generates(server.spec.index))
            await self._until_all_serve()
        except BaseException:
            await self.stop()
            raise
        self.spawn(self._watch_deaths(), "deaths")

    async def stop(self) -> None:
        """Stop watching, close the connections, stop the servers; may be called again."""
        self.running = False
        tasks = list(self._tasks)
        for task in tasks:
            if task not in self._kills:
                task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for server in self.servers:
            server.watch = None
        if self.in_front is not None:
            await self.in_front.stop()
        await asyncio.gather(*(server.end() for server in reversed(self.servers)))
        self._changed.set()

    def publish_begun(self) -> Sequence[int]:
        """A publication begins; returns its participants. Meanwhile no server joins.

        Raises:
            ValueError: another runs.
        """
        return self._recovery.publish_begun()

    def publish_ended(self, holds: int) -> None:
        """It left its participants with this version; ``current`` has the fleet's."""
        if holds != self.version:
            for server in self.servers:
                self._routes.forget_cache(server.spec.index)
        self._apply(self._recovery.publish_ended(holds))

    def suspected(self, index: int) -> None:
        """A connection to this server broke."""
        self._apply(self._recovery.suspected(index))

    async def settle(self, indexes: Sequence[int]) -> None:
        """Ask these servers whether they live; returns when each has answered or counts as dead."""
        await asyncio.gather(*(self._settle(self.servers[index]) for index in indexes))

    async def _settle(self, server: Server) -> None:
        index = server.spec.index
        while self._recovery.phase(index) in (Phase.SERVING, Phase.SUSPECT):  # at most missed_heartbeats times
            await self._look_at(server)
            client = server.client
            if client is None:
                return
            answered = await client.health()
            if client is server.client:
                self._apply(self._recovery.heartbeat(index, answered, time.monotonic()))
            if answered:
                return

    async def _look_for_deaths(self) -> None:
        await asyncio.gather(*(self._look_at(server) for server in self.servers))

    async def _look_at(self, server: Server) -> None:
        index, launched = server.spec.index, server.launched
        if launched is None or self._recovery.phase(index) is Phase.STARTING:  # whose start looks for itself
            return
        if (reason := await launched.failure()) is not None and launched is server.launched:
            self._apply(self._recovery.died(index, reason, time.monotonic()))

    def spawn(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        """A task that ends with the fleet; where it fails, whoever asks for a server is told."""
        task = asyncio.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[None]) -> None:
        """A fleet that lost one of its tasks no longer knows of its servers: whoever asks it for one is told."""
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("the fleet's task %s failed", task.get_name(), exc_info=error)
            self._failed = f"the fleet's task {task.get_name()} failed: {error!r}"
            self._changed.set()

    # What becomes of a server

    def _apply(self, actions: Sequence[Action]) -> None:
        if not self.running:  # a request that ``stop`` cut off must not have a server started again
            return
        for action in actions:
            server = self.servers[action.server]
            if action.do is Do.ROUTE:
                self._routes.set_healthy(action.server, True)
                self._say(f"{server.name} takes requests with weights of version {self.version}")
                server.watch = server.watch or self.spawn(self._watch_health(server), f"{server.name}-health")
            elif action.do is Do.UNROUTE:
                self._routes.set_healthy(action.server, False)
            elif action.do is Do.KILL:
                self._say(f"lost {server.name}: {action.reason.splitlines()[0]}")
                kill = self.spawn(server.end(), f"{server.name}-kill")
                self._kills.add(kill)
                kill.add_done_callback(self._kills.discard)
            elif action.do is Do.START:
                self.spawn(self._restart(server), f"{server.name}-start")
            elif action.do is Do.LOAD:
                self.spawn(self._join(server), f"{server.name}-join")
            elif action.do is Do.GIVE_UP:
                self._say(f"{server.name} is given up: it died {self._config.recovery.max_restarts + 1} times")
        if self.in_front is not None:
            self.in_front.serve([self.servers[index].engine.url for index in self._recovery.serving])
        self._changed.set()

    async def _restart(self, server: Server) -> None:
        index = server.spec.index
        try:
            await server.end()
            self._say(f"{server.name} starts again, attempt {self._recovery.restarts(index)}")
            await server.bring_up(self._model_dir, self._model_version)
            await self._join_partner(server)
        except (EngineError, ProcessError) as error:
            self._apply(self._recovery.died(index, str(error), time.monotonic()))
        else:
            self._routes.forget_cache(index)
            self._apply(self._recovery.generates(index))

    async def _join_partner(self, server: Server) -> None:
        """Have a prefill or decode server that was started again work with one of the other kind, where one serves.

        Raises:
            EngineError: they do not, and the other one lives.
        """
        index = server.spec.index
        others = self._routes.generating if index in self._routes.prefill else self._routes.prefill
        serving = [other for other in others if self._recovery.phase(other) is Phase.SERVING][:1]
        try:
            for prefill, decode in (
                pairs([index], serving) if index in self._routes.prefill else pairs(serving, [index])
            ):
                await self._hand_over(prefill, decode)
        except EngineError:
            await self.settle(serving)
            if self._recovery.phase(serving[0]) is Phase.SERVING:
                raise

    async def _hand_over(self, prefill: int, decode: int) -> None:
        halves = (self.servers[prefill], self.servers[decode])
        first, then = (Half(half.name, half.engine, half.launched.log if half.launched else "") for half in halves)
        await hand_over(first, then, self.servers[prefill].rendezvous, self._config.start_timeout_s)

    async def _join(self, server: Server) -> None:
        """Give a server the fleet's weights, where it has others, and have it say its version."""
        index, wanted, launched = server.spec.index, self.version, server.launched
        failure: EngineError | None = None
        version = UNKNOWN
        try:
            if self.current is not None:
                await self.current.load(server.engine)
            version = await server.engine.weight_version()
            if version not in (wanted, self.version):
                raise EngineError(f"it says that it has version {version}, the others have {wanted}")
        except EngineError as error:
            failure = error
        if launched is not server.launched:
            return  # it died meanwhile, which was reported
        if failure is None:
            self._apply(self._recovery.joined(index, version, time.monotonic()))
        else:
            self._apply(self._recovery.died(index, f"{server.name} could not join: {failure}", time.monotonic()))

    async def _until_all_serve(self) -> None:
        """Raises:
        EngineError: a server died, or could not join, or the router does not have them all."""
        try:
            async with asyncio.timeout(self._config.start_timeout_s):
                while not self._all_serve():
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError as error:
            waited, missing = f"{self._config.start_timeout_s:g} s", self.lost or f"{ROUTER} does not list them all"
            raise EngineError(
                f"servers that generated did not take requests within {waited} (engine.start_timeout_s): {missing}"
            ) from error

    def _all_serve(self) -> bool:
        for index, server in enumerate(self.servers):
            if self._recovery.phase(index) in (Phase.DOWN, Phase.LOST):
                raise EngineError(f"{server.name} died while the servers started: {self._recovery.reason(index)}")
        listed = self.in_front is None or self.in_front.complete
        return len(self._recovery.serving) == len(self.servers) and listed

    async def _watch_deaths(self) -> None:
        while True:
            await self._look_for_deaths()
            self._apply(self._recovery.tick(time.monotonic()))
            await asyncio.sleep(DEATH_POLL_S)

    async def _watch_health(self, server: Server) -> None:
        """Heartbeats, for as long as the fleet runs; a suspect's come at once, and without a pause."""
        index, interval = server.spec.index, self._config.recovery.heartbeat_interval_s
        due = time.monotonic() + interval
        while True:
            await asyncio.sleep(min(DEATH_POLL_S, interval))
            if self._recovery.phase(index) is not Phase.SUSPECT and time.monotonic() < due:
                continue
            due = time.monotonic() + interval
            client = server.client
            if client is None or self._recovery.phase(index) not in (Phase.SERVING, Phase.SUSPECT):
                continue
            answered = await client.health()
            if not answered:
                await self._look_at(server)  # a process that ended says more of why
            if client is server.client:  # else it died meanwhile
                self._apply(self._recovery.heartbeat(index, answered, time.monotonic()))


async def _all(work: Any) -> None:
    """Run all together; the first failure ends the others."""
    try:
        async with asyncio.TaskGroup() as group:
            for item in work:
                group.create_task(item)
    except BaseExceptionGroup as failures:
        raise failures.exceptions[0] from None
