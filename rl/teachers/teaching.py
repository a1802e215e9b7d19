"""What the driver tells the trainer of a batch's teachers. Light: it travels to the ranks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from rl.teachers.routing import Shares
from rl.teachers.sources import TeacherSource


@dataclass(frozen=True)
class TeacherSetup:
    """The teachers whose weights the ranks hold, and the memory that they may take on each rank."""

    sources: Sequence[TeacherSource]
    store: str
    hbm_bytes: int
    pinned_bytes: int


@dataclass(frozen=True)
class Teaching:
    """The teachers of one batch, trajectory by trajectory."""

    shares: Sequence[Shares]
    """Of each trajectory; they need not add up to 1."""
    scored: Mapping[str, Sequence[np.ndarray | None]] = field(default_factory=dict)
    """Log-probs by teachers that run elsewhere, of each trajectory's tokens; None where it is not theirs."""
    ahead: Mapping[str, int] = field(default_factory=dict)
    """Prompts by teacher in the batch after this one, as far as it is known."""

    def groups(self) -> dict[str, list[int]]:
        """Trajectories by teacher."""
        groups: dict[str, list[int]] = {}
        for index, shares in enumerate(self.shares):
            for teacher in shares:
                groups.setdefault(teacher, []).append(index)
        return groups

    def counts(self) -> Counter[str]:
        return Counter({teacher: len(members) for teacher, members in self.groups().items()})
