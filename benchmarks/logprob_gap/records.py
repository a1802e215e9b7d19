"""Tokens as the trainer takes them."""

from __future__ import annotations

import numpy as np
from jaxtyping import Bool, Float32, Int32

from rollout.trajectory import NO_VERSION, StopReason, Trajectory


def record(
    token_ids: Int32[np.ndarray, " tokens"],
    counted: Bool[np.ndarray, " tokens"],
    rollout_logprobs: Float32[np.ndarray, " tokens"],
    index: int,
    reward: float,
) -> Trajectory:
    """A trajectory of its own group, at temperature 1, of which the ``counted`` tokens are the actions."""
    return Trajectory(
        token_ids=token_ids,
        action_mask=counted,
        rollout_logprobs=rollout_logprobs,
        weight_versions=np.where(counted, 0, NO_VERSION).astype(np.int32),
        turn_index=np.zeros(len(token_ids), np.int32),
        temperature=1.0,
        reward=reward,
        task="benchmark",
        epoch=0,
        prompt_id=str(index),
        group_id=index,
        sample_id=0,
        stop_reason=StopReason.LENGTH,
    )
