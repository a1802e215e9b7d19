"""The parts of a running stage, and the small operations that its phases share."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from rl.preflight import Plan
from rl.serving import Serving
from rl.stopwatch import Stopwatch
from rl.teachers.driver import Teachers
from rl.tracking import Tracker
from rl.trainer.group import TrainerGroup
from rl.weights.updates import Updates
from rollout.chat import ChatRenderer
from rollout.engine.protocol import EngineError
from rollout.evaluation import evaluate
from rollout.prompts import PromptRef
from rollout.trajectory import Trajectory

PROBES = 4
"""Sequences that a probe of the log-prob gap scores."""

log = logging.getLogger(__name__)

Rewards = dict[str, dict[str, float]]
"""By task: ``sampled`` and ``greedy``."""


@dataclass
class Totals:
    """What the summary adds up; kept in checkpoints."""

    logprob_gap_max: float | None = None
    staleness_max: int = 0
    dropped_rollouts: dict[str, int] = field(default_factory=dict)
    publish_seconds_max: float = 0.0
    turns: int = 0
    """Of the model, up to the checkpoint that a run was resumed from."""


@dataclass
class Parts:
    plan: Plan
    tracker: Tracker
    stopwatch: Stopwatch
    trainer: TrainerGroup
    renderer: ChatRenderer
    say: Callable[[str], None]
    totals: Totals
    model_dir: Path
    """HF directory that trainer and engines loaded."""
    starting: asyncio.Task[Serving] | None = None
    """Servers on their way up."""
    serving: Serving | None = None
    teachers: Teachers | None = None
    updates: Updates | None = None
    """New weights for the engines; None where there are none."""

    def check_starting(self) -> None:
        """Raise what kept a server from coming up, as soon as it is known."""
        if self.starting is not None and self.starting.done():
            self.starting.result()

    async def wait_for_servers(self) -> None:
        if self.starting is not None:
            self.serving = await self.starting

    @property
    def turns(self) -> int:
        """Turns of the model in the whole run, those before a resume included."""
        earlier = self.plan.resumed["totals"]["turns"] if self.plan.resumed else 0
        return earlier + (self.serving.gateway.stats.turns if self.serving else 0)

    @property
    def generating(self) -> Serving:
        if self.serving is None:
            raise RuntimeError("this stage has no inference servers")
        return self.serving

    async def prefetch_teachers(self, ahead: Sequence[PromptRef]) -> None:
        """Let the tiers load, while the engines generate, what the next batch needs first."""
        if self.teachers is not None:
            await self.trainer.prefetch_teachers(self.teachers.counts(ahead))

    async def publish(self, version: int) -> float:
        """Put the trainer's weights on every engine; returns the seconds in which none generated."""
        if self.updates is None:
            raise RuntimeError("this stage has no inference servers to publish to")
        seconds = await self.updates.publish(version)
        self.totals.publish_seconds_max = max(self.totals.publish_seconds_max, seconds)
        return seconds

    async def training(self) -> None:
        """The trainer's turn, where it shares GPUs with the engines."""
        if self.updates is not None:
            await self.updates.training()

    @contextlib.asynccontextmanager
    async def borrowed(self) -> AsyncIterator[None]:
        """The trainer's turn for something between two publications."""
        if self.updates is None:
            yield
            return
        async with self.updates.borrowed():
            yield

    async def probe_logprob_gap(self, trajectories: Sequence[Trajectory]) -> float | None:
        """Largest |trainer − engine log-prob| at temperature 1 over all tokens of a few sequences; None where the
        engine can't say.

        For steps whose batch has no token of the current weights, so that sampling itself shows no gap. Both sides must
        hold the same version.
        """
        longest = self.plan.config.engine.context_length - 1  # the engine wants room for a token
        probes = [_head(t, longest) for t in trajectories[:PROBES]]
        try:
            fleet = self.generating.fleet
            scored = await asyncio.gather(*(fleet.score(t.token_ids.tolist()) for t in probes))
        except EngineError as error:
            log.warning("the log-prob gap was not measured: %s", error)
            return None
        await self.training()
        computed = await self.trainer.logprobs(probes)
        return max(float(np.abs(a - b).max()) for a, b in zip(scored, computed, strict=True))

    async def evaluate(self, step: int) -> Rewards:
        """Play each task's eval prompts, sampled and greedy, with the weights that the engines hold."""
        config = self.plan.config
        rewards: Rewards = {}
        for label, (task, prompts) in self.plan.evaluation_sets().items():
            rewards[label] = {}
            for name, temperature in (("sampled", config.rollout.temperature), ("greedy", 0.0)):
                room = min(config.evaluation.concurrency, self.generating.slots[task])
                result = await evaluate(self.generating.runner, task, prompts, temperature, config.seed, room)
                if result.failed:
                    self.say(f"evaluation of {label}: {result.failed} of {len(prompts)} episodes failed")
                rewards[label][name] = result.reward
        figures = {f"{label}/{name}": r for label, by in rewards.items() for name, r in by.items()}
        self.tracker.log("eval", step, figures)
        return rewards


def _head(trajectory: Trajectory, length: int) -> Trajectory:
    """Its first tokens, at temperature 1."""
    arrays = ("token_ids", "action_mask", "rollout_logprobs", "weight_versions", "turn_index")
    cut = {name: getattr(trajectory, name)[:length] for name in arrays}
    return trajectory.replace(temperature=1.0, routed_experts=None, top_ids=None, top_logprobs=None, **cut)
