"""Starts the inference servers, watches them, starts dead ones again, and spreads requests over them.

What happens to a server is decided in ``recovery``, which server a request goes to in ``routing``; here is the I/O.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeVar

import numpy as np
from jaxtyping import Float32

from rollout.engine.config import EngineConfig
from rollout.engine.launch import server_specs
from rollout.engine.launcher import Launched, Launcher, LocalLauncher
from rollout.engine.pd import NOWHERE, Half, Rendezvous, generate_apart, hand_over, pairs, rendezvous
from rollout.engine.protocol import EngineError, EngineLost, EngineMetrics, Generation, Sampling
from rollout.engine.recovery import UNKNOWN, Action, Do, FleetRecovery, Phase
from rollout.engine.routing import Router
from rollout.engine.server import Server
from rollout.engine.sglang import SGLangEngine
from rollout.engine.sglang_router import NAME as ROUTER
from rollout.engine.sglang_router import SGLangRouter
from rollout.processes import ProcessError, ProcessRegistry

log = logging.getLogger(__name__)

T = TypeVar("T")

DEATH_POLL_S = 0.25
"""How often it is looked whether a server's process still runs."""
CHECK_UP_S = 5.0
"""How long a request that was lost behind sglang-router waits to learn which server it was."""


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


class Publication:
    """One publication in progress; see ``EngineFleet.publication``."""

    def __init__(self, fleet: EngineFleet, participants: Sequence[int]) -> None:
        self._fleet = fleet
        self._participants = participants
        self.holds = fleet.weight_version
        """Version that the engines are left with; whoever publishes sets it: the new one, or ``UNKNOWN``."""

    @property
    def engines(self) -> Sequence[SGLangEngine]:
        """Engines to publish to; those that died since it began are no longer among them, so it may be empty: servers
        that start again then load the new version."""
        return self._fleet.engines_in(self._participants)

    async def lost_any(self, engines: Sequence[SGLangEngine]) -> bool:
        """Whether one of these died since: publishing to the rest is then worth another try. One that does not answer
        is waited for, until it does or counts as dead."""
        await self._fleet.settle(self._participants)
        return len(self.engines) < len(engines)


class EngineFleet:
    """The servers of one ``EngineConfig``.

    ``start``, then ``generate``, then ``stop``; whoever owns the registry stops the processes in any case. Weights are
    published within ``publication``.
    """

    def __init__(
        self,
        config: EngineConfig,
        registry: ProcessRegistry,
        log_dir: Path,
        on_progress: Callable[[str], None] = lambda message: None,
        launcher: Launcher | None = None,
        experts_shape: tuple[int, int] = (0, 0),
    ) -> None:
        self.config = config
        self.current: CurrentWeights | None = None
        """None while the servers' model directory holds the weights."""
        self._launcher = launcher or LocalLauncher(config, registry, log_dir)
        self._on_progress = on_progress
        self._servers = [
            Server(spec, config, self._launcher, on_progress, experts_shape) for spec in server_specs(config)
        ]
        self._prefill = [s.spec.index for s in self._servers if s.spec.role == "prefill"]
        self._generating = [s.spec.index for s in self._servers if s.spec.role != "prefill"]
        self._router = Router(len(self._generating))
        self._prefill_router = Router(len(self._prefill))
        self._rng = random.Random()
        self._recovery = FleetRecovery(config.recovery, len(self._servers), 0)
        self._requests: dict[str, int] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._kills: set[asyncio.Task[None]] = set()
        """Of the tasks, those that are ended by nobody."""
        self._changed = asyncio.Event()
        self._in_front = (
            None
            if config.sglang_router is None
            else SGLangRouter(
                config, config.sglang_router, registry, log_dir, on_progress, self._changed.set, self._spawn
            )
        )
        self._check_up: asyncio.Task[None] | None = None
        self._model_dir = Path()
        self._model_version = 0
        self._running = False
        self._failed = ""
        """Which of its own tasks ended by an error that none of them expects, and by which."""

    @property
    def weight_version(self) -> int:
        """Of the last publication."""
        return self._recovery.version

    @property
    def engines(self) -> Sequence[SGLangEngine]:
        """Those that take requests; none while all are being started again.

        Raises:
            EngineError: none will any more.
        """
        self._require_hope()
        return [self._servers[index].engine for index in self._recovery.serving]

    def engines_in(self, indexes: Sequence[int]) -> Sequence[SGLangEngine]:
        """Of these servers, those that have not died."""
        alive = (Phase.SERVING, Phase.SUSPECT)
        return [self._servers[index].engine for index in indexes if self._recovery.phase(index) in alive]

    @property
    def processes(self) -> Mapping[str, Launched]:
        """By server name; those that run."""
        return {server.name: server.launched for server in self._servers if server.launched is not None}

    @property
    def lost(self) -> dict[str, str]:
        """Why servers take no requests, in a line each, by server name; empty where all do."""
        told = {}
        for index, server in enumerate(self._servers):
            phase = self._recovery.phase(index)
            if phase is not Phase.SERVING:
                reason = self._recovery.reason(index).splitlines()
                told[server.name] = f"{phase}: {reason[0]}" if reason else str(phase)
        if self._in_front is not None and (phase := self._in_front.state[0]) is not Phase.SERVING:
            told[ROUTER] = f"{phase}: {(self._in_front.reason.splitlines() or ['it has not begun'])[0]}"
        return told if self._running else {}

    async def start(self, model_dir: Path, weight_version: int = 0) -> None:
        """Start all servers together and wait until each has generated a token, one that only prefills or only decodes
        together with another; on failure none is left running.

        Args:
            model_dir: HF directory; also where a server that dies is started from again.
            weight_version: version of its weights.

        Raises:
            ProcessError: where a configured port is taken or a KV cache could not be sent (before anything is
                launched), or a server died, with the end of its log.
            EngineError: where a server generates nothing within ``start_timeout_s``.
        """
        self._launcher.check()
        if self._in_front is not None:
            self._in_front.check()
        self._model_dir, self._model_version = model_dir, weight_version
        self._recovery = FleetRecovery(self.config.recovery, len(self._servers), weight_version)
        self._running = True
        try:
            routers = [] if self._in_front is None else [self._in_front.start()]
            await _all([*routers, *(server.bring_up(model_dir, weight_version) for server in self._servers)])
            await _all(self._hand_over(*pair) for pair in pairs(self._prefill, self._generating))
            for server in self._servers:
                self._apply(self._recovery.generates(server.spec.index))
            await self._until_all_serve()
        except BaseException:
            await self.stop()
            raise
        self._spawn(self._watch_deaths(), "deaths")

    async def stop(self) -> None:
        """Stop watching, close the connections, stop the servers; may be called again."""
        self._running = False
        tasks = list(self._tasks)
        for task in tasks:
            if task not in self._kills:
                task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for server in self._servers:
            server.watch = None
        if self._in_front is not None:
            await self._in_front.stop()
        await asyncio.gather(*(server.end() for server in reversed(self._servers)))
        self._changed.set()

    async def generate(self, token_ids: Sequence[int], sampling: Sampling, request_id: str, session: str) -> Generation:
        """Generate on the session's server; where none takes requests but one is being started again, wait for that.

        Raises:
            EngineLost: the server died; with what it had sampled. Sent again, the request goes to another.
            EngineError: also, and at once, where no server is left.
        """
        if self._in_front is not None:
            return await self._behind(self._in_front, token_ids, sampling, request_id, session)
        if self._prefill:
            return await self._apart(token_ids, sampling, request_id, session)
        slot = await self._first(lambda: self._router.pick(session, token_ids))
        with self._in_flight(request_id, slot):
            return await self._on(self._generating[slot], token_ids, sampling, request_id)

    async def score(self, token_ids: Sequence[int]) -> Float32[np.ndarray, " tokens"]:
        """Log-prob of each token given those before it, at temperature 1; position 0 is 0. By any server that takes
        requests; where they are apart, by one that prefills, which sends the KV cache nowhere.

        Raises:
            EngineError: none takes requests now, or it failed.
        """
        able = self._prefill or self._generating
        serving = [self._servers[index].engine for index in self._recovery.serving if index in able]
        if not serving:
            raise EngineError(f"no inference server takes requests: {self.lost or 'none was started'}")
        return await serving[0].score(token_ids, NOWHERE.fields() if self._prefill else None)

    async def abort(self, request_ids: Sequence[str]) -> None:
        """End these requests; ids that are not in flight are ignored. Behind sglang-router every server is told, since
        nobody knows which has them."""
        if self._in_front is not None:
            aborts = [server.client.abort(request_ids) for server in self._servers if server.client is not None]
            for failure in await asyncio.gather(*aborts, return_exceptions=True):
                if isinstance(failure, BaseException) and not isinstance(failure, EngineLost):  # what is lost has none
                    raise failure
            return
        for server in self._servers:
            mine = [request for request in request_ids if self._requests.get(request) == server.spec.index]
            if mine and server.client is not None:
                await server.client.abort(mine)

    def end_session(self, session: str) -> None:
        """The session sends nothing more."""
        self._router.end_session(session)
        self._prefill_router.end_session(session)

    async def metrics(self) -> Mapping[str, EngineMetrics]:
        """Of the servers that take requests and answer, by name."""

        async def read(server: Server) -> tuple[str, EngineMetrics | None]:
            try:
                return server.name, await server.engine.metrics()
            except EngineError:
                return server.name, None

        answers = await asyncio.gather(*(read(self._servers[index]) for index in self._recovery.serving))
        return {name: metrics for name, metrics in answers if metrics is not None}

    def states(self) -> Mapping[str, tuple[Phase, int]]:
        """Phase and restarts in a row of each server, by name."""
        states = {s.name: (self._recovery.phase(i), self._recovery.restarts(i)) for i, s in enumerate(self._servers)}
        return states if self._in_front is None else states | {ROUTER: self._in_front.state}

    @contextlib.asynccontextmanager
    async def publication(self) -> AsyncIterator[Publication]:
        """Publish within this: meanwhile no server joins. Set ``Publication.holds`` and ``current`` before it ends."""
        publication = Publication(self, self._recovery.publish_begun())
        try:
            yield publication
        finally:
            if publication.holds != self.weight_version:
                for slot in range(len(self._generating)):
                    self._router.forget_cache(slot)
            self._apply(self._recovery.publish_ended(publication.holds))

    async def settle(self, indexes: Sequence[int]) -> None:
        """Ask these servers whether they live; returns when each has answered or counts as dead."""
        await asyncio.gather(*(self._settle(self._servers[index]) for index in indexes))

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
        await asyncio.gather(*(self._look_at(server) for server in self._servers))

    async def _look_at(self, server: Server) -> None:
        index, launched = server.spec.index, server.launched
        if launched is None or self._recovery.phase(index) is Phase.STARTING:  # whose start looks for itself
            return
        if (reason := await launched.failure()) is not None and launched is server.launched:
            self._apply(self._recovery.died(index, reason, time.monotonic()))

    # Requests

    @contextlib.contextmanager
    def _in_flight(self, request_id: str, slot: int) -> Iterator[None]:
        """Count a request for its server, and have ``abort`` find it there."""
        self._requests[request_id] = self._generating[slot]
        try:
            with self._router.request(slot):
                yield
        finally:
            self._requests.pop(request_id, None)

    def _require_hope(self) -> None:
        """Raises:
        EngineError: no request will be taken any more: the fleet does not run, it failed, or all servers of a kind that
            is needed are given up."""
        if self._failed:
            raise EngineError(self._failed)
        needed = [self._generating, self._prefill] if self._prefill else [self._generating]
        hopeful = all(map(self._recovery.hopeful, needed)) and (self._in_front is None or self._in_front.hopeful)
        if not self._running or not hopeful:
            raise EngineError(f"no inference server is left: {self.lost or 'none was started'}")

    async def _first(self, choose: Callable[[], T | None]) -> T:
        """What ``choose`` says as soon as it says something, while there is hope."""
        deadline = time.monotonic() + self.config.request_timeout_s
        while True:
            self._changed.clear()
            self._require_hope()
            slot = choose()
            if slot is not None:
                return slot
            try:
                await asyncio.wait_for(self._changed.wait(), min(1.0, max(deadline - time.monotonic(), 0.0)))
            except TimeoutError as error:
                if time.monotonic() >= deadline:
                    waited = f"{self.config.request_timeout_s:g} s"
                    raise EngineError(f"no inference server took requests for {waited}: {self.lost}") from error

    async def _behind(
        self, router: SGLangRouter, token_ids: Sequence[int], sampling: Sampling, request_id: str, session: str
    ) -> Generation:
        """Generate on a server of the router's choice."""
        await self._first(lambda: 0 if router.takes else None)
        await asyncio.gather(*(self._servers[index].engine.until_open() for index in self._recovery.serving))
        try:
            return await router.generate(token_ids, sampling, request_id, session)
        except EngineLost:
            if not self._running:
                raise
            # Nobody says which server it was, and sent again at once it could go there again.
            if self._check_up is None or self._check_up.done():
                self._check_up = self._spawn(self._examine(), "check-up")
            await asyncio.wait({self._check_up}, timeout=CHECK_UP_S)
            raise

    async def _examine(self) -> None:
        await asyncio.sleep(DEATH_POLL_S)  # a connection may break a moment before its process has ended
        await self.settle(self._recovery.serving)

    async def _on(
        self,
        index: int,
        token_ids: Sequence[int],
        sampling: Sampling,
        request_id: str,
        placement: Mapping[str, Any] | None = None,
    ) -> Generation:
        try:
            return await self._servers[index].engine.generate(token_ids, sampling, request_id, placement)
        except EngineLost as error:
            self._apply(self._recovery.suspected(index))
            raise EngineLost(str(error), error.partial, self._servers[index].spec.role) from error

    async def _apart(self, token_ids: Sequence[int], sampling: Sampling, request_id: str, session: str) -> Generation:
        """Prefill on one server, decode on another. The first to fail ends both."""

        def both() -> tuple[int, int] | None:  # at one moment: while we wait for one, the other may die
            first, then = self._prefill_router.pick(session, token_ids), self._router.pick(session, token_ids)
            return None if first is None or then is None else (first, then)

        first, then = await self._first(both)
        prefill, decode = self._prefill[first], self._generating[then]
        meeting = self._rendezvous(prefill).fields()
        with self._prefill_router.request(first), self._in_flight(request_id, then):
            return await generate_apart(
                self._on(prefill, token_ids, sampling, f"{request_id}.prefill", meeting),
                self._on(decode, token_ids, sampling, request_id, meeting),
            )

    def _rendezvous(self, prefill: int) -> Rendezvous:
        server = self._servers[prefill]
        assert server.spec.bootstrap_port is not None, "a prefill server has a bootstrap port"
        return rendezvous(server.engine.url, server.spec.bootstrap_port, self._rng)

    # A server's life

    def _apply(self, actions: Sequence[Action]) -> None:
        if not self._running:  # a request that ``stop`` cut off must not have a server started again
            return
        for action in actions:
            server = self._servers[action.server]
            if action.do is Do.ROUTE:
                router, slot = self._routed_by(server)
                router.set_healthy(slot, True)
                self._on_progress(f"{server.name} takes requests with weights of version {self.weight_version}")
                server.watch = server.watch or self._spawn(self._watch_health(server), f"{server.name}-health")
            elif action.do is Do.UNROUTE:
                router, slot = self._routed_by(server)
                router.set_healthy(slot, False)
            elif action.do is Do.KILL:
                self._on_progress(f"lost {server.name}: {action.reason.splitlines()[0]}")
                kill = self._spawn(server.end(), f"{server.name}-kill")
                self._kills.add(kill)
                kill.add_done_callback(self._kills.discard)
            elif action.do is Do.START:
                self._spawn(self._restart(server), f"{server.name}-start")
            elif action.do is Do.LOAD:
                self._spawn(self._join(server), f"{server.name}-join")
            elif action.do is Do.GIVE_UP:
                self._on_progress(f"{server.name} is given up: it died {self.config.recovery.max_restarts + 1} times")
        if self._in_front is not None:
            self._in_front.serve([self._servers[index].engine.url for index in self._recovery.serving])
        self._changed.set()

    def _routed_by(self, server: Server) -> tuple[Router, int]:
        """The router that knows it, and by which index."""
        if server.spec.role == "prefill":
            return self._prefill_router, self._prefill.index(server.spec.index)
        return self._router, self._generating.index(server.spec.index)

    def _spawn(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
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

    async def _hand_over(self, prefill: int, decode: int) -> None:
        halves = (self._servers[prefill], self._servers[decode])
        first, then = (Half(half.name, half.engine, half.launched.log if half.launched else "") for half in halves)
        await hand_over(first, then, lambda: self._rendezvous(prefill), self.config.start_timeout_s)

    async def _join_partner(self, server: Server) -> None:
        """Have a prefill or decode server that was started again work with one of the other kind, where one serves.

        Raises:
            EngineError: they do not, and the other one lives.
        """
        index = server.spec.index
        others = self._generating if index in self._prefill else self._prefill
        serving = [other for other in others if self._recovery.phase(other) is Phase.SERVING][:1]
        try:
            for prefill, decode in pairs([index], serving) if index in self._prefill else pairs(serving, [index]):
                await self._hand_over(prefill, decode)
        except EngineError:
            await self.settle(serving)
            if self._recovery.phase(serving[0]) is Phase.SERVING:
                raise

    async def _until_all_serve(self) -> None:
        """Raises:
        EngineError: a server died, or could not join, or the router does not have them all."""
        try:
            async with asyncio.timeout(self.config.start_timeout_s):
                while not self._all_serve():
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError as error:
            waited, missing = f"{self.config.start_timeout_s:g} s", self.lost or f"{ROUTER} does not list them all"
            raise EngineError(
                f"servers that generated did not take requests within {waited} (engine.start_timeout_s): {missing}"
            ) from error

    def _all_serve(self) -> bool:
        for index, server in enumerate(self._servers):
            if self._recovery.phase(index) in (Phase.DOWN, Phase.LOST):
                raise EngineError(f"{server.name} died while the servers started: {self._recovery.reason(index)}")
        listed = self._in_front is None or self._in_front.complete
        return len(self._recovery.serving) == len(self._servers) and listed

    async def _restart(self, server: Server) -> None:
        index = server.spec.index
        try:
            await server.end()
            self._on_progress(f"{server.name} starts again, attempt {self._recovery.restarts(index)}")
            await server.bring_up(self._model_dir, self._model_version)
            await self._join_partner(server)
        except (EngineError, ProcessError) as error:
            self._apply(self._recovery.died(index, str(error), time.monotonic()))
        else:
            router, slot = self._routed_by(server)
            router.forget_cache(slot)
            self._apply(self._recovery.generates(index))

    async def _join(self, server: Server) -> None:
        """Give a server the fleet's weights, where it has others, and have it say its version."""
        index, wanted, launched = server.spec.index, self.weight_version, server.launched
        failure: EngineError | None = None
        version = UNKNOWN
        try:
            if self.current is not None:
                await self.current.load(server.engine)
            version = await server.engine.weight_version()
            if version not in (wanted, self.weight_version):
                raise EngineError(f"it says that it has version {version}, the others have {wanted}")
        except EngineError as error:
            failure = error
        if launched is not server.launched:
            return  # it died meanwhile, which was reported
        if failure is None:
            self._apply(self._recovery.joined(index, version, time.monotonic()))
        else:
            self._apply(self._recovery.died(index, f"{server.name} could not join: {failure}", time.monotonic()))

    async def _watch_deaths(self) -> None:
        while True:
            await self._look_for_deaths()
            self._apply(self._recovery.tick(time.monotonic()))
            await asyncio.sleep(DEATH_POLL_S)

    async def _watch_health(self, server: Server) -> None:
        """Heartbeats, for as long as the fleet runs; a suspect's come at once, and without a pause."""
        index, interval = server.spec.index, self.config.recovery.heartbeat_interval_s
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


__all__ = ["UNKNOWN", "CurrentWeights", "EngineFleet", "Publication"]
