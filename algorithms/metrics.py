"""Metrics that add up: each is a small record that merges across micro-batches, ranks and steps."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol, Self


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
