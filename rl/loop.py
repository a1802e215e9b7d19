"""The loops of a run: SFT on demonstrations; RL as collect, update, publish; and a replay without engines."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import Sequence
from pathlib import Path

from algorithms import registry as algorithms
from algorithms.metrics import metric_values
from algorithms.types import Algorithm
from rl.demonstrations import demonstration_batches
from rl.figures import readable_samples, rollout_figures
from rl.ledger import Ledger
from rl.parts import Parts, Rewards
from rl.trainer.result import UpdateResult
from rollout.orchestrator import Batch, Orchestrator
from rollout.prompts import PromptStream
from rollout.scheduler import DroppedGroup, PromptRef, Scheduler, SchedulerConfig, SchedulerState, Verdict
from rollout.trajectory import Trajectory
from rollout.trajectory_file import load_trajectories, save_trajectories


async def sft_loop(parts: Parts) -> None:
    """Fine-tune the trainer's model, or its indexers, on the tasks' demonstrations."""
    config = parts.plan.config
    algorithm = parts.plan.algorithm if config.stage == "sft" else algorithms.build("sft", {})
    await parts.training()
    await parts.trainer.set_optimizer(config.sft.optimizer, config.sft.steps)
    batches = demonstration_batches(
        parts.plan.tasks, parts.renderer, config.sft.conversations_per_step, config.engine.context_length, config.seed
    )
    for step in range(1, config.sft.steps + 1):
        parts.check_starting()
        started = time.perf_counter()
        with parts.stopwatch.phase("sft"):
            result = await _update(parts, next(batches), step, algorithm)
        parts.tracker.log("sft", step, _update_figures(result) | {"seconds/step": time.perf_counter() - started})


async def _update(
    parts: Parts,
    trajectories: Sequence[Trajectory],
    version: int,
    algorithm: Algorithm,
    ahead: Sequence[PromptRef] = (),
) -> UpdateResult:
    """One step on what is given, of the model or of its indexers.

    Args:
        ahead: prompts of the batch after this one, as far as they are known.
    """
    if parts.plan.config.trainer.trained != "model":
        return await parts.trainer.update_indexer(trajectories, version)
    if parts.teachers is not None and algorithm is parts.plan.algorithm:
        teaching = await parts.teachers.teaching(trajectories, ahead)
        return await parts.trainer.update(trajectories, version, algorithm, teaching=teaching)
    return await parts.trainer.update(trajectories, version, algorithm)


def build_orchestrator(parts: Parts, state: SchedulerState | None) -> Orchestrator:
    """The orchestrator of a run, at its start or at a checkpoint's state."""
    config, algorithm = parts.plan.config, parts.plan.algorithm
    prompts = {name: {p.prompt_id: p.data for p in task.prompts("train")} for name, task in parts.plan.tasks.items()}
    streams = {name: PromptStream(name, list(data), config.seed) for name, data in prompts.items()}

    def judge(rewards: Sequence[float], valid: Sequence[bool]) -> Verdict:
        decision = algorithm.decide_group(rewards, valid)
        kept = decision.verdict == "keep"
        return Verdict(drop=None if kept else str(decision.verdict), repeat=decision.repeat)

    scheduler = Scheduler(
        SchedulerConfig(
            group_size=algorithm.group_size,
            groups_per_step=config.rollout.groups_per_step,
            steps_ahead=config.rollout.staleness,
            total_steps=config.steps,
            max_lag=algorithm.max_staleness if algorithm.drops_stale else None,
            max_rollouts=config.rollout.max_rollouts,
            max_attempts=config.rollout.max_attempts,
            max_refusals=config.rollout.max_refusals,
            shares={name: task.share for name, task in config.tasks.items()},
            slots=parts.generating.slots,
        ),
        streams,
        judge,
    )
    if state is not None:
        scheduler.restore(state)
    return Orchestrator(
        scheduler,
        parts.generating.runner,
        prompts,
        config.rollout.temperature,
        config.seed,
        config.rollout.max_failures_in_a_row,
        config.rollout.max_dropped_groups,
    )


async def rl_loop(parts: Parts, orchestrator: Orchestrator, first_step: int, rewards_before: Rewards) -> None:
    """Collect, update, publish, from ``first_step`` to the last; generation goes on meanwhile as far as the staleness
    allows."""
    config, folder, stopwatch = parts.plan.config, parts.plan.folder, parts.stopwatch
    ledger = Ledger(folder.ledger)
    seconds = stopwatch.read()
    orchestrator.start()
    try:
        for step in range(first_step, config.steps + 1):
            await parts.prefetch_teachers(orchestrator.ahead())
            with stopwatch.phase("generate"):
                batch = await orchestrator.next_batch()
            stopwatch.move("generate", "wait", batch.idle_s)
            if config.rollout.save_trajectories:
                path = folder.trajectories(step)
                await asyncio.to_thread(save_trajectories, path, batch.trajectories, batch.stale, step - 1)
            result = await _train(parts, batch, step - 1, orchestrator.ahead())
            orchestrator.trained()
            with stopwatch.phase("publish"):
                await parts.publish(step)
            if config.evaluation.every and step % config.evaluation.every == 0 and step < config.steps:
                with stopwatch.phase("evaluate"):
                    await parts.evaluate(step)
            orchestrator.published(step)
            engine = await parts.generating.engine_figures()
            # From here to the snapshot inside _save_checkpoint nothing is awaited: see Orchestrator.take_dropped.
            dropped = orchestrator.take_dropped()
            ledger.record(step, batch.groups, dropped)
            seconds = _log_step(parts, orchestrator, step, batch, dropped, result, seconds, engine)
            if step == config.steps or (config.checkpoint.every and step % config.checkpoint.every == 0):
                await _save_checkpoint(parts, orchestrator, step, rewards_before)
    finally:
        await orchestrator.stop()


async def _train(parts: Parts, batch: Batch, version: int, ahead: Sequence[PromptRef]) -> UpdateResult:
    """One update. Where the batch has no token of the current weights, the log-prob gap is measured on purpose."""
    own = any((t.weight_versions == version).any() for t in batch.trajectories)
    probed = None if own else await parts.probe_logprob_gap(batch.trajectories)
    with parts.stopwatch.phase("train"):
        await parts.training()
        result = await _update(parts, batch.trajectories, version, parts.plan.algorithm, ahead)
    return result if own else dataclasses.replace(result, logprob_gap_max=probed)


def _log_step(
    parts: Parts,
    orchestrator: Orchestrator,
    step: int,
    batch: Batch,
    dropped: list[DroppedGroup],
    result: UpdateResult,
    before: dict[str, float],
    engine: dict[str, float],
) -> dict[str, float]:
    """Log a step's figures; returns the stopwatch's reading. A step's seconds go from the row before to this one."""
    figures = rollout_figures(batch, dropped, step - 1) | _update_figures(result)
    figures |= {f"scheduler/{name}": value for name, value in orchestrator.scheduler.gauges().items()}
    gateway = dataclasses.asdict(parts.generating.gateway.stats)
    figures |= {f"gateway/{name}": float(value) for name, value in gateway.items()} | engine
    reading = parts.stopwatch.read()
    seconds = {name: value - before.get(name, 0.0) for name, value in reading.items()}
    wall = sum(seconds.values())
    figures |= {f"seconds/{name}": value for name, value in sorted(seconds.items()) if value}
    figures |= {"seconds/step": wall, "tokens_per_second": figures["action_tokens"] / wall}
    parts.tracker.log("rl", step, figures)
    decode = parts.renderer.tokenizer.decode
    parts.tracker.samples(
        step, readable_samples(batch.trajectories, parts.plan.config.tracking.samples_per_step, decode)
    )
    totals = parts.totals
    if result.logprob_gap_max is not None:
        totals.logprob_gap_max = max(totals.logprob_gap_max or 0.0, result.logprob_gap_max)
    totals.staleness_max = max(totals.staleness_max, int(figures.get("staleness_max", 0)))
    for name, value in metric_values(result.metrics).items():
        if name.startswith("dropped/"):
            reason = name.removeprefix("dropped/")
            totals.dropped_rollouts[reason] = totals.dropped_rollouts.get(reason, 0) + int(value)
    return reading


def _update_figures(result: UpdateResult) -> dict[str, float]:
    figures = {
        "loss": result.loss,
        "grad_norm": result.grad_norm,
        "lr": result.lr,
        "trained_tokens": float(result.trained_tokens),
        "micro_batches": float(result.micro_batches),
    }
    for name, gap in (("logprob_gap_max", result.logprob_gap_max), ("logprob_gap_mean", result.logprob_gap_mean)):
        if gap is not None:
            figures[name] = gap
    if result.gradient_digest is not None:
        figures["gradient_digest"] = float(result.gradient_digest)
    figures |= {f"seconds/train/{part}": value for part, value in result.seconds.items()}
    return figures | metric_values(result.metrics)


async def _save_checkpoint(parts: Parts, orchestrator: Orchestrator, step: int, rewards_before: Rewards) -> None:
    folder = parts.plan.folder
    with parts.stopwatch.phase("checkpoint"):
        parts.totals.turns = parts.turns
        state = {
            "step": step,
            **parts.plan.lineage(),
            "initial_model": str(parts.model_dir),
            "scheduler": orchestrator.snapshot().model_dump(),
            "rewards_before": rewards_before,
            "totals": dataclasses.asdict(parts.totals),
            "seconds_by_phase": parts.stopwatch.read(),
        }
        async with parts.borrowed():
            await parts.trainer.save_checkpoint(folder.checkpoint(step), state)
        folder.prune_checkpoints(parts.plan.config.checkpoint.keep)


async def replay_loop(parts: Parts, source: Path) -> None:
    """Train on recorded trajectories in their order: the same updates as the run that recorded them."""
    paths = sorted((source / "trajectories").glob("step_*.npz"))[: parts.plan.config.steps]
    for step, path in enumerate(paths, start=1):
        trajectories, _, version = load_trajectories(path)
        with parts.stopwatch.phase("train"):
            result = await _update(parts, trajectories, version, parts.plan.algorithm)
        parts.tracker.log("rl", step, _update_figures(result))
