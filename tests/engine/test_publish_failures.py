"""All engines or none: what happens when one of two fails. The engines are scripted."""

import asyncio
import base64
import pickle
from collections.abc import Sequence

import pytest
import torch

from rl.weights.publisher import Fallback, PublishError, publish
from rl.weights.serialize import directory_shapes, make_buckets
from rl.weights.transports import TensorTransport
from rollout.engine.protocol import EngineError
from rollout.engine.sglang_weights import Abilities, PauseMode

NEW = Abilities("0.5.23", sessions=True, hisparse=False, memory_saver=False, tensor_parallel=1)
OLDER = Abilities("0.5.16", sessions=False, hisparse=False, memory_saver=False, tensor_parallel=1)
HISPARSE = Abilities("0.5.23", sessions=True, hisparse=True, memory_saver=False, tensor_parallel=1)
HALF = Abilities("0.5.23", sessions=True, hisparse=False, memory_saver=False, tensor_parallel=1, disaggregated=True)
SHAPES = {"a": (4,), "b": (2, 2)}


def weights(value: float) -> TensorTransport:
    return TensorTransport(list(make_buckets([(name, torch.full(s, float(value))) for name, s in SHAPES.items()], 16)))


class ScriptedEngine:
    """Remembers each tensor's value. ``fails`` counts down: so many calls of that name are refused."""

    able = NEW

    def __init__(self, url: str, **fails: int) -> None:
        self.url = url
        self.mode: PauseMode | None = None
        self.flushed = False
        self.fails = fails
        self.paused = False
        self.updating = False
        self.loaded: dict[str, float] = {}
        self.version = 0
        self.calls: list[str] = []

    async def _called(self, name: str) -> None:
        self.calls.append(name)
        await asyncio.sleep(0)
        if self.fails.get(name, 0) > 0:
            self.fails[name] -= 1
            raise EngineError(f"{self.url} refused {name}")

    async def abilities(self) -> Abilities:
        return self.able

    async def pause(self, mode: PauseMode) -> None:
        await self._called("pause")
        self.paused = True
        self.mode = mode

    async def resume(self) -> None:
        await self._called("resume")
        self.paused = False

    async def weight_version(self) -> int:
        await self._called("weight_version")
        return self.version

    async def begin_weight_update(self) -> None:
        await self._called("begin")
        self.updating = True
        self.loaded = {}

    async def update_weights_from_tensors(
        self, payloads: Sequence[str], version: int | None, flush: bool, flat: bool
    ) -> None:
        assert not flat
        assert self.paused
        assert self.updating
        await self._called("update")
        for name, tensor in pickle.loads(base64.b64decode(payloads[0])):
            self.loaded[name] = float(tensor.mean())
        self.version = self.version if version is None else version
        self.flushed = version is not None and flush

    async def end_weight_update(self) -> None:
        await self._called("end")
        self.updating = False

    def holds(self, value: float) -> bool:
        return self.loaded == dict.fromkeys(SHAPES, value)


def run(engines, version=1, **kwargs):
    return asyncio.run(publish(engines, weights(version), version, SHAPES, **kwargs))


OLD = Fallback(weights(0), 0)


def test_both_are_updated_between_pause_and_resume():
    engines = [ScriptedEngine("one"), ScriptedEngine("two")]
    published = run(engines)
    assert published.nbytes == 32
    for engine in engines:
        assert engine.holds(1)
        assert engine.version == 1
        assert not engine.paused
        assert engine.calls == ["pause", "begin", "update", "update", "end", "weight_version", "resume"]


@pytest.mark.parametrize(
    ("able", "in_flight", "mode", "flushed"),
    [
        (NEW, "exact", PauseMode.RETRACT, True),
        (NEW, "in_place", PauseMode.IN_PLACE, False),
        (OLDER, "exact", PauseMode.ABORT, True),
        (OLDER, "in_place", PauseMode.ABORT, False),
        (HISPARSE, "exact", PauseMode.ABORT, True),
        (HALF, "exact", PauseMode.ABORT, True),
        (HALF, "in_place", PauseMode.IN_PLACE, False),
    ],
)
def test_requests_in_flight_by_what_the_server_can(able, in_flight, mode, flushed):
    engines = [ScriptedEngine("one"), ScriptedEngine("two")]
    engines[1].able = able
    run(engines, in_flight=in_flight)
    assert engines[1].mode is mode
    assert engines[1].flushed is flushed


def test_a_failed_preparation_pauses_nobody():
    class Unprepared(TensorTransport):
        async def prepare(self, engines, version):
            raise EngineError("two has no room")

    engines = [ScriptedEngine("one"), ScriptedEngine("two")]
    with pytest.raises(PublishError, match="two has no room") as error:
        asyncio.run(publish(engines, Unprepared(weights(1).buckets), 1, SHAPES))
    assert not error.value.mixed
    assert engines[0].calls == []


@pytest.mark.parametrize("step", ["begin", "update", "end", "weight_version"])
def test_one_refusal_costs_a_second_attempt(step):
    engines = [ScriptedEngine("one"), ScriptedEngine("two", **{step: 1})]
    assert run(engines).attempts == 2
    for engine in engines:
        assert engine.holds(1)
        assert engine.version == 1
        assert not engine.paused
        assert not engine.updating


@pytest.mark.parametrize("step", ["begin", "update", "end", "weight_version"])
def test_lasting_refusal_puts_all_back(step):
    engines = [ScriptedEngine("one"), ScriptedEngine("two", **{step: 2})]
    with pytest.raises(PublishError, match=f"two refused {step}.*back at version 0") as error:
        run(engines, fallback=OLD)
    assert not error.value.mixed
    for engine in engines:
        assert engine.holds(0)
        assert engine.version == 0
        assert not engine.paused


@pytest.mark.parametrize("fallback", [None, OLD])
def test_engines_that_may_differ_stay_paused(fallback):
    engines = [ScriptedEngine("one"), ScriptedEngine("two", update=99)]
    with pytest.raises(PublishError, match=r"two refused update.*stay paused") as error:
        run(engines, fallback=fallback)
    assert error.value.mixed
    assert all(engine.paused for engine in engines)
    assert not any("resume" in engine.calls for engine in engines)


def test_a_failed_pause_touches_nothing_and_lets_all_go_on():
    engines = [ScriptedEngine("one"), ScriptedEngine("two", pause=1)]
    with pytest.raises(PublishError, match="two refused pause") as error:
        run(engines)
    assert not error.value.mixed
    assert engines[0].calls == ["pause", "resume"]
    assert not engines[0].paused


def test_a_failed_resume_is_an_error():
    engines = [ScriptedEngine("one"), ScriptedEngine("two", resume=1)]
    with pytest.raises(PublishError, match="two refused resume"):
        run(engines)
    assert not engines[0].paused


def test_an_error_of_ours_leaves_the_engines_paused():
    class Broken(ScriptedEngine):
        async def update_weights_from_tensors(self, payloads, version, flush, flat):
            raise RuntimeError("a bug")

    engines = [ScriptedEngine("one"), Broken("two")]
    with pytest.raises(RuntimeError, match="a bug"):
        run(engines)
    assert all(engine.paused for engine in engines)


def test_nothing_is_paused_for_weights_that_do_not_fit():
    engine = ScriptedEngine("one")
    unfit = TensorTransport(list(make_buckets([("a", torch.zeros(4)), ("c", torch.zeros(1))], 100)))
    with pytest.raises(ValueError, match="c is not a tensor of the model; b is missing"):
        asyncio.run(publish([engine], unfit, 1, SHAPES))
    with pytest.raises(ValueError, match="b is missing"):
        run([engine], fallback=Fallback(TensorTransport(weights(0).buckets[:1]), 0))
    assert engine.calls == []


def test_buckets_are_bounded_and_hold_no_more_than_their_tensors():
    whole = torch.arange(10_000, dtype=torch.float32)
    named = [("x", whole[:100]), ("y", whole[100:200]), ("z", whole[:300]), ("w", whole[:1].bfloat16())]
    buckets = list(make_buckets(named, bucket_bytes=800))
    assert [list(bucket.shapes) for bucket in buckets] == [["x", "y"], ["z"], ["w"]]
    assert [bucket.nbytes for bucket in buckets] == [800, 1200, 2]
    assert len(buckets[0].payload) < 4000  # a view does not take its storage of 40 kB along
    with pytest.raises(ValueError, match="must be positive"):
        list(make_buckets(named, 0))
    with pytest.raises(ValueError, match="twice"):
        list(make_buckets([("x", whole), ("x", whole)], 10**6))


def test_a_directory_without_weights(tmp_path):
    with pytest.raises(FileNotFoundError, match="no safetensors"):
        directory_shapes(tmp_path)
