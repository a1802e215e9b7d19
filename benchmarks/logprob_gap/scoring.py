"""The trainer's log-probs of what servers sampled: in its own type, also with its indexer in fp8 as the engine's is, or
with the experts that the engine chose; and in float32.

Runs in a child, which keeps its worker from job to job.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float32

from benchmarks.logprob_gap.fp8_indexer import fp8_indexer
from benchmarks.logprob_gap.models import TOP_K
from benchmarks.logprob_gap.report import append
from benchmarks.logprob_gap.statistics import all_pairs
from benchmarks.trainer.sides import make_worker
from rl.trainer.worker import TrainerWorker
from rollout.trajectory import Trajectory

_workers: dict[str, TrainerWorker] = {}
"""The child's own, by device; a process has one process group."""


@dataclass
class Sampled:
    """What one server sampled in one case."""

    facts: Mapping[str, Any]
    """For the report."""
    trajectories: Sequence[Trajectory]
    sides: dict[str, Float32[np.ndarray, " tokens"]] = field(default_factory=dict)
    """Log-probs of the sampled tokens, by who computed them."""

    @property
    def selects(self) -> bool:
        """Whether an indexer has something to choose."""
        return self.facts["model"] == "dsa" and max(map(len, self.trajectories)) > TOP_K

    @property
    def recorded(self) -> bool:
        """Whether the engine said which experts it chose."""
        return any(trajectory.routed_experts is not None for trajectory in self.trajectories)

    def add(self, side: str, values: Sequence[Float32[np.ndarray, " _"]]) -> None:
        pairs = zip(values, self.trajectories, strict=True)
        self.sides[side] = np.concatenate([x[trajectory.action_mask] for x, trajectory in pairs])


def prepare(device: str) -> None:
    """Import and start what scoring needs, while the servers start."""
    if device not in _workers:
        _workers[device] = make_worker(device, 4)


def score(directory: Path, found: Sequence[Sampled], device: str, path: Path) -> None:
    """Append a line for each case to the report: first with the trainer's own type, then with the reference, too."""
    prepare(device)
    worker = _workers[device]
    for case in found:
        case.add("rollout", [trajectory.rollout_logprobs for trajectory in case.trajectories])
    own = "bfloat16" if device == "cuda" else "float32"
    for name, dtype in (("trainer", own), ("float32", "float32")):
        worker.config = worker.config.model_copy(update={"dtype": dtype})
        worker.load_model(directory)
        for case in found:
            begin = time.monotonic()
            own_choice = [replace(t, routed_experts=None) for t in case.trajectories]
            case.add(name, worker.logprobs(own_choice))
            if name == "trainer" and case.selects:
                with fp8_indexer():
                    case.add("trainer+fp8", worker.logprobs(own_choice))
            if name == "trainer" and case.recorded:
                case.add("trainer+experts", worker.logprobs(case.trajectories))
            means = {side: float(values.mean()) for side, values in case.sides.items()}
            seconds = {"score_s": time.monotonic() - begin}
            append(path, {**case.facts, "pairs": all_pairs(case.sides), "mean_logprob": means, **seconds})
