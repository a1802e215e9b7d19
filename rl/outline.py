"""What a checked run would do, in a few lines: ``--check`` prints it and stops."""

from __future__ import annotations

from collections.abc import Iterator

from rl.config import SUPERVISED
from rl.preflight import Plan
from rl.weights.choose import choose
from rollout.engine.fit import gpus_needed


def outline(plan: Plan) -> Iterator[tuple[str, str]]:
    """Name and value of each line."""
    config, trainer = plan.config, plan.config.trainer
    yield "run", f"{config.stage} in {config.run_dir}, {_begin(plan)}"
    model = config.model.checkpoint or "fresh weights" + ("" if config.stage in SUPERVISED else ", after SFT")
    yield "model", str(model)
    for name, task in sorted(plan.tasks.items()):
        settings = config.tasks[name]
        where = ", ".join(settings.urls) or f"{settings.replicas} of them started here"
        prompts = f"{len(task.prompts('train')):,} prompts to train, {len(task.prompts('eval')):,} held out"
        yield f"tasks.{name}", f"{prompts}; servers: {where}"
    if config.stage in SUPERVISED:
        yield "batch", f"{config.sft.steps} steps of {config.sft.conversations_per_step} conversations"
    else:
        rollout, size = config.rollout, plan.algorithm.group_size
        yield (
            "batch",
            f"{config.steps} steps of {rollout.groups_per_step} prompts x {size} rollouts, generation at most "
            f"{rollout.staleness} steps ahead",
        )
        yield "algorithm", str(config.algorithm["name"])
    if config.teachers:
        yield "teachers", ", ".join(sorted(config.teachers))
    gpus = f"{trainer.world_size * trainer.gpus_per_rank:g} GPUs" if trainer.gpus_per_rank else "the CPU"
    yield (
        "trainer",
        f"{trainer.world_size} ranks ({trainer.data_parallel} data-parallel) in {trainer.dtype} on {gpus}, "
        + (f"Ray at {config.cluster.address}" if config.cluster.address else "Ray started here"),
    )
    if config.needs_engine:
        engine = config.engine
        gpus = f"{gpus_needed(engine)} GPUs" if engine.device == "cuda" else "the CPU"
        yield "engine", f"{sum(map(engine.servers_of, engine.roles))} servers on {gpus}, placed {engine.placement}"
        choice = choose(config.publish.transport, plan.config.topology)
        yield "weights", f"published by {choice.way}: {choice.why}"
    yield "tracking", f"metrics.jsonl, W&B {config.tracking.wandb}"


def _begin(plan: Plan) -> str:
    if plan.checkpoint is not None:
        return f"resumed from {plan.checkpoint.name}"
    if plan.config.replay is not None:
        return f"replaying {plan.config.replay}"
    return "replacing the run that is there" if plan.folder.occupied else "new"
