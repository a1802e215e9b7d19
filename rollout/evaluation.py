"""Evaluation: each prompt played once, at a temperature of its own, outside the scheduler."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rollout.episode import EpisodeOutcome, EpisodeRunner
from rollout.session import RolloutKey
from rollout.task_client import TaskServerError
from rollout.trajectory import Trajectory

ATTEMPTS = 3


@dataclass(frozen=True)
class EvaluationResult:
    reward: float | None
    """Mean over the episodes that ended; None where none did."""
    episodes: int
    failed: int
    turns: int
    samples: list[Trajectory]


async def evaluate(
    runner: EpisodeRunner,
    task: str,
    prompts: Sequence[tuple[str, Mapping[str, Any]]],
    temperature: float,
    seed: int,
    concurrency: int,
) -> EvaluationResult:
    """Play each (prompt id, data) of one task once, ``concurrency`` at a time; a failed one up to three times."""
    room = asyncio.Semaphore(concurrency)

    async def one(index: int, prompt_id: str, data: Mapping[str, Any]) -> EpisodeOutcome:
        key = RolloutKey(task, epoch=0, prompt_id=prompt_id, group_id=index, sample_id=0)
        digest = hashlib.blake2b(f"{seed}/eval/{task}/{prompt_id}/{temperature}".encode(), digest_size=4).digest()
        async with room:
            outcome = EpisodeOutcome(False, 0.0, 0, [], "not played")
            for _ in range(ATTEMPTS):
                try:
                    outcome = await runner.run(key, data, temperature, int.from_bytes(digest, "big") & 0x7FFFFFFF)
                except TaskServerError as error:
                    outcome = EpisodeOutcome(False, 0.0, 0, [], str(error))
                if outcome.valid:
                    break
            return outcome

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(one(i, prompt_id, data)) for i, (prompt_id, data) in enumerate(prompts)]
    outcomes = [task_.result() for task_ in tasks]
    done = [outcome for outcome in outcomes if outcome.valid]
    return EvaluationResult(
        reward=sum(outcome.reward for outcome in done) / len(done) if done else None,
        episodes=len(done),
        failed=len(outcomes) - len(done),
        turns=sum(outcome.turns for outcome in outcomes),
        samples=[t for outcome in done for t in outcome.trajectories],
    )
