"""Steady-state decoding of long outputs at growing concurrency: requests are added, none ends, prompts are not counted.

Every request has a prompt of its own, so no cache helps. A point is measured once all requests (or all that the server
admits) decode. The localities are switched while the requests run; only the indexers' heads' weights change.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.engine import observe
from benchmarks.engine.servers import Server
from benchmarks.engine.streams import Client, Stream, inter_token_latency, passed, quantile, settled, throughput

OBSERVATION_S = 6.0
"""A dozen steps take less than one."""

Emit = Callable[[dict[str, Any]], None]


@dataclass(frozen=True)
class SteadyPlan:
    prompt_tokens: int
    concurrency: Sequence[int]
    """Increasing."""
    locality: float
    """While the concurrency grows; the server has it loaded."""
    then: Mapping[float, Path]
    """Further localities at the highest concurrency, and the directories of their weights."""
    vocabulary: int
    max_new_tokens: int = 8192
    settle_s: float = 1.0
    window_s: float = 4.0
    patience_s: float = 3.0
    timeout_s: float = 240.0
    ignore_eos: bool = False
    observed: bool = True
    """Whether the server's observer is asked for hits and locality."""


async def steady(server: Server, plan: SteadyPlan, emit: Emit, seed: int = 0) -> list[dict[str, Any]]:
    """Points in order; each is handed to ``emit`` when it is there."""
    numbers, points = random.Random(seed), []
    streams: list[Stream] = []
    tasks: list[asyncio.Task[None]] = []

    async def point(locality: float, expected: int) -> int:
        begin = time.monotonic()
        running = await settled(streams, expected, plan.patience_s, plan.timeout_s)
        wait = time.monotonic() - begin
        found = {"section": "steady", "side": server.side, "concurrency": expected, "locality_asked": locality}
        found |= await measure(server, streams, plan) | {"prefill_s": wait}
        points.append(found)
        emit(found)
        return running

    async with Client(server.url) as client:
        try:
            for count in plan.concurrency:
                while len(streams) < count:
                    stream = Stream(time.monotonic())
                    prompt = numbers.choices(range(2, plan.vocabulary), k=plan.prompt_tokens)
                    request = client.generate(stream, prompt, plan.max_new_tokens, plan.ignore_eos)
                    streams.append(stream)
                    tasks.append(asyncio.create_task(request))
                if await point(plan.locality, count) < count:
                    break  # its KV is full: more requests wait
            for locality, directory in plan.then.items():
                await asyncio.to_thread(server.load_weights, directory, True)
                await point(locality, len(streams))
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await asyncio.to_thread(server.post, "/abort_request", {"abort_all": True}, 30.0)
    return points


async def measure(server: Server, streams: Sequence[Stream], plan: SteadyPlan) -> dict[str, Any]:
    """One point, of the requests that decode now."""
    await asyncio.sleep(plan.settle_s)
    seen = await asyncio.to_thread(_observation, server) if plan.observed else None
    running = [stream for stream in streams if stream.events]
    begin = time.monotonic()
    await asyncio.sleep(plan.window_s)
    end = time.monotonic()
    await passed(running, end)
    rate = throughput(running, begin, end)
    itl = inter_token_latency(running, begin, end, 0.9)
    return {
        "running": len(running),
        "context": sum(s.prompt_tokens + s.tokens_at(begin) for s in running) / len(running),
        "tokens_per_s": rate,
        "step_ms": 1e3 * len(running) / rate if rate else None,
        "itl_p90_ms": None if itl is None else 1e3 * itl,
        "ttft_p90_s": quantile([s.ttft for s in running if s.ttft is not None], 0.9),
        "waiting": len(streams) - len(running),
        "ended": sum(stream.ended for stream in running),
        "observed": seen,
    }


def _observation(server: Server) -> dict[str, Any] | None:
    if server.side != "hisparse" or observe.pools(server.folder) is None:  # nobody observes
        return None
    observe.ask(server.folder)
    return observe.answer(server.folder, OBSERVATION_S)
