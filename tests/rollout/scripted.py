"""An engine without a model, for tests of scheduling, the token record and faults."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np

from rl.fresh_model import character_tokenizer
from rollout.chat import ChatRenderer
from rollout.engine.protocol import (
    CachedTokens,
    EngineError,
    EngineLost,
    EngineMetrics,
    FinishReason,
    Generation,
    Latency,
    Sampling,
    TopLogprobs,
)
from rollout.engine.recovery import Phase

TOKENIZER = character_tokenizer(256)
EOS = TOKENIZER.eos_token_id


def renderer() -> ChatRenderer:
    return ChatRenderer(TOKENIZER)


class ScriptedEngines:
    """Answers with ``reply(prompt text)``; log-prob of a token is -token/100, so that records can be checked."""

    def __init__(self, reply: Callable[[str], str], version: int = 0, delay_s: float = 0.0) -> None:
        self.reply = reply
        self.version = version
        self.delay_s = delay_s
        self.cut_first: int | None = None
        """Abort the next generation after so many tokens."""
        self.die_after: list[int] = []
        """Die after so many tokens of the next generations, in turn."""
        self.dying: Iterator[str] = itertools.repeat("both")
        """Roles of those that die."""
        self.broken = False
        self.calls: list[tuple[list[int], Sampling, str]] = []
        self.aborted: list[str] = []
        self.ended: list[str] = []

    async def generate(self, token_ids: Sequence[int], sampling: Sampling, request_id: str, session: str) -> Generation:
        self.calls.append((list(token_ids), sampling, request_id))
        await asyncio.sleep(self.delay_s)
        if self.broken:
            raise EngineError("http://engine died")
        text = TOKENIZER.decode(token_ids)
        prefix, _, partial = text.rpartition("<assistant>")
        full = [*TOKENIZER.encode(self.reply(prefix + "<assistant>"), add_special_tokens=False), EOS]
        ids = full[len(TOKENIZER.encode(partial, add_special_tokens=False)) :]
        finish = FinishReason.STOP
        if self.cut_first is not None:
            ids, self.cut_first, finish = ids[: self.cut_first], None, FinishReason.ABORT
            self.version += 1
            version = self.version - 1
        else:
            version = self.version
        if len(ids) > sampling.max_new_tokens:
            ids, finish = ids[: sampling.max_new_tokens], FinishReason.LENGTH
        if self.die_after:
            ids = ids[: self.die_after.pop(0)]
            had = _generation(ids, version, FinishReason.ABORT, token_ids, sampling)
            raise EngineLost("http://engine died", had, next(self.dying))
        return _generation(ids, version, finish, token_ids, sampling)

    async def abort(self, request_ids: Sequence[str]) -> None:
        self.aborted += request_ids

    def end_session(self, session: str) -> None:
        self.ended.append(session)

    async def metrics(self) -> Mapping[str, EngineMetrics]:
        return {"engine-0": EngineMetrics(running=3, waiting=1, kv_used_share=0.5, tokens_per_second=80.0)}

    def states(self) -> Mapping[str, tuple[Phase, int]]:
        return {"engine-0": (Phase.SERVING, 2)}


def _generation(
    ids: Sequence[int], version: int, finish: FinishReason, prompt: Sequence[int], sampling: Sampling
) -> Generation:
    tokens = np.asarray(ids, dtype=np.int32)
    experts = None
    if sampling.routed_experts_from is not None:  # the expert of a position is the token there
        positions = [*prompt, *ids][sampling.routed_experts_from : -1]
        experts = np.asarray(positions, np.int32)[:, None, None]
    logprobs = (-tokens / 100).astype(np.float32)
    top = None
    if sampling.top_logprobs:  # the likeliest are the token, the next one, ...
        likeliest = tokens[:, None] + np.arange(sampling.top_logprobs, dtype=np.int32)
        top = TopLogprobs(likeliest, (-likeliest / 100).astype(np.float32))
    versions = np.full(len(ids), version, np.int32)
    return Generation(
        tokens,
        logprobs,
        versions,
        finish,
        len(prompt),
        cached=CachedTokens(1, 2),
        latency=Latency(0.25, 0.5),
        top_logprobs=top,
        routed_experts=experts,
    )
