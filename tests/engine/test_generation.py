"""A real server on a tiny model: what it samples, and how sure it says that it was."""

import asyncio

import numpy as np
import pytest

from rollout.engine.protocol import EngineError, FinishReason, Sampling
from tests.engine.conftest import CONTEXT_LENGTH, EOS, until_running

PROMPT = [2, 20, 21, 22, 30, 31, 4]


def agree(server, prompt, generation, temperature=1.0):
    ids = prompt + generation.token_ids.tolist()
    reference = server.models[0].logprobs(ids, temperature)[len(prompt) :]
    np.testing.assert_allclose(generation.logprobs, reference, atol=1e-4)


@pytest.mark.parametrize(("temperature", "reported"), [(1.0, 1.0), (0.7, 0.7), (0.0, 1.0)])
def test_logprobs_agree_with_hf_at_the_sampling_temperature(server, temperature, reported):
    async def run():
        async with server.engine() as engine:
            return await asyncio.gather(
                *(engine.generate([*PROMPT, 20 + i], Sampling(temperature, 32), f"lp-{i}") for i in range(8))
            )

    for index, generation in enumerate(asyncio.run(run())):
        assert generation.prompt_tokens == len(PROMPT) + 1
        assert generation.token_ids.dtype == generation.weight_versions.dtype == np.int32
        assert generation.logprobs.dtype == np.float32
        agree(server, [*PROMPT, 20 + index], generation, reported)


def test_greedy_keeps_its_logprobs_in_a_batch_with_sampled_requests(server):
    async def run():
        async with server.engine() as engine:
            mixed = [Sampling(0.0, 24), Sampling(0.7, 24), Sampling(1.3, 24), Sampling(0.0, 24)]
            return mixed, await asyncio.gather(
                *(engine.generate(PROMPT, sampling, f"mix-{i}") for i, sampling in enumerate(mixed))
            )

    samplings, generations = asyncio.run(run())
    for sampling, generation in zip(samplings, generations, strict=True):
        agree(server, PROMPT, generation, sampling.temperature or 1.0)
    assert generations[0].token_ids.tolist() == generations[3].token_ids.tolist()


def test_a_generation_ends_with_its_stop_token_or_at_the_limit(server):
    async def run():
        async with server.engine() as engine:
            return await asyncio.gather(*(engine.generate(PROMPT, Sampling(3.0, 60), f"stop-{i}") for i in range(32)))

    generations = asyncio.run(run())
    reasons = {generation.finish_reason for generation in generations}
    assert reasons == {FinishReason.STOP, FinishReason.LENGTH}
    for generation in generations:
        ids = generation.token_ids.tolist()
        if generation.finish_reason is FinishReason.STOP:
            assert ids.index(EOS) == len(ids) - 1
        else:
            assert EOS not in ids
            assert len(ids) == 60


def test_score(server):
    async def run():
        async with server.engine() as engine:
            return await engine.score([*PROMPT, 40, 41, EOS, 2, 50])

    scores = asyncio.run(run())
    np.testing.assert_allclose(scores, server.models[0].logprobs([*PROMPT, 40, 41, EOS, 2, 50]), atol=1e-4)
    assert scores.dtype == np.float32


def test_a_prefix_is_cached(server):
    async def run():
        async with server.engine() as engine:
            first = await engine.generate(PROMPT, Sampling(0.0, 4), "cache-1")
            longer = PROMPT + first.token_ids.tolist()
            return await engine.generate(longer, Sampling(0.0, 4), "cache-2")

    assert asyncio.run(run()).cached.total >= len(PROMPT)


def test_abort_ends_only_the_requests_named(server):
    async def run():
        async with server.engine() as engine:
            # "ab-1" is a prefix of "ab-10": SGLang's own matching would end both
            requests = {
                name: asyncio.create_task(engine.generate(PROMPT, Sampling(0.5, 240), name))
                for name in ("ab-1", "ab-10")
            }
            await until_running(engine, 2)
            await engine.abort(["ab-1", "unknown"])
            return {name: await request for name, request in requests.items()}

    done = asyncio.run(run())
    assert done["ab-1"].finish_reason is FinishReason.ABORT
    assert len(done["ab-1"].token_ids) < 240
    agree(server, PROMPT, done["ab-1"], 0.5)
    assert done["ab-10"].finish_reason is not FinishReason.ABORT


def test_abort_of_a_retracted_request(server):
    async def run():
        async with server.engine() as engine:
            request = asyncio.create_task(engine.generate(PROMPT, Sampling(0.5, 240), "retracted"))
            await until_running(engine, 1)
            await engine.pause()
            try:
                await engine.abort(["retracted"])
                return await asyncio.wait_for(request, 10)
            finally:
                await engine.resume()

    generation = asyncio.run(run())
    assert generation.finish_reason is FinishReason.ABORT
    agree(server, PROMPT, generation, 0.5)


def test_metrics_and_health(server):
    async def run():
        async with server.engine() as engine:
            assert await engine.health()
            request = asyncio.create_task(engine.generate(PROMPT, Sampling(0.5, 240), "metrics"))
            await until_running(engine, 1)
            assert 0 < (await engine.metrics()).kv_used_share < 1
            await engine.pause()
            assert await engine.health()  # paused by us is not sick
            await engine.resume()
            await request

    asyncio.run(run())


def test_a_late_answer_is_an_error_that_names_the_url(server):
    async def run():
        async with server.engine(request_s=0.05) as engine:
            await engine.pause()
            try:
                await engine.generate(PROMPT, Sampling(1.0, 4), "late")
            finally:
                await engine.resume()

    with pytest.raises(EngineError, match=rf"{server.url}/generate did not answer within 0.05 s"):
        asyncio.run(run())


def test_a_prompt_that_is_too_long_is_refused(server):
    async def run():
        async with server.engine() as engine:
            await engine.generate([5] * (CONTEXT_LENGTH + 1), Sampling(1.0, 4), "long")

    with pytest.raises(EngineError, match=r"longer than|maximum"):
        asyncio.run(run())
