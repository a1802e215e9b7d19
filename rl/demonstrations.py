"""SFT batches: the tasks' demonstrations, tokenised with the policy's chat template."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np

from rollout.chat import ChatRenderer
from rollout.trajectory import NO_VERSION, StopReason, Trajectory
from tasks.protocol import Message, Task


def demonstration_batches(
    tasks: Mapping[str, Task], renderer: ChatRenderer, size: int, context_length: int, seed: int
) -> Iterator[list[Trajectory]]:
    """Endless batches, the tasks in turn, so that each has an equal part.

    Raises:
        ValueError: where a demonstration is longer than the model's context.
    """
    sources = {name: task.demonstrations(seed) for name, task in sorted(tasks.items())}
    count = 0
    while True:
        batch = []
        for _ in range(size):
            name = sorted(sources)[count % len(sources)]
            trajectory = _trajectory(name, next(sources[name]), renderer, count)
            if len(trajectory) > context_length:
                raise ValueError(
                    f"task {name}: a demonstration has {len(trajectory)} tokens, context_length is {context_length}"
                )
            batch.append(trajectory)
            count += 1
        yield batch


def _trajectory(task: str, conversation: list[Message], renderer: ChatRenderer, count: int) -> Trajectory:
    token_ids, mask = renderer.conversation([message.model_dump() for message in conversation])
    action_mask = np.asarray(mask)
    return Trajectory(
        token_ids=np.asarray(token_ids, dtype=np.int32),
        action_mask=action_mask,
        rollout_logprobs=np.zeros(len(token_ids), dtype=np.float32),
        weight_versions=np.where(action_mask, 0, NO_VERSION).astype(np.int32),
        turn_index=np.zeros(len(token_ids), dtype=np.int32),
        temperature=1.0,
        reward=1.0,
        task=task,
        epoch=0,
        prompt_id=str(count),
        group_id=count,
        sample_id=0,
        stop_reason=StopReason.STOP,
    )
