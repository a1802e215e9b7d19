"""A server that closes idle connections, as uvicorn does after 5 s, loses no request of ours."""

import asyncio
import contextlib
import json
import threading

import aiohttp
import pytest
import uvicorn

from rollout.http_pool import KEEP_ALIVE_S, pool
from rollout.processes import free_port
from rollout.task_client import TaskClient
from tasks.protocol import EpisodeRequest

CLOSES_S = 3
"""uvicorn takes whole seconds."""
CLIENTS = 60
SPREAD_S = 0.06
SOON = 10
"""Requests that follow one another at once."""


async def application(scope, receive, send):
    """A task server as somebody else may write it: every episode is over at once, and says whose connection it was."""
    if scope["type"] != "http":
        return
    while (await receive()).get("more_body"):
        pass
    answer = {"episode_id": "one", "state": "completed", "reward": 1.0, "metrics": {"port": scope["client"][1]}}
    body = json.dumps(answer).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": body})


@pytest.fixture(scope="module")
def url():
    port = free_port()
    settings = uvicorn.Config(application, port=port, timeout_keep_alive=CLOSES_S, log_level="error", lifespan="off")
    server = uvicorn.Server(settings)
    thread = threading.Thread(target=server.run)
    thread.start()
    yield f"http://127.0.0.1:{port}"
    server.should_exit = True
    thread.join(30)


async def until_served(url):
    async with asyncio.timeout(60), aiohttp.ClientSession() as http:
        while True:
            with contextlib.suppress(aiohttp.ClientError):
                async with http.get(url):
                    return
            await asyncio.sleep(0.05)


def pauses():
    """From before the server closes an idle connection to after."""
    return [CLOSES_S + SPREAD_S * (2 * client / (CLIENTS - 1) - 1) for client in range(CLIENTS)]


def test_episodes_that_begin_while_the_server_closes_idle_connections_are_all_played(url):
    async def play(pause):
        async with TaskClient("theirs", [url]) as client:
            rewards = []
            for turn in range(2):
                request = EpisodeRequest(
                    episode_id=f"{pause}-{turn}", gateway_url="http://nowhere/v1", data={}, max_tokens=1, timeout_s=60
                )
                rewards.append((await client.play(request)).reward)
                await asyncio.sleep(pause * (1 - turn))
            return rewards

    async def run():
        await until_served(url)
        return await asyncio.gather(*map(play, pauses()))

    assert asyncio.run(run()) == [[1.0, 1.0]] * CLIENTS


def test_a_connection_is_used_again_until_well_before_it_is_closed(url):
    async def run():
        await until_served(url)
        async with aiohttp.ClientSession(connector=pool()) as http:
            used = []
            for pause in (*[0.0] * SOON, KEEP_ALIVE_S + 0.3):
                await asyncio.sleep(pause)
                async with http.post(url) as response:
                    used.append((await response.json())["metrics"]["port"])
            return used

    *soon, late = asyncio.run(run())
    assert len(set(soon)) < SOON  # a busy machine may let one of these requests wait for longer than the others
    assert late not in soon
    assert KEEP_ALIVE_S < CLOSES_S
