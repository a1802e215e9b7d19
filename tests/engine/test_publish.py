"""Publishing to a real server: what was sampled by which weights."""

import asyncio

import numpy as np
import pytest

from rl.weights.publisher import publish
from rl.weights.serialize import make_buckets
from rl.weights.transports import TensorTransport
from rollout.engine.protocol import Sampling
from tests.engine.conftest import until_running

PROMPT = [2, 20, 21, 22, 30, 31, 4]


def assert_sampled_by_its_versions(server, prompt, generation, temperature):
    """Each token's log-prob is that of its version's weights on the whole prefix, computed anew."""
    ids = prompt + generation.token_ids.tolist()
    references = [model.logprobs(ids, temperature)[len(prompt) :] for model in server.models]
    expected = np.where(generation.weight_versions % 2 == 0, *references)
    np.testing.assert_allclose(generation.logprobs, expected, atol=1e-4)
    assert np.abs(references[0] - references[1]).max() > 0.1  # else the above would show nothing


@pytest.mark.parametrize("way", ["tensors", "disk"])
def test_publish(server, way):
    async def run():
        async with server.engine() as engine:
            version = await engine.weight_version() + 1
            transport = server.transport(version) if way == "tensors" else server.disk(version)
            published = await publish([engine], transport, version, server.shapes())
            return version, published, await engine.generate(PROMPT, Sampling(1.0, 32), f"after-{way}")

    version, published, generation = asyncio.run(run())
    assert published.version == version
    assert published.attempts == 1
    assert published.nbytes > 300_000
    assert set(generation.weight_versions.tolist()) == {version}
    assert_sampled_by_its_versions(server, PROMPT, generation, 1.0)


def test_tokens_in_flight_name_the_weights_that_sampled_them(server):
    async def run():
        async with server.engine() as engine:
            version = await engine.weight_version()
            prompts = [[*PROMPT, 40 + index] for index in range(16)]
            requests = [
                asyncio.create_task(engine.generate(prompt, Sampling(0.8, 200), f"flight-{prompt[-1]}"))
                for prompt in prompts
            ]
            await until_running(engine, 12)  # one may have ended before the last begins
            await server.publish(engine, version + 1)
            await asyncio.sleep(0.2)
            await server.publish(engine, version + 2)
            return version, prompts, await asyncio.gather(*requests)

    version, prompts, generations = asyncio.run(run())
    for prompt, generation in zip(prompts, generations, strict=True):
        assert (np.diff(generation.weight_versions) >= 0).all()
        assert_sampled_by_its_versions(server, prompt, generation, 0.8)
    through_all = [set(generation.weight_versions.tolist()) for generation in generations]
    assert through_all.count({version, version + 1, version + 2}) >= 8


def test_weights_that_do_not_fit_are_refused_before_anything_is_paused(server):
    named = [(name, tensor) for name, tensor in server.models[0].hf.state_dict().items() if name != "lm_head.weight"]
    wrong = [
        ([("model.nonsense.weight", named[0][1]), *named[1:]], "model.nonsense.weight is not a tensor of the model"),
        (named[1:], f"{named[0][0]} is missing"),
        ([(named[0][0], named[0][1][1:]), *named[1:]], rf"{named[0][0]} has shape \(101, 64\)"),
    ]

    async def run(weights):
        async with server.engine() as engine:
            await publish([engine], TensorTransport(list(make_buckets(weights, 10**9))), 99, server.shapes())

    for weights, message in wrong:
        with pytest.raises(ValueError, match=message):
            asyncio.run(run(weights))

    async def still_generates():
        async with server.engine() as engine:
            return await engine.generate(PROMPT, Sampling(1.0, 8), "fits")

    assert (asyncio.run(still_generates()).weight_versions % 2 == 0).all()


def test_an_update_left_open_does_not_stop_the_next(server):
    async def run():
        async with server.engine() as engine:
            version = await engine.weight_version()
            await engine.begin_weight_update()
            return version, await server.publish(engine, version + 2)

    version, published = asyncio.run(run())
    assert (published.version, published.attempts) == (version + 2, 1)
