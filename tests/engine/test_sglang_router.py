"""The real sglang-router in front of servers: what it passes on, and that it sends requests only to those that serve.

The servers that come and go answer like SGLang and start at once; one test has the real server.
"""

import asyncio
import importlib.util
import os
import signal
import sys
import threading
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from pydantic import ValidationError

from rollout.engine.config import EngineConfig
from rollout.engine.fleet import EngineFleet
from rollout.engine.launch import arguments
from rollout.engine.launcher import LocalLauncher, LocalProcess
from rollout.engine.protocol import EngineError, EngineLost, FinishReason, Sampling
from rollout.engine.recovery import Phase, RecoveryConfig
from rollout.engine.router_settings import SGLangRouterConfig
from rollout.engine.sglang_router import NAME, Changes, SGLangRouter, changes
from rollout.processes import ProcessError, ProcessRegistry, free_port
from tests.engine.conftest import CONTEXT_LENGTH, received, until, until_idle, until_running

FAKE = Path(__file__).with_name("fake_server.py")
ONE_TOKEN = Sampling(1.0, 1)
ENDLESS = Sampling(1.0, 9000)
QUICK = RecoveryConfig(heartbeat_interval_s=0.2, heartbeat_timeout_s=2.0, backoff_s=0.1)


def test_the_list_of_workers_becomes_that_of_the_servers_that_take_requests():
    listed = {"http://a": "1", "http://b": "2"}
    assert changes({"http://a", "http://b"}, listed, ()) == Changes([], [])
    assert changes({"http://c", "http://a", "http://d"}, listed, {"http://d"}) == Changes(["http://c"], ["2"])
    assert changes((), listed, ()) == Changes([], ["1", "2"])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"routed_experts": True}, "routed_experts=true, but sglang_router drops"),
        ({"disaggregation": {}}, "set sglang_router or disaggregation to null"),
        ({"servers": 2, "port": 7000, "sglang_router": {"port": 7001}}, "sglang_router.port=7001 is among"),
    ],
)
def test_what_the_router_cannot_do_is_refused(settings, message):
    with pytest.raises(ValidationError, match=message):
        EngineConfig(**({"context_length": 128, "sglang_router": {}} | settings))


def test_servers_are_told_what_the_router_drops_from_requests():
    plain = EngineConfig(context_length=128)
    behind = EngineConfig(context_length=128, sglang_router=SGLangRouterConfig())
    assert "stream-interval" not in arguments(plain, Path("model"), 1, 0)
    assert arguments(behind, Path("model"), 1, 0)["stream-interval"] == 32


def test_a_missing_package_is_told_before_anything_is_launched(monkeypatch, tmp_path):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with ProcessRegistry() as registry:
        fleet = EngineFleet(EngineConfig(context_length=128, sglang_router=SGLangRouterConfig()), registry, tmp_path)
        with pytest.raises(ProcessError, match="pip install sglang-router"):
            asyncio.run(fleet.start(Path("unused")))
        assert registry.processes == ()


class FakeLauncher(LocalLauncher):
    async def launch(self, spec, model_dir, weight_version):
        port = self._ports.setdefault(spec.index, free_port())
        line = [sys.executable, str(FAKE), str(port), "serves", str(weight_version)]
        process = self._registry.start(spec.name, line, self._log_dir / f"{spec.name}.log", grace_s=0.0)
        return LocalProcess(process, self._registry, f"http://127.0.0.1:{port}")


@dataclass
class Running:
    """A fleet of two servers behind a router, and the event loop of a thread that watches it."""

    fleet: EngineFleet
    loop: asyncio.AbstractEventLoop

    def run(self, coroutine):
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(timeout=200)


@pytest.fixture(scope="module", params=["cache_aware", "manual"])
def running(request, tmp_path_factory):
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    router = SGLangRouterConfig(policy=request.param)
    config = EngineConfig(context_length=128, servers=2, recovery=QUICK, sglang_router=router)
    logs = tmp_path_factory.mktemp("logs")
    with ProcessRegistry() as registry:
        launcher = FakeLauncher(config, registry, logs)
        running = Running(EngineFleet(config, registry, logs, print, launcher), loop)
        running.run(running.fleet.start(Path("unused")))
        yield running
        running.run(running.fleet.stop())
    loop.call_soon_threadsafe(loop.stop)
    thread.join()


@pytest.fixture
def fleet(running):
    """With both servers in the router's list."""

    async def whole():
        return running.fleet.supervisor.in_front.complete and len(await workers(running.fleet)) == 2

    running.run(until(whole, 120))
    return running.fleet


def port(generation):
    """Which server it was: the fake says it so."""
    return generation.cached.total


def server_at(fleet, wanted):
    return next((name, p) for name, p in fleet.processes.items() if p.url.endswith(str(wanted)))


async def in_flight(fleet, request_id):
    """An endless request, and the server that has it."""
    task = asyncio.create_task(fleet.generate([7], ENDLESS, request_id, session="long"))
    found = []

    async def arrived():
        for name, process in fleet.processes.items():
            if any(body["rid"].startswith(request_id) for body in await received(process)):
                found.append((name, process))
        return bool(found)

    await until(arrived, 60)
    return task, *found[0]


async def workers(fleet):
    return await fleet.supervisor.in_front._client.workers()


def test_sessions_keep_the_server_that_has_their_prefix(running, fleet):
    async def session(number):
        conversation = [*range(1000 * number, 1000 * number + 40)]
        asked = []
        for turn in range(4):
            reply = await fleet.generate(conversation, Sampling(1.0, 10), f"{number}.{turn}", session=f"s{number}")
            assert reply.token_ids.tolist() == [conversation[-1] + i for i in range(1, 11)]
            asked.append(port(reply))
            conversation += [*reply.token_ids.tolist(), 1, 2, 3]
        return asked

    async def run():
        return await asyncio.gather(*(session(number) for number in range(12)))

    asked = running.run(run())
    assert all(len(set(turns)) == 1 for turns in asked)
    if fleet.config.sglang_router.policy == "manual":  # cache_aware spreads by loads, which may have been equal
        assert len({turns[0] for turns in asked}) == 2


def test_an_abort_finds_the_server_that_has_the_request(running, fleet):
    async def run():
        request, *_ = await in_flight(fleet, "aborted")
        await fleet.abort(["aborted"])
        return await asyncio.wait_for(request, 60)

    assert running.run(run()).finish_reason is FinishReason.ABORT


def test_a_killed_server_leaves_the_list_and_comes_back(running, fleet):
    async def run():
        request, _, process = await in_flight(fleet, "killed")
        os.kill(process.pid, signal.SIGKILL)
        with pytest.raises(EngineLost) as lost:
            await asyncio.wait_for(request, 60)
        # whoever resumes it now meets the other server, at once and every time
        resumed = [await fleet.generate([7], ONE_TOKEN, f"resumed-{i}", session="long") for i in range(5)]
        return lost.value.partial, process.url, resumed, await workers(fleet)

    partial, dead, resumed, serving = running.run(run())
    assert partial is not None
    assert partial.token_ids.tolist() == [8 + i for i in range(len(partial.token_ids))]
    assert dead not in serving
    assert {port(generation) for generation in resumed} == {int(url.rpartition(":")[2]) for url in serving}


def test_a_hung_server_is_left_out_and_its_request_ends(running, fleet):
    async def run():
        request, name, process = await in_flight(fleet, "hung")
        os.kill(process.pid, signal.SIGSTOP)
        with pytest.raises(EngineLost):
            await asyncio.wait_for(request, 120)
        await fleet.generate([7], ONE_TOKEN, "after-hung", session="long")
        return fleet.states()[name]

    _, restarts = running.run(run())
    assert restarts > 0


def test_a_router_that_dies_is_started_again_with_the_same_servers(running, fleet):
    async def run():
        request, *_ = await in_flight(fleet, "unrouted")
        first = fleet.supervisor.in_front.pid
        os.kill(first, signal.SIGKILL)
        with pytest.raises(EngineLost):
            await asyncio.wait_for(request, 60)
        answer = await asyncio.wait_for(fleet.generate([7], ONE_TOKEN, "after", session="long"), 120)
        assert fleet.supervisor.in_front.pid != first
        return answer, fleet.states()

    answer, states = running.run(run())
    assert answer.token_ids.tolist() == [8]
    assert states[NAME] == (Phase.SERVING, 1)


def test_a_fleet_that_was_stopped_says_so_at_once(tmp_path):
    async def run(registry):
        config = EngineConfig(context_length=128, sglang_router=SGLangRouterConfig())
        fleet = EngineFleet(config, registry, tmp_path)
        with pytest.raises(EngineError, match="no inference server is left"):
            await asyncio.wait_for(fleet.generate([7], ONE_TOKEN, "late", session="s"), 10)

    with ProcessRegistry() as registry:
        asyncio.run(run(registry))


def test_the_real_servers_tokens_pass_through_whole(server, tmp_path):
    """Ids, log-probs, likeliest tokens and versions are what the server itself says; an abort and a client that goes
    away reach it."""
    config = EngineConfig(context_length=CONTEXT_LENGTH, sglang_router=SGLangRouterConfig())
    prompt = [2, 20, 21, 22, 23, 24]

    async def run(registry):
        changed = asyncio.Event()
        spawn = lambda work, name: asyncio.create_task(work, name=name)  # noqa: E731
        router = SGLangRouter(config, config.sglang_router, registry, tmp_path, print, changed.set, spawn)
        await router.start()
        try:
            router.serve([server.url])
            async with asyncio.timeout(60):
                while not router.takes:
                    await changed.wait()
                    changed.clear()
            async with server.engine() as engine:
                many = Sampling(1.0, 100, top_logprobs=3)
                # Several pieces of a stream: a reply ends by chance.
                replies = [await router.generate(prompt, many, f"through-{i}", session="s") for i in range(12)]
                whole = max(replies, key=lambda reply: len(reply.token_ids))
                going = asyncio.create_task(router.generate(prompt, Sampling(1.0, 240), "cut", session="s"))
                await until_running(engine, 1)
                await engine.abort(["cut"])
                cut = await asyncio.wait_for(going, 30)
                leaving = asyncio.create_task(router.generate(prompt, Sampling(1.0, 240), "gone", session="s"))
                await until_running(engine, 1)
                leaving.cancel()
                await asyncio.gather(leaving, return_exceptions=True)
                await until_idle(engine)
            return whole, cut
        finally:
            await router.stop()

    with ProcessRegistry() as registry:
        whole, cut = asyncio.run(run(registry))
    ids = [*prompt, *whole.token_ids.tolist()]
    assert len(whole.token_ids) > 32  # several events
    np.testing.assert_allclose(whole.logprobs, server.models[0].logprobs(ids)[len(prompt) :], atol=1e-4)
    assert (whole.weight_versions % 2 == 0).all()
    assert whole.top_logprobs.token_ids.shape == (len(whole.token_ids), 3)
    assert cut.finish_reason is FinishReason.ABORT
    assert 0 < len(cut.token_ids) < 240
