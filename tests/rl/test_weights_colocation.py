"""Whose turn it is on shared GPUs: the order of the steps, and that none can come too early."""

import asyncio

import pytest

from rl.weights.colocation import Colocation, ColocationError, Holder
from rl.weights.publisher import Fallback, PublishError, publish
from rollout.engine.protocol import EngineError
from rollout.engine.sglang_weights import Abilities, PauseMode


class Trainer:
    def __init__(self, calls):
        self.calls = calls
        self.away = True

    async def offload(self):
        self.calls.append("offload trainer")
        self.away = True
        return 1

    async def onload(self):
        self.calls.append("onload trainer")
        self.away = False

    async def release_bucket(self):
        self.calls.append("release bucket")


class Engine:
    """Refuses what a server without its memory could not do."""

    url = "engine"

    def __init__(self, calls, trainer, able=None):
        self.calls, self.trainer = calls, trainer
        self.able = able or Abilities("0.5.23", True, False, True, 1)
        self.memory = {"weights", "kv_cache"}
        self.paused = False
        self.version = 0
        self.fails = 0

    async def abilities(self):
        return self.able

    async def pause(self, mode):
        self.calls.append(f"pause {mode}")
        self.paused = True

    async def resume(self):
        assert self.memory == {"weights", "kv_cache"}, "it would generate without its memory"
        self.calls.append("resume")
        self.paused = False

    async def release_memory(self, tags):
        assert self.paused
        self.calls.append("sleep engine")
        self.memory -= set(tags)

    async def resume_memory(self, tags):
        if "kv_cache" in tags:
            assert self.trainer.away, "both would hold the GPU"
        self.calls.append(f"wake {tags[0]}")
        self.memory |= set(tags)

    async def weight_version(self):
        return self.version


class Transport:
    nbytes = 1

    def __init__(self, calls):
        self.calls = calls

    def check(self, expected):
        """Anything fits."""

    async def prepare(self, engines, version):
        """Nothing to do."""

    async def load(self, engines, version, flush):
        for engine in engines:
            assert "weights" in engine.memory
            if engine.fails:
                engine.fails -= 1
                raise EngineError("refused")
            engine.version = version
        self.calls.append("publish")


def parts(able=None):
    calls = []
    trainer = Trainer(calls)
    engine = Engine(calls, trainer, able)
    return calls, trainer, engine, Colocation(lambda: [engine], trainer)


async def step(calls, engine, colocation, version, fallback=None):
    await colocation.to_trainer()
    calls.append("update")
    await colocation.wake_weights()
    return await publish([engine], Transport(calls), version, {}, fallback, before_resume=colocation.to_engines)


TURN = ["sleep engine", "onload trainer", "update", "wake weights"]
BACK = ["publish", "release bucket", "offload trainer", "wake kv_cache", "resume"]


def test_a_step_s_order():
    calls, _, engine, colocation = parts()
    asyncio.run(step(calls, engine, colocation, 1))
    assert [call for call in calls if not call.startswith("pause")] == [*TURN, *BACK]
    assert calls[0] == f"pause {PauseMode.RETRACT}"
    assert colocation.holder is Holder.ENGINES
    assert (engine.version, engine.paused) == (1, False)


def test_a_start_and_several_steps():
    async def run():
        calls, _, engine, colocation = parts()
        await colocation.clear_for_trainer()
        await colocation.wake_weights()
        await publish([engine], Transport(calls), 0, {}, before_resume=colocation.to_engines)
        for version in (1, 2, 3):
            await step(calls, engine, colocation, version)
        return [call for call in calls if not call.startswith("pause")]

    start = ["sleep engine", "wake weights", *BACK]
    assert asyncio.run(run()) == start + [*TURN, *BACK] * 3


def test_older_servers_abort_what_they_have():
    calls, _, engine, colocation = parts(Abilities("0.5.16", False, False, True, 1))
    asyncio.run(step(calls, engine, colocation, 1))
    assert calls[0] == f"pause {PauseMode.ABORT}"


def test_a_failed_publication_gives_the_memory_back_with_the_version_before():
    calls, trainer, engine, colocation = parts()
    engine.fails = 2

    with pytest.raises(PublishError, match="back at version 0") as error:
        asyncio.run(step(calls, engine, colocation, 1, Fallback(Transport(calls), 0)))
    assert not error.value.mixed
    assert (engine.version, engine.paused, trainer.away) == (0, False, True)
    assert colocation.holder is Holder.ENGINES


def test_engines_that_may_differ_get_nothing_back():
    calls, _, engine, colocation = parts()
    engine.fails = 9
    with pytest.raises(PublishError, match="stay paused"):
        asyncio.run(step(calls, engine, colocation, 1))
    assert engine.paused
    assert "wake kv_cache" not in calls


def test_no_step_comes_before_its_turn():
    async def run(colocation, *steps):
        for name in steps:
            await getattr(colocation, name)()

    for steps in (["wake_weights"], ["to_trainer", "to_engines"], ["to_trainer", "wake_weights", "to_trainer"]):
        with pytest.raises(ColocationError, match="the GPUs' memory is with"):
            asyncio.run(run(parts()[3], *steps))
    calls, _, _, colocation = parts()
    asyncio.run(run(colocation, "to_trainer", "to_trainer"))
    assert calls.count("onload trainer") == 1
    alone = Colocation(lambda: [])
    with pytest.raises(ColocationError, match="no trainer yet"):
        asyncio.run(run(alone, "to_trainer"))
