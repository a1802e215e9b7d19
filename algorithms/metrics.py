"""Metrics that add up: each is a small record that merges across micro-batches, ranks and steps."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Protocol, Self

LOG_RATIO_UNIT = 1e-4
"""Bins of ``LogRatioQuantile`` are even in sign(x)·log(1 + |x|/unit): finest near a ratio of 1, and odd in number, so
that a ratio of exactly 1 has a bin of its own."""
BINS_PER_E_FOLD = 20.0
LOG_RATIO_BINS = 2 * 245 + 1
"""Reach |log ratio| = 20; a bin is 5 % of |log ratio| wide."""


class Metric(Protocol):
    def merge(self, other: Self) -> Self: ...

    def value(self) -> float | None:
        """The number to log; None where it is undefined (nothing was counted)."""
        ...


@dataclass(frozen=True)
class Mean:
    total: float
    count: float

    def merge(self, other: Mean) -> Mean:
        return Mean(self.total + other.total, self.count + other.count)

    def value(self) -> float | None:
        return self.total / self.count if self.count else None


@dataclass(frozen=True)
class Sum:
    total: float

    def merge(self, other: Sum) -> Sum:
        return Sum(self.total + other.total)

    def value(self) -> float:
        return self.total


@dataclass(frozen=True)
class Max:
    maximum: float | None

    def merge(self, other: Max) -> Max:
        present = [x for x in (self.maximum, other.maximum) if x is not None]
        return Max(max(present) if present else None)

    def value(self) -> float | None:
        return self.maximum


@dataclass(frozen=True)
class Std:
    """Standard deviation (unbiased), by sums of deviations from the mean so that large means lose nothing."""

    count: float
    mean: float
    squares: float
    """Σ (x − mean)²."""

    def merge(self, other: Std) -> Std:
        count = self.count + other.count
        if not count:
            return self
        gap = other.mean - self.mean
        mean = self.mean + gap * other.count / count
        return Std(count, mean, self.squares + other.squares + gap * gap * self.count * other.count / count)

    def value(self) -> float | None:
        return math.sqrt(self.squares / (self.count - 1)) if self.count > 1 else None


@dataclass(frozen=True)
class EffectiveShare:
    """Effective sample size over sample size, (Σw)² / (n Σw²): 1 where all importance weights are equal."""

    count: float
    total: float
    squares: float

    def merge(self, other: EffectiveShare) -> EffectiveShare:
        return EffectiveShare(self.count + other.count, self.total + other.total, self.squares + other.squares)

    def value(self) -> float | None:
        return self.total**2 / (self.count * self.squares) if self.count and self.squares else None


@dataclass(frozen=True)
class LogRatioQuantile:
    """A quantile of a probability ratio from a histogram of its logarithm (see ``algorithms.diagnostics``)."""

    q: float
    counts: tuple[int, ...] = field(repr=False)

    def merge(self, other: LogRatioQuantile) -> LogRatioQuantile:
        return LogRatioQuantile(self.q, tuple(a + b for a, b in zip(self.counts, other.counts, strict=True)))

    def value(self) -> float | None:
        wanted = self.q * sum(self.counts)
        for index, reached in enumerate(accumulate(self.counts)):
            if reached and reached >= wanted:
                side = index - len(self.counts) // 2
                return math.exp(math.copysign(math.expm1(abs(side) / BINS_PER_E_FOLD) * LOG_RATIO_UNIT, side))
        return None


Metrics = Mapping[str, Metric]


def merge_metrics(parts: Iterable[Metrics]) -> dict[str, Metric]:
    """Union of the names; metrics of one name are merged."""
    merged: dict[str, Metric] = {}
    for part in parts:
        for name, metric in part.items():
            merged[name] = merged[name].merge(metric) if name in merged else metric
    return merged


def metric_values(metrics: Metrics) -> dict[str, float]:
    """Numbers by name, those that are undefined left out."""
    values = {name: metric.value() for name, metric in metrics.items()}
    return {name: value for name, value in values.items() if value is not None}
