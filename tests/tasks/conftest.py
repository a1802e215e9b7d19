from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import aiohttp
from aiohttp import web

from tasks.protocol import EpisodeStatus
from tasks.registry import LoadedTask
from tasks.server import EpisodeServer, listening

Messages = list[dict[str, str]]


@dataclass
class FakeGateway:
    """An OpenAI-compatible endpoint: ``policy`` maps a conversation to the next turn."""

    policy: Callable[[Messages], str] = lambda messages: "=0"
    finish_reason: str = "stop"
    hang: bool = False
    status: int = 200
    body: Any = None
    """Sent in place of a completion."""
    requests: list[dict[str, Any]] = field(default_factory=list)
    dropped: int = 0
    """Calls whose client went away."""
    url: str = ""

    async def complete(self, request: web.Request) -> web.Response:
        wanted = await request.json()
        self.requests.append(wanted)
        if self.hang:
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                self.dropped += 1
                raise
        if self.body is not None:
            return web.json_response(self.body, status=self.status)
        message = {"role": "assistant", "content": self.policy(wanted["messages"])}
        choice = {"index": 0, "finish_reason": self.finish_reason, "message": message}
        return web.json_response(
            {"id": "1", "object": "chat.completion", "created": 1, "model": "policy", "choices": [choice]}
        )


@contextlib.asynccontextmanager
async def gateway(**settings: Any) -> AsyncIterator[FakeGateway]:
    async with mortal_gateway(**settings) as (fake, _):
        yield fake


@contextlib.asynccontextmanager
async def mortal_gateway(**settings: Any) -> AsyncIterator[tuple[FakeGateway, Callable[[], Awaitable[None]]]]:
    """A gateway on a real port, and what kills it with its calls in flight."""
    fake = FakeGateway(**settings)
    app = web.Application()
    app.router.add_post("/session/{id}/v1/chat/completions", fake.complete)
    runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    fake.url = f"http://127.0.0.1:{runner.addresses[0][1]}/session/a/v1"
    try:
        yield fake, runner.cleanup
    finally:
        await runner.cleanup()


class Client:
    """The orchestrator's side of the protocol, in a few lines."""

    def __init__(self, http: aiohttp.ClientSession, url: str, gateway_url: str) -> None:
        self.http, self.url, self.gateway_url = http, url, gateway_url

    def body(self, episode_id: str, data: dict[str, Any], **changes: Any) -> dict[str, Any]:
        body = {"episode_id": episode_id, "gateway_url": self.gateway_url, "data": data}
        return body | {"max_tokens": 16, "timeout_s": 10.0} | changes

    async def post(self, body: Any) -> tuple[int, dict[str, Any]]:
        async with self.http.post(f"{self.url}/episodes", json=body) as response:
            return response.status, await response.json()

    async def get(self, path: str) -> tuple[int, dict[str, Any]]:
        async with self.http.get(f"{self.url}/{path}") as response:
            return response.status, await response.json()

    async def delete(self, episode_id: str) -> int:
        async with self.http.delete(f"{self.url}/episodes/{episode_id}") as response:
            return response.status

    async def wait(self, episode_id: str) -> EpisodeStatus:
        status, body = await self.get(f"episodes/{episode_id}?wait_s=10")
        assert status == 200, body
        return EpisodeStatus.model_validate(body)

    async def episode(self, episode_id: str, data: dict[str, Any], **changes: Any) -> EpisodeStatus:
        status, body = await self.post(self.body(episode_id, data, **changes))
        assert status == 202, body
        return await self.wait(episode_id)


async def until(condition: Callable[[], object], seconds: float = 5.0) -> None:
    async with asyncio.timeout(seconds):
        while not condition():  # noqa: ASYNC110 (what is waited for happens in another process or in the server)
            await asyncio.sleep(0.01)


@contextlib.asynccontextmanager
async def serving(task: LoadedTask, gateway_url: str, slots: int = 8, **settings: Any) -> AsyncIterator[Client]:
    """A server for the task on a real port, and a client of it."""
    async with listening(EpisodeServer(task, slots, **settings), "127.0.0.1", 0) as url:
        timeout = aiohttp.ClientTimeout(total=15)
        async with aiohttp.ClientSession(timeout=timeout) as http:
            yield Client(http, url, gateway_url)
