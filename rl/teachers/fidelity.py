"""What keeping a teacher in fp8 does to its log-probs.

Its first batch in a run measures it, on the run's own tokens:

    |log π_fp8(token) − log π_exact(token)|   over the action tokens of its first ``SAMPLE_TOKENS``: mean, p99, max

by the same passes, at the sampling temperature. The exact weights are in the store only until then, as another teacher,
so that they are brought in within the budgets of the tiers. The result stays in the store, beside the weights.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from jaxtyping import Float32
from torch import Tensor

from algorithms.metrics import Max, Mean, Metric
from rl.teachers.sources import TeacherSource
from rollout.trajectory import Trajectory

SAMPLE_TOKENS = 16_384
NOTE = "logprob_error"
"""Where the manifest of an fp8 teacher has it."""
_SUFFIX = ".exact"


@dataclass(frozen=True)
class LogprobError:
    mean: float
    p99: float
    max: float
    tokens: int

    @classmethod
    def between(cls, found: Float32[Tensor, " tokens"], exact: Float32[Tensor, " tokens"]) -> LogprobError:
        """
        Args:
            found: of one token at least.
        """
        gaps = (found.double() - exact.double()).abs().sort().values
        at = min(len(gaps) - 1, int(0.99 * len(gaps)))  # by rank: torch.quantile takes at most 2^24 numbers
        return cls(float(gaps.mean()), float(gaps[at]), float(gaps[-1]), len(gaps))

    @classmethod
    def noted(cls, meta: Mapping[str, Any]) -> LogprobError | None:
        """What was measured of a shard in the store."""
        return cls(**meta[NOTE]) if NOTE in meta else None

    def note(self) -> dict[str, Any]:
        return {NOTE: asdict(self)}

    def metrics(self) -> dict[str, Metric]:
        return {
            "fp8_error_mean": Mean(self.mean, 1.0),
            "fp8_error_p99": Mean(self.p99, 1.0),
            "fp8_error_max": Max(self.max),
        }

    def __str__(self) -> str:
        return f"{self.mean:.2g} mean, {self.p99:.2g} p99, {self.max:.2g} max over {self.tokens} tokens"


def reference(source: TeacherSource) -> TeacherSource:
    """The same weights, exact; without a base, which it would need memory beside."""
    return replace(source, name=source.name + _SUFFIX, codec="exact", base=None)


def is_reference(name: str) -> bool:
    return name.endswith(_SUFFIX)


def sample(trajectories: Sequence[Trajectory]) -> list[Trajectory]:
    """The first of them, one at least."""
    chosen: list[Trajectory] = []
    tokens = 0
    for trajectory in trajectories:
        tokens += len(trajectory)
        if chosen and tokens > SAMPLE_TOKENS:
            break
        chosen.append(trajectory)
    return chosen
