"""Two real servers, of which one is killed and one hangs while episodes run: the episodes go on, their records are of
the weights that their versions name, and the lost servers come back with the weights of the others."""

import asyncio
import os
import signal

import numpy as np
import openai
import pytest
from transformers import AutoTokenizer

from rollout.chat import ChatRenderer
from rollout.engine.config import EngineConfig
from rollout.engine.fleet import EngineFleet
from rollout.engine.recovery import Phase, RecoveryConfig
from rollout.engine.router_settings import SGLangRouterConfig
from rollout.gateway import Gateway
from rollout.processes import ProcessRegistry
from rollout.session import RolloutKey
from rollout.trajectory import StopReason
from tests.engine.conftest import CONTEXT_LENGTH, until

EPISODES = 6
REPLY = 90
TOP = 3
RECOVERY = RecoveryConfig(heartbeat_interval_s=1.0, heartbeat_timeout_s=15.0, backoff_s=0.5)


class Weights:
    """The second model's, as version 1."""

    def __init__(self, directory):
        self.directory = str(directory)

    async def load(self, engine):
        await engine.pause()  # SGLang flushes its cache only where nothing runs
        await engine.update_weights_from_disk(self.directory, 1, True)
        await engine.resume()


async def play(gateway, name):
    """Two turns."""
    url = gateway.open(name, RolloutKey("task", 0, "p", 0, 0), 1.0, None)
    chat = openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0, timeout=280)
    messages = [{"role": "user", "content": name}]
    for _ in range(2):
        answer = await chat.chat.completions.create(model="policy", messages=messages, max_tokens=REPLY)
        messages += [{"role": "assistant", "content": answer.choices[0].message.content}]
        messages += [{"role": "user", "content": "b"}]
    await chat.close()
    return await gateway.close(name)


async def lose_during_episodes(fleet, gateway, how):
    """Play episodes, and hit a server while it generates; returns their records and which server it was."""
    episodes = [asyncio.create_task(play(gateway, f"{how.name.lower()[3:]} {i}")) for i in range(EPISODES)]
    busy = []

    async def any_busy():
        busy.extend([name for name, metrics in (await fleet.metrics()).items() if metrics.running > 0])
        return bool(busy)

    await until(any_busy, 60)
    name = busy[0]
    os.kill(fleet.processes[name].pid, how)
    return await asyncio.gather(*episodes), name


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "router", [None, pytest.param(SGLangRouterConfig(policy="manual"), marks=pytest.mark.slow)], ids=["own", "sglang"]
)
def test_kill_9_and_a_hang_during_episodes(models, tmp_path, router):
    async def run(registry):
        config = EngineConfig(
            context_length=CONTEXT_LENGTH,
            servers=2,
            max_total_tokens=8192,
            metrics=True,
            recovery=RECOVERY,
            start_timeout_s=300,
            sglang_router=router,
        )
        fleet = EngineFleet(config, registry, tmp_path, print)
        await fleet.start(models[0].directory)
        tokenizer = AutoTokenizer.from_pretrained(models[0].directory)
        gateway = Gateway(fleet, ChatRenderer(tokenizer), CONTEXT_LENGTH, "policy", top_logprobs=TOP)
        await gateway.start("127.0.0.1", 0)
        records = []
        try:
            async with fleet.publication() as publication:
                weights = Weights(models[1].directory)
                for engine in publication.engines:
                    await weights.load(engine)
                fleet.current, publication.holds = weights, 1
            for how in (signal.SIGKILL, signal.SIGSTOP):
                lost_before = gateway.stats.lost
                played, name = await lose_during_episodes(fleet, gateway, how)
                records += played
                assert gateway.stats.lost > lost_before

                async def back(name=name):
                    return fleet.states()[name][0] is Phase.SERVING

                await until(back, 280)
                assert [await engine.weight_version() for engine in fleet.engines] == [1, 1]
            records += [await play(gateway, f"after {i}") for i in range(2)]
            return records, await fleet.metrics(), gateway.telemetry.latencies()
        finally:
            await gateway.stop()
            await fleet.stop()

    with ProcessRegistry() as registry:
        records, metrics, latencies = asyncio.run(run(registry))
    assert len(records) == 2 * EPISODES + 2
    assert set(metrics) == {"engine-0", "engine-1"}
    assert all(each.raw["time_to_first_token_seconds_count"] > 0 for each in metrics.values())
    assert 0 < latencies["inter_token_mean"] <= latencies["inter_token_p90"] * 10
    for record in records:
        (trajectory,) = record.trajectories(0.0, StopReason.STOP, {})
        acted = trajectory.action_mask
        assert record.turns == 2
        assert set(trajectory.weight_versions[acted]) == {1}
        computed = models[1].logprobs(trajectory.token_ids.tolist())
        np.testing.assert_allclose(trajectory.rollout_logprobs[acted], computed[acted], atol=1e-4)
        ids, logprobs = models[1].likeliest(trajectory.token_ids.tolist(), TOP)
        np.testing.assert_allclose(trajectory.top_logprobs[acted], logprobs[acted], atol=1e-4)
        assert (trajectory.top_ids[acted] == ids[acted]).mean() > 0.99  # two may be equally likely
