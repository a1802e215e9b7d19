"""What the gateway saw of the engines: counters, and latencies as its clients feel them; for W&B and for Prometheus."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from rollout.engine.protocol import EngineMetrics, Generation
from rollout.engine.recovery import Phase

TTFT_BUCKETS = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0)
INTER_TOKEN_BUCKETS = (0.001, 0.003, 0.01, 0.02, 0.03, 0.05, 0.1, 0.3, 1.0)
KEPT = 100_000
"""Latencies between two readings; more are left out of the percentiles, not of the histograms."""


@dataclass
class GatewayStats:
    """Counters since the start."""

    turns: int = 0
    sampled_tokens: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    """Prompt tokens that the engines' prefix caches spared."""
    cached_host_tokens: int = 0
    """Of these, those that came from host memory or storage."""
    resumptions: int = 0
    """Replies that the engine aborted, sent again by prefix."""
    lost: int = 0
    """Replies whose engine died, sent again to another by prefix."""
    errors: int = 0
    """Requests that an engine failed."""


class Telemetry:
    """One gateway's."""

    def __init__(self) -> None:
        self.stats = GatewayStats()
        self._ttft: list[float] = []
        self._inter_token: list[float] = []
        self._registry = CollectorRegistry()
        self._ttft_histogram = Histogram(
            "atelier_time_to_first_token_seconds", "", buckets=TTFT_BUCKETS, registry=self._registry
        )
        self._inter_token_histogram = Histogram(
            "atelier_inter_token_seconds",
            "Mean of a generation's tokens after its first",
            buckets=INTER_TOKEN_BUCKETS,
            registry=self._registry,
        )

    def generated(self, generation: Generation) -> None:
        """One engine's answer, whole or partial."""
        stats, new = self.stats, len(generation.token_ids)
        stats.sampled_tokens += new
        stats.prompt_tokens += generation.prompt_tokens
        stats.cached_tokens += generation.cached.total
        stats.cached_host_tokens += generation.cached.host + generation.cached.storage
        if generation.latency is None:
            return
        first, total = generation.latency.first_token_s, generation.latency.total_s
        self._ttft_histogram.observe(first)
        _keep(self._ttft, first)
        if new > 1:
            each = (total - first) / (new - 1)
            self._inter_token_histogram.observe(each)
            _keep(self._inter_token, each)

    def latencies(self) -> dict[str, float]:
        """Seconds, of what was generated since the last call."""
        figures: dict[str, float] = {}
        for name, values in (("ttft", self._ttft), ("inter_token", self._inter_token)):
            if values:
                figures |= {f"{name}_mean": float(np.mean(values)), f"{name}_p90": float(np.quantile(values, 0.9))}
            values.clear()
        return figures

    def prometheus(
        self, sessions: int, engines: Mapping[str, EngineMetrics], states: Mapping[str, tuple[Phase, int]]
    ) -> bytes:
        """The text that Prometheus scrapes: the gateway's own figures, and each engine's."""
        now = CollectorRegistry()
        Gauge("atelier_sessions", "Open sessions", registry=now).set(sessions)
        for name, value in vars(self.stats).items():
            Counter(f"atelier_{name}", "Since the start", registry=now).inc(value)
        values = {name: dict(_engine_values(metrics)) for name, metrics in engines.items()}
        for metric in sorted({metric for by in values.values() for metric in by}):
            gauge = Gauge(f"atelier_engine_{metric}", "", ["engine"], registry=now)
            for engine, by in values.items():
                if metric in by:
                    gauge.labels(engine).set(by[metric])
        serving = Gauge("atelier_engine_serving", "1 where it takes requests", ["engine", "phase"], registry=now)
        restarts = Gauge("atelier_engine_restarts", "In a row", ["engine"], registry=now)
        for engine, (phase, times) in states.items():
            serving.labels(engine, phase.value).set(float(phase is Phase.SERVING))
            restarts.labels(engine).set(times)
        return generate_latest(self._registry) + generate_latest(now)


def engine_figures(engines: Mapping[str, EngineMetrics]) -> dict[str, float]:
    """Over all engines: requests and tokens a second added up, shares of the mean engine, and of the fullest pool."""
    by: dict[str, list[float]] = {}
    for metrics in engines.values():
        for name, value in _engine_values(metrics):
            by.setdefault(name, []).append(value)
    summed = ("running", "waiting", "tokens_per_second")
    figures = {name: sum(v) if name in summed else sum(v) / len(v) for name, v in by.items()}
    if "kv_used_share" in by:
        figures["kv_used_share_max"] = max(by["kv_used_share"])
    return figures | {"serving": float(len(engines))}


def _engine_values(metrics: EngineMetrics) -> Iterable[tuple[str, float]]:
    for name, value in vars(metrics).items():
        if name != "raw" and value is not None:
            yield name, float(value)


def _keep(values: list[float], value: float) -> None:
    if len(values) < KEPT:
        values.append(value)
