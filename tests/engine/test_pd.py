"""Prefill and decode on servers apart: a request reaches both, and names where they meet.

SGLang's prefill servers need a transfer backend that wants a GPU or a network card (they refuse the fake one), so
the servers of the CPU test answer like SGLang; the real pair is tested on a GPU.
"""

import asyncio
import importlib.util
import os
import random
import signal
import sys
from pathlib import Path

import aiohttp
import pytest
import torch

from rollout.engine import launcher as launcher_module
from rollout.engine.config import EngineConfig
from rollout.engine.disaggregation import DisaggregationConfig, RoleConfig
from rollout.engine.fleet import EngineFleet
from rollout.engine.pd import ROOMS, rendezvous
from rollout.engine.protocol import EngineLost, Sampling
from rollout.engine.recovery import RecoveryConfig
from rollout.processes import ProcessRegistry
from tests.engine.conftest import CONTEXT_LENGTH

FAKE = Path(__file__).with_name("fake_server.py")


def test_a_rendezvous_is_at_the_prefill_servers_machine_in_a_room_of_its_own():
    rng = random.Random(0)
    first, second = (rendezvous("http://10.1.2.3:30000", 8998, rng) for _ in range(2))
    assert first.fields() == {"bootstrap_host": "10.1.2.3", "bootstrap_port": 8998, "bootstrap_room": first.room}
    assert first.room != second.room
    assert 0 <= first.room < ROOMS


@pytest.fixture
def apart(monkeypatch, tmp_path):
    """Two prefill servers and a decode server."""

    def command(config, model_dir, port, weight_version, index):
        return [sys.executable, str(FAKE), str(port), "serves", str(weight_version)]

    monkeypatch.setattr(launcher_module, "command", command)
    roles = DisaggregationConfig(prefill=RoleConfig(servers=2), decode=RoleConfig(servers=1), bootstrap_port=9500)
    config = EngineConfig(context_length=128, disaggregation=roles, recovery=RecoveryConfig(backoff_s=0.1))
    with ProcessRegistry() as registry:
        yield EngineFleet(config, registry, tmp_path, print)


async def received(fleet, name):
    async with aiohttp.ClientSession() as http, http.get(fleet.processes[name].url + "/requests") as response:
        return await response.json()


def test_both_servers_get_the_request_and_the_same_room(apart):
    async def run():
        await apart.start(Path("unused"))
        try:
            for index in range(4):
                answer = await apart.generate([index], Sampling(1.0, 2), f"r{index}", session=f"s{index}")
                assert answer.token_ids.tolist() == [index + 1, index + 2]
            return {name: await received(apart, name) for name in apart.processes}
        finally:
            await apart.stop()

    requests = asyncio.run(run())
    assert set(requests) == {"prefill-0", "prefill-1", "decode-2"}
    assert [len(requests[name]) for name in ("prefill-0", "prefill-1", "decode-2")] == [2, 2, 4]
    decoded = {body["bootstrap_room"]: body for body in requests["decode-2"]}
    for rank in range(2):
        for body in requests[f"prefill-{rank}"]:
            partner = decoded[body["bootstrap_room"]]
            assert body["bootstrap_port"] == partner["bootstrap_port"] == 9500 + rank
            assert body["bootstrap_host"] == partner["bootstrap_host"] == "127.0.0.1"
            assert body["input_ids"] == partner["input_ids"]


def test_a_prefill_server_that_dies_ends_the_request_so_that_it_can_go_to_the_other(apart):
    async def run():
        await apart.start(Path("unused"))
        try:
            in_flight = asyncio.create_task(apart.generate([1], Sampling(1.0, 9000), "r", session="s"))
            await asyncio.sleep(0.5)
            os.kill(apart.processes["prefill-0"].pid, signal.SIGKILL)
            with pytest.raises(EngineLost):
                await asyncio.wait_for(in_flight, 60)
            return await apart.generate([1], Sampling(1.0, 1), "r2", session="s")
        finally:
            await apart.stop()

    assert asyncio.run(run()).token_ids.tolist() == [2]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.skipif(importlib.util.find_spec("mooncake") is None, reason="needs mooncake-transfer-engine")
@pytest.mark.timeout(900)
def test_two_real_servers_share_a_request(models, tmp_path):
    async def run(registry):
        roles = DisaggregationConfig(
            prefill=RoleConfig(memory_fraction=0.2),
            decode=RoleConfig(memory_fraction=0.2),
            transfer_backend="mooncake_tcp",
            share_gpus=True,
        )
        config = EngineConfig(
            context_length=CONTEXT_LENGTH, device="cuda", dtype="bfloat16", disaggregation=roles, start_timeout_s=600
        )
        fleet = EngineFleet(config, registry, tmp_path, print)
        await fleet.start(models[0].directory)
        try:
            return await fleet.generate([2, 20, 21, 22], Sampling(0.0, 8), "r", session="s")
        finally:
            await fleet.stop()

    with ProcessRegistry() as registry:
        generation = asyncio.run(run(registry))
    ids = [2, 20, 21, 22, *generation.token_ids.tolist()]
    assert generation.logprobs == pytest.approx(models[0].logprobs(ids)[4:], abs=0.1)
