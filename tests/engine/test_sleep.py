"""Memory that is taken from a server is given back to that server alone."""

import asyncio

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from rollout.engine.protocol import EngineError, EngineRefused
from rollout.engine.sglang_http import Timeouts
from rollout.engine.sglang_weights import SGLangWeights


async def served(asked, refuse=(), late=()):
    async def answer(request):
        if request.method == "POST":
            asked.append((request.path, (await request.json())["tags"]))
            if request.path in late:
                late.remove(request.path)
                await asyncio.sleep(60)
            if request.path in refuse:
                refuse.remove(request.path)
                return web.json_response({"error": "not now"}, status=400)
        loads = [{"num_running_reqs": 0, "num_waiting_reqs": 0}]
        info = {"version": "0", "tp_size": 1, "enable_memory_saver": True}
        return web.json_response({"loads": loads, "paths": {}} | info)

    app = web.Application()
    app.add_routes([web.route("*", "/{path:.*}", answer)])
    return TestServer(app)


def test_only_what_was_taken_is_given_back():
    asked = []

    async def run():
        async with await served(asked) as server:
            url = str(server.make_url(""))
            async with SGLangWeights(url) as engine, SGLangWeights(url) as started_anew:
                await engine.release_memory(["kv_cache", "weights"])
                for each in (engine, started_anew):
                    await each.resume_memory(["weights"])
                    await each.resume_memory(["weights", "kv_cache"])

    asyncio.run(run())
    assert asked == [
        ("/release_memory_occupation", ["kv_cache", "weights"]),
        ("/resume_memory_occupation", ["weights"]),
        ("/resume_memory_occupation", ["kv_cache"]),
    ]


RELEASE, RESUME = "/release_memory_occupation", "/resume_memory_occupation"


def test_what_a_server_refused_to_give_is_not_given_back():
    asked = []

    async def run():
        async with await served(asked, refuse=[RELEASE]) as server, SGLangWeights(str(server.make_url(""))) as engine:
            with pytest.raises(EngineRefused, match="not now"):
                await engine.release_memory(["kv_cache"])
            await engine.resume_memory(["kv_cache"])

    asyncio.run(run())
    assert asked == [(RELEASE, ["kv_cache"])]


def test_what_was_taken_before_a_refusal_is_still_given_back():
    asked, refuse = [], []

    async def run():
        async with await served(asked, refuse) as server, SGLangWeights(str(server.make_url(""))) as engine:
            await engine.release_memory(["kv_cache"])
            refuse.append(RELEASE)
            with pytest.raises(EngineRefused):
                await engine.release_memory(["kv_cache", "weights"])
            await engine.resume_memory(["kv_cache", "weights"])

    asyncio.run(run())
    assert asked[-1] == (RESUME, ["kv_cache"])


def test_what_a_server_may_have_given_without_an_answer_is_given_back():
    asked = []

    async def run():
        async with (
            await served(asked, late=[RELEASE]) as server,
            SGLangWeights(str(server.make_url("")), Timeouts(control_s=1.0)) as engine,
        ):
            with pytest.raises(EngineError, match="did not answer within"):
                await engine.release_memory(["kv_cache"])
            await engine.resume_memory(["kv_cache"])

    asyncio.run(run())
    assert asked == [(RELEASE, ["kv_cache"]), (RESUME, ["kv_cache"])]
