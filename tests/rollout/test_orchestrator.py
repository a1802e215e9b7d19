"""Rollouts through real task servers and the real gateway; only the engine is scripted."""

from __future__ import annotations

import asyncio
import re
from contextlib import AsyncExitStack, asynccontextmanager

import pytest

from rollout.episode import EpisodeRunner, EpisodeSettings
from rollout.evaluation import evaluate
from rollout.gateway import Gateway
from rollout.orchestrator import Orchestrator, RolloutsFailed
from rollout.prompts import PromptStream
from rollout.scheduler import Scheduler, SchedulerConfig, Verdict
from rollout.task_client import TaskClient, TaskServerError
from tasks.calculator.task import solve
from tasks.registry import load_task
from tasks.server import EpisodeServer, listening
from tests.rollout.scripted import ScriptedEngines, renderer

PROMPTS = {text: {"expression": text} for text in ("1+2+3", "3*4-5", "9-1*2", "2+2+2", "7*7-1", "5-5+5")}


def solver(prompt: str) -> str:
    """Plays the calculator right."""
    first, _, second, result = solve(re.search(r"<user>([^<]*)", prompt)[1])
    return [first, second, f"={result}"][prompt.count("<tool>")]


def keep_all(rewards, valid):
    return Verdict(repeat=[valid.index(True)] * valid.count(False)) if any(valid) else Verdict(drop="environment")


@asynccontextmanager
async def orchestrator(engines, *, steps_ahead=1, slots=64, group_size=2, failures=8, timeout_s=10.0, url=None):
    async with AsyncExitStack() as stack:
        if url is None:
            url = await stack.enter_async_context(
                listening(EpisodeServer(load_task("calculator", {}), slots), "127.0.0.1", 0)
            )
        client = await stack.enter_async_context(TaskClient("calculator", [url]))
        gateway = Gateway(engines, renderer(), 200, "policy")
        await gateway.start("127.0.0.1", 0)
        stack.push_async_callback(gateway.stop)
        scheduler = Scheduler(
            SchedulerConfig(
                group_size=group_size,
                groups_per_step=2,
                steps_ahead=steps_ahead,
                max_lag=None,
                max_rollouts=64,
                max_attempts=2,
                max_refusals=20,
                shares={"calculator": 1.0},
                slots={"calculator": 1000},
            ),
            {"calculator": PromptStream("calculator", list(PROMPTS), 0)},
            keep_all,
        )
        runner = EpisodeRunner(gateway, {"calculator": client}, {"calculator": EpisodeSettings(16, timeout_s)})
        yield Orchestrator(scheduler, runner, {"calculator": PROMPTS}, 1.0, 0, failures)


def test_batches_of_right_episodes_with_every_version_and_no_session_left():
    engines = ScriptedEngines(solver)

    async def play():
        async with orchestrator(engines) as o:
            o.start()
            batches = []
            for step in range(1, 4):
                batches.append(await asyncio.wait_for(o.next_batch(), 20))
                o.trained()
                engines.version = step
                o.published(step)
            await o.stop()
            return batches, o.runner.gateway.sessions

    batches, sessions = asyncio.run(play())
    assert sessions == 0
    for batch in batches:
        assert len(batch.trajectories) == 4
        assert all(t.reward == 1.0 and t.metrics["turns"] == 3 for t in batch.trajectories)
    prompts = [group.ref.prompt_id for batch in batches for group in batch.groups]
    assert sorted(prompts) == sorted(PROMPTS)  # one epoch, each prompt once


def test_a_full_server_only_delays():
    async def play():
        async with orchestrator(ScriptedEngines(solver, delay_s=0.01), slots=1) as o:
            o.start()
            batch = await asyncio.wait_for(o.next_batch(), 30)
            await o.stop()
            return batch, o.scheduler.gauges()["refusals"]

    batch, refusals = asyncio.run(play())
    assert len(batch.trajectories) == 4
    assert refusals > 0


def test_an_engine_that_is_down_for_a_moment_costs_retries_not_rollouts():
    engines = ScriptedEngines(solver)
    engines.broken = True

    async def play():
        async with orchestrator(engines, failures=100) as o:
            o.start()
            await asyncio.sleep(0.15)
            engines.broken = False
            batch = await asyncio.wait_for(o.next_batch(), 30)
            await o.stop()
            return batch

    batch = asyncio.run(play())
    assert len(batch.trajectories) == 4
    assert batch.failures["calculator"] > 0


def test_episodes_that_only_fail_stop_the_run_by_name():
    engines = ScriptedEngines(solver)
    engines.broken = True

    async def play():
        async with orchestrator(engines) as o:
            o.start()
            try:
                await asyncio.wait_for(o.next_batch(), 30)
            finally:
                await o.stop()

    with pytest.raises(
        RolloutsFailed, match=r"task calculator: 8 episodes in a row failed; the last one: .*engine died"
    ):
        asyncio.run(play())


def test_stopping_with_episodes_in_flight_closes_them_at_once():
    engines = ScriptedEngines(solver, delay_s=30.0)

    async def play():
        async with orchestrator(engines) as o:
            o.start()
            await asyncio.sleep(0.5)
            assert o.in_flight > 0
            started = asyncio.get_running_loop().time()
            await o.stop()
            return asyncio.get_running_loop().time() - started, o.in_flight, o.runner.gateway.sessions

    seconds, in_flight, sessions = asyncio.run(play())
    assert (in_flight, sessions) == (0, 0)
    assert seconds < 5


def test_another_tasks_server_or_garbage_is_refused_by_url():
    from aiohttp import web

    async def garbage(request):
        return web.Response(text="<html>hello</html>")

    async def check(app_task):
        async with AsyncExitStack() as stack:
            if app_task is None:
                app = web.Application()
                app.router.add_get("/{any:.*}", garbage)
                runner = web.AppRunner(app)
                await runner.setup()
                stack.push_async_callback(runner.cleanup)
                await web.TCPSite(runner, "127.0.0.1", 0).start()
                url = "http://{}:{}".format(*runner.addresses[0])
            else:
                server = EpisodeServer(load_task(app_task, {}), 4)
                url = await stack.enter_async_context(listening(server, "127.0.0.1", 0))
            client = await stack.enter_async_context(TaskClient("calculator", [url]))
            await client.check()

    with pytest.raises(TaskServerError, match=r"no Metadata: '<html>"):
        asyncio.run(check(None))
    with pytest.raises(TaskServerError, match="serves task 'sorting'"):
        asyncio.run(check("sorting"))
    asyncio.run(check("calculator"))


def test_evaluation_plays_each_prompt_once():
    async def play():
        async with orchestrator(ScriptedEngines(solver)) as o:
            return await evaluate(o.runner, "calculator", list(PROMPTS.items()), 0.0, seed=0, concurrency=3)

    result = asyncio.run(play())
    assert (result.reward, result.episodes, result.failed, result.turns) == (1.0, 6, 0, 18)
