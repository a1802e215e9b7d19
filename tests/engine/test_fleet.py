"""Starting, routing, losing and bringing back servers. The servers answer like SGLang and start at once."""

import asyncio
import contextlib
import os
import signal
import socket
import sys
from collections import Counter
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np
import pytest

from rollout.engine import launcher as launcher_module
from rollout.engine.config import EngineConfig
from rollout.engine.fleet import UNKNOWN, EngineFleet
from rollout.engine.protocol import EngineError, EngineLost, FinishReason, Sampling
from rollout.engine.recovery import Phase, RecoveryConfig
from rollout.engine.sglang import SGLangEngine
from rollout.engine.sglang_weights import PauseMode
from rollout.processes import ProcessError, ProcessRegistry, free_port
from tests.engine.conftest import until, until_received

FAKE = Path(__file__).with_name("fake_server.py")
ONE_TOKEN = Sampling(1.0, 1)
ENDLESS = Sampling(1.0, 9000)
QUICK = RecoveryConfig(heartbeat_interval_s=0.2, heartbeat_timeout_s=0.5, backoff_s=0.1)


@pytest.fixture
def registry():
    with ProcessRegistry() as registry:
        yield registry


@pytest.fixture
def make_fleet(registry, monkeypatch, tmp_path):
    def make(behaviours=("serves",), **settings):
        def command(config, model_dir, port, weight_version, index):
            return [sys.executable, str(FAKE), str(port), behaviours[index], str(weight_version)]

        monkeypatch.setattr(launcher_module, "command", command)
        settings = {"recovery": QUICK} | settings
        config = EngineConfig(context_length=128, servers=len(behaviours), **settings)
        fleet = EngineFleet(config, registry, tmp_path, messages.append)
        fleet.messages = messages
        return fleet

    messages = []
    return make


@asynccontextmanager
async def started(fleet):
    await fleet.start(Path("unused"))
    try:
        yield fleet
    finally:
        await fleet.stop()


def port(generation):
    """Which server it was: the fake says it so."""
    return generation.cached.total


async def server_of(fleet, session):
    """Name and process of the server that a session is on."""
    asked = port(await fleet.generate([1], ONE_TOKEN, f"which-{session}", session))
    return next((name, p) for name, p in fleet.processes.items() if p.url.endswith(str(asked)))


async def phase_is(fleet, name, phase):
    async def reached():
        return fleet.states()[name][0] is phase

    await until(reached, 60)


class DiskWeights:
    """What a publisher provides; counts the servers that asked."""

    def __init__(self, version):
        self.version = version
        self.loads = 0

    async def load(self, engine):
        self.loads += 1
        await engine.update_weights_from_disk("unused", self.version, True)


async def publish(fleet, version):
    """As ``rl.weights.updates`` does: servers that died are left out."""
    async with fleet.publication() as publication:
        while True:
            engines = publication.engines
            try:
                for engine in engines:
                    await engine.update_weights_from_disk("unused", version, True)
            except EngineError:
                assert await publication.lost_any(engines)
            else:
                fleet.current, publication.holds = DiskWeights(version), version
                return


def test_sessions_stay_on_their_server(make_fleet, registry):
    async def run():
        async with started(make_fleet(("serves", "serves"))) as fleet:
            answers = [await fleet.generate([1], ONE_TOKEN, f"r{i}", session=f"s{i % 4}") for i in range(8)]
            return [port(answer) for answer in answers], fleet.messages

    servers, messages = asyncio.run(run())
    assert servers[:4] == servers[4:]
    assert len(set(servers)) == 2
    assert registry.processes == ()
    assert any("engine-1 serves http://127.0.0.1:" in message for message in messages)


def test_scores_are_asked_of_the_server_with_least_to_do(make_fleet, monkeypatch):
    async def run():
        asked = []
        async with started(make_fleet(("serves", "serves"))) as fleet:

            async def score(engine, token_ids, placement):
                asked.append(engine.url)
                await asyncio.sleep(0.1)
                return np.zeros(len(token_ids), np.float32)

            monkeypatch.setattr(SGLangEngine, "score", score)
            await asyncio.gather(*(fleet.score([1, 2]) for _ in range(4)))
        assert sorted(Counter(asked).values()) == [2, 2]

    asyncio.run(run())


def test_requests_are_aborted_on_their_servers_also_where_another_is_lost(make_fleet, monkeypatch):
    async def run():
        async with started(make_fleet(("serves", "serves"))) as fleet:
            tasks = {s: asyncio.create_task(fleet.generate([1], ENDLESS, s, session=s)) for s in "ab"}
            for process, session in zip(fleet.processes.values(), "ab", strict=True):
                await until_received(process, session)
            real, lost = SGLangEngine.abort, fleet.engines[0].url

            async def abort(engine, request_ids):
                if engine.url == lost:
                    raise EngineLost("gone")
                await real(engine, request_ids)

            monkeypatch.setattr(SGLangEngine, "abort", abort)
            await fleet.abort(["a", "b", "of nobody"])
            aborted = await asyncio.wait_for(tasks["b"], 60)
        with pytest.raises(EngineLost):
            await tasks["a"]  # until its server was stopped
        return aborted.finish_reason

    assert asyncio.run(run()) is FinishReason.ABORT


def test_death_at_start_is_told_with_its_log_and_stops_the_others(make_fleet, registry):
    fleet = make_fleet(("serves", "dies"))
    with pytest.raises(ProcessError, match=r"(?s)engine-1 .*exit code 1.*no room for the model"):
        asyncio.run(fleet.start(Path("unused")))
    assert registry.processes == ()


def test_a_server_that_never_generates(make_fleet, registry):
    fleet = make_fleet(("never generates",), start_timeout_s=1.5)
    with pytest.raises(EngineError, match=r"no token from engine-0 .*log.* within 1.5 s"):
        asyncio.run(fleet.start(Path("unused")))
    assert registry.processes == ()


def test_a_server_that_cannot_join_is_told(make_fleet, registry):
    class Never:
        async def load(self, engine):
            await asyncio.sleep(3600)

    fleet = make_fleet(start_timeout_s=6)
    fleet.current = Never()
    with pytest.raises(EngineError, match=r"did not take requests within 6 s .*'engine-0': 'joining'"):
        asyncio.run(fleet.start(Path("unused")))
    assert registry.processes == ()


def test_a_taken_port_is_refused_before_anything_is_launched(make_fleet, tmp_path):
    taken = free_port()
    with socket.create_server(("127.0.0.1", taken + 1)):
        fleet = make_fleet(("serves", "serves"), port=taken)
        with pytest.raises(ProcessError, match=f"engine-1: port {taken + 1} .*taken"):
            asyncio.run(fleet.start(Path("unused")))
    assert list(tmp_path.glob("*.log")) == []


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_a_dead_or_hung_server_gives_up_its_requests_and_comes_back_with_the_weights_of_the_others(make_fleet, how):
    """Published twice: before it dies, and while it is away. It starts from the model directory, which has neither."""

    async def run():
        async with started(make_fleet(("serves", "serves"))) as fleet:
            await publish(fleet, 1)
            name, process = await server_of(fleet, "s")
            in_flight = asyncio.create_task(fleet.generate([1], ENDLESS, "r", session="s"))
            await until_received(process, "r", tokens=8)
            os.kill(process.pid, how)
            with pytest.raises(EngineLost) as lost:
                await asyncio.wait_for(in_flight, 60)
            await publish(fleet, 2)
            resumed = [1, *lost.value.partial.token_ids.tolist()]
            rest = await fleet.generate(resumed, ONE_TOKEN, "r2", session="s")
            await phase_is(fleet, name, Phase.SERVING)
            assert [await engine.weight_version() for engine in fleet.engines] == [2, 2]
            assert fleet.processes[name].pid != process.pid
            return lost.value.partial, rest

    partial, rest = asyncio.run(run())
    assert partial.token_ids.tolist() == list(range(2, 2 + len(partial.token_ids)))
    assert len(partial.token_ids) > 3
    assert set(partial.weight_versions) == {1}
    assert rest.token_ids.tolist() == [partial.token_ids[-1] + 1]
    assert set(rest.weight_versions) == {2}


def test_a_request_waits_for_the_only_server_to_come_back(make_fleet):
    async def run():
        async with started(make_fleet()) as fleet:
            os.kill(fleet.processes["engine-0"].pid, signal.SIGKILL)
            await phase_is(fleet, "engine-0", Phase.DOWN)
            assert list(fleet.engines) == []
            answer = await fleet.generate([1], ONE_TOKEN, "r", session="s")
            assert len(fleet.engines) == 1
            return answer

    assert asyncio.run(run()).token_ids.tolist() == [2]


def test_a_request_that_waits_for_a_paused_server_is_lost_with_it(make_fleet):
    async def run():
        async with started(make_fleet()) as fleet:
            await fleet.engines[0].pause(PauseMode.ABORT)
            waiting = asyncio.create_task(fleet.generate([1], ONE_TOKEN, "waits", "s"))
            await asyncio.sleep(0)
            os.kill(fleet.processes["engine-0"].pid, signal.SIGKILL)
            with pytest.raises(EngineLost):
                await asyncio.wait_for(waiting, 60)

    asyncio.run(run())


def test_a_fleet_that_is_stopped_during_a_publication_starts_nothing(make_fleet, registry):
    async def run():
        fleet = make_fleet()
        async with started(fleet), fleet.publication() as publication:
            publication.holds = UNKNOWN
            await fleet.stop()
        await asyncio.sleep(0)
        return fleet.messages

    assert not any(message.startswith("lost") for message in asyncio.run(run()))
    assert registry.processes == ()


def test_a_server_that_keeps_dying_is_lost_for_good_with_its_reason(make_fleet):
    async def run():
        async with started(make_fleet(recovery=QUICK.model_copy(update={"max_restarts": 1}))) as fleet:
            for _ in range(2):
                os.kill(fleet.processes["engine-0"].pid, signal.SIGKILL)
                await phase_is(fleet, "engine-0", Phase.DOWN if _ == 0 else Phase.LOST)
                if _ == 0:
                    await phase_is(fleet, "engine-0", Phase.SERVING)
            with pytest.raises(EngineError, match=r"no inference server is left.*engine-0.*lost.*SIGKILL"):
                await fleet.generate([1], ONE_TOKEN, "r", session="s")
            with pytest.raises(EngineError, match=r"no inference server is left.*SIGKILL"):
                _ = fleet.engines

    fleet = make_fleet()
    with pytest.raises(EngineError, match="none was started"):
        _ = fleet.engines
    asyncio.run(run())


def test_a_suspect_is_asked_at_once(make_fleet):
    """Not when its next heartbeat is due: it takes no requests until it has answered."""

    async def run():
        async with started(make_fleet(recovery=RecoveryConfig(heartbeat_interval_s=3600))) as fleet:
            fleet.supervisor.suspected(0)
            assert list(fleet.engines) == []
            await phase_is(fleet, "engine-0", Phase.SERVING)

    asyncio.run(run())


def test_a_server_that_dies_during_a_publication_is_no_longer_asked_and_gets_the_new_weights_later(make_fleet):
    async def run():
        async with started(make_fleet(("serves", "serves"))) as fleet:
            async with fleet.publication() as publication:
                before = publication.engines
                os.kill(fleet.processes["engine-1"].pid, signal.SIGKILL)
                assert await publication.lost_any(before)
                (left,) = publication.engines
                await left.update_weights_from_disk("unused", 1, True)
                weights = DiskWeights(1)
                fleet.current, publication.holds = weights, 1
                await asyncio.sleep(1.0)  # time to start again, but not to join
                assert fleet.states()["engine-1"][0] is not Phase.SERVING
            await phase_is(fleet, "engine-1", Phase.SERVING)
            return [await engine.weight_version() for engine in fleet.engines], weights.loads

    versions, loads = asyncio.run(run())
    assert versions == [1, 1]
    assert loads == 1


def test_engines_that_a_publication_left_half_loaded_take_no_requests_until_they_loaded_the_current_weights(make_fleet):
    async def run():
        async with started(make_fleet(("serves", "serves"))) as fleet:
            await publish(fleet, 1)
            async with fleet.publication() as publication:
                await publication.engines[0].update_weights_from_disk("unused", 2, True)
                publication.holds = UNKNOWN
            assert fleet.weight_version == 1
            for name in ("engine-0", "engine-1"):
                await phase_is(fleet, name, Phase.SERVING)
            return [await engine.weight_version() for engine in fleet.engines], fleet.current.loads

    assert asyncio.run(run()) == ([1, 1], 2)


async def until_no_longer_lost(fleet):
    while True:
        with contextlib.suppress(EngineLost):
            await fleet.generate([1], ONE_TOKEN, "asked", "session")


def test_who_waits_for_a_server_is_told_that_the_fleet_itself_failed(make_fleet, monkeypatch):
    """An error that none of its tasks expects: nobody would start the server again."""

    async def run():
        async with started(make_fleet(("serves",))) as fleet:

            async def fails(server):
                raise RuntimeError("no such thing")

            monkeypatch.setattr(fleet.supervisor, "_restart", fails)
            os.kill(fleet.processes["engine-0"].pid, signal.SIGKILL)
            with pytest.raises(EngineError, match=r"task engine-0-start failed: RuntimeError.*no such thing"):
                await until_no_longer_lost(fleet)
            with pytest.raises(EngineError, match="no such thing"):
                _ = fleet.engines

    asyncio.run(run())


async def restarted(fleet, killed):
    launched = fleet.processes.get("engine-1")
    return launched is not None and launched.pid != killed and fleet.states()["engine-1"][0] is Phase.SERVING


def test_a_server_is_known_by_its_url_while_it_is_suspect_and_after_it_was_started_again(make_fleet):
    long = QUICK.model_copy(update={"heartbeat_timeout_s": 3.0})  # so that it is seen while it is suspect

    async def run():
        async with started(make_fleet(("serves", "serves"), recovery=long)) as fleet:
            before = {url: spec.name for url, spec in fleet.specs.items()}
            os.kill(fleet.processes["engine-1"].pid, signal.SIGSTOP)
            await phase_is(fleet, "engine-1", Phase.SUSPECT)
            suspect = {url: spec.name for url, spec in fleet.specs.items()}
            os.kill(killed := fleet.processes["engine-1"].pid, signal.SIGKILL)
            await until(lambda: restarted(fleet, killed), 60)
            return before, suspect, {url: spec.name for url, spec in fleet.specs.items()}

    before, suspect, after = asyncio.run(run())
    assert sorted(before.values()) == ["engine-0", "engine-1"]
    assert before == suspect == after
