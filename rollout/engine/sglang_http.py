"""The connection to one SGLang server: one pool, a timeout for every call, errors that name the URL."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import aiohttp

from rollout.engine.protocol import EngineError

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


class SGLangConnection:
    """One connection pool, made at the first call and bound to that event loop; ``close`` it, or use ``async with``.

    Every call raises ``EngineError``, which names the URL, where the server refuses, is gone, or is late.
    """

    def __init__(self, url: str, timeouts: Timeouts | None = None) -> None:
        self.url = url.rstrip("/")
        self._timeouts = timeouts or Timeouts()
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connections; calls in flight fail."""
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
        where = f"{method} {self.url}{path}"
        if self._session is None:
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0),  # SGLang queues better than a pool does
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=self._timeouts.connect_s),
            )
        try:
            async with (
                asyncio.timeout(timeout_s),
                self._session.request(method, self.url + path, json=body) as response,
            ):
                text = await response.text()
                if response.status != 200:
                    raise EngineError(f"{where} answered {response.status}: {text[:SHOWN_CHARACTERS]}")
                return json.loads(text) if response.content_type == "application/json" else None
        except TimeoutError as error:
            raise EngineError(f"{where} did not answer within {timeout_s:g} s") from error
        except (aiohttp.ClientError, OSError, ValueError) as error:
            raise EngineError(f"{where} failed: {type(error).__name__}: {error}") from error

    @contextlib.contextmanager
    def _answer_errors(self, path: str) -> Iterator[None]:
        try:
            yield
        except (KeyError, TypeError, ValueError, IndexError) as error:
            raise EngineError(f"{self.url}{path} answered what we cannot read: {error!r}") from error
