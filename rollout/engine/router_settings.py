"""Settings of ``sglang-router`` in front of an engine's servers, and its command line; for sglang-router 0.3.2.

It stands for ``routing.Router``: which server a request goes to is its choice. What concerns one server (weights,
health, sleep, aborts) goes to that server directly. What it can't do, as seen with 0.3.2:

- It reads a request into its own fields and sends only those on. ``return_routed_experts`` and
  ``sampling_params.stream_interval`` are none of them: the first is refused here, the second is said to the servers
  when they are launched.
- It does not say which server a request went to, and does not pass aborts on: they go to every server, each of which
  ignores what it does not know.
- It pairs prefill and decode servers in a mode of its own, which would replace our requests' rendezvous: refused.
"""

from __future__ import annotations

import importlib.util
import math
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Literal

from pydantic import Field

from rollout.engine.settings import Argument, Settings, flags

if TYPE_CHECKING:
    from rollout.engine.config import EngineConfig

PACKAGE = "sglang_router"
SESSION_HEADER = "X-SMG-Routing-Key"
"""Requests with the same value go to the same server, with ``policy=manual``."""
LATER_S = 10.0
"""By which the router gives a request up later than we do, so that ours is the error that is told."""


class SGLangRouterConfig(Settings):
    policy: Literal["cache_aware", "manual"] = "cache_aware"
    """cache_aware: where most of the prompt's beginning has been, or, where that is less than ``cache_threshold`` of it
    or the load is uneven, where there is least to do. manual: a session stays where its first request went, the server
    with the fewest requests."""
    cache_threshold: float = Field(0.3, ge=0, le=1)
    """Share of the prompt. After a reply much longer than all before it a session keeps its server only with less."""
    balance_abs_threshold: int = Field(64, ge=0)
    """The load is uneven where one server has so many requests more than another, and also:"""
    balance_rel_threshold: float = Field(1.5, ge=1)
    """so many times as many."""
    port: int | None = Field(None, gt=0, le=65_535)
    """None takes a free one."""
    start_timeout_s: float = Field(120.0, gt=0)


def problems(config: EngineConfig) -> Iterator[str]:
    """What can't work with the router, each beginning with a key below ``engine``."""
    if config.disaggregation is not None:
        yield (
            "sglang_router does not pair our prefill and decode servers: set sglang_router or disaggregation to null"
        )
    if config.routed_experts:
        yield (
            "routed_experts=true, but sglang_router drops the request's return_routed_experts (seen with 0.3.2): set "
            "routed_experts to false, or sglang_router to null"
        )
    own = config.sglang_router.port if config.sglang_router is not None else None
    if own is not None and config.port is not None and 0 <= own - config.port < config.servers:
        yield f"sglang_router.port={own} is among the servers' own, from port={config.port} on: move either"


def missing() -> str | None:
    """What has to be installed; None where the router can be started."""
    if importlib.util.find_spec(PACKAGE) is not None:
        return None
    return f"engine.sglang_router needs the package {PACKAGE}: pip install sglang-router==0.3.2, or set it to null"


def command(config: EngineConfig, settings: SGLangRouterConfig, port: int, metrics_port: int) -> list[str]:
    """Command line of a router that has no workers yet and leaves health, retries and circuit breaking to the fleet."""
    options: dict[str, Argument] = {
        "host": "127.0.0.1",
        "port": port,
        "prometheus-host": "127.0.0.1",
        "prometheus-port": metrics_port,
        "policy": settings.policy,
        "assignment-mode": "min_load",
        "cache-threshold": settings.cache_threshold,
        "balance-abs-threshold": settings.balance_abs_threshold,
        "balance-rel-threshold": settings.balance_rel_threshold,
        "request-timeout-secs": math.ceil(config.request_timeout_s + LATER_S),
        "worker-startup-timeout-secs": math.ceil(config.control_timeout_s),
        "worker-startup-check-interval": 1,
        "disable-retries": True,  # a request that was sampled half and sent again would be sampled twice
        "disable-circuit-breaker": True,
        "disable-health-check": True,
        "log-level": "warn",
    }
    return [sys.executable, "-m", f"{PACKAGE}.launch_router", *flags(options)]
