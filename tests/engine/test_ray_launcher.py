"""Servers that Ray places: what runs on each machine, and that a lost one is started again. Ray has CPUs only here."""

import asyncio
import os
import signal
import sys
from pathlib import Path

import pytest
import ray

from rollout.engine import ray_launcher
from rollout.engine.config import EngineConfig
from rollout.engine.fleet import EngineFleet
from rollout.engine.launch import server_specs
from rollout.engine.protocol import Sampling
from rollout.engine.ray_launcher import RayLauncher, bundle, rank_commands
from rollout.engine.recovery import Phase, RecoveryConfig
from rollout.processes import ProcessError, ProcessRegistry
from tests.engine.conftest import until

FAKE = Path(__file__).with_name("fake_server.py")


def option(line, name):
    """The value that counts: the last one."""
    return [line[i + 1] for i, part in enumerate(line) if part == f"--{name}"][-1]


def test_a_server_on_two_machines():
    config = EngineConfig(context_length=128, device="cuda", tensor_parallel=16, nodes_per_server=2, servers=2)
    spec = server_specs(config)[1]
    assert bundle(spec.settings) == {"CPU": 1.0, "GPU": 8.0}
    lines = rank_commands(config, spec, Path("model"), 3, ["10.0.0.1", "10.0.0.2"], [30000, 30001])
    assert [option(line, "node-rank") for line in lines] == ["0", "1"]
    assert [option(line, "host") for line in lines] == ["10.0.0.1", "10.0.0.2"]
    for line in lines:
        assert option(line, "dist-init-addr") == "10.0.0.1:30001"
        assert option(line, "nnodes") == "2"
        assert option(line, "tp-size") == "16"
        assert option(line, "base-gpu-id") == "0"
        assert option(line, "weight-version") == "3"


def test_a_fixed_port_is_refused():
    with pytest.raises(ProcessError, match=r"engine\.port"):
        RayLauncher(EngineConfig(context_length=128, port=30000), Path("logs")).check()


@pytest.fixture
def ray_on_cpus():
    ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False, object_store_memory=80 * 2**20)
    yield
    ray.shutdown()


@pytest.mark.timeout(400)
def test_a_server_under_an_actor_dies_and_comes_back(ray_on_cpus, monkeypatch, tmp_path):
    def fake(config, spec, model_dir, version, addresses, ports):
        return [[sys.executable, str(FAKE), str(ports[0]), "serves", str(version)]]

    monkeypatch.setattr(ray_launcher, "rank_commands", fake)
    monkeypatch.setattr(ray_launcher.ServerNode, "address", lambda self: "127.0.0.1")

    async def run(registry):
        config = EngineConfig(context_length=128, recovery=RecoveryConfig(backoff_s=0.1))
        fleet = EngineFleet(config, registry, tmp_path, print, RayLauncher(config, tmp_path))
        await fleet.start(Path("unused"))
        try:
            pid = fleet.processes["engine-0"].pid
            os.kill(pid, signal.SIGKILL)

            async def is_down():
                return fleet.states()["engine-0"][0] is not Phase.SERVING

            await until(is_down, 60)
            answer = await fleet.generate([1], Sampling(1.0, 1), "r", session="s")  # it waits
            return answer, pid, fleet.processes["engine-0"].pid
        finally:
            await fleet.stop()

            async def room_is_back():  # Ray gives it back a moment later
                return ray.available_resources().get("CPU") == 2.0

            await until(room_is_back, 60)

    with ProcessRegistry() as registry:
        answer, before, after = asyncio.run(run(registry))
    assert answer.token_ids.tolist() == [2]
    assert before != after
