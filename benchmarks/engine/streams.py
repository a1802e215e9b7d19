"""Streamed requests to a server, with the time of every token, and what follows from the times."""

from __future__ import annotations

import asyncio
import itertools
import json
import math
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from rollout.http_pool import pool

TIMEOUT_S = 900.0


@dataclass
class Stream:
    """One request. An event carries several tokens; their times are that event's."""

    begin: float
    events: list[tuple[float, int]] = field(default_factory=list)
    """When, and tokens generated until then."""
    output_ids: list[int] = field(default_factory=list)
    prompt_tokens: int = 0
    cached: dict[str, int] = field(default_factory=dict)
    """Tokens of the prompt found in a cache, by tier."""
    ended: bool = False
    error: str | None = None

    @property
    def ttft(self) -> float | None:
        return self.events[0][0] - self.begin if self.events else None

    def tokens_at(self, when: float) -> float:
        """Tokens generated until ``when``; between two events as if evenly spread."""
        before = (self.begin, 0)
        for event in self.events:
            if event[0] > when:
                share = (when - before[0]) / (event[0] - before[0])
                # Until the first event nothing was generated: the prompt was queued or read.
                return before[1] + share * (event[1] - before[1]) if before[1] else 0.0
            before = event
        return before[1]

    def gaps(self, begin: float, end: float) -> list[tuple[float, int]]:
        """(Seconds a token, tokens) of the events after another one within the time."""
        pairs = itertools.pairwise(self.events)
        return [
            ((later[0] - earlier[0]) / (later[1] - earlier[1]), later[1] - earlier[1])
            for earlier, later in pairs
            if begin <= earlier[0] and later[0] <= end and later[1] > earlier[1]
        ]


class Client:
    """Streams from one server; use it as an asynchronous context manager."""

    def __init__(self, url: str) -> None:
        self.url = url
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Client:
        self._session = aiohttp.ClientSession(
            connector=pool(), timeout=aiohttp.ClientTimeout(total=TIMEOUT_S), read_bufsize=2**20
        )
        return self

    async def __aexit__(self, *error: object) -> None:
        if self._session is not None:
            await self._session.close()

    async def generate(self, stream: Stream, input_ids: Sequence[int], max_new_tokens: int, ignore_eos: bool) -> None:
        """Fill ``stream`` until the request ends; an error is kept in it, a cancellation ends the request."""
        assert self._session is not None
        sampling = {"max_new_tokens": max_new_tokens, "temperature": 1.0, "ignore_eos": ignore_eos}
        body = {"input_ids": list(input_ids), "sampling_params": sampling, "stream": True}
        stream.prompt_tokens = len(input_ids)
        try:
            async with self._session.post(f"{self.url}/generate", json=body) as response:
                if response.status != 200:
                    stream.error = f"{response.status}: {(await response.text())[:300]}"
                    return
                async for line in response.content:
                    if line.startswith(b"data:") and not line.startswith(b"data: [DONE]"):
                        _take(stream, json.loads(line[5:]))
        except (aiohttp.ClientError, TimeoutError, ValueError) as error:
            stream.error = f"{type(error).__name__}: {error}"
        finally:
            stream.ended = True


def _take(stream: Stream, event: dict[str, Any]) -> None:
    if "error" in event:
        stream.error = str(event["error"])
        return
    meta = event["meta_info"]
    stream.output_ids += event.get("output_ids", [])
    if meta["completion_tokens"]:
        stream.events.append((time.monotonic(), meta["completion_tokens"]))
    details = meta.get("cached_tokens_details")
    tiers = details if isinstance(details, dict) else {"device": meta.get("cached_tokens", 0)}
    stream.cached = {tier: int(count) for tier, count in tiers.items() if isinstance(count, int)}


def throughput(streams: Iterable[Stream], begin: float, end: float) -> float:
    """Tokens a second."""
    return sum(stream.tokens_at(end) - stream.tokens_at(begin) for stream in streams) / (end - begin)


def quantile(values: Sequence[float], share: float, weights: Sequence[int] | None = None) -> float | None:
    """The smallest value that at least ``share`` of the values are not above; None where there are none."""
    if not values:
        return None
    pairs = sorted(zip(values, weights or [1] * len(values), strict=True))
    needed, seen = share * sum(weight for _, weight in pairs), 0
    for value, weight in pairs:
        seen += weight
        if seen >= needed - 1e-9:
            return value
    raise AssertionError("the weights' sum is reached at the last value")


def inter_token_latency(streams: Iterable[Stream], begin: float, end: float, share: float) -> float | None:
    """Quantile of the seconds between tokens, each token counted once."""
    gaps = [gap for stream in streams for gap in stream.gaps(begin, end)]
    return quantile([gap for gap, _ in gaps], share, [count for _, count in gaps])


async def passed(running: Sequence[Stream], end: float, timeout_s: float = 3.0) -> None:
    """Wait for an event of each after ``end``: until then the tokens before ``end`` are not all known."""
    while time.monotonic() < end + timeout_s:
        if all(stream.ended or stream.events[-1][0] >= end for stream in running):
            return
        await asyncio.sleep(0.02)


async def settled(streams: Sequence[Stream], expected: int, patience_s: float, timeout_s: float) -> int:
    """Wait until ``expected`` requests produce tokens, or all that the server admits at once; returns how many.

    Admission is taken to be over once for ``patience_s`` no request has started while all started ones produced.

    Raises:
        TimeoutError: prompts are still being read.
        RuntimeError: a request failed.
    """
    deadline = time.monotonic() + timeout_s
    started, since, counts = -1, math.inf, [0]
    while True:
        for stream in streams:
            if stream.error:
                raise RuntimeError(f"a request failed: {stream.error}")
        now = time.monotonic()
        running = [stream for stream in streams if stream.events]
        if len(running) >= expected:
            return len(running)
        before, counts = counts, [stream.events[-1][1] for stream in running]
        moving = len(before) == len(counts) and sum(counts) > sum(before)
        if len(running) != started or not moving:
            started, since = len(running), now
        if started and now - since > patience_s:
            return started
        if now > deadline:
            raise TimeoutError(f"{started} of {expected} requests decode after {timeout_s:g} s")
        await asyncio.sleep(min(1.0, patience_s / 2))
