"""Starting, routing and losing servers. The servers answer like SGLang and start at once."""

import asyncio
import os
import signal
import socket
import sys
import time
from pathlib import Path

import pytest

from rollout.engine import fleet as fleet_module
from rollout.engine.config import EngineConfig
from rollout.engine.fleet import EngineFleet
from rollout.engine.protocol import EngineError, Sampling
from rollout.processes import ProcessError, ProcessRegistry, free_port
from tests.engine.conftest import until

FAKE = Path(__file__).with_name("fake_server.py")
ONE_TOKEN = Sampling(1.0, 1)
ENDLESS = Sampling(1.0, 100)


@pytest.fixture
def registry():
    with ProcessRegistry() as registry:
        yield registry


@pytest.fixture
def make_fleet(registry, monkeypatch, tmp_path):
    def make(behaviours=("serves",), **settings):
        def command(config, model_dir, port, weight_version, index):
            return [sys.executable, str(FAKE), str(port), behaviours[index]]

        monkeypatch.setattr(fleet_module, "command", command)
        config = EngineConfig(context_length=128, servers=len(behaviours), **settings)
        fleet = EngineFleet(config, registry, tmp_path, messages.append)
        fleet.messages = messages
        return fleet

    messages = []
    return make


def test_sessions_stay_on_their_server(make_fleet, registry):
    async def run():
        fleet = make_fleet(("serves", "serves"))
        await fleet.start(Path("unused"))
        try:
            answers = [await fleet.generate([1], ONE_TOKEN, f"r{i}", session=f"s{i % 4}") for i in range(8)]
            return [int(answer.token_ids[0]) for answer in answers], fleet.messages
        finally:
            await fleet.stop()
            await fleet.stop()

    servers, messages = asyncio.run(run())
    assert servers[:4] == servers[4:]
    assert len(set(servers)) == 2
    assert registry.processes == ()
    assert any("engine-1 serves http://127.0.0.1:" in message for message in messages)


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


def test_a_taken_port_is_refused_before_anything_is_launched(make_fleet, tmp_path):
    port = free_port()
    with socket.create_server(("127.0.0.1", port + 1)):
        fleet = make_fleet(("serves", "serves"), port=port)
        with pytest.raises(ProcessError, match=f"engine-1: port {port + 1} .*taken"):
            asyncio.run(fleet.start(Path("unused")))
    assert list(tmp_path.glob("*.log")) == []


def test_losing_the_only_server_is_an_error_at_once(make_fleet):
    async def run():
        fleet = make_fleet()
        await fleet.start(Path("unused"))
        try:
            in_flight = asyncio.create_task(fleet.generate([1], ENDLESS, "r", session="s"))
            await asyncio.sleep(0.2)
            killed = time.monotonic()
            os.kill(fleet.processes[0].pid, signal.SIGKILL)
            with pytest.raises(EngineError, match=fleet.engines[0].url):
                await in_flight
            await asyncio.sleep(1)
            with pytest.raises(EngineError, match=r"(?s)no inference server takes requests.*engine-0.*SIGKILL"):
                await fleet.generate([1], ONE_TOKEN, "r2", session="s")
            assert time.monotonic() - killed < 3
        finally:
            await fleet.stop()

    asyncio.run(run())


def test_a_hung_server_is_left_and_taken_back(make_fleet, monkeypatch):
    async def run():
        fleet = make_fleet(("serves", "serves"), health_interval_s=0.2)
        monkeypatch.setattr(fleet_module, "HEALTH_TIMEOUT_S", 0.3)
        await fleet.start(Path("unused"))
        try:
            first = int((await fleet.generate([1], ONE_TOKEN, "r", session="s")).token_ids[0])
            in_flight = asyncio.create_task(fleet.generate([1], ENDLESS, "r2", session="s"))
            await asyncio.sleep(0.1)
            hung = next(p for p, e in zip(fleet.processes, fleet.engines, strict=True) if int(e.url[-3:]) == first)
            os.kill(hung.pid, signal.SIGSTOP)
            with pytest.raises(EngineError, match="failed"):
                await asyncio.wait_for(in_flight, 5)
            assert list(fleet.lost) == [hung.name]
            assert int((await fleet.generate([1], ONE_TOKEN, "r3", session="s")).token_ids[0]) != first
            fleet.weight_version = 1  # published without it
            os.kill(hung.pid, signal.SIGCONT)
            await asyncio.sleep(1.0)
            assert list(fleet.lost) == [hung.name]  # it answers, but with old weights
            fleet.weight_version = 0

            async def back() -> bool:
                return not fleet.lost

            await until(back)
        finally:
            await fleet.stop()

    asyncio.run(run())
