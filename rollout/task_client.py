"""HTTP client of one task's servers (``tasks.protocol``)."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Sequence
from types import TracebackType
from typing import Self, TypeVar

import aiohttp
from pydantic import BaseModel, ValidationError

from rollout.http_pool import pool
from tasks.protocol import PROTOCOL_VERSION, EpisodeRequest, EpisodeState, EpisodeStatus, Health, Metadata

log = logging.getLogger(__name__)

Answer = TypeVar("Answer", bound=BaseModel)

CALL_TIMEOUT_S = 15.0
POLL_S = 20.0
"""How long the server holds a request for an episode's end before it answers "running"."""


class TaskServerError(RuntimeError):
    """A task server gave no usable answer; the message names the task and the URL."""


class TaskServerRefused(TaskServerError):
    """No server took the episode, nothing was started: worth another try later."""


class TaskServerFull(TaskServerRefused):
    """At least one server can be reached, and all that can are full (429)."""


class TaskServerGone(TaskServerRefused):
    """No server can be reached."""


class TaskClient:
    """Spreads one task's episodes over its servers by load. Use as an async context manager."""

    def __init__(self, task: str, urls: Sequence[str]) -> None:
        if not urls:
            raise ValueError(f"task {task}: no server URL")
        self.task = task
        self.urls = [url.rstrip("/") for url in urls]
        self._load: Counter[str] = Counter()
        self._http: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        self._http = aiohttp.ClientSession(connector=pool(), timeout=aiohttp.ClientTimeout(total=CALL_TIMEOUT_S))
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._http is not None:
            await self._http.close()
            self._http = None

    async def check(self) -> int:
        """Free slots of all servers together; raises ``TaskServerError`` where one is not this task's server."""
        slots = 0
        for url in self.urls:
            metadata = await self._call("GET", f"{url}/metadata", Metadata)
            if metadata.task != self.task or metadata.version != PROTOCOL_VERSION:
                raise TaskServerError(
                    f"task {self.task}: {url} serves task {metadata.task!r} with protocol version {metadata.version}, "
                    f"expected {self.task!r} with version {PROTOCOL_VERSION}"
                )
            slots += (await self._call("GET", f"{url}/health", Health)).slots
        return slots

    async def play(self, request: EpisodeRequest) -> EpisodeStatus:
        """Start an episode and wait for its end, ``request.timeout_s`` seconds and a grace at most.

        Raises:
            TaskServerFull, TaskServerGone: nothing was started.
            TaskServerError: the episode was lost.
        """
        refusals: list[TaskServerRefused] = []
        for url in sorted(self.urls, key=lambda candidate: self._load[candidate]):
            try:
                return await self._play_on(url, request)
            except TaskServerRefused as refusal:
                refusals.append(refusal)
        raise next((refusal for refusal in refusals if isinstance(refusal, TaskServerFull)), refusals[0])

    async def _play_on(self, url: str, request: EpisodeRequest) -> EpisodeStatus:
        self._load[url] += 1
        started = ended = False
        try:
            async with asyncio.timeout(request.timeout_s + 2 * CALL_TIMEOUT_S):
                status = await self._start(url, request)
                started = True
                while status.state is EpisodeState.RUNNING:
                    status = await self._call(
                        "GET",
                        f"{url}/episodes/{request.episode_id}?wait_s={POLL_S}",
                        EpisodeStatus,
                        timeout_s=POLL_S + CALL_TIMEOUT_S,
                    )
                ended = True
        except TimeoutError:
            raise TaskServerError(
                f"task {self.task}: {url} did not end an episode within its {request.timeout_s:g} s"
            ) from None
        finally:
            self._load[url] -= 1
            if started and not ended:
                await self._cancel(url, request.episode_id)
        if status.state is EpisodeState.COMPLETED and status.reward is None:
            raise TaskServerError(f"task {self.task}: {url} completed an episode without a reward")
        return status

    async def _start(self, url: str, request: EpisodeRequest) -> EpisodeStatus:
        try:
            return await self._call("POST", f"{url}/episodes", EpisodeStatus, body=request)
        except aiohttp.ClientConnectionError as error:
            raise TaskServerGone(f"task {self.task}: {url} can't be reached: {error}") from None

    async def _cancel(self, url: str, episode_id: str) -> None:
        """Best effort: a server that does not hear of it fails the episode at its own timeout."""
        try:
            async with self._session().delete(f"{url}/episodes/{episode_id}") as response:
                await response.read()
        except (aiohttp.ClientError, TimeoutError) as error:
            log.warning("task %s: %s could not be told to cancel an episode: %r", self.task, url, error)

    def _session(self) -> aiohttp.ClientSession:
        if self._http is None:
            raise RuntimeError("TaskClient is used outside its context")
        return self._http

    async def _call(
        self,
        method: str,
        url: str,
        answer: type[Answer],
        body: BaseModel | None = None,
        timeout_s: float = CALL_TIMEOUT_S,
    ) -> Answer:
        http = self._session()
        try:
            async with http.request(
                method,
                url,
                data=None if body is None else body.model_dump_json(),
                headers={"Content-Type": "application/json"},
                timeout=aiohttp.ClientTimeout(total=timeout_s),
            ) as response:
                text = await response.text()
                status = response.status
        except aiohttp.ClientConnectionError:
            if method == "POST":
                raise
            raise TaskServerError(f"task {self.task}: {url} can't be reached") from None
        except (aiohttp.ClientError, TimeoutError) as error:
            raise TaskServerError(f"task {self.task}: {method} {url} failed: {error!r}") from None
        if status == 429:
            raise TaskServerFull(f"task {self.task}: {url} is full")
        if status >= 300:
            raise TaskServerError(f"task {self.task}: {method} {url} answered {status}: {text[:200]}")
        try:
            return answer.model_validate_json(text)
        except ValidationError:
            raise TaskServerError(
                f"task {self.task}: {method} {url} answered something that is no {answer.__name__}: {text[:200]!r}"
            ) from None
