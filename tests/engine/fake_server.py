"""Answers like an SGLang server, without a model: ``python fake_server.py PORT BEHAVIOUR VERSION``.

Its tokens count up from the prompt's last one, so that whoever resumes a reply by its prefix gets the same tokens.
"""

import asyncio
import json
import sys

from aiohttp import web

SLOW_FROM = 100
"""Replies of so many tokens come one token every 20 ms; shorter ones at once."""


async def generate(request: web.Request) -> web.StreamResponse:
    body = await request.json()
    request.app["state"]["requests"].append(body)
    wanted = body["sampling_params"]["max_new_tokens"]
    last, app = body["input_ids"][-1], request.app
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)
    slow = wanted >= SLOW_FROM
    for sent in range(1 if slow else wanted, wanted + 1):
        tokens = [last + sent] if slow else list(range(last + 1, last + wanted + 1))
        meta = {
            "finish_reason": {"type": "length"} if sent == wanted else None,
            "output_token_logprobs": [[-token / 100, token, None] for token in tokens],
            "completion_tokens": sent,
            "weight_version": app["state"]["version"],
            "cached_tokens": app["port"],
        }
        event = {"output_ids": tokens, "meta_info": meta}
        if body.get("rid") in app["state"]["aborted"]:
            meta["finish_reason"] = {"type": "abort"}
        await response.write(b"data: " + json.dumps(event).encode() + b"\n\n")
        body["sent"] = sent  # for whoever asks for the requests
        if meta["finish_reason"] is not None:
            break
        await asyncio.sleep(0.02 if slow else 0)
    await response.write(b"data: [DONE]\n\n")
    return response


async def healthy(request: web.Request) -> web.Response:
    return web.Response()


async def abort(request: web.Request) -> web.Response:
    request.app["state"]["aborted"].append((await request.json())["rid"])
    return web.Response()


async def model_info(request: web.Request) -> web.Response:
    return web.json_response({"weight_version": request.app["state"]["version"]})


async def loads(request: web.Request) -> web.Response:
    return web.json_response({"loads": [{"num_running_reqs": 0, "num_waiting_reqs": 0}]})


async def requests(request: web.Request) -> web.Response:
    return web.json_response(request.app["state"]["requests"])


async def update(request: web.Request) -> web.Response:
    request.app["state"]["version"] = (await request.json())["weight_version"]
    return web.json_response({"success": True})


def main() -> None:
    port, behaviour, version = int(sys.argv[1]), sys.argv[2], sys.argv[3]
    if behaviour == "dies":
        sys.exit("no room for the model")
    app = web.Application()
    app["port"], app["state"] = port, {"version": version, "requests": [], "aborted": []}
    if behaviour != "never generates":
        app.add_routes(
            [
                web.post("/generate", generate),
                web.get("/health", healthy),
                web.get("/health_generate", healthy),
                web.post("/abort_request", abort),
                web.post("/pause_generation", healthy),
                web.get("/v1/loads", loads),
                web.get("/model_info", model_info),
                web.get("/requests", requests),
                web.post("/update_weights_from_disk", update),
            ]
        )
    web.run_app(app, host="127.0.0.1", port=port, print=None)


if __name__ == "__main__":
    main()
