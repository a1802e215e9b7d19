"""A run's publisher and its fleet: what the engines hold is kept, also when one dies or the way fails."""

import asyncio
import contextlib
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from rl.config import PublishConfig
from rl.weights.choose import Choice
from rl.weights.colocation import Colocation, Holder
from rl.weights.publisher import PublishError
from rl.weights.publishing import WeightPublisher
from rl.weights.serialize import make_buckets
from rl.weights.updates import Updates
from rollout.engine.fleet import UNKNOWN
from rollout.engine.protocol import EngineError
from rollout.engine.sglang_weights import Abilities

SHAPES = {"a": (2, 2)}


class Source:
    """A trainer whose weights are all one value."""

    def __init__(self):
        self.value = 0.0
        self.away = False

    def weights(self):
        assert not self.away, "the trainer's weights are in host memory"
        return {"a": torch.full((2, 2), self.value)}

    async def save_hf(self, directory):
        directory.mkdir()
        save_file(self.weights(), directory / "model.safetensors")

    async def weight_buckets(self, bucket_bytes):
        return list(make_buckets(self.weights().items(), bucket_bytes))

    async def offload(self):
        self.away = True
        return 1

    async def onload(self):
        self.away = False

    async def release_bucket(self):
        """It has none."""


class Engine:
    def __init__(self, url):
        self.url = url
        self.value, self.version = 0.0, 0
        self.paused = self.dead = False
        self.refuses = 0
        self.memory = {"weights", "kv_cache"}

    async def abilities(self):
        return Abilities("0.5.23", True, False, True, 1)

    async def _call(self):
        await asyncio.sleep(0)
        if self.dead:
            raise EngineError(f"{self.url} is gone")

    async def pause(self, mode):
        await self._call()
        self.paused = True

    async def resume(self):
        await self._call()
        assert self.memory == {"weights", "kv_cache"}
        self.paused = False

    async def weight_version(self):
        await self._call()
        return self.version

    async def update_weights_from_disk(self, directory, version, flush):
        await self._call()
        assert "weights" in self.memory
        if self.refuses:
            self.refuses -= 1
            raise EngineError(f"{self.url} refused")
        self.value = float(load_file(Path(directory) / "model.safetensors")["a"].mean())
        self.version = version

    async def release_memory(self, tags):
        self.memory -= set(tags)
        self.value = float("nan")  # its content is lost

    async def resume_memory(self, tags):
        self.memory |= set(tags)


class Publication:
    def __init__(self, fleet):
        self.fleet, self.holds = fleet, fleet.weight_version

    @property
    def engines(self):
        return [engine for engine in self.fleet.all if not engine.dead]

    async def lost_any(self, engines):
        return len(self.engines) < len(engines)


class Fleet:
    """Of scripted engines; ``dies`` is one that dies at the next publication's first call."""

    def __init__(self, *engines):
        self.all = engines
        self.weight_version = 0
        self.current = None
        self.dies = None

    @property
    def engines(self):
        return [engine for engine in self.all if not engine.dead]

    @contextlib.asynccontextmanager
    async def publication(self):
        publication = Publication(self)
        taken = publication.engines
        if self.dies is not None:
            publication_engines = iter([taken])
            self.dies, dying = None, self.dies

            class First(Publication):
                @property
                def engines(self):
                    found = next(publication_engines, None)
                    if found is not None:
                        dying.dead = True
                        return found
                    return [engine for engine in self.fleet.all if not engine.dead]

            publication = First(self)
        try:
            yield publication
        finally:
            self.weight_version = publication.holds


@pytest.fixture
def run(tmp_path):
    source, fleet = Source(), Fleet(Engine("one"), Engine("two"))
    config = PublishConfig.model_validate({"directory": tmp_path})
    publisher = WeightPublisher(config, Choice("disk", "the test says so"), source, SHAPES, 1, "gloo")
    return source, fleet, publisher


async def step(source, updates, version):
    await updates.training()
    source.value = float(version)
    await updates.publish(version)


def test_versions_reach_all_and_an_engine_that_starts_anew(run):
    source, fleet, publisher = run
    updates = Updates(publisher, fleet, None)

    async def play():
        for version in (1, 2, 3):
            await step(source, updates, version)
        source.value = 99.0  # the trainer goes on
        anew = Engine("one")
        await fleet.current.load(anew)
        return anew

    anew = asyncio.run(play())
    assert [(e.value, e.version, e.paused) for e in (*fleet.all, anew)] == [(3.0, 3, False)] * 3
    assert fleet.weight_version == 3
    asyncio.run(publisher.close())
    assert list(publisher.config.directory.iterdir()) == []


def test_nothing_to_load_before_the_first_publication(run):
    _, _, publisher = run
    with pytest.raises(EngineError, match="nothing was published yet"):
        asyncio.run(publisher.load(Engine("one")))
    with pytest.raises(ValueError, match="was not exported"):
        asyncio.run(publisher.publish([], 1))


def test_a_refusal_puts_all_back_and_the_fleet_keeps_its_version(run):
    source, fleet, publisher = run
    updates = Updates(publisher, fleet, None)

    async def play():
        await step(source, updates, 1)
        fleet.all[1].refuses = 2
        with pytest.raises(PublishError, match=r"two refused.*back at version 1"):
            await step(source, updates, 2)
        held = [(engine.value, engine.version, engine.paused) for engine in fleet.all], fleet.weight_version
        await step(source, updates, 3)
        return held

    assert asyncio.run(play()) == ([(1.0, 1, False)] * 2, 1)
    assert [(e.value, e.version, e.paused) for e in fleet.all] == [(3.0, 3, False)] * 2


def test_engines_that_may_differ_count_as_unknown(run):
    source, fleet, publisher = run
    updates = Updates(publisher, fleet, None)

    async def play():
        await step(source, updates, 1)
        fleet.all[1].refuses = 9
        with pytest.raises(PublishError, match="stay paused"):
            await step(source, updates, 2)

    asyncio.run(play())
    assert fleet.weight_version == UNKNOWN
    assert all(engine.paused for engine in fleet.all)


def test_an_engine_that_dies_meanwhile_is_left_out(run):
    source, fleet, publisher = run
    updates = Updates(publisher, fleet, None)

    async def play():
        await step(source, updates, 1)
        fleet.dies = fleet.all[0]
        await step(source, updates, 2)

    asyncio.run(play())
    assert (fleet.all[1].value, fleet.all[1].version, fleet.all[1].paused) == (2.0, 2, False)
    assert (fleet.weight_version, fleet.current.current.version) == (2, 2)


def test_taking_turns_through_start_steps_and_a_checkpoint(run):
    source, fleet, publisher = run
    colocation = Colocation(lambda: fleet.engines)
    updates = Updates(publisher, fleet, colocation)

    async def play():
        await colocation.clear_for_trainer()
        colocation.trainer = source
        await updates.publish(0)
        for version in (1, 2):
            await step(source, updates, version)
        async with updates.borrowed():
            saved = (source.away, [set(engine.memory) for engine in fleet.all], float(source.weights()["a"].mean()))
        return saved

    saved = asyncio.run(play())
    assert saved == (False, [set(), set()], 2.0)
    assert [(e.value, e.version, e.paused) for e in fleet.all] == [(2.0, 2, False)] * 2  # restored from what is kept
    assert source.away
    assert colocation.holder is Holder.ENGINES
