"""Runs one stage: starts its parts, runs its loops, and ends everything that it started."""

from __future__ import annotations

import asyncio
import functools
import json
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import ray
from rich.console import Console
from transformers import AutoTokenizer
from transformers.utils import logging as transformers_logging

from rl.cluster import shortage, start_ray
from rl.config import SUPERVISED, RunConfig
from rl.fresh_model import create_model
from rl.ledger import count_dropped, read_fates
from rl.loop import build_orchestrator, replay_loop, rl_loop, sft_loop
from rl.parts import Parts, Rewards, Totals
from rl.plot import plot_rewards
from rl.preflight import Plan
from rl.serving import Serving, check_remote_tasks, start_serving
from rl.signals import cancel_on_signals
from rl.starting import ended, while_starting
from rl.stopwatch import Stopwatch
from rl.teachers.driver import start_teachers
from rl.tracking import build_trackers, check_login
from rl.trainer.group import TrainerGroup
from rl.weights.colocation import Colocation
from rl.weights.updates import start_updates
from rollout.chat import ChatRenderer
from rollout.orphans import OrphanWatch
from rollout.processes import ProcessRegistry
from rollout.scheduler import SchedulerState

transformers_logging.disable_progress_bar()  # its bars would break up ours


async def run_stage(plan: Plan, console: Console) -> dict[str, Any]:
    """Run a checked plan to its end; returns what ``summary.json`` holds."""
    config, folder = plan.config, plan.folder
    if config.needs_engine:
        await check_remote_tasks(config)
    check_login(config.tracking)
    resumed = plan.resumed
    summary: dict[str, Any] = {}
    async with AsyncExitStack() as stack:
        stack.enter_context(folder.held())
        if config.cluster.address is not None:
            start_ray(config.cluster, stack)  # a cluster that is not there costs no earlier run
        stack.enter_context(OrphanWatch())
        registry = stack.enter_context(ProcessRegistry())
        folder.prepare(config, resumed["step"] if resumed else None)
        model_dir = _initial_model(plan)
        identity = folder.begin(config, _stage_model(plan, model_dir))
        if resumed:
            console.print(f"resuming after step {resumed['step']} from {plan.checkpoint}", markup=False)
        stopwatch = Stopwatch(resumed["seconds_by_phase"] if resumed else None)
        tracker = build_trackers(config, identity.run_id, _totals(plan), console)
        failed = True
        stack.push(lambda *_: tracker.finish(summary, failed))
        say = functools.partial(console.print, markup=False, soft_wrap=True)
        renderer = ChatRenderer(AutoTokenizer.from_pretrained(model_dir))
        starting = None
        with stopwatch.phase("start"):
            if config.needs_engine:
                serving_stack = await stack.enter_async_context(AsyncExitStack())
                starting = asyncio.create_task(
                    start_serving(
                        config, renderer, model_dir, registry, serving_stack, folder.logs, say, plan.top_logprobs
                    )
                )
                stack.push_async_callback(ended, starting)  # before its parts are
                await asyncio.sleep(0)  # the servers start while Ray does
            if config.cluster.address is None:
                start_ray(config.cluster, stack)
            elif lacking := shortage(config, ray.cluster_resources()):
                say(f"{lacking}: waiting trainer.start_timeout_s={config.trainer.start_timeout_s:g} s for it to grow")
            cancel_on_signals()  # Ray has put its own handlers in our place
            colocation = await _colocation(config, starting)
            trainer = await while_starting(starting, TrainerGroup.start(config.trainer))
            stack.push_async_callback(trainer.close)
            say(await while_starting(starting, trainer.load_model(model_dir)))
            teachers = await while_starting(starting, start_teachers(plan, trainer, stack, say))
        totals = Totals(**resumed["totals"]) if resumed else Totals()
        parts = Parts(plan, tracker, stopwatch, trainer, renderer, say, totals, model_dir, starting, teachers=teachers)
        await _initial_sft(parts)
        with stopwatch.phase("start"):
            await parts.wait_for_servers()
            if parts.serving is not None:
                if colocation is not None:
                    colocation.trainer = trainer
                fleet = parts.serving.fleet
                parts.updates = await start_updates(
                    config, trainer, fleet, model_dir, colocation, registry, stack, folder.logs, say
                )
        rewards = await _phases(parts)
        with stopwatch.phase("save"):
            await parts.training()
            await trainer.save_hf(folder.final_model)
        summary |= _summary(parts, identity.run_id, rewards)
        folder.write_summary(summary)
        failed = False
    if config.stage not in SUPERVISED and config.replay is None:
        plot_rewards(folder.metrics, folder.path / "reward.png")
    return summary


async def _colocation(config: RunConfig, starting: asyncio.Task[Serving] | None) -> Colocation | None:
    """Where trainer and engines share GPUs: the engines' memory, which they took when they started, given to the
    trainer."""
    if not config.cluster.colocated or starting is None:
        return None
    serving = await starting
    colocation = Colocation(lambda: serving.fleet.engines)
    await colocation.clear_for_trainer()
    return colocation


def _initial_model(plan: Plan) -> Path:
    """HF directory that trainer and engines load: the given checkpoint, or fresh weights of the same shape."""
    config, folder = plan.config, plan.folder
    if plan.resumed is not None:
        return Path(plan.resumed["initial_model"])
    if config.replay is not None:
        return Path(json.loads((config.replay / "run.json").read_text())["initial_model"])
    if config.model.checkpoint is not None:
        return config.model.checkpoint
    assert config.model.fresh is not None
    create_model(folder.fresh_model, config.model.fresh, config.seed)
    return folder.fresh_model


def _stage_model(plan: Plan, model_dir: Path) -> Path:
    """HF directory of the weights that the stage's own training begins with."""
    return plan.folder.sft_model if _needs_sft(plan, model_dir) else model_dir


def _needs_sft(plan: Plan, model_dir: Path) -> bool:
    return plan.resumed is None and plan.config.stage not in SUPERVISED and model_dir == plan.folder.fresh_model


async def _initial_sft(parts: Parts) -> None:
    """RL from fresh weights has nothing to reward: SFT on the tasks' demonstrations comes first."""
    plan = parts.plan
    if not _needs_sft(plan, parts.model_dir):
        return
    parts.say("no model.checkpoint is given: the fresh model learns from the tasks' demonstrations first (stage sft)")
    await sft_loop(parts)
    await parts.trainer.save_hf(plan.folder.sft_model)


async def _phases(parts: Parts) -> tuple[Rewards, Rewards]:
    """The stage's own work; rewards before and after it."""
    plan, resumed = parts.plan, parts.plan.resumed
    config = plan.config
    if config.replay is not None:
        await parts.trainer.set_optimizer(config.trainer.optimizer, config.steps)
        await replay_loop(parts, config.replay)
        return {}, {}
    step = int(resumed["step"]) if resumed else 0
    before: Rewards = dict(resumed["rewards_before"]) if resumed else {}
    if config.stage not in SUPERVISED:
        await parts.trainer.set_optimizer(config.trainer.optimizer, config.steps)
    if plan.checkpoint is not None:
        with parts.stopwatch.phase("start"):
            await parts.trainer.load_checkpoint(plan.checkpoint)
    if parts.serving is not None:
        with parts.stopwatch.phase("publish"):
            await parts.publish(step)
    if config.evaluation.prompts and not resumed:
        with parts.stopwatch.phase("evaluate"):
            before = await parts.evaluate(step)
    if config.stage in SUPERVISED:
        await sft_loop(parts)
        step = config.sft.steps
        if parts.serving is not None:
            with parts.stopwatch.phase("publish"):
                await parts.publish(step)
    else:
        state = SchedulerState.model_validate(resumed["scheduler"]) if resumed else None
        await rl_loop(parts, build_orchestrator(parts, state), step + 1, before)
        step = config.steps
    after: Rewards = {}
    if config.evaluation.prompts:
        with parts.stopwatch.phase("evaluate"):
            after = await parts.evaluate(step)
    return before, after


def _totals(plan: Plan) -> dict[str, int]:
    config = plan.config
    if config.stage in SUPERVISED:
        return {"sft": config.sft.steps}
    return {"sft": config.sft.steps, "rl": config.steps}


def _summary(parts: Parts, run_id: str, rewards: tuple[Rewards, Rewards]) -> dict[str, Any]:
    config, totals = parts.plan.config, parts.totals
    seconds = parts.stopwatch.read()
    ledger = parts.plan.folder.ledger
    dropped = count_dropped(read_fates(ledger).values()) if ledger.exists() else {}
    return {
        "stage": config.stage,
        "run_id": run_id,
        "seed": config.seed,
        "steps": config.steps,
        "seconds": sum(seconds.values()),
        "seconds_by_phase": {name: round(value, 3) for name, value in sorted(seconds.items())},
        "reward_before": rewards[0],
        "reward_after": rewards[1],
        "logprob_gap_max": totals.logprob_gap_max,
        "staleness_max": totals.staleness_max,
        "dropped": dropped,
        "dropped_rollouts": totals.dropped_rollouts,
        "turns": parts.turns,
        "publish_seconds_max": totals.publish_seconds_max,
        "model": str(parts.plan.folder.final_model),
    }


def prepare_config(config: RunConfig) -> RunConfig:
    """Paths made absolute, since Ray's workers run elsewhere, and a resume may be started from another folder."""
    checkpoint = config.model.checkpoint
    model = config.model.model_copy(update={"checkpoint": checkpoint.resolve() if checkpoint else None})
    return config.model_copy(update={"run_dir": config.run_dir.resolve(), "model": model})
