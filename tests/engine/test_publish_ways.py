"""Every way of publishing, to a real server while 32 requests run: what was sampled by which weights, and what happens
when the way fails half-way."""

import asyncio
import socket
import threading
from dataclasses import dataclass
from pathlib import Path

import pytest
from aiohttp import web

from benchmarks.publish.local import LocalSender
from rl.weights.collective import Broadcasts, CollectiveTransport
from rl.weights.copies import Copies
from rl.weights.delta import MODEL
from rl.weights.delta_transport import DeltaTransport, Held
from rl.weights.ipc import IpcTransport, Openings
from rl.weights.publisher import Fallback, PublishError, publish
from rl.weights.receiver import make_app
from rl.weights.transports import Transport
from rollout.engine.protocol import EngineError, Sampling
from rollout.engine.sglang_weights import PauseMode
from tests.engine.conftest import until_running
from tests.engine.test_publish import PROMPT, assert_sampled_by_its_versions

BUCKET_BYTES = 100_000
WAYS = ["disk", "tensors", "ipc", "ipc-in-rounds", "ipc-of-handles", "collective", "delta"]
REQUESTS = 32
NEW_TOKENS = 150


def named(server, version):
    # lm_head is tied to the embedding and no tensor of its own
    state = server.models[version % 2].hf.state_dict().items()
    return [(name, tensor) for name, tensor in state if name != "lm_head.weight"]


class OfHandles(IpcTransport):
    """To an engine that has not our loader."""

    async def _all_open(self, engines):
        return False


@dataclass
class Ways:
    """Transports of one server's two models, and what they need beside it."""

    server: object
    sender: LocalSender
    broadcasts: Broadcasts
    receiver: str
    work: Path
    openings: dict[str, Openings]

    def transport(self, way: str, version: int, base: int | None = None) -> Transport:
        if way == "disk":
            return self.server.disk(version)
        if way == "tensors":
            return self.server.transport(version)
        if way == "delta":
            held = None if base is None else Held(base, self.server.models[base % 2].directory)
            new = Held(version, self.server.models[version % 2].directory)
            return DeltaTransport(new, held, {self.server.url: self.receiver}, self.work, 30, MODEL)
        self.sender.named = named(self.server, version)
        plan = self.sender.plan(BUCKET_BYTES)
        if way == "ipc-of-handles":
            return OfHandles(self.sender, plan, {}, self.openings["ipc"])
        if way in self.openings:
            return IpcTransport(self.sender, plan, {}, self.openings[way])
        return CollectiveTransport(self.broadcasts, plan)


@pytest.fixture(scope="module")
def receiver(running_server, tmp_path_factory):
    """One beside the session's server, in a thread; its URL."""
    copies = Copies(tmp_path_factory.mktemp("copies"), running_server.models[0].directory, 0)
    started, address = threading.Event(), []
    loop = asyncio.new_event_loop()

    async def start():
        runner = web.AppRunner(make_app(copies))
        await runner.setup()
        listening = socket.create_server(("127.0.0.1", 0))
        await web.SockSite(runner, listening).start()
        address.append(f"http://127.0.0.1:{listening.getsockname()[1]}")
        started.set()

    thread = threading.Thread(target=lambda: (loop.run_until_complete(start()), loop.run_forever()), daemon=True)
    thread.start()
    assert started.wait(10)
    yield address[0]
    loop.call_soon_threadsafe(loop.stop)
    thread.join()


@pytest.fixture
def ways(server, receiver, tmp_path):
    sender = LocalSender([])
    broadcasts = Broadcasts(sender, "gloo", timeout_s=20)
    openings = {"ipc": Openings(10**9), "ipc-in-rounds": Openings(0)}
    yield Ways(server, sender, broadcasts, receiver, tmp_path, openings)
    for each in openings.values():
        each.close()

    async def leave():
        async with server.engine() as engine:
            await broadcasts.leave([engine])

    asyncio.run(leave())


async def sample(engine, label):
    """Requests that are running when this returns."""
    prompts = [[*PROMPT, 40 + index] for index in range(REQUESTS)]
    requests = [
        asyncio.create_task(engine.generate(prompt, Sampling(0.8, NEW_TOKENS), f"{label}-{prompt[-1]}"))
        for prompt in prompts
    ]
    await until_running(engine, REQUESTS * 3 // 4)  # one may have ended before the last begins
    return prompts, requests


async def sample_until(engine, label, prompt, done):
    """Generations of one prompt, one after another, however long a way takes to prepare."""
    generations = []
    while not done.is_set():
        generations.append(
            await engine.generate(prompt, Sampling(0.8, NEW_TOKENS), f"{label}-{prompt[-1]}-{len(generations)}")
        )
    return generations


@pytest.mark.parametrize("way", WAYS)
def test_every_token_names_the_weights_that_sampled_it(server, ways, way):
    async def run():
        async with server.engine() as engine:
            version = await engine.weight_version()
            done = asyncio.Event()
            prompts = [[*PROMPT, 40 + index] for index in range(REQUESTS)]
            sampling = [asyncio.create_task(sample_until(engine, way, prompt, done)) for prompt in prompts]
            published = []
            try:
                for step in (1, 2):
                    await until_running(engine, REQUESTS * 3 // 4)
                    transport = ways.transport(way, version + step, base=version + step - 1)
                    published.append(await publish([engine], transport, version + step, server.shapes()))
            finally:
                done.set()
            return version, published, prompts, await asyncio.gather(*sampling)

    version, published, prompts, generations = asyncio.run(run())
    assert [p.attempts for p in published] == [1, 1]
    for prompt, of_prompt in zip(prompts, generations, strict=True):
        for generation in of_prompt:
            assert_sampled_by_its_versions(server, prompt, generation, 0.8)
    seen = [set(generation.weight_versions.tolist()) for of_prompt in generations for generation in of_prompt]
    for step in (1, 2):  # some went on through it; on busy cores others had just begun
        assert sum({version + step - 1, version + step} <= versions for versions in seen) >= REQUESTS // 4


class Interrupted:
    """A transport whose first so many loads end after the weights were changed: the engine took them, and then the call
    that says so failed."""

    def __init__(self, inner: Transport, failures: int) -> None:
        self.inner, self.failures = inner, failures
        self.nbytes = inner.nbytes

    def check(self, expected):
        self.inner.check(expected)

    async def prepare(self, engines, version):
        await self.inner.prepare(engines, version)

    async def load(self, engines, version, flush):
        await self.inner.load(engines, version, flush)
        if self.failures:
            self.failures -= 1
            raise EngineError("the connection was lost")


@pytest.mark.parametrize("way", WAYS)
def test_failing_half_way_goes_back_to_the_version_before(server, ways, way):
    async def run():
        async with server.engine() as engine:
            version = await engine.weight_version()
            prompts, requests = await sample(engine, f"fails-{way}")
            transport = Interrupted(ways.transport(way, version + 1, base=version), failures=2)
            fallback = Fallback(server.disk(version), version)
            with pytest.raises(PublishError, match=f"connection was lost.*back at version {version}") as failure:
                await publish([engine], transport, version + 1, server.shapes(), fallback)
            return version, failure.value.mixed, await engine.weight_version(), prompts, await asyncio.gather(*requests)

    version, mixed, found, prompts, generations = asyncio.run(run())
    assert not mixed
    assert found == version
    for prompt, generation in zip(prompts, generations, strict=True):
        assert set(generation.weight_versions.tolist()) == {version}
        assert_sampled_by_its_versions(server, prompt, generation, 0.8)


def test_a_group_is_made_anew_for_an_engine_that_left_it(server, ways):
    async def run():
        async with server.engine() as engine:
            version = await engine.weight_version()
            await publish([engine], ways.transport("collective", version + 1), version + 1, server.shapes())
            first = ways.broadcasts.group
            await engine.leave_update_group(first.name)  # as if it had been started anew under the same object
            again = await publish([engine], ways.transport("collective", version + 2), version + 2, server.shapes())
            async with server.engine() as restarted:  # another object is another life
                transport = ways.transport("collective", version + 4)
                third = await publish([restarted], transport, version + 4, server.shapes())
            return first.name, ways.broadcasts.group.name, again.attempts, third.attempts, ways.broadcasts.made

    first, last, again, third, made = asyncio.run(run())
    assert first != last
    assert (again, third, made) == (2, 1, 3)


def test_a_receiver_is_sent_what_it_lacks(server, ways):
    async def run():
        async with server.engine() as engine:
            version = await engine.weight_version()
            sent = []
            for base, new in ((None, 900), (900, 902), (900, 902), (555, 904)):
                transport = ways.transport("delta", new, base)
                await transport.prepare([engine], new)
                sent.append(transport.sent[engine.url])
            transport = ways.transport("delta", 904)
            await publish([engine], transport, 904, server.shapes())
            generation = await engine.generate(PROMPT, Sampling(1.0, 16), "delta")
            await server.publish(engine, version)
            return sent, generation

    sent, generation = asyncio.run(run())
    assert [each.how for each in sent] == ["all", "patch", "nothing", "all"]
    assert sent[1].nbytes < sent[0].nbytes / 10  # 900 and 902 are the same weights
    assert_sampled_by_its_versions(server, PROMPT, generation, 1.0)


def test_in_place_keeps_the_old_keys_and_values(server, ways):
    async def run():
        async with server.engine() as engine:
            version = await engine.weight_version()
            prompts, requests = await sample(engine, "in-place")
            await publish(
                [engine], ways.transport("tensors", version + 1), version + 1, server.shapes(), in_flight="in_place"
            )
            return version, prompts, await asyncio.gather(*requests)

    version, prompts, generations = asyncio.run(run())
    both = [g for g in generations if set(g.weight_versions.tolist()) == {version, version + 1}]
    assert len(both) >= REQUESTS // 2
    with pytest.raises(AssertionError):  # the new tokens are not what the new weights alone would say
        assert_sampled_by_its_versions(server, prompts[0], generations[0], 0.8)


def test_aborted_requests_return_what_they_have(server):
    async def run():
        async with server.engine() as engine:
            _, requests = await sample(engine, "abort")
            await engine.pause(PauseMode.ABORT)
            done = await asyncio.gather(*requests)
            late = asyncio.create_task(engine.generate(PROMPT, Sampling(1.0, 4), "late"))
            await asyncio.sleep(0.1)
            waited = not late.done()
            await engine.resume()
            return done, waited, await late

    done, waited, late = asyncio.run(run())
    assert [str(generation.finish_reason) for generation in done].count("abort") >= REQUESTS // 2
    assert waited
    assert len(late.token_ids) == 4
