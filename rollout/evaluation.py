"""Evaluation: each prompt played once, at a temperature of its own, outside the scheduler."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rollout.episode import EpisodeOutcome, EpisodeRunner, RolloutsFailed
from rollout.session import RolloutKey
from rollout.task_client import TaskServerError, TaskServerRefused

ATTEMPTS = 3
REFUSALS = 60
REFUSAL_PAUSE_S = 0.5
"""A full server is asked again so many times, after so many seconds: rollouts may hold its slots."""


@dataclass(frozen=True)
class EvaluationResult:
    reward: float
    """Mean over the episodes that ended."""
    episodes: int
    failed: int
    turns: int


async def evaluate(
    runner: EpisodeRunner,
    task: str,
    prompts: Sequence[tuple[str, Mapping[str, Any]]],
    temperature: float,
    seed: int,
    concurrency: int,
) -> EvaluationResult:
    """Play each (prompt id, data) of one task once, ``concurrency`` at a time; a failed one up to three times.

    Raises:
        RolloutsFailed: none of them ended.
    """
    room = asyncio.Semaphore(concurrency)

    async def one(index: int, prompt_id: str, data: Mapping[str, Any]) -> EpisodeOutcome:
        key = RolloutKey(task, epoch=0, prompt_id=prompt_id, group_id=index, sample_id=0)
        digest = hashlib.blake2b(f"{seed}/eval/{task}/{prompt_id}/{temperature}".encode(), digest_size=4).digest()
        outcome = EpisodeOutcome(False, 0.0, 0, [], "not played")
        attempts = refusals = 0
        async with room:
            while not outcome.valid and attempts < ATTEMPTS and refusals < REFUSALS:
                try:
                    outcome = await runner.run(key, data, temperature, int.from_bytes(digest, "big") & 0x7FFFFFFF)
                    attempts += 1
                except TaskServerRefused as error:
                    refusals += 1
                    outcome = EpisodeOutcome(False, 0.0, 0, [], str(error))
                    await asyncio.sleep(REFUSAL_PAUSE_S)
                except TaskServerError as error:
                    attempts += 1
                    outcome = EpisodeOutcome(False, 0.0, 0, [], str(error))
        return outcome

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(one(i, prompt_id, data)) for i, (prompt_id, data) in enumerate(prompts)]
    outcomes = [task_.result() for task_ in tasks]
    done = [outcome for outcome in outcomes if outcome.valid]
    if not done:
        raise RolloutsFailed(
            f"task {task}: none of {len(outcomes)} evaluation episodes ended; the last: {outcomes[-1].error}"
        )
    return EvaluationResult(
        reward=sum(outcome.reward for outcome in done) / len(done),
        episodes=len(done),
        failed=len(outcomes) - len(done),
        turns=sum(outcome.turns for outcome in outcomes),
    )
