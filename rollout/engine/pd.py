"""Requests to prefill and decode servers apart, as SGLang pairs them.

Both servers get the same request. It names the prefill server's bootstrap address, where the decode server asks for the
KV cache, and a room, by which the two find each other. The prefill server samples the first token and answers once the
decode server has the KV cache; the decode server answers with all of them. Neither notices by itself that the other has
given a request up (the decode server waits five minutes for a KV cache that does not come), so whoever sent both ends
both. (Read in SGLang 0.5.23's ``disaggregation`` and in sglang-router 0.3.2's ``mini_lb``; seen on a CPU with mooncake
over TCP.)
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, replace
from typing import Any
from urllib.parse import urlsplit

from rollout.engine.protocol import EngineError, FinishReason, Generation, Sampling
from rollout.engine.sglang import SGLangEngine

ROOMS = 2**63 - 1
PREFILL_ANSWER_S = 1.0
"""How long the prefill server's answer may come after the decode server's. Cut off before, it would be aborted while it
still lets go of the KV cache that it has sent."""


@dataclass(frozen=True)
class Rendezvous:
    """Where the two servers of one request meet."""

    host: str
    port: int
    room: int

    def fields(self) -> dict[str, Any]:
        """Of the request to either."""
        return {"bootstrap_host": self.host, "bootstrap_port": self.port, "bootstrap_room": self.room}


NOWHERE = Rendezvous("2.2.2.2", 0, 0)
"""SGLang's own name for where no decode server is: a prefill server answers without having sent the KV cache."""


def rendezvous(prefill_url: str, bootstrap_port: int, rng: random.Random) -> Rendezvous:
    """A new one; rooms are drawn so that two gateways do not meet in one."""
    host = urlsplit(prefill_url).hostname
    if host is None:
        raise ValueError(f"{prefill_url!r} names no host")
    return Rendezvous(host, bootstrap_port, rng.randrange(ROOMS))


def pairs(prefill: Sequence[int], decode: Sequence[int]) -> list[tuple[int, int]]:
    """Fewest pairs in which every server occurs; none where either kind is missing."""
    if not (prefill and decode):
        return []
    count = max(len(prefill), len(decode))
    return [(prefill[index % len(prefill)], decode[index % len(decode)]) for index in range(count)]


async def generate_apart(
    prefill: Coroutine[Any, Any, Generation], decode: Coroutine[Any, Any, Generation]
) -> Generation:
    """Send both requests; what the decode server generated. Where one of the two ends without what the other waits for,
    both end.

    Raises:
        EngineError: of the first that failed.
    """
    prefilling, decoding = asyncio.create_task(prefill), asyncio.create_task(decode)
    try:
        await asyncio.wait({prefilling, decoding}, return_when=asyncio.FIRST_COMPLETED)
        if not decoding.done():
            prefilled = prefilling.result()  # raises where it failed
            if prefilled.finish_reason is FinishReason.ABORT:
                return prefilled
        generation = await decoding
        if generation.finish_reason is not FinishReason.ABORT or generation.routed_experts is not None:
            await asyncio.wait({prefilling}, timeout=PREFILL_ANSWER_S)
        answered = prefilling.done() and prefilling.exception() is None
        return join_experts(prefilling.result() if answered else None, generation)
    finally:
        for task in (prefilling, decoding):
            task.cancel()
        await asyncio.gather(prefilling, decoding, return_exceptions=True)


def join_experts(prefilled: Generation | None, generation: Generation) -> Generation:
    """Routed experts of the prompt are known to the prefill server alone: in the decode server's answer their rows hold
    whatever was in that memory. Without the prefill server's answer there are none."""
    if generation.routed_experts is None:
        return generation
    if prefilled is None or prefilled.routed_experts is None:
        return replace(generation, routed_experts=None)
    rows = min(len(prefilled.routed_experts), len(generation.routed_experts))
    experts = generation.routed_experts.copy()
    experts[:rows] = prefilled.routed_experts[:rows]
    return replace(generation, routed_experts=experts)


@dataclass(frozen=True)
class Half:
    """A server that only prefills, or only decodes."""

    name: str
    engine: SGLangEngine
    log: str


async def hand_over(prefill: Half, decode: Half, meet: Callable[[], Rendezvous], timeout_s: float) -> None:
    """Have the two generate two tokens, of which one samples the first and the other the second. Either's own health
    check says nothing of how KV caches get from the one to the other; nor does a request that a publication aborts,
    after which another is sent (it waits until that server has been resumed).

    Raises:
        EngineError: they do not; names both and their logs.
    """
    prompt, sampling, name = [0], Sampling(temperature=0.0, max_new_tokens=2), f"start-{prefill.name}-{decode.name}"
    reason = FinishReason.ABORT
    try:
        async with asyncio.timeout(timeout_s):
            while reason is FinishReason.ABORT:
                meeting = meet().fields()
                generation = await generate_apart(
                    prefill.engine.generate(prompt, sampling, f"{name}.prefill", meeting),
                    decode.engine.generate(prompt, sampling, name, meeting),
                )
                reason = generation.finish_reason
    except (EngineError, TimeoutError) as error:
        raise EngineError(
            f"{prefill.name} could not hand a prompt's KV cache over to {decode.name}: "
            f"{error or f'it took more than {timeout_s:g} s'}; see {prefill.log} and {decode.log}"
        ) from error
