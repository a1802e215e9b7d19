"""Any server with OpenAI's completions API that takes and returns token ids, as a frozen engine: for evaluation, judges
and teachers. It can't be published to.

Asked for as vLLM and SGLang (0.5.23) spell it: ``prompt`` as ids, ``return_token_ids``, ``logprobs``; prompt log-probs
by ``echo``. What a server lacks of that, ``rollout.engine.conformance`` finds out.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Float32

from rollout.engine.protocol import (
    CachedTokens,
    EngineError,
    EngineMetrics,
    FinishReason,
    Generation,
    Latency,
    Sampling,
)
from rollout.engine.sglang_http import Connection, Timeouts

FROZEN = 0
"""Weight version of all its tokens."""


class OpenAICompatibleEngine(Connection):
    """Implements ``rollout.engine.protocol.Engine``; ``pause`` and ``resume`` are refused.

    Args:
        url: up to and without ``/v1``.
        model: what its requests call the model.
        api_key: sent as a bearer token.
    """

    def __init__(self, url: str, model: str, timeouts: Timeouts | None = None, api_key: str | None = None) -> None:
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else None
        super().__init__(url.removesuffix("/").removesuffix("/v1"), timeouts, headers)
        self.model = model
        self._in_flight: dict[str, asyncio.Future[None]] = {}

    async def generate(self, token_ids: Sequence[int], sampling: Sampling, request_id: str) -> Generation:
        """Sample a continuation. One that is aborted has no tokens: they come with the end of the answer.

        Raises:
            EngineError: also where the answer lacks token ids or log-probs, which it names.
        """
        body = self._body(token_ids, sampling.max_new_tokens) | {
            "temperature": sampling.temperature,
            "top_p": 1.0,
            "logprobs": max(sampling.top_logprobs, 1),
            "return_token_ids": True,
        }
        if sampling.seed is not None:
            body["seed"] = sampling.seed
        aborted = self._in_flight[request_id] = asyncio.get_running_loop().create_future()
        sent = time.monotonic()
        call = asyncio.create_task(self._call("POST", "/v1/completions", body, self._timeouts.request_s))
        try:
            await asyncio.wait({call, aborted}, return_when=asyncio.FIRST_COMPLETED)
            if not call.done():
                return _nothing(len(token_ids))
            with self._answer_errors("/v1/completions"):
                return parse_completion(call.result(), len(token_ids), time.monotonic() - sent)
        finally:
            self._in_flight.pop(request_id, None)
            call.cancel()  # closes the connection, at which such servers abort
            await asyncio.gather(call, return_exceptions=True)

    async def score(self, token_ids: Sequence[int]) -> Float32[np.ndarray, " tokens"]:
        """Log-prob of each token given those before it, at temperature 1; position 0 is 0."""
        body = self._body(token_ids, 1) | {"temperature": 1.0, "logprobs": 1, "echo": True}
        answer = await self._call("POST", "/v1/completions", body, self._timeouts.request_s)
        with self._answer_errors("/v1/completions"):
            logprobs = answer["choices"][0]["logprobs"]["token_logprobs"][: len(token_ids)]
            if len(logprobs) < len(token_ids):
                raise ValueError(f"{len(logprobs)} log-probs for {len(token_ids)} tokens of the prompt")
            return np.array([0.0, *logprobs[1:]], np.float32)

    async def abort(self, request_ids: Sequence[str]) -> None:
        """End these requests; ids that are not in flight are ignored."""
        for request_id in request_ids:
            aborted = self._in_flight.get(request_id)
            if aborted is not None and not aborted.done():
                aborted.set_result(None)

    async def pause(self) -> None:
        """Refused: nothing is published to it."""
        raise EngineError(f"{self.url} is a frozen engine, which can't be paused")

    async def resume(self) -> None:
        """Refused, as ``pause``."""
        raise EngineError(f"{self.url} is a frozen engine, which was never paused")

    async def health(self) -> bool:
        """True where it lists its models."""
        return await self._answers("/v1/models")

    async def metrics(self) -> EngineMetrics:
        """Refused: the API has none."""
        raise EngineError(f"{self.url}: OpenAI's API has no metrics")

    async def models(self) -> list[str]:
        """Names of the models that it serves."""
        answer = await self._call("GET", "/v1/models", None, self._timeouts.control_s)
        with self._answer_errors("/v1/models"):
            return [str(model["id"]) for model in answer["data"]]

    def _body(self, token_ids: Sequence[int], max_tokens: int) -> dict[str, Any]:
        return {"model": self.model, "prompt": [int(token) for token in token_ids], "max_tokens": max_tokens}


def parse_completion(answer: Mapping[str, Any], prompt_tokens: int, seconds: float) -> Generation:
    """Answer of ``/v1/completions``. Pure.

    Raises:
        ValueError: naming what it lacks.
    """
    choice = answer["choices"][0]
    ids = choice.get("token_ids")
    if ids is None:
        raise ValueError("no token ids of what was generated (return_token_ids is not known to it)")
    reported = (choice.get("logprobs") or {}).get("token_logprobs")
    if reported is None:
        raise ValueError("no log-probs of what was generated")
    if len(reported) != len(ids):
        raise ValueError(f"{len(reported)} log-probs for {len(ids)} tokens")
    if choice["finish_reason"] not in set(FinishReason):
        raise ValueError(f"finish_reason {choice['finish_reason']!r}, not one of {[*map(str, FinishReason)]}")
    details = (answer.get("usage") or {}).get("prompt_tokens_details") or {}
    return Generation(
        token_ids=np.array(ids, np.int32),
        logprobs=np.array(reported, np.float32),
        weight_versions=np.full(len(ids), FROZEN, np.int32),
        finish_reason=FinishReason(choice["finish_reason"]),
        prompt_tokens=prompt_tokens,
        cached=CachedTokens(hbm=int(details.get("cached_tokens") or 0)),
        latency=Latency(seconds, seconds),
    )


def _nothing(prompt_tokens: int) -> Generation:
    none = np.zeros(0, np.int32)
    return Generation(none, np.zeros(0, np.float32), none, FinishReason.ABORT, prompt_tokens)
