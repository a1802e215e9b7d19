"""``sglang-router`` as a process in front of the fleet's servers: started, watched, started again, told who serves.

A router that dies or hangs is treated by the law of ``recovery``, as a server is. Its list of workers is compared with
the servers that take requests, and corrected, until the two agree: whatever is lost on the way (a job in its queue, a
router that starts anew with an empty list) is asked for again.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Collection, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rollout.engine.config import EngineConfig
from rollout.engine.protocol import EngineError, EngineLost, Generation, Sampling
from rollout.engine.recovery import Action, Do, FleetRecovery, Phase
from rollout.engine.router_settings import SESSION_HEADER, SGLangRouterConfig, command, missing
from rollout.engine.sglang import generate_body, receive
from rollout.engine.sglang_answers import GenerationStream
from rollout.engine.sglang_http import Connection, Timeouts
from rollout.processes import ManagedProcess, ProcessError, ProcessRegistry, free_ports, require_free_port

NAME = "sglang-router"
UPSTREAM_LOST = ("call_upstream_request_error", "no_available_workers")
"""Error codes of the router's own for a server that is gone, and for none at all: the request may go elsewhere."""
POLL_S = 0.25
"""How often it is looked whether the process runs, and, until router and fleet agree, at its list of workers."""
ASK_AGAIN_S = 10.0
"""After which a worker that was to be added and is not listed is added again; the router's own checks take a second."""
GRACE_S = 0.0
"""Seconds between SIGTERM and SIGKILL: it holds nothing."""


@dataclass(frozen=True)
class Changes:
    """What has to be asked of the router."""

    add: Sequence[str]
    """URLs."""
    remove: Sequence[str]
    """The router's own ids of workers."""


def changes(wanted: Collection[str], listed: Mapping[str, str], asked: Collection[str]) -> Changes:
    """Pure.

    Args:
        wanted: URLs of the servers that take requests.
        listed: the router's id of each URL that it has.
        asked: URLs that it was told to add a moment ago.
    """
    add = sorted(set(wanted) - listed.keys() - set(asked))
    return Changes(add, [listed[url] for url in sorted(listed.keys() - set(wanted))])


class RouterClient(Connection):
    """The router's HTTP API."""

    async def generate(self, token_ids: Sequence[int], sampling: Sampling, request_id: str, session: str) -> Generation:
        """As ``SGLangEngine.generate``, on a server of the router's choice.

        Raises:
            EngineLost: the server, or the router, died meanwhile, or there is none.
        """
        stream = GenerationStream(len(token_ids))
        body = generate_body(token_ids, sampling, request_id)
        with self._answer_errors("/generate"):
            events = self._events("/generate", body, self._timeouts.request_s, {SESSION_HEADER: session})
            return await receive(events, stream)

    async def alive(self) -> bool:
        return await self._answers("/liveness")

    async def workers(self) -> Mapping[str, str]:
        """Its id of each worker, by URL."""
        answer = await self._call("GET", "/workers", None, self._timeouts.health_s)
        with self._answer_errors("/workers"):
            return {str(worker["url"]).rstrip("/"): str(worker["id"]) for worker in answer["workers"]}

    async def add(self, url: str) -> None:
        """Have it check a server and add it; returns at once."""
        await self._call("POST", "/workers", {"url": url}, self._timeouts.health_s)

    async def remove(self, worker: str) -> None:
        """Requests in flight go on."""
        await self._call("DELETE", f"/workers/{worker}", None, self._timeouts.health_s)

    def _refusal(self, message: str, headers: Mapping[str, str]) -> EngineError:
        lost = headers.get("X-SMG-Error-Code") in UPSTREAM_LOST
        return EngineLost(message) if lost else EngineError(message)


class SGLangRouter:
    """The process, and what the fleet wants of it. ``start``, ``serve``, ``generate`` while it ``takes``, ``stop``."""

    def __init__(
        self,
        config: EngineConfig,
        settings: SGLangRouterConfig,
        registry: ProcessRegistry,
        log_dir: Path,
        say: Callable[[str], None],
        on_change: Callable[[], None],
        spawn: Callable[[Coroutine[Any, Any, None], str], asyncio.Task[None]],
    ) -> None:
        """
        Args:
            spawn: starts a task by a name, and tells whoever asks for a server where it failed.
        """
        self._config = config
        self._settings = settings
        self._registry = registry
        self._log = log_dir / f"{NAME}.log"
        self._say = say
        self._on_change = on_change
        self._spawn = spawn
        self._recovery = FleetRecovery(config.recovery, 1, 0)
        self._process: ManagedProcess | None = None
        self._client: RouterClient | None = None
        self._watch: asyncio.Task[None] | None = None
        self._wake = asyncio.Event()
        self._wanted: frozenset[str] = frozenset()
        self._listed: frozenset[str] = frozenset()
        self._asked: dict[str, float] = {}
        self._complaint = ""
        """The last, which is said once."""

    @property
    def state(self) -> tuple[Phase, int]:
        """Phase, and restarts in a row."""
        return self._recovery.phase(0), self._recovery.restarts(0)

    @property
    def hopeful(self) -> bool:
        """Whether it runs, or may do so again."""
        return self._recovery.hopeful([0])

    @property
    def reason(self) -> str:
        """Why it last died; empty where it never did."""
        return self._recovery.reason(0)

    @property
    def takes(self) -> bool:
        """Whether a request would go to a server that takes requests, and to no other."""
        return self._recovery.phase(0) is Phase.SERVING and bool(self._listed) and self._listed <= self._wanted

    @property
    def complete(self) -> bool:
        """Whether all servers that take requests are in its list, and no others."""
        return self.takes and self._listed == self._wanted

    @property
    def pid(self) -> int:
        """Of the process that runs.

        Raises:
            EngineError: none does.
        """
        if self._process is None:
            raise EngineError(f"{NAME} is not running: {self.reason}")
        return self._process.pid

    def check(self) -> None:
        """Raises:
        ProcessError: the router can't be started."""
        if (problem := missing()) is not None:
            raise ProcessError(problem)
        if self._settings.port is not None:
            require_free_port("engine.sglang_router.port", self._settings.port)

    async def start(self) -> None:
        """Launch it and wait until it answers; from then on it is watched.

        Raises:
            ProcessError, EngineError: it did not come up.
        """
        self._recovery = FleetRecovery(self._config.recovery, 1, 0)
        await self._bring_up()
        self._watch = self._spawn(self._run(), f"{NAME}-watch")

    async def stop(self) -> None:
        """May be called again."""
        if self._watch is not None:
            self._watch.cancel()
            await asyncio.gather(self._watch, return_exceptions=True)
            self._watch = None
        await self._end()

    def serve(self, urls: Collection[str]) -> None:
        """From now on these servers take requests, and no others."""
        self._wanted = frozenset(url.rstrip("/") for url in urls)
        self._wake.set()

    async def generate(self, token_ids: Sequence[int], sampling: Sampling, request_id: str, session: str) -> Generation:
        """Through the router, wherever that sends it.

        Raises:
            EngineLost: the server or the router died.
        """
        if self._client is None:
            raise EngineLost(f"{NAME} is not running: {self.reason}")
        return await self._client.generate(token_ids, sampling, request_id, session)

    # Its life

    async def _run(self) -> None:
        checked = time.monotonic()
        while True:
            now = time.monotonic()
            due = now - checked >= self._config.recovery.heartbeat_interval_s
            if self._recovery.phase(0) in (Phase.SERVING, Phase.SUSPECT):
                if (ended := self._ended()) is not None:
                    await self._apply(self._recovery.died(0, ended, now))
                elif due or not self.complete:
                    checked = now
                    await self._apply(self._recovery.heartbeat(0, await self._correct(), time.monotonic()))
            await self._apply(self._recovery.tick(time.monotonic()))
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._wake.wait(), POLL_S)
            self._wake.clear()

    def _ended(self) -> str | None:
        assert self._process is not None
        try:
            self._process.check()
        except ProcessError as error:
            return str(error)
        return None

    async def _correct(self) -> bool:
        """Bring its list nearer to the servers that take requests; whether it answered."""
        assert self._client is not None
        now = time.monotonic()
        try:
            listed = await self._client.workers()
        except EngineError:
            return await self._client.alive()
        self._listed = frozenset(listed)
        self._asked = {
            url: at
            for url, at in self._asked.items()
            if url in self._wanted and url not in listed and now - at < ASK_AGAIN_S
        }
        self._on_change()
        todo = changes(self._wanted, listed, self._asked)
        try:
            for worker in todo.remove:
                await self._client.remove(worker)
            for url in todo.add:
                self._asked[url] = now  # before the answer: one that is refused is not asked for four times a second
                await self._client.add(url)
        except EngineError as error:
            if str(error) != self._complaint:
                self._complaint = str(error)
                self._say(f"{NAME} did not change its list of servers, it is asked again: {error}")
            return await self._client.alive()
        return True

    async def _apply(self, actions: Sequence[Action]) -> None:
        for action in actions:
            if action.do is Do.KILL:
                self._say(f"lost {NAME}: {action.reason.splitlines()[0]}")
                await self._end()
            elif action.do is Do.START:
                self._say(f"{NAME} starts again, attempt {self._recovery.restarts(0)}")
                try:
                    await self._bring_up()
                except (EngineError, ProcessError) as error:
                    await self._apply(self._recovery.died(0, str(error), time.monotonic()))
            elif action.do is Do.GIVE_UP:
                self._say(f"{NAME} is given up: it died {self._config.recovery.max_restarts + 1} times")
            self._on_change()

    async def _bring_up(self) -> None:
        free_port, metrics_port = free_ports(2)
        port = self._settings.port or free_port
        line = command(self._config, self._settings, port, metrics_port)
        self._process = self._registry.start(NAME, line, self._log, grace_s=GRACE_S)
        self._client = RouterClient(f"http://127.0.0.1:{port}", Timeouts.of(self._config))
        started = time.monotonic()
        while not await self._client.alive():
            if (ended := self._ended()) is not None:
                raise ProcessError(ended)
            if time.monotonic() - started > self._settings.start_timeout_s:
                waited = f"{self._settings.start_timeout_s:g} s"
                raise EngineError(f"{NAME} (see {self._log}) did not answer within {waited} of its start")
            await asyncio.sleep(POLL_S)
        self._recovery.generates(0)
        self._recovery.joined(0, 0, time.monotonic())
        self._say(f"{NAME} listens at {self._client.url} after {time.monotonic() - started:.1f} s")

    async def _end(self) -> None:
        client, self._client = self._client, None
        process, self._process = self._process, None
        self._listed, self._asked = frozenset(), {}
        if client is not None:
            await client.close()
        if process is not None:
            try:
                await asyncio.to_thread(self._registry.stop, process)
            except ProcessError as error:  # it holds a port, no GPU: the next one takes another
                self._say(str(error))
