"""Any server with OpenAI's API as a frozen engine: SGLang's own endpoints, and servers that lack things."""

import asyncio
import re
import threading
from contextlib import contextmanager

import numpy as np
import pytest
from aiohttp import web

from rl.cli import main
from rollout.engine.config import EngineConfig
from rollout.engine.launch import command, environment
from rollout.engine.openai_compatible import OpenAICompatibleEngine
from rollout.engine.protocol import EngineError, FinishReason, Sampling
from rollout.processes import ProcessRegistry, free_port
from tests.engine.conftest import CONTEXT_LENGTH

PROMPT = [2, 20, 21, 22, 30, 31, 4]
LOGPROB = -0.7


@contextmanager
def fake(**lacks):
    """Serves the same 16 tokens to everybody. ``lacks`` says what it leaves out."""

    async def completions(request):
        body = await request.json()
        if lacks.get("ids_in") and not isinstance(body["prompt"], str):
            return web.json_response({"error": {"message": "prompt must be a string"}}, status=400)
        new = min(body["max_tokens"], 16)
        scale = 1.0 if lacks.get("temperature") else 1.0 / (body["temperature"] or 1.0)
        logprobs = [LOGPROB * scale] * new
        if body.get("echo"):
            logprobs = [None] + [LOGPROB + lacks.get("accuracy", 0.0)] * (len(body["prompt"]) - 1) + logprobs
        if lacks.get("prompt_logprobs") and body.get("echo"):
            return web.json_response({"error": {"message": "echo is not supported"}}, status=400)
        choice = {"finish_reason": "length", "logprobs": {"token_logprobs": logprobs}, "token_ids": [9] * new}
        for name in ("token_ids", "logprobs"):
            if lacks.get(name):
                del choice[name]
        return web.json_response({"choices": [choice], "usage": {"prompt_tokens_details": {"cached_tokens": 3}}})

    async def models(request):
        return web.json_response({"data": [{"id": "frozen"}]})

    async def serve():
        app = web.Application()
        app.add_routes([web.post("/v1/completions", completions), web.get("/v1/models", models)])
        runner = web.AppRunner(app)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", port).start()

    port = free_port()
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    asyncio.run_coroutine_threadsafe(serve(), loop).result(30)
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()


def test_a_server_that_has_everything_passes(capsys):
    with fake() as url:
        assert main(["check-engine", url]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 8
    assert all(line.startswith("has") for line in lines)


@pytest.mark.parametrize(
    ("lacks", "says"),
    [
        ({"ids_in": True}, "LACKS  token ids in and out, with log-probs: .*prompt must be a string"),
        ({"token_ids": True}, "LACKS  token ids in and out, with log-probs: .*no token ids of what was generated"),
        ({"logprobs": True}, "LACKS  token ids in and out, with log-probs: .*no log-probs"),
        ({"prompt_logprobs": True}, "LACKS  prompt log-probs: .*echo is not supported"),
        ({"accuracy": 0.2}, "LACKS  log-probs agree when generated and when scored: they differ by up to 0.2"),
        ({"temperature": True}, "LACKS  log-probs are at the sampling temperature: .*sample at temperature 1 only"),
    ],
)
def test_what_a_server_lacks_is_named(lacks, says, capsys):
    with fake(**lacks) as url:
        assert main(["check-engine", url]) == 1
    out = capsys.readouterr().out
    assert any(re.search(says, line) for line in out.splitlines()), out


def test_a_server_that_is_not_there_is_named(capsys):
    assert main(["check-engine", f"http://127.0.0.1:{free_port()}"]) == 1
    assert "/v1/models failed" in capsys.readouterr().err


def test_it_can_not_be_published_to():
    async def run():
        async with OpenAICompatibleEngine("http://127.0.0.1:1", "frozen") as engine:
            await engine.pause()

    with pytest.raises(EngineError, match="frozen engine"):
        asyncio.run(run())


@pytest.fixture(scope="module")
def sglang_url(models, tmp_path_factory):
    """A real server with a tokenizer, which its OpenAI endpoints want."""
    config = EngineConfig(context_length=CONTEXT_LENGTH, max_total_tokens=4096)
    port = free_port()
    line = [part for part in command(config, models[0].directory, port) if part != "--skip-tokenizer-init"]
    url = f"http://127.0.0.1:{port}"

    async def up():
        async with OpenAICompatibleEngine(url, "any") as engine:
            async with asyncio.timeout(250):
                while not await engine.health():  # nothing tells us
                    process.check()
                    await asyncio.sleep(0.5)

    with ProcessRegistry() as registry:
        log = tmp_path_factory.mktemp("logs") / "sglang.log"
        process = registry.start("sglang", line, log, environment(config), 0.0)
        asyncio.run(up())
        yield url


@pytest.mark.timeout(400)
def test_sglangs_own_endpoints_generate_and_score_as_the_model_does(sglang_url, models):
    async def run():
        async with OpenAICompatibleEngine(sglang_url, "any") as engine:
            generation = await engine.generate(PROMPT, Sampling(1.0, 16), "a")
            return generation, await engine.score([*PROMPT, *generation.token_ids.tolist()])

    generation, scores = asyncio.run(run())
    ids = [*PROMPT, *generation.token_ids.tolist()]
    assert generation.finish_reason in (FinishReason.LENGTH, FinishReason.STOP)
    reference = models[0].logprobs(ids)
    np.testing.assert_allclose(generation.logprobs, reference[len(PROMPT) :], atol=1e-4)
    np.testing.assert_allclose(scores, reference, atol=1e-4)
