"""Rollouts through real task servers and the real gateway; only the engine is scripted."""

from __future__ import annotations

import asyncio
import re
from contextlib import AsyncExitStack, asynccontextmanager

import pytest

from rollout.episode import EpisodeRunner, EpisodeSettings, RolloutsFailed
from rollout.evaluation import evaluate
from rollout.gateway import Gateway
from rollout.orchestrator import Orchestrator
from rollout.processes import free_port
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
async def orchestrator(
    engines, *, steps_ahead=1, slots=64, failures=8, urls=(), judge=keep_all, context=200, max_dropped=100
):
    async with AsyncExitStack() as stack:
        server = EpisodeServer(load_task("calculator", {}), slots)
        url = await stack.enter_async_context(listening(server, "127.0.0.1", 0))
        client = await stack.enter_async_context(TaskClient("calculator", [*urls, url]))
        gateway = Gateway(engines, renderer(), context, "policy")
        await gateway.start("127.0.0.1", 0)
        stack.push_async_callback(gateway.stop)
        config = SchedulerConfig(
            group_size=2,
            groups_per_step=2,
            steps_ahead=steps_ahead,
            total_steps=100,
            max_lag=None,
            max_rollouts=64,
            max_attempts=2,
            max_refusals=20,
            shares={"calculator": 1.0},
            slots={"calculator": 1000},
        )
        scheduler = Scheduler(config, {"calculator": PromptStream("calculator", list(PROMPTS), 0)}, judge)
        runner = EpisodeRunner(gateway, {"calculator": client}, {"calculator": EpisodeSettings(16, 10.0)})
        yield Orchestrator(scheduler, runner, {"calculator": PROMPTS}, 1.0, 0, failures, max_dropped)


async def first_batch(o):
    """The first batch of an orchestrator that is started and stopped for it."""
    o.start()
    try:
        return await asyncio.wait_for(o.next_batch(), 30)
    finally:
        await o.stop()


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
        async with orchestrator(ScriptedEngines(solver, delay_s=0.01), slots=1, failures=2) as o:
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
            await first_batch(o)

    with pytest.raises(
        RolloutsFailed, match=r"task calculator: 8 episodes in a row failed; the last one: .*engine died"
    ):
        asyncio.run(play())


def test_a_dead_server_beside_a_live_one_costs_no_episode():
    dead = f"http://127.0.0.1:{free_port()}"

    async def play():
        async with orchestrator(ScriptedEngines(solver), urls=[dead], failures=2) as o:
            return await first_batch(o)

    assert len(asyncio.run(play()).trajectories) == 4


def test_groups_that_are_dropped_without_end_stop_the_run_with_the_reason():
    async def play():
        drop = Verdict(drop="zero_variance")
        async with orchestrator(ScriptedEngines(solver), judge=lambda rewards, valid: drop, max_dropped=10) as o:
            await first_batch(o)

    with pytest.raises(
        RolloutsFailed, match=r"\d+ groups were dropped without filling one batch \(zero_variance \d+\)"
    ):
        asyncio.run(play())


def test_a_prompt_that_does_not_fit_the_context_is_a_failure_that_says_so():
    async def play():
        async with orchestrator(ScriptedEngines(solver), context=5) as o:
            await first_batch(o)

    with pytest.raises(RolloutsFailed, match="the prompt does not fit into the context"):
        asyncio.run(play())


def test_drops_are_handed_over_once_also_those_after_a_batch_was_taken():
    verdicts = iter([None, None, "zero_variance", "zero_variance"])

    def judge(rewards, valid):
        return Verdict(drop=next(verdicts, None))

    async def play():
        async with orchestrator(ScriptedEngines(solver), judge=judge) as o:
            o.start()
            await asyncio.wait_for(o.next_batch(), 30)
            dropped = o.take_dropped()
            while len(dropped) < 2:
                await asyncio.sleep(0.05)
                dropped += o.take_dropped()
            o.trained()
            state = o.snapshot()
            await o.stop()
            return dropped, state

    dropped, state = asyncio.run(play())
    assert [group.reason for group in dropped] == ["zero_variance"] * 2
    outstanding = {(p.epoch, p.prompt_id) for p in state.outstanding}
    assert not outstanding & {(group.ref.epoch, group.ref.prompt_id) for group in dropped}


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


def test_evaluation_waits_for_slots_and_fails_where_no_episode_ends():
    async def play(engines, slots):
        async with orchestrator(engines, slots=slots) as o:
            return await evaluate(o.runner, "calculator", list(PROMPTS.items()), 0.0, seed=0, concurrency=6)

    result = asyncio.run(play(ScriptedEngines(solver, delay_s=0.02), slots=2))
    assert (result.episodes, result.failed) == (6, 0)
    broken = ScriptedEngines(solver)
    broken.broken = True
    with pytest.raises(RolloutsFailed, match=r"none of 6 evaluation episodes ended; the last: .*engine died"):
        asyncio.run(play(broken, slots=6))
