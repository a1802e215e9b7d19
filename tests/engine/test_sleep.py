"""Memory that is taken from a server is given back to that server alone."""

import asyncio

from aiohttp import web
from aiohttp.test_utils import TestServer

from rollout.engine.sglang_weights import SGLangWeights


async def served(asked):
    async def answer(request):
        if request.method == "POST":
            asked.append((request.path, (await request.json())["tags"]))
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
