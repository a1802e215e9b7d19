"""The episode server: plays any task's episodes over HTTP, by the protocol of ``tasks.protocol``."""

from __future__ import annotations

import asyncio
import collections
import contextlib
import logging
import math
from collections.abc import AsyncIterator
from dataclasses import dataclass

from aiohttp import web
from pydantic import BaseModel, ValidationError

from tasks.chat import Chat, GatewayError, Outcome
from tasks.policy_client import PolicyClient
from tasks.protocol import EpisodeRequest, EpisodeState, EpisodeStatus, Health, Metadata, Refusal
from tasks.registry import LoadedTask

log = logging.getLogger(__name__)

MAX_WAIT_S = 60.0
"""Longest time a GET is held; a longer ``wait_s`` is answered after this."""
RETENTION_S = 120.0
"""How long an ended episode that nobody deletes is kept."""
MAX_BODY_BYTES = 16 * 2**20
DISCONNECT_GRACE_S = 1.0
"""How long a server that stops waits for its plays and open answers."""


class EpisodeTimeout(Exception):
    """The episode did not end within its time."""


@dataclass
class Episode:
    request: EpisodeRequest
    task: asyncio.Task[Outcome]
    forget: asyncio.TimerHandle | None = None
    """Set once it has ended."""

    def status(self) -> EpisodeStatus:
        episode_id = self.request.episode_id
        if not self.task.done():
            return EpisodeStatus(episode_id=episode_id, state=EpisodeState.RUNNING)
        if self.task.cancelled():
            return EpisodeStatus(episode_id=episode_id, state=EpisodeState.CANCELLED)
        if (error := self.task.exception()) is not None:
            text = " ".join(f"{type(error).__name__}: {error}".split())
            return EpisodeStatus(episode_id=episode_id, state=EpisodeState.FAILED, error=text)
        outcome = self.task.result()
        return EpisodeStatus(
            episode_id=episode_id,
            state=EpisodeState.COMPLETED,
            reward=outcome.reward,
            end=outcome.end,
            metrics=dict(outcome.metrics),
        )


class EpisodeServer:
    """Serves one task. ``slots`` is how many episodes it plays at once; times are seconds."""

    def __init__(self, task: LoadedTask, slots: int, retention_s: float = RETENTION_S) -> None:
        self._task = task
        self._slots = slots
        self._retention_s = retention_s
        self._episodes: dict[str, Episode] = {}
        # Plays that have not ended, also of deleted episodes: a play that takes long to cancel still holds its slot.
        self._running: set[asyncio.Task[Outcome]] = set()
        self._ended: collections.Counter[EpisodeState] = collections.Counter()
        self._logged: set[type[BaseException]] = set()

    def app(self) -> web.Application:
        """The web application; it cancels all episodes when it shuts down."""
        app = web.Application(client_max_size=MAX_BODY_BYTES)
        app.add_routes(
            [
                web.post("/episodes", self._start),
                web.get("/episodes/{id}", self._get),
                web.delete("/episodes/{id}", self._delete),
                web.get("/health", self._health),
                web.get("/metadata", self._metadata),
            ]
        )
        app.cleanup_ctx.append(self._policy_client)
        app.on_shutdown.append(self._cancel_all)
        return app

    @property
    def running(self) -> int:
        """Plays that have not ended."""
        return len(self._running)

    async def _start(self, request: web.Request) -> web.Response:
        try:
            wanted = EpisodeRequest.model_validate_json(await request.read())
        except ValidationError as error:
            return _refuse(422, _one_line(error))
        episode_id = wanted.episode_id
        episode = self._episodes.get(episode_id)
        if episode is not None and episode.request != wanted:
            return _refuse(409, f"episode_id: {episode_id} is taken by another request")
        if episode is None:
            if self.running >= self._slots:
                return _refuse(429, f"all {self._slots} slots are taken")
            episode = Episode(wanted, asyncio.create_task(self._play(wanted)))
            self._episodes[episode_id] = episode
            self._running.add(episode.task)
            episode.task.add_done_callback(lambda _: self._on_end(episode))
        return _answer(episode.status(), 202)

    async def _get(self, request: web.Request) -> web.Response:
        try:
            wait_s = float(request.query.get("wait_s", "0"))
        except ValueError:
            wait_s = math.nan
        if not wait_s >= 0:
            return _refuse(422, "wait_s: it must be a number of seconds, 0 or more")
        episode = self._episodes.get(request.match_info["id"])
        if episode is None:
            return _refuse(404, f"episode {request.match_info['id']} is unknown: never started, deleted, or too old")
        if not episode.task.done() and wait_s > 0:
            await asyncio.wait([episode.task], timeout=min(wait_s, MAX_WAIT_S))
        return _answer(episode.status())

    async def _delete(self, request: web.Request) -> web.Response:
        episode = self._episodes.pop(request.match_info["id"], None)
        if episode is not None:
            episode.task.cancel()
            if episode.forget is not None:
                episode.forget.cancel()
        return web.Response(status=204)

    async def _health(self, _: web.Request) -> web.Response:
        free = max(0, self._slots - self.running)
        return _answer(Health(slots=self._slots, free_slots=free, ended=dict(self._ended)))

    async def _metadata(self, _: web.Request) -> web.Response:
        return _answer(Metadata(task=self._task.name))

    async def _play(self, request: EpisodeRequest) -> Outcome:
        chat = Chat(self._client.bind(request.gateway_url, request.max_tokens, request.timeout_s))
        try:
            async with asyncio.timeout(request.timeout_s) as limit:
                outcome = await self._task.play(self._task.options, request.data, chat)
        except TimeoutError as error:
            if not limit.expired():
                raise
            raise EpisodeTimeout(f"not ended after {request.timeout_s:g} s, in turn {chat.turns + 1}") from error
        if not isinstance(outcome, Outcome):
            raise TypeError(f"play of {self._task.name} returned {type(outcome).__name__}, it must return an Outcome")
        return outcome

    def _on_end(self, episode: Episode) -> None:
        self._running.discard(episode.task)
        state = episode.status().state
        self._ended[state] += 1
        if state is EpisodeState.FAILED:
            self._log_first(episode.task.exception())
        episode_id = episode.request.episode_id
        if self._episodes.get(episode_id) is episode:
            loop = asyncio.get_running_loop()
            episode.forget = loop.call_later(self._retention_s, self._episodes.pop, episode_id, None)

    def _log_first(self, error: BaseException | None) -> None:
        # The status carries one line; a fault in a task's own code needs its traceback, but not a thousand times.
        if error is None or isinstance(error, GatewayError | EpisodeTimeout) or type(error) in self._logged:
            return
        self._logged.add(type(error))
        log.error("play of %s failed (the first %s)", self._task.name, type(error).__name__, exc_info=error)

    async def _policy_client(self, _: web.Application) -> AsyncIterator[None]:
        self._client = PolicyClient(max_connections=self._slots)
        yield
        await self._client.close()

    async def _cancel_all(self, _: web.Application) -> None:
        for play in self._running:
            play.cancel()
        if self._running:
            await asyncio.wait(self._running, timeout=DISCONNECT_GRACE_S)


@contextlib.asynccontextmanager
async def listening(server: EpisodeServer, host: str, port: int) -> AsyncIterator[str]:
    """Serve until the block is left; yields the base URL. Port 0 takes a free one.

    Raises:
        OSError: where the address cannot be bound.
    """
    runner = web.AppRunner(server.app(), access_log=None, shutdown_timeout=DISCONNECT_GRACE_S / 2)
    await runner.setup()
    try:
        await web.TCPSite(runner, host, port).start()
        bound_port = runner.addresses[0][1]
        yield f"http://{host}:{bound_port}"
    finally:
        await runner.cleanup()


def _answer(body: BaseModel, status: int = 200) -> web.Response:
    return web.Response(text=body.model_dump_json(), status=status, content_type="application/json")


def _refuse(status: int, error: str) -> web.Response:
    return _answer(Refusal(error=error), status)


def _one_line(error: ValidationError) -> str:
    return "; ".join(f"{'.'.join(map(str, e['loc'])) or 'body'}: {e['msg']}" for e in error.errors(include_url=False))
