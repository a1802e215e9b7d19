"""What the rounds at one ratio of scoring to loading say, as far as it can be told. Pure.

    S     how long the scoring of a batch takes alone: the median of a few looks, with a ``spread``
    wait  a batch's wall time less S: the median over the rounds; below zero when S alone was a slower look

A wait is told from none down to ``resolution``: the largest of ``LEAST_SHARE`` of S, the spread of S, and how far below
zero a round came. A wait below that is reported as less than it, and what it is compared with as at least so many
times as long.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

LEAST_SHARE = 0.001


@dataclass(frozen=True)
class Wait:
    seconds: float
    resolution: float

    @classmethod
    def of(cls, waits: Sequence[float], scoring: float, spread: float) -> Wait:
        return cls(statistics.median(waits), max(LEAST_SHARE * scoring, spread, -min(waits)))

    @property
    def is_told(self) -> bool:
        return self.seconds > self.resolution

    @property
    def at_most(self) -> float:
        """The wait, or what it is less than."""
        return max(self.seconds, self.resolution)

    def multiple(self, other: float) -> float:
        """How many times as long another wait is; at least so many, unless this one ``is_told``."""
        return other / self.at_most

    def times(self, other: float) -> str:
        multiple = self.multiple(other)
        return f"{'' if self.is_told else '≥ '}{multiple:.{0 if multiple >= 20 else 1}f}×"

    def said(self, scoring: float) -> str:
        sign = "" if self.is_told else "< "
        return f"{sign}{self.at_most:.3f} s ({sign}{self.at_most / scoring:.1%} of S)"
