"""Multi-turn sessions: a context that grows by what the model says and what a tool answers, with pauses for the tool.

Without a prefix cache (HiSparse) every turn reads its whole context again. The first turns' contexts are drawn from the
whole range that a session goes through, and no cache can know them; so the time that is measured begins when each
session has had its first answer. Tokens, first-token times and cache hits are those of turns within it.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.engine.servers import Server
from benchmarks.engine.steady import Emit
from benchmarks.engine.streams import Client, Stream, inter_token_latency, passed, quantile, throughput


@dataclass(frozen=True)
class AgenticPlan:
    concurrency: Sequence[int]
    vocabulary: int
    first_tokens: int = 4096
    """Of system prompt and task."""
    tool_tokens: int = 1024
    turn_tokens: int = 256
    turns: int = 12
    pause_s: float = 1.0
    """Mean time of a tool; exponentially distributed."""
    warm_s: float = 45.0
    """The longest wait for every session's first answer."""
    window_s: float = 20.0
    ignore_eos: bool = False


async def agentic(server: Server, plan: AgenticPlan, emit: Emit, seed: int = 0) -> list[dict[str, Any]]:
    """Points in order of concurrency; each is handed to ``emit`` when it is there."""
    points = []
    for sessions in plan.concurrency:
        found = await _point(server, plan, sessions, seed)
        points.append(found)
        emit(found)
    return points


async def _point(server: Server, plan: AgenticPlan, sessions: int, seed: int) -> dict[str, Any]:
    streams: list[Stream] = []
    async with Client(server.url) as client:
        loops = [
            asyncio.create_task(_session(client, plan, random.Random(seed * 100_003 + index), streams))
            for index in range(sessions)
        ]
        created = time.monotonic()
        try:
            warm = await _answered(streams, sessions, created + plan.warm_s)
            begin = time.monotonic()
            await asyncio.sleep(plan.window_s)
            end = time.monotonic()
            await passed([stream for stream in streams if stream.events and not stream.ended], end)
        finally:
            for loop in loops:
                loop.cancel()
            ended = await asyncio.gather(*loops, return_exceptions=True)
            await asyncio.to_thread(server.post, "/abort_request", {"abort_all": True}, 30.0)
    failed = [error for error in ended if isinstance(error, Exception)]
    if failed:
        raise failed[0]
    return summary(server.side, sessions, streams, begin, end) | {"warm_s": begin - created, "warm_sessions": warm}


async def _answered(streams: Sequence[Stream], sessions: int, deadline: float) -> int:
    """Wait until the first turn of every session has a token; returns for how many it has."""
    while True:
        answered = sum(1 for stream in streams[:sessions] if stream.events or stream.ended)
        if answered == sessions or time.monotonic() > deadline:
            return answered
        await asyncio.sleep(0.05)


def summary(side: str, sessions: int, streams: Sequence[Stream], begin: float, end: float) -> dict[str, Any]:
    """A point; the cached share is by tier, of the prompts whose first token came within the time."""
    started = [s for s in streams if s.events and begin <= s.events[0][0] <= end]
    prompts = sum(stream.prompt_tokens for stream in started)
    cached = sum((Counter(stream.cached) for stream in started), Counter[str]())
    itl = inter_token_latency(streams, begin, end, 0.9)
    return {
        "section": "agentic",
        "side": side,
        "concurrency": sessions,
        "turns": len(started),
        "tokens_per_s": throughput(streams, begin, end),
        "prompt_tokens_per_s": prompts / (end - begin),
        "itl_p90_ms": None if itl is None else 1e3 * itl,
        "ttft_p90_s": quantile([s.ttft for s in started if s.ttft is not None], 0.9),
        "cached_share": {tier: count / prompts for tier, count in cached.items()} if prompts else {},
    }


async def _session(client: Client, plan: AgenticPlan, numbers: random.Random, streams: list[Stream]) -> None:
    """Sessions one after the other, the first one begun somewhere in the middle."""
    done = numbers.randrange(plan.turns)
    while True:
        grown = done * (plan.turn_tokens + plan.tool_tokens)
        context = numbers.choices(range(2, plan.vocabulary), k=plan.first_tokens + grown)
        for _ in range(done, plan.turns):
            stream = Stream(time.monotonic())
            streams.append(stream)
            await client.generate(stream, context, plan.turn_tokens, plan.ignore_eos)
            if stream.error:
                raise RuntimeError(f"a turn failed: {stream.error}")
            context = context + stream.output_ids + numbers.choices(range(2, plan.vocabulary), k=plan.tool_tokens)
            await asyncio.sleep(numbers.expovariate(1 / plan.pause_s))
        done = 0
