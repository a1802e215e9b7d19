"""Which rollout starts next, and what becomes of those that ended: a pure state machine.

Control law. Let B be the groups of one step, η the steps that generation may run ahead (0: synchronous), v the updates
whose weights are published, T the groups taken into batches so far and O those admitted but neither taken nor dropped.
A new group is admitted while

    T + O < min(v + 1 + η, S) · B                     S: steps of the whole run

so that a group is at most η versions old when the step that it was admitted for trains it; a dropped group leaves O and
is replaced by the next prompt. Which task it comes from: the one that is furthest behind its share of the groups
admitted and not dropped, so that shares hold among what is trained, however long a task's episodes take.

A rollout that lags by more than τ (``max_lag``) when its group is taken is kept for its group's baseline only; a group
whose rollouts are all too old is dropped and replaced.

Who calls: the orchestrator (``starts``, ``refused``, ``ended``), the training loop (``take_batch``, ``trained``,
``published``) and the checkpoint (``snapshot``, ``restore``). Time is passed in, in seconds; nothing here does I/O.
"""

from __future__ import annotations

import heapq
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from pydantic import BaseModel, ConfigDict

from rollout.prompts import PromptRef, PromptStream, StreamState

FIRST_RETRY_S = 0.25
LAST_RETRY_S = 10.0
"""Delay before a refused or failed rollout is tried again: doubles from the first to the last."""


@dataclass(frozen=True)
class SchedulerConfig:
    group_size: int
    groups_per_step: int
    steps_ahead: int
    """η"""
    total_steps: int
    """S"""
    max_lag: int | None
    """τ in weight versions; None keeps every rollout."""
    max_rollouts: int
    """Rollouts in flight, over all tasks."""
    max_attempts: int
    """Tries of a rollout whose environment fails, before it counts as failed."""
    max_refusals: int
    """Times in a row that a rollout is refused (its task's servers are full or gone) before it counts as failed."""
    shares: Mapping[str, float]
    """Relative share of the groups, by task."""
    slots: Mapping[str, int]
    """Rollouts that a task's servers take at once."""


@dataclass(frozen=True)
class Start:
    """Decision: start this rollout now."""

    rollout_id: int
    ref: PromptRef
    group_id: int
    sample_id: int
    attempt: int


@dataclass(frozen=True)
class RolloutResult:
    """How a rollout ended."""

    valid: bool
    reward: float = 0.0
    oldest_version: int | None = None


@dataclass(frozen=True)
class Verdict:
    """What becomes of a finished group: dropped for a reason, or kept with rollouts repeated for those that failed."""

    drop: str | None = None
    repeat: Sequence[int] = ()
    """Indices within the group of the rollouts that stand in for the failed ones, in their order."""


@dataclass(frozen=True)
class Member:
    """A rollout of a taken group."""

    rollout_id: int
    stale: bool
    """Too old to be trained on: only its reward counts, in the baseline."""


@dataclass(frozen=True)
class TakenGroup:
    ref: PromptRef
    group_id: int
    members: Sequence[Member]


@dataclass(frozen=True)
class DroppedGroup:
    ref: PromptRef
    group_id: int
    reason: str
    rollout_ids: Sequence[int]


@dataclass
class _Rollout:
    group_id: int
    sample_id: int
    attempt: int = 0
    refusals: int = 0
    result: RolloutResult | None = None


@dataclass
class _Group:
    ref: PromptRef
    rollout_ids: list[int]
    members: list[int] = field(default_factory=list)
    """Rollouts to train on, once complete: failed ones replaced by repeats."""


class OutstandingPrompt(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    task: str
    epoch: int
    prompt_id: str


class SchedulerState(BaseModel):
    """What a checkpoint keeps: enough that each (epoch, prompt) is trained once along the lineage of checkpoints."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    version: int
    taken_groups: int
    next_group_id: int
    streams: dict[str, StreamState]
    outstanding: list[OutstandingPrompt]
    """Handed out, but neither trained nor dropped: they go first after a resume."""
    admitted: dict[str, int]
    dropped: dict[str, int]


class Scheduler:
    """See the module's docstring. ``judge`` maps (rewards, valid) of a finished group to its verdict."""

    def __init__(
        self,
        config: SchedulerConfig,
        streams: Mapping[str, PromptStream],
        judge: Callable[[Sequence[float], Sequence[bool]], Verdict],
    ) -> None:
        if set(streams) != set(config.shares) or set(streams) != set(config.slots):
            raise ValueError(
                f"shares {sorted(config.shares)} and slots {sorted(config.slots)} must name {sorted(streams)}"
            )
        self.config = config
        self.judge = judge
        self.version = 0
        self._streams = dict(streams)
        self._groups: dict[int, _Group] = {}
        self._rollouts: dict[int, _Rollout] = {}
        self._waiting: dict[str, deque[int]] = {task: deque() for task in streams}
        self._delayed: list[tuple[float, int]] = []
        self._in_flight: Counter[str] = Counter()
        self._ready: deque[int] = deque()
        self._training: list[int] = []
        self._returned: dict[str, deque[PromptRef]] = {task: deque() for task in streams}
        self._taken_groups = 0
        self._next_group_id = 0
        self._next_rollout_id = 0
        self._admitted: Counter[str] = Counter()
        self._dropped: Counter[str] = Counter()
        self._retries = 0
        self._refusals = 0

    # --- admission ---------------------------------------------------------------------------------------------

    def starts(self, now: float) -> list[Start]:
        """Every rollout that may start now. Each counts as in flight until ``ended`` or ``refused`` names it."""
        while self._delayed and self._delayed[0][0] <= now:
            _, rollout_id = heapq.heappop(self._delayed)
            self._waiting[self._task_of(rollout_id)].append(rollout_id)
        self._admit()
        room = self.config.max_rollouts - self._in_flight.total()
        decisions: list[Start] = []
        for task, waiting in self._waiting.items():
            while waiting and room > 0 and self._in_flight[task] < self.config.slots[task]:
                decisions.append(self._start(waiting.popleft()))
                self._in_flight[task] += 1
                room -= 1
        return decisions

    def _admit(self) -> None:
        steps = min(self.version + 1 + self.config.steps_ahead, self.config.total_steps)
        limit = steps * self.config.groups_per_step
        while self._taken_groups + self._outstanding() < limit:
            task = min(self._streams, key=lambda name: (self._admitted[name] / self.config.shares[name], name))
            returned = self._returned[task]
            ref = returned.popleft() if returned else self._streams[task].next()
            group_id = self._next_group_id
            self._next_group_id += 1
            rollout_ids = list(range(self._next_rollout_id, self._next_rollout_id + self.config.group_size))
            self._next_rollout_id += self.config.group_size
            self._groups[group_id] = _Group(ref, rollout_ids)
            for sample_id, rollout_id in enumerate(rollout_ids):
                self._rollouts[rollout_id] = _Rollout(group_id, sample_id)
            self._waiting[task].extend(rollout_ids)
            self._admitted[task] += 1

    def _outstanding(self) -> int:
        return len(self._groups) - len(self._training)

    def _start(self, rollout_id: int) -> Start:
        rollout = self._rollouts[rollout_id]
        ref = self._groups[rollout.group_id].ref
        return Start(rollout_id, ref, rollout.group_id, rollout.sample_id, rollout.attempt)

    def _task_of(self, rollout_id: int) -> str:
        return self._groups[self._rollouts[rollout_id].group_id].ref.task

    def wake_at(self) -> float | None:
        """When a delayed rollout may be tried again."""
        return self._delayed[0][0] if self._delayed else None

    # --- events ------------------------------------------------------------------------------------------------

    def refused(self, rollout_id: int, now: float) -> DroppedGroup | None:
        """The task's server took no new episode (full, or not reachable)."""
        rollout = self._rollouts[rollout_id]
        rollout.refusals += 1
        self._refusals += 1
        self._in_flight[self._task_of(rollout_id)] -= 1
        if rollout.refusals >= self.config.max_refusals:
            return self._finish(rollout, RolloutResult(valid=False))
        self._delay(rollout_id, rollout.refusals, now)
        return None

    def ended(self, rollout_id: int, result: RolloutResult, now: float) -> DroppedGroup | None:
        """A rollout ended; a failed one is tried again while it has attempts left.

        Returns:
            the group, when this completed it and the verdict was to drop it.
        """
        rollout = self._rollouts[rollout_id]
        if rollout.result is not None:
            raise ValueError(f"rollout {rollout_id} ended twice")
        self._in_flight[self._task_of(rollout_id)] -= 1
        rollout.refusals = 0
        rollout.attempt += 1
        if not result.valid and rollout.attempt < self.config.max_attempts:
            self._retries += 1
            self._delay(rollout_id, rollout.attempt, now)
            return None
        return self._finish(rollout, result)

    def _finish(self, rollout: _Rollout, result: RolloutResult) -> DroppedGroup | None:
        """Take a rollout's final result; the last one of its group decides the group's fate."""
        rollout.result = result
        group = self._groups[rollout.group_id]
        results = [self._rollouts[member].result for member in group.rollout_ids]
        if any(member is None for member in results):
            return None
        done = [member for member in results if member is not None]
        verdict = self.judge([r.reward for r in done], [r.valid for r in done])
        if verdict.drop is not None:
            return self._drop(rollout.group_id, verdict.drop)
        stand_ins = iter(verdict.repeat)
        group.members = [
            member if r.valid else group.rollout_ids[next(stand_ins)]
            for member, r in zip(group.rollout_ids, done, strict=True)
        ]
        self._ready.append(rollout.group_id)
        return None

    def _delay(self, rollout_id: int, times: int, now: float) -> None:
        heapq.heappush(self._delayed, (now + min(FIRST_RETRY_S * 2 ** (times - 1), LAST_RETRY_S), rollout_id))

    def _drop(self, group_id: int, reason: str) -> DroppedGroup:
        group = self._groups.pop(group_id)
        for rollout_id in group.rollout_ids:
            del self._rollouts[rollout_id]
        self._admitted[group.ref.task] -= 1
        self._dropped[reason] += 1
        return DroppedGroup(group.ref, group_id, reason, group.rollout_ids)

    def published(self, version: int) -> None:
        """The engines sample with the weights of ``version`` updates from now on."""
        self.version = version

    # --- batches -----------------------------------------------------------------------------------------------

    def take_batch(self) -> tuple[list[TakenGroup] | None, list[DroppedGroup]]:
        """The next step's groups in the order of admission, if there are enough, and groups dropped as too old."""
        if self._training:
            raise ValueError("the batch before is still being trained: call trained() first")
        dropped = [self._drop(group_id, "stale") for group_id in self._ready if self._all_stale(group_id)]
        gone = {group.group_id for group in dropped}
        self._ready = deque(group_id for group_id in self._ready if group_id not in gone)
        if len(self._ready) < self.config.groups_per_step:
            return None, dropped
        self._training = sorted(self._ready.popleft() for _ in range(self.config.groups_per_step))
        self._taken_groups += len(self._training)
        taken = [
            TakenGroup(
                self._groups[group_id].ref,
                group_id,
                [Member(member, self._stale(member)) for member in self._groups[group_id].members],
            )
            for group_id in self._training
        ]
        return taken, dropped

    def _stale(self, rollout_id: int) -> bool:
        result = self._rollouts[rollout_id].result
        oldest = None if result is None else result.oldest_version
        return self.config.max_lag is not None and oldest is not None and self.version - oldest > self.config.max_lag

    def _all_stale(self, group_id: int) -> bool:
        return all(self._stale(member) for member in self._groups[group_id].members)

    def trained(self) -> None:
        """The batch that was taken is in the weights."""
        for group_id in self._training:
            for rollout_id in self._groups.pop(group_id).rollout_ids:
                del self._rollouts[rollout_id]
        self._training = []

    def ahead(self) -> list[PromptRef]:
        """Prompts of the batch after the one that is trained, in the order of admission: those that were admitted."""
        later = sorted(self._groups.keys() - set(self._training))
        return [self._groups[group_id].ref for group_id in later[: self.config.groups_per_step]]

    # --- checkpoint --------------------------------------------------------------------------------------------

    def snapshot(self) -> SchedulerState:
        """State between two steps; rollouts in flight or ready are listed as outstanding prompts."""
        if self._training:
            raise ValueError("a batch is being trained: snapshot after trained()")
        refs = [group.ref for _, group in sorted(self._groups.items())]
        refs += [ref for returned in self._returned.values() for ref in returned]
        outstanding = [OutstandingPrompt(task=r.task, epoch=r.epoch, prompt_id=r.prompt_id) for r in refs]
        admitted = Counter(self._admitted)
        admitted.subtract(Counter(group.ref.task for group in self._groups.values()))
        return SchedulerState(
            version=self.version,
            taken_groups=self._taken_groups,
            next_group_id=self._next_group_id,
            streams={task: stream.state() for task, stream in self._streams.items()},
            outstanding=outstanding,
            admitted={task: admitted[task] for task in self._streams},
            dropped=dict(self._dropped),
        )

    def restore(self, state: SchedulerState) -> None:
        """Go on from a checkpoint; only before the first ``starts``."""
        if self._next_rollout_id:
            raise ValueError("restore() comes before the first rollout")
        if set(state.streams) != set(self._streams):
            raise ValueError(
                f"the checkpoint's tasks are {sorted(state.streams)}, this run's are {sorted(self._streams)}: "
                "resume with the same tasks"
            )
        self.version = state.version
        self._taken_groups = state.taken_groups
        self._next_group_id = state.next_group_id
        for task, stream in self._streams.items():
            stream.restore(state.streams[task])
        for prompt in state.outstanding:
            self._returned[prompt.task].append(PromptRef(prompt.task, prompt.epoch, prompt.prompt_id))
        self._admitted = Counter(state.admitted)
        self._dropped = Counter(state.dropped)

    @property
    def dropped(self) -> dict[str, int]:
        """Groups dropped so far, by reason."""
        return dict(self._dropped)

    def gauges(self) -> dict[str, float]:
        """Figures of the moment, for the tracker."""
        values: dict[str, float] = {
            "rollouts_in_flight": self._in_flight.total(),
            "rollouts_waiting": sum(map(len, self._waiting.values())),
            "rollouts_delayed": len(self._delayed),
            "groups_ready": len(self._ready),
            "groups_outstanding": self._outstanding(),
            "retries": self._retries,
            "refusals": self._refusals,
        }
        return values | {f"in_flight/{task}": self._in_flight[task] for task in self._streams}
