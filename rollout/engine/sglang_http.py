"""The connection to one inference server: one pool, a timeout for every call, errors that name the URL."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import aiohttp

from rollout.engine.protocol import EngineError, EngineLost, EngineRefused
from rollout.http_pool import pool

if TYPE_CHECKING:
    from rollout.engine.config import EngineConfig

SHOWN_CHARACTERS = 500
"""How much of an error answer's body an error shows."""


@dataclass(frozen=True)
class Timeouts:
    """Seconds until a call is given up."""

    request_s: float = 600.0
    """One generation or scoring, the wait in the server's queue included."""
    control_s: float = 60.0
    """Pause, resume, abort, metrics, each step of a weight update."""
    health_s: float = 30.0
    connect_s: float = 5.0

    @classmethod
    def of(cls, config: EngineConfig) -> Timeouts:
        """As the settings say."""
        return cls(config.request_timeout_s, config.control_timeout_s, config.recovery.heartbeat_timeout_s)


class Connection:
    """One connection pool, made at the first call and bound to that event loop; ``close`` it, or use ``async with``.

    Every call raises ``EngineError``, which names the URL, where the server refuses, is gone, or is late.
    """

    def __init__(self, url: str, timeouts: Timeouts | None = None, headers: Mapping[str, str] | None = None) -> None:
        self.url = url.rstrip("/")
        self._headers = dict(headers or {})
        self._timeouts = timeouts or Timeouts()
        self._session: aiohttp.ClientSession | None = None
        self._responses: set[aiohttp.ClientResponse] = set()
        self._closed = False

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connections; calls in flight fail with ``EngineLost``."""
        self._closed = True
        for response in list(self._responses):
            response.close()  # closing the pool does not wake those that wait for more of an answer
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def _answers(self, path: str) -> bool:
        try:
            await self._call("GET", path, None, self._timeouts.health_s)
        except EngineError:
            return False
        return True

    async def _control(self, path: str, body: Mapping[str, Any]) -> None:
        await self._call("POST", path, body, self._timeouts.control_s)

    async def _call(self, method: str, path: str, body: Mapping[str, Any] | None, timeout_s: float) -> Any:
        """The answer's JSON, or None where it is not JSON."""
        async with self._request(method, path, body, timeout_s) as response:
            text = await response.text()
            return json.loads(text) if response.content_type == "application/json" else None

    async def _text(self, path: str, timeout_s: float) -> str:
        async with self._request("GET", path, None, timeout_s) as response:
            return await response.text()

    async def _events(
        self, path: str, body: Mapping[str, Any], timeout_s: float, headers: Mapping[str, str] | None = None
    ) -> AsyncGenerator[Mapping[str, Any], None]:
        """The answer's server-sent events, up to ``[DONE]``; whoever stops before it closes the generator.

        Raises:
            EngineLost: also where the stream ends without it.
        """
        async with self._request("POST", path, body, timeout_s, headers) as response:
            if response.content_type != "text/event-stream":
                raise EngineError(f"POST {self.url}{path} answered with {response.content_type}, not with events")
            pending = bytearray()
            async for received in response.content.iter_any():  # a line of routed experts exceeds aiohttp's line limit
                pending += received
                *lines, rest = pending.split(b"\n")
                pending = bytearray(rest)
                for line in lines:
                    if not line.startswith(b"data:"):
                        continue
                    if (data := line[5:].strip()) == b"[DONE]":
                        return
                    yield json.loads(data)
        raise EngineLost(f"POST {self.url}{path} ended before its answer did")

    @contextlib.asynccontextmanager
    async def _request(
        self,
        method: str,
        path: str,
        body: Mapping[str, Any] | None,
        timeout_s: float,
        headers: Mapping[str, str] | None = None,
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        where = f"{method} {self.url}{path}"
        if self._closed:
            raise EngineLost(f"{where}: the connection was closed")
        if self._session is None:
            self._session = aiohttp.ClientSession(
                connector=pool(),
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=self._timeouts.connect_s),
                headers=self._headers,
            )
        try:
            async with (
                asyncio.timeout(timeout_s),
                self._session.request(method, self.url + path, json=body, headers=headers) as response,
            ):
                if response.status // 100 != 2:
                    text = await response.text()
                    message = f"{where} answered {response.status}: {text[:SHOWN_CHARACTERS]}"
                    raise self._refusal(message, response.headers)
                self._responses.add(response)
                try:
                    yield response
                finally:
                    self._responses.discard(response)
        except TimeoutError as error:
            raise EngineError(f"{where} did not answer within {timeout_s:g} s") from error
        except (aiohttp.ClientError, OSError) as error:
            raise EngineLost(f"{where} failed: {type(error).__name__}: {error}") from error
        except ValueError as error:
            raise EngineError(f"{where} answered no JSON: {error}") from error

    def _refusal(self, message: str, headers: Mapping[str, str]) -> EngineError:
        """What an answer with an error status means."""
        return EngineRefused(message)

    @contextlib.contextmanager
    def _answer_errors(self, path: str) -> Iterator[None]:
        try:
            yield
        except (KeyError, TypeError, ValueError, IndexError) as error:
            raise EngineError(f"{self.url}{path} answered what we cannot read: {error!r}") from error
