"""Whether a server can stand in for an engine: what of OpenAI's completions API it has that training needs.

Each check asks the server for one thing and says what it saw. What uses of it need which:

    evaluation, judges      ids in, ids out
    frozen reference        ids in, ids out, log-probs, log-probs at the sampling temperature
    teacher                 ids in, prompt log-probs, accuracy
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

import numpy as np

from rollout.engine.openai_compatible import OpenAICompatibleEngine
from rollout.engine.protocol import EngineError, FinishReason, Generation, Sampling

TOLERANCE = 0.05
"""Largest difference of a token's log-prob, generated and scored: what bf16 kernels with other batch shapes make."""
NEW_TOKENS = 16
ABORT_AFTER_S = 0.5
ANSWERS_WITHIN_S = 30.0


@dataclass(frozen=True)
class Check:
    name: str
    passed: bool
    seen: str


class Conformance:
    """Checks one server. ``prompt`` must be ids of its vocabulary."""

    def __init__(self, engine: OpenAICompatibleEngine, prompt: Sequence[int]) -> None:
        self._engine = engine
        self._prompt = list(prompt)
        self._requests = 0

    async def run(self) -> list[Check]:
        """All checks, in an order in which later ones build on earlier ones."""
        checks: list[tuple[str, Callable[[], Awaitable[str]]]] = [
            ("token ids in and out, with log-probs", self._ids_and_logprobs),
            ("prompt log-probs", self._prompt_logprobs),
            ("log-probs agree when generated and when scored", self._accuracy),
            ("log-probs are at the sampling temperature", self._temperature),
            ("greedy is repeatable", self._greedy),
            ("a seed makes sampling repeatable", self._seed),
            ("the length limit is kept and said", self._length),
            ("it answers on after a request was cut off", self._abort),
        ]
        done = []
        for name, check in checks:
            try:
                done.append(Check(name, True, await check()))
            except EngineError as error:
                done.append(Check(name, False, str(error)))
        return done

    async def _generate(self, temperature: float, tokens: int = NEW_TOKENS, seed: int | None = None) -> Generation:
        self._requests += 1
        return await self._engine.generate(
            self._prompt, Sampling(temperature, tokens, seed), f"conformance-{self._requests}"
        )

    async def _ids_and_logprobs(self) -> str:
        generation = await self._generate(1.0)
        if (generation.logprobs > 0).any() or not np.isfinite(generation.logprobs).all():
            raise EngineError(f"log-probs above 0 or not finite: {generation.logprobs.tolist()}")
        return f"{len(generation.token_ids)} tokens"

    async def _prompt_logprobs(self) -> str:
        scored = await self._engine.score(self._prompt)
        return f"{len(scored)} of {len(self._prompt)} tokens"

    async def _accuracy(self) -> str:
        generation = await self._generate(1.0)
        scored = await self._scored(generation)
        largest = float(np.abs(scored - generation.logprobs).max())
        if largest > TOLERANCE:
            raise EngineError(f"they differ by up to {largest:.3g}, more than {TOLERANCE:g}")
        return f"differ by at most {largest:.2g} over {len(scored)} tokens"

    async def _temperature(self) -> str:
        """Where temperature is left out of the log-probs, they are those of scoring, which is at temperature 1."""
        generation = await self._generate(0.5)
        apart = float(np.abs(await self._scored(generation) - generation.logprobs).max())
        if apart <= TOLERANCE:
            raise EngineError(
                f"at temperature 0.5 they are within {apart:.2g} of those at 1: sample at temperature 1 only"
            )
        return f"at temperature 0.5 up to {apart:.2g} from those at temperature 1"

    async def _scored(self, generation: Generation) -> np.ndarray:
        return (await self._engine.score([*self._prompt, *generation.token_ids.tolist()]))[len(self._prompt) :]

    async def _greedy(self) -> str:
        return _same(await self._generate(0.0), await self._generate(0.0))

    async def _seed(self) -> str:
        return _same(await self._generate(1.0, seed=7), await self._generate(1.0, seed=7))

    async def _length(self) -> str:
        generation = await self._generate(1.0, tokens=2)
        if len(generation.token_ids) > 2:
            raise EngineError(f"{len(generation.token_ids)} tokens for max_tokens=2")
        if len(generation.token_ids) == 2 and generation.finish_reason is FinishReason.ABORT:
            raise EngineError("it says abort where the limit was reached")
        return f"{len(generation.token_ids)} tokens, {generation.finish_reason}"

    async def _abort(self) -> str:
        self._requests += 1
        name = f"conformance-{self._requests}"
        long = asyncio.create_task(self._engine.generate(self._prompt, Sampling(1.0, 100_000), name))
        await asyncio.sleep(ABORT_AFTER_S)
        await self._engine.abort([name])
        try:
            cut = str((await long).finish_reason)
        except EngineError as error:  # some refuse more tokens than their context holds
            cut = f"refused ({error})"
        try:
            async with asyncio.timeout(ANSWERS_WITHIN_S):
                await self._generate(1.0, tokens=1)
        except TimeoutError as error:
            raise EngineError(f"no answer within {ANSWERS_WITHIN_S:g} s after a request was cut off") from error
        return f"the long request ended with: {cut[:80]}"


def _same(first: Generation, second: Generation) -> str:
    a, b = first.token_ids.tolist(), second.token_ids.tolist()
    if a != b:
        common = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
        raise EngineError(f"two times the same request part after {common} of {len(a)} tokens")
    return f"{len(a)} tokens twice"
