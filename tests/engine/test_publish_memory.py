"""The trainer's memory, which a real server opens once and copies from: the bits, and what happens when the server, the
trainer or the layout is another."""

import asyncio
import multiprocessing
import os
import signal
from dataclasses import replace

import numpy as np
import pytest
import torch

from benchmarks.publish.bits import engine_checksums
from benchmarks.publish.local import LocalSender
from rl.config import PublishConfig
from rl.weights.choose import Choice
from rl.weights.flat import memory_handle
from rl.weights.ipc import IpcTransport, Openings
from rl.weights.publisher import Fallback, PublishError, publish
from rl.weights.publishing import WeightPublisher
from rollout.engine.config import EngineConfig
from rollout.engine.fleet import EngineFleet
from rollout.engine.opened_memory import LOADER, Answer
from rollout.engine.protocol import Sampling
from rollout.engine.sglang import SGLangEngine, Timeouts
from rollout.processes import ProcessRegistry
from tests.engine.conftest import CONTEXT_LENGTH, until
from tests.engine.test_publish import PROMPT, assert_sampled_by_its_versions
from tests.engine.test_publish_failures import NEW, SHAPES, ScriptedEngine
from tests.engine.test_publish_ways import BUCKET_BYTES, named

DEAD_TRAINER_BYTES = 4096


class Trainer:
    """A sender whose tensors take the values of one version after another, and what engines have open of it."""

    def __init__(self, server, sender=None, resident_bytes=10**9, keep=True, turned=False):
        self.server = server
        self.weights = [(name, tensor.clone()) for name, tensor in named(server, 0)]
        if turned:
            self.weights.reverse()
        self.sender = sender or LocalSender([])
        self.sender.named = self.weights
        self.openings = Openings(resident_bytes, keep)

    async def publish(self, engine, version, **settings):
        """Returns the publication, and how the engine loaded."""
        values = dict(named(self.server, version))
        for name, tensor in self.weights:
            tensor.copy_(values[name])
        transport = IpcTransport(self.sender, self.sender.plan(BUCKET_BYTES), {}, self.openings, checksums=True)
        done = await publish([engine], transport, version, self.server.shapes(), **settings)
        return done, self.openings.last[engine.url][0]


async def bits(engine):
    (found,) = await engine_checksums(engine)
    return found


def test_the_server_has_our_loader(server):
    async def run():
        async with server.engine() as engine:
            return await engine.abilities()

    assert LOADER.startswith("rollout.engine")
    assert asyncio.run(run()).opens_memory


@pytest.mark.parametrize("settings", [{}, {"resident_bytes": 0}, {"keep": False}], ids=["whole", "rounds", "closed"])
def test_the_bits_are_those_of_the_ordinary_way(server, settings):
    async def run():
        async with server.engine() as engine:
            version = await engine.weight_version()
            expected = []
            for step in (1, 2):
                await publish([engine], server.disk(version + step), version + step, server.shapes())
                expected.append(await bits(engine))
            trainer, found = Trainer(server, **settings), []
            for step in (3, 4, 5, 6):
                found.append((await trainer.publish(engine, version + step))[1])
            return expected, found, await bits(engine)

    expected, found, last = asyncio.run(run())
    assert expected[0] != expected[1]
    assert [answer.checksums for answer in found] == expected * 2
    assert last == expected[1]
    assert found[0].why == ""
    assert [answer.how for answer in found] == ["loader, recorded", "plan", "plan", "plan"]


def test_a_server_that_forgot_is_told_again(server):
    """As one that was started anew behind the same URL, or that another trainer has spoken to."""

    async def run():
        async with server.engine() as engine:
            version = await engine.weight_version()
            trainer = Trainer(server)
            first, _ = await trainer.publish(engine, version + 1)
            await bits(engine)
            second, answer = await trainer.publish(engine, version + 2)
            async with server.engine() as other:
                third, _ = await trainer.publish(other, version + 4)
            generation = await engine.generate(PROMPT, Sampling(1.0, 16), "told-again")
            return [first.attempts, second.attempts, third.attempts], answer, generation

    attempts, answer, generation = asyncio.run(run())
    assert attempts == [1, 2, 1]
    assert answer.error == ""
    assert_sampled_by_its_versions(server, PROMPT, generation, 1.0)


@pytest.mark.slow
@pytest.mark.timeout(700)
def test_a_server_that_was_killed_is_told_again_by_a_trainer_that_lives(server, models, tmp_path):
    """The trainer keeps its memory, and speaks to the server through the same object, so that it thinks that it is
    open there; on a GPU: ``test_gpu_publish``."""
    config = EngineConfig(context_length=CONTEXT_LENGTH, max_total_tokens=2048, start_timeout_s=300)

    async def run(registry):
        fleet, trainer = EngineFleet(config, registry, tmp_path, print), Trainer(server)
        await fleet.start(models[0].directory)
        try:
            async with SGLangEngine(fleet.engines[0].url, Timeouts()) as engine:
                before = fleet.processes["engine-0"].pid
                done, answers = [], []
                for version in (1, 2, 3):
                    published, answer = await trainer.publish(engine, version)
                    done.append(published.attempts)
                    answers.append(answer.how)
                    if version == 1:
                        os.kill(before, signal.SIGKILL)

                        async def back():
                            return bool(fleet.engines) and fleet.processes["engine-0"].pid != before

                        await until(back, 300)
                return done, answers, await engine.score(PROMPT)
        finally:
            await fleet.stop()

    with ProcessRegistry() as registry:
        attempts, answers, scored = asyncio.run(run(registry))
    assert attempts == [1, 2, 1]
    assert answers == ["loader, recorded", "loader, recorded", "plan"]
    np.testing.assert_allclose(scored, models[1].logprobs(PROMPT), atol=1e-4)


def test_another_layout_is_recorded_anew(server):
    async def run():
        async with server.engine() as engine:
            version = await engine.weight_version()
            await bits(engine)  # it knows no layout but that of nothing
            found = []
            for step, turned in enumerate([False, True, True], 1):
                found.append((await Trainer(server, turned=turned).publish(engine, version + 2 * step))[1])
            return found

    first, other, again = asyncio.run(run())
    assert first.checksums == other.checksums == again.checksums
    # the third is another trainer, whose tensors lie as those of the second
    assert [first.how, other.how, again.how] == ["loader, recorded", "loader, recorded", "plan"]


class Opens(ScriptedEngine):
    """Says that it has copied, and keeps the memory open."""

    able = replace(NEW, opens_memory=True)

    async def update_weights_from_memory(self, requests, version, flush):
        await self._called("copy")
        with requests[0].answers.open("a") as file:
            file.writelines(Answer(began=0, ended=0).model_dump_json() + "\n" for _ in requests)
        self.version = self.version if version is None else version


class Counting(LocalSender):
    asked = 0

    async def memory_handles(self):
        self.asked += 1
        await asyncio.sleep(0)
        return await super().memory_handles()


@pytest.mark.parametrize("resident_bytes", [10**9, 0], ids=["whole", "rounds"])
def test_the_trainer_says_once_what_opens_its_memory(resident_bytes):
    """To all engines together, and again only when one was started anew."""
    sender = Counting([(name, torch.zeros(shape)) for name, shape in SHAPES.items()])
    openings, asked = Openings(resident_bytes), []

    async def run():
        one, two = Opens("one"), Opens("two")
        for version, engines in enumerate([(one, two), (one, two), (one, Opens("two"))], 1):
            await publish(engines, IpcTransport(sender, sender.plan(16), {}, openings), version, SHAPES)
            asked.append(sender.asked)

    asyncio.run(run())
    openings.close()
    assert asked == [1, 1, 2]


class Saved(LocalSender):
    """A trainer's, as far as ``WeightPublisher`` asks."""

    async def save_hf(self, directory):
        directory.mkdir()


@pytest.mark.parametrize(("resident_bytes", "rounds"), [(64, 1), (32, 2), (0, 4)])
def test_a_round_is_as_large_as_the_memory_that_it_may_take(resident_bytes, rounds, tmp_path):
    shapes = dict.fromkeys("abcd", (4,))
    config = PublishConfig(bucket_bytes=16, resident_bytes=resident_bytes, directory=tmp_path)
    source = Saved([(name, torch.zeros(shape)) for name, shape in shapes.items()])

    async def run():
        engine, publisher = Opens("one"), WeightPublisher(config, Choice("ipc", ""), source, shapes, 1, "gloo")
        await publisher.export(1)
        await publisher.publish([engine], 1)
        await publisher.close()
        return engine.calls

    assert asyncio.run(run()).count("copy") == rounds


def hand_over(pipe):
    memory = torch.zeros(DEAD_TRAINER_BYTES, dtype=torch.uint8)
    pipe.send(memory_handle(memory))
    signal.pause()


class Dead(LocalSender):
    """A sender whose handle is of a process that is gone."""

    handle = ""

    async def memory_handles(self):
        return dict.fromkeys(await super().memory_handles(), self.handle)


def test_the_memory_of_a_dead_trainer_is_refused_and_the_server_lives(server):
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=hand_over, args=(theirs,))
    process.start()
    assert ours.poll(200)  # it imports what we have, on a busy machine
    sender = Dead([])
    sender.handle = ours.recv()
    os.kill(process.pid, signal.SIGKILL)
    process.join()

    async def run():
        async with server.engine() as engine:
            version = await engine.weight_version()
            fallback = Fallback(server.disk(version), version)
            with pytest.raises(
                PublishError, match=f"(?s)could not copy the weights.*back at version {version}"
            ) as failure:
                await Trainer(server, sender).publish(engine, version + 1, fallback=fallback)
            generation = await engine.generate(PROMPT, Sampling(1.0, 16), "after-death")
            done, _ = await Trainer(server).publish(engine, version + 1)
            return failure.value.mixed, version, generation, done

    mixed, version, generation, done = asyncio.run(run())
    assert not mixed
    assert set(generation.weight_versions.tolist()) == {version}
    assert_sampled_by_its_versions(server, PROMPT, generation, 1.0)
    assert done.attempts == 1
