"""The parts of a running stage, and the small operations that its phases share."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from rl.preflight import Plan
from rl.serving import Serving
from rl.stopwatch import Stopwatch
from rl.tracking import Tracker
from rl.trainer.group import TrainerGroup
from rl.weights.publisher import Fallback, publish
from rl.weights.serialize import directory_shapes
from rl.weights.transports import TensorTransport
from rollout.chat import ChatRenderer
from rollout.evaluation import evaluate
from rollout.trajectory import Trajectory

PROBES = 4
"""Sequences that a probe of the log-prob gap scores."""

Rewards = dict[str, dict[str, float | None]]
"""By task: ``sampled`` and ``greedy``."""


@dataclass
class Totals:
    """What the summary adds up; kept in checkpoints."""

    logprob_gap_max: float | None = None
    staleness_max: int = 0
    dropped_rollouts: dict[str, int] = field(default_factory=dict)
    publish_seconds_max: float = 0.0


@dataclass
class Parts:
    plan: Plan
    tracker: Tracker
    stopwatch: Stopwatch
    trainer: TrainerGroup
    renderer: ChatRenderer
    say: Callable[[str], None]
    totals: Totals
    starting: asyncio.Task[Serving] | None = None
    """Servers on their way up."""
    serving: Serving | None = None
    shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """Of the engines' tensors, by HF name."""
    published: Fallback | None = None
    """What the engines hold."""

    def check_starting(self) -> None:
        """Raise what kept a server from coming up, as soon as it is known."""
        if self.starting is not None and self.starting.done():
            self.starting.result()

    async def wait_for_servers(self, model_dir: Path) -> None:
        if self.starting is not None:
            self.serving = await self.starting
            self.shapes = directory_shapes(model_dir)

    @property
    def generating(self) -> Serving:
        if self.serving is None:
            raise RuntimeError("this stage has no inference servers")
        return self.serving

    async def publish(self, version: int) -> float:
        """Put the trainer's weights on every engine; returns the seconds in which none generated."""
        buckets = await self.trainer.weight_buckets()
        transport = TensorTransport(buckets, self.plan.config.engine.tensor_parallel)
        done = await publish(self.generating.fleet.engines, transport, version, self.shapes, fallback=self.published)
        self.published = Fallback(transport, version)
        self.totals.publish_seconds_max = max(self.totals.publish_seconds_max, done.seconds)
        return done.seconds

    async def probe_logprob_gap(self, trajectories: Sequence[Trajectory]) -> float:
        """Largest |trainer − engine log-prob| at temperature 1 over all tokens of a few sequences.

        For steps whose batch has no token of the current weights, so that sampling itself shows no gap. Both sides must
        hold the same version.
        """
        probes = [t.replace(temperature=1.0) for t in trajectories[:PROBES]]
        engine = self.generating.fleet.engines[0]
        scored = await asyncio.gather(*(engine.score(t.token_ids.tolist()) for t in probes))
        computed = await self.trainer.logprobs(probes)
        return max(float(np.abs(a - b).max()) for a, b in zip(scored, computed, strict=True))

    async def evaluate(self, step: int) -> Rewards:
        """Play each task's eval prompts, sampled and greedy, with the weights that the engines hold."""
        config = self.plan.config
        rewards: Rewards = {}
        for task, options in sorted(self.plan.tasks.items()):
            prompts = [(p.prompt_id, p.data) for p in options.prompts("eval")[: config.evaluation.prompts]]
            rewards[task] = {}
            for name, temperature in (("sampled", config.rollout.temperature), ("greedy", 0.0)):
                result = await evaluate(
                    self.generating.runner, task, prompts, temperature, config.seed, config.evaluation.concurrency
                )
                if result.failed:
                    self.say(f"evaluation of {task}: {result.failed} of {len(prompts)} episodes failed")
                rewards[task][name] = result.reward
        figures = {f"{task}/{name}": r for task, by in rewards.items() for name, r in by.items() if r is not None}
        self.tracker.log("eval", step, figures)
        return rewards
