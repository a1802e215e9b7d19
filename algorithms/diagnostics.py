"""How far the trainer's policy is from the one that sampled, token by token, and what an objective made of it.

With d = log π_θ − log π_inf and r = e^d over the trained tokens: ``ratio/p01``…``p99`` and ``ratio/max`` of r,
``ratio/effective_share`` (Σr)²/(nΣr²), and two estimates of KL(π_inf‖π_θ): ``kl/rollout_k1`` mean(−d), unbiased, and
``kl/rollout_k3`` mean(r − 1 − d), never negative. An objective adds its own shares and means.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping

import torch
from jaxtyping import Float32, Float64, Int64, Shaped
from torch import Tensor

from algorithms.metrics import (
    BINS_PER_E_FOLD,
    LOG_RATIO_BINS,
    LOG_RATIO_UNIT,
    EffectiveShare,
    LogRatioQuantile,
    Max,
    Mean,
    Metric,
    Metrics,
)
from algorithms.packed import indicator
from algorithms.types import LossInputs

QUANTILES = (0.01, 0.5, 0.99)


def log_ratio_histogram(d: Float32[Tensor, " tokens"]) -> Int64[Tensor, " bins"]:
    middle = LOG_RATIO_BINS // 2
    scaled = d.abs().div_(LOG_RATIO_UNIT).log1p_().mul_(BINS_PER_E_FOLD).copysign_(d).round_()
    bins = scaled.long().add_(middle).clamp_(0, LOG_RATIO_BINS - 1)
    if bins.device.type == "cpu":
        return torch.bincount(bins, minlength=LOG_RATIO_BINS)
    # On an accelerator bincount waits until it knows the largest bin.
    return bins.new_zeros(LOG_RATIO_BINS).scatter_add_(0, bins, torch.ones_like(bins))


class Tally:
    """Sums over the chunks of a micro-batch, brought to the host once, when somebody looks at the metrics."""

    def __init__(self, mismatch: bool = True) -> None:
        self._mismatch = mismatch
        self._names: tuple[str, ...] = ()
        self._sums: list[Float64[Tensor, " names"]] = []
        self._largest: list[Tensor] = []
        self._histograms: list[Tensor] = []

    def add(self, chunk: LossInputs, marks: Mapping[str, Shaped[Tensor, " tokens"]]) -> None:
        """``marks`` are of the objective: a mean of each over the trained tokens is logged (of bool, the share)."""
        on = indicator(chunk.weights)
        sums = {"count": on.sum()}
        if chunk.entropy is not None:
            marks = {**marks, "entropy": chunk.entropy.detach()}
        sums |= {name: on.dot(mark.to(on.dtype)) for name, mark in marks.items()}
        if self._mismatch:
            d = (chunk.logprobs.detach() - chunk.rollout_logprobs).mul_(on).clamp_(-20, 20)
            sums |= self._mismatch_sums(d, on, sums["count"])
        self._names = tuple(sums)
        self._sums.append(torch.stack(list(sums.values())).double())

    def metrics(self) -> Metrics:
        return _Unread(self._read)

    def _read(self) -> dict[str, Metric]:
        if not self._sums:
            return {}
        pieces = [torch.stack(self._sums).sum(0)]
        if self._mismatch:
            pieces += [torch.stack(self._largest).max()[None].double(), torch.stack(self._histograms).sum(0).double()]
        numbers = torch.cat(pieces).tolist()
        sums = dict(zip(self._names, numbers[: len(self._names)], strict=True))
        count, r, r2 = sums.pop("count"), sums.pop("r", 0.0), sums.pop("r2", 0.0)
        metrics: dict[str, Metric] = {name: Mean(total, count) for name, total in sums.items()}
        if self._mismatch:
            largest, *counts = numbers[len(self._names) :]
            metrics["ratio/effective_share"] = EffectiveShare(count, r, r2)
            metrics["ratio/max"] = Max(largest if count else None)
            bins = tuple(int(x) for x in counts)
            metrics |= {f"ratio/p{round(100 * q):02d}": LogRatioQuantile(q, bins) for q in QUANTILES}
        return metrics

    def _mismatch_sums(
        self, d: Float32[Tensor, " tokens"], on: Float32[Tensor, " tokens"], count: Float32[Tensor, ""]
    ) -> dict[str, Tensor]:
        """``d`` is 0 where ``on`` is."""
        r = d.exp().mul_(on)
        self._largest.append(r.max())
        histogram = log_ratio_histogram(d)
        histogram[LOG_RATIO_BINS // 2] -= (len(on) - count).long()
        self._histograms.append(histogram)
        return {
            "kl/rollout_k1": -d.sum(),
            "kl/rollout_k3": (r - on).sub_(d).sum(),
            "r": r.sum(),
            "r2": r.dot(r),
        }


class _Unread(Mapping[str, Metric]):
    """Metrics whose numbers are still on the device: they are fetched once, when somebody first looks."""

    def __init__(self, read: Callable[[], dict[str, Metric]]) -> None:
        self._fetch = read

    @functools.cached_property
    def _metrics(self) -> dict[str, Metric]:
        return self._fetch()

    def __getitem__(self, name: str) -> Metric:
        return self._metrics[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._metrics)

    def __len__(self) -> int:
        return len(self._metrics)
