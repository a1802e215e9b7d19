"""The one record that crosses every boundary: what was sampled, by which weights, and how it was rewarded."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from jaxtyping import Bool, Float32, Int32

NO_VERSION = -1
"""Weight version of a token that no policy sampled (prompt, observation)."""
NOT_RECORDED = -1
"""Expert, or likeliest token, of a position for which the engine said none."""


class StopReason(enum.StrEnum):
    """Why a trajectory ended."""

    STOP = "stop"  # the model ended its turn, and the task its episode
    LENGTH = "length"  # the token budget of the context or of the episode was spent
    MAX_TURNS = "max_turns"  # the task's turn limit
    FAILED = "failed"  # the environment failed: the reward means nothing
    CANCELLED = "cancelled"


@dataclass(frozen=True)
class Trajectory:
    """One sample of one rollout, as token ids. All arrays have the same length (``tokens``).

    A rollout whose context was rewritten by its harness (compaction, a forked conversation) has several
    trajectories with the same ``group_id`` and ``sample_id`` and rising ``segment``.

    Raises:
        ValueError: where an array's length or dtype is wrong, or an action token has no weight version.
    """

    token_ids: Int32[np.ndarray, " tokens"]
    action_mask: Bool[np.ndarray, " tokens"]
    """True where the policy sampled the token."""
    rollout_logprobs: Float32[np.ndarray, " tokens"]
    """Natural log-prob under the engine at ``temperature``; 0 where ``action_mask`` is False."""
    weight_versions: Int32[np.ndarray, " tokens"]
    """Weight version that sampled the token; ``NO_VERSION`` where ``action_mask`` is False."""
    turn_index: Int32[np.ndarray, " tokens"]
    """Index of the policy's turn that the token belongs to; an observation belongs to the turn it precedes."""
    temperature: float
    reward: float
    task: str
    epoch: int
    prompt_id: str
    group_id: int
    sample_id: int
    """Index of the rollout within its group."""
    stop_reason: StopReason
    segment: int = 0
    repeated: bool = False
    """A copy in the place of a failed rollout of its group: it trains, but its group's baseline leaves it out."""
    routed_experts: Int32[np.ndarray, "tokens layers top_k"] | None = None
    """Experts that the engine chose, where they were asked for; ``NOT_RECORDED`` where it did not compute the token."""
    top_ids: Int32[np.ndarray, "tokens k"] | None = None
    """The likeliest tokens at each position that the policy sampled, the likeliest first, where they were asked for;
    ``NOT_RECORDED`` where ``action_mask`` is False."""
    top_logprobs: Float32[np.ndarray, "tokens k"] | None = None
    """Their log-probs, as ``rollout_logprobs``; 0 where ``action_mask`` is False."""
    metrics: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        length = len(self.token_ids)
        dtypes = {
            "token_ids": np.int32,
            "action_mask": np.bool_,
            "rollout_logprobs": np.float32,
            "weight_versions": np.int32,
            "turn_index": np.int32,
        }
        for name, dtype in dtypes.items():
            array = getattr(self, name)
            if array.shape != (length,) or array.dtype != dtype:
                raise ValueError(
                    f"trajectory {self.task}/{self.prompt_id}: {name} is {array.dtype}{array.shape}, "
                    f"it must be {np.dtype(dtype)}({length},) like token_ids"
                )
        if (self.weight_versions[self.action_mask] < 0).any():
            raise ValueError(f"trajectory {self.task}/{self.prompt_id}: an action token has no weight version")
        if self.routed_experts is not None and len(self.routed_experts) != length:
            raise ValueError(
                f"trajectory {self.task}/{self.prompt_id}: routed_experts has {len(self.routed_experts)} rows, "
                f"it must have {length}, one a token"
            )
        self._check_top()

    def _check_top(self) -> None:
        ids, logprobs = self.top_ids, self.top_logprobs
        if ids is None and logprobs is None:
            return
        where = f"trajectory {self.task}/{self.prompt_id}: top_ids and top_logprobs"
        if ids is None or logprobs is None:
            raise ValueError(f"{where} go together, one of them is missing")
        expected = (len(self.token_ids), *ids.shape[1:])
        if ids.ndim != 2 or ids.dtype != np.int32 or ids.shape != expected:
            raise ValueError(f"{where}: the ids are {ids.dtype}{ids.shape}, they must be int32({expected[0]}, k)")
        if logprobs.shape != ids.shape or logprobs.dtype != np.float32:
            raise ValueError(f"{where}: the log-probs are {logprobs.dtype}{logprobs.shape}, the ids int32{ids.shape}")
        if ((ids >= 0) != self.action_mask[:, None]).any():
            raise ValueError(f"{where} must be of the sampled tokens, and of no others")

    def __len__(self) -> int:
        return len(self.token_ids)

    @property
    def valid(self) -> bool:
        """False where the environment failed, so that ``reward`` means nothing."""
        return self.stop_reason not in (StopReason.FAILED, StopReason.CANCELLED)

    @property
    def truncated(self) -> bool:
        return self.stop_reason is StopReason.LENGTH

    @property
    def oldest_version(self) -> int | None:
        """Smallest weight version of an action token; None without action tokens."""
        versions = self.weight_versions[self.action_mask]
        return int(versions.min()) if len(versions) else None

    def replace(self, **changes: object) -> Trajectory:
        return dataclasses.replace(self, **changes)  # type: ignore[arg-type]
