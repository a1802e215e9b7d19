"""Prefill and decode on servers apart: a request reaches both, and names where they meet.

On the CPU no transfer backend runs but SGLang's fake one, which sends nothing: this proves the wiring, not the tokens.
"""

import asyncio
import random

import pytest

from rollout.engine.config import EngineConfig
from rollout.engine.disaggregation import DisaggregationConfig
from rollout.engine.fleet import EngineFleet
from rollout.engine.pd import ROOMS, rendezvous
from rollout.engine.protocol import FinishReason, Sampling
from rollout.engine.recovery import RecoveryConfig
from rollout.processes import ProcessRegistry, free_port
from tests.engine.conftest import CONTEXT_LENGTH


def test_a_rendezvous_is_at_the_prefill_servers_machine_in_a_room_of_its_own():
    rng = random.Random(0)
    first, second = (rendezvous("http://10.1.2.3:30000", 8998, rng) for _ in range(2))
    assert first.fields() == {"bootstrap_host": "10.1.2.3", "bootstrap_port": 8998, "bootstrap_room": first.room}
    assert first.room != second.room
    assert 0 <= first.room < ROOMS


@pytest.mark.timeout(600)
def test_two_real_servers_share_a_request(models, tmp_path):
    async def run(registry):
        config = EngineConfig(
            context_length=CONTEXT_LENGTH,
            max_total_tokens=4096,
            disaggregation=DisaggregationConfig(transfer_backend="fake", bootstrap_port=free_port()),
            recovery=RecoveryConfig(heartbeat_timeout_s=60.0),
            start_timeout_s=300,
        )
        fleet = EngineFleet(config, registry, tmp_path, print)
        await fleet.start(models[0].directory)
        try:
            assert set(fleet.processes) == {"prefill-0", "decode-1"}
            generation = await fleet.generate([2, 20, 21, 22], Sampling(1.0, 8), "r", session="s")
            return generation, await fleet.metrics()
        finally:
            await fleet.stop()

    with ProcessRegistry() as registry:
        generation, metrics = asyncio.run(run(registry))
    assert len(generation.token_ids) == 8
    assert generation.finish_reason is FinishReason.LENGTH
    assert set(metrics) == {"prefill-0", "decode-1"}
