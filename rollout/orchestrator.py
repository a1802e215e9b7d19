"""The asyncio shell around the scheduler: plays the rollouts it decides on and hands out batches."""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rollout.episode import EpisodeOutcome, EpisodeRunner, RolloutsFailed
from rollout.scheduler import DroppedGroup, PromptRef, RolloutResult, Scheduler, SchedulerState, Start, TakenGroup
from rollout.session import RolloutKey
from rollout.task_client import TaskServerError, TaskServerFull, TaskServerRefused
from rollout.trajectory import Trajectory


@dataclass(frozen=True)
class Batch:
    """One step's trajectories, in the order of their groups' admission."""

    trajectories: list[Trajectory]
    stale: list[bool]
    """For each trajectory: kept for its group's baseline only."""
    groups: list[TakenGroup]
    failures: Mapping[str, int]
    """Failed episodes since the batch before, by task (retried ones included)."""
    generating_s: float
    """Seconds that the caller waited for it while episodes ran."""
    idle_s: float
    """Seconds that the caller waited for it while none ran (all were delayed)."""


class Orchestrator:
    """Runs rollouts in the background from ``start`` to ``stop``; everything happens in one asyncio loop."""

    def __init__(
        self,
        scheduler: Scheduler,
        runner: EpisodeRunner,
        prompts: Mapping[str, Mapping[str, Mapping[str, Any]]],
        temperature: float,
        seed: int,
        max_failures_in_a_row: int,
        max_dropped_groups: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.scheduler = scheduler
        self.runner = runner
        self.prompts = prompts
        self.temperature = temperature
        self.seed = seed
        self.max_failures_in_a_row = max_failures_in_a_row
        self.max_dropped_groups = max_dropped_groups
        self.clock = clock
        self._episodes: set[asyncio.Task[None]] = set()
        self._kept: dict[int, list[Trajectory]] = {}
        self._dropped: list[DroppedGroup] = []
        self._dropped_since_batch: Counter[str] = Counter()
        self._failures: Counter[str] = Counter()
        self._failures_in_a_row: Counter[str] = Counter()
        self._changed = asyncio.Event()
        self._timer: asyncio.TimerHandle | None = None
        self._fatal: BaseException | None = None
        self._running = False

    def start(self) -> None:
        self._running = True
        self._pump()

    async def stop(self) -> None:
        """Cancel every episode in flight, and wait until each has given back its session."""
        self._running = False
        if self._timer is not None:
            self._timer.cancel()
        episodes = list(self._episodes)
        for episode in episodes:
            episode.cancel()
        await asyncio.gather(*episodes, return_exceptions=True)

    def published(self, version: int) -> None:
        """The engines have the weights of ``version``."""
        self.scheduler.published(version)
        self._pump()

    def trained(self) -> None:
        """The last batch is in the trainer's weights."""
        self.scheduler.trained()

    def take_dropped(self) -> list[DroppedGroup]:
        """Groups that were dropped since the call before. With no await between this, the ledger's record of them and
        ``snapshot``, a prompt is either in the ledger or outstanding."""
        dropped, self._dropped = self._dropped, []
        return dropped

    def snapshot(self) -> SchedulerState:
        return self.scheduler.snapshot()

    def ahead(self) -> list[PromptRef]:
        """Prompts of the next batch, as far as they were admitted."""
        return self.scheduler.ahead()

    @property
    def in_flight(self) -> int:
        return len(self._episodes)

    async def next_batch(self) -> Batch:
        """Wait for the next step's groups.

        Raises:
            RolloutsFailed: a task's episodes only fail, or groups are dropped without end.
        """
        generating_s = idle_s = 0.0
        while True:
            if self._fatal is not None:
                raise self._fatal
            taken, dropped = self.scheduler.take_batch()
            self._forget(dropped)
            if taken is not None:
                return self._batch(taken, generating_s, idle_s)
            self._pump()
            self._changed.clear()
            since, running = time.perf_counter(), bool(self._episodes)
            await self._changed.wait()
            waited = time.perf_counter() - since
            generating_s, idle_s = (generating_s + waited, idle_s) if running else (generating_s, idle_s + waited)

    def _batch(self, taken: list[TakenGroup], generating_s: float, idle_s: float) -> Batch:
        trajectories: list[Trajectory] = []
        stale: list[bool] = []
        for group in taken:
            for sample_id, member in enumerate(group.members):
                segments = [
                    t.replace(sample_id=sample_id, repeated=t.sample_id != sample_id)
                    for t in self._kept[member.rollout_id]
                ]
                trajectories += segments
                stale += [member.stale] * len(segments)
        for group in taken:
            for member in group.members:
                self._kept.pop(member.rollout_id, None)
        batch = Batch(trajectories, stale, taken, self._failures, generating_s, idle_s)
        self._dropped_since_batch = Counter()
        self._failures = Counter()
        return batch

    def _pump(self) -> None:
        """Start what the scheduler lets start, and see to it that it is asked again when a delay ends."""
        if not self._running:
            return
        now = self.clock()
        for start in self.scheduler.starts(now):
            episode = asyncio.create_task(self._play(start), name=f"rollout {start.rollout_id}")
            self._episodes.add(episode)
            episode.add_done_callback(self._episode_done)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        wake_at = self.scheduler.wake_at()
        if wake_at is not None:
            self._timer = asyncio.get_running_loop().call_later(max(0.0, wake_at - now), self._pump)

    def _episode_done(self, episode: asyncio.Task[None]) -> None:
        self._episodes.discard(episode)
        if not episode.cancelled() and episode.exception() is not None:
            self._fatal = episode.exception()
        self._changed.set()
        self._pump()

    async def _play(self, start: Start) -> None:
        ref = start.ref
        key = RolloutKey(ref.task, ref.epoch, ref.prompt_id, start.group_id, start.sample_id)
        data = self.prompts[ref.task][ref.prompt_id]
        try:
            outcome = await self.runner.run(key, data, self.temperature, self._rollout_seed(start))
        except TaskServerRefused as error:
            if not isinstance(error, TaskServerFull):
                self._note_failure(ref.task, str(error), episode=False)
            self._forget([self.scheduler.refused(start.rollout_id, self.clock())])
            return
        except TaskServerError as error:
            outcome = EpisodeOutcome(False, 0.0, 0, [], str(error))
        if outcome.valid:
            self._failures_in_a_row[ref.task] = 0
            self._kept[start.rollout_id] = outcome.trajectories
        else:
            self._note_failure(ref.task, outcome.error or "failed", episode=True)
        versions = [t.oldest_version for t in outcome.trajectories if t.oldest_version is not None]
        result = RolloutResult(outcome.valid, outcome.reward, min(versions, default=None))
        self._forget([self.scheduler.ended(start.rollout_id, result, self.clock())])

    def _note_failure(self, task: str, error: str, episode: bool) -> None:
        if episode:
            self._failures[task] += 1
        self._failures_in_a_row[task] += 1
        if self._failures_in_a_row[task] >= self.max_failures_in_a_row:
            self._fatal = RolloutsFailed(
                f"task {task}: {self.max_failures_in_a_row} episodes in a row failed; the last one: {error}"
            )

    def _forget(self, dropped: Sequence[DroppedGroup | None]) -> None:
        for group in dropped:
            if group is not None:
                self._dropped.append(group)
                self._dropped_since_batch[group.reason] += 1
                for rollout_id in group.rollout_ids:
                    self._kept.pop(rollout_id, None)
        if self._dropped_since_batch.total() > self.max_dropped_groups:
            reasons = ", ".join(f"{reason} {count}" for reason, count in self._dropped_since_batch.most_common())
            self._fatal = RolloutsFailed(
                f"{self._dropped_since_batch.total()} groups were dropped without filling one batch ({reasons}): the "
                "prompts are solved, too hard, or failing; see algorithm.filter_zero_variance and "
                "rollout.max_dropped_groups"
            )

    def _rollout_seed(self, start: Start) -> int:
        """Seed of a rollout's sampling: the same for the same rollout of a run, whatever runs beside it."""
        ref = start.ref
        name = f"{self.seed}/{ref.task}/{ref.epoch}/{ref.prompt_id}/{start.sample_id}/{start.attempt}"
        return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=4).digest(), "big") & 0x7FFFFFFF
