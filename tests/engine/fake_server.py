"""Answers like an SGLang server, without a model: ``python fake_server.py PORT BEHAVIOUR``."""

import asyncio
import sys

from aiohttp import web


async def generate(request: web.Request) -> web.Response:
    body = await request.json()
    wanted = body["sampling_params"]["max_new_tokens"]
    await asyncio.sleep(0.01 if wanted < 100 else 60)
    tokens = [request.app["port"] % 1000] * wanted
    meta = {
        "finish_reason": {"type": "length"},
        "output_token_logprobs": [[-1.0, token, None] for token in tokens],
        "weight_version": "3",
        "cached_tokens": 0,
    }
    return web.json_response({"output_ids": tokens, "meta_info": meta})


async def healthy(request: web.Request) -> web.Response:
    return web.Response()


async def model_info(request: web.Request) -> web.Response:
    return web.json_response({"weight_version": "0"})


def main() -> None:
    port, behaviour = int(sys.argv[1]), sys.argv[2]
    if behaviour == "dies":
        sys.exit("no room for the model")
    app = web.Application()
    app["port"] = port
    if behaviour != "never generates":
        app.add_routes(
            [web.post("/generate", generate), web.get("/health_generate", healthy), web.get("/model_info", model_info)]
        )
    web.run_app(app, host="127.0.0.1", port=port, print=None)


if __name__ == "__main__":
    main()
