"""One SGLang server, spoken to over HTTP."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Float32

from rollout.engine.protocol import EngineLost, EngineMetrics, Generation, Sampling
from rollout.engine.sglang_answers import (
    STREAM_INTERVAL,
    GenerationStream,
    host_used_share,
    parse_loads,
    parse_prometheus,
)
from rollout.engine.sglang_http import Timeouts
from rollout.engine.sglang_weights import SGLangWeights

__all__ = ["SGLangEngine", "Timeouts"]

RID_END = "#"
"""Ends every request id on the wire: SGLang aborts all requests whose id *begins* with the one given."""


class SGLangEngine(SGLangWeights):
    """Implements ``rollout.engine.protocol.Engine``; what publishing weights calls is in ``SGLangWeights``.

    ``experts_shape``: layers and experts a token of a mixture model, to read routed experts.
    """

    def __init__(
        self, url: str, timeouts: Timeouts | None = None, experts_shape: tuple[int, int] = (0, 0), metrics: bool = False
    ) -> None:
        super().__init__(url, timeouts)
        self._experts_shape = experts_shape
        self._prometheus = metrics

    async def generate(
        self,
        token_ids: Sequence[int],
        sampling: Sampling,
        request_id: str,
        placement: Mapping[str, Any] | None = None,
    ) -> Generation:
        """Sample a continuation. ``request_id`` must be unique among the requests in flight.

        Args:
            placement: further fields of the request, such as where its prefix is computed (``rollout.engine.pd``).

        Raises:
            EngineLost: the server died meanwhile; with what had come by then.
        """
        stream = GenerationStream(len(token_ids), sampling.routed_experts_from, self._experts_shape)
        body = generate_body(token_ids, sampling, request_id) | dict(placement or {})
        await self.until_open()
        with self._answer_errors("/generate"):
            return await receive(self._events("/generate", body, self._timeouts.request_s), stream)

    async def score(
        self, token_ids: Sequence[int], placement: Mapping[str, Any] | None = None
    ) -> Float32[np.ndarray, " tokens"]:
        """Log-prob of each token given those before it, at temperature 1; position 0 is 0. ``placement`` as for
        ``generate``."""
        body: dict[str, Any] = {
            "input_ids": [int(token) for token in token_ids],
            # A server that only prefills samples a token in any case.
            "sampling_params": {"temperature": 1.0, "max_new_tokens": 0 if placement is None else 1},
            "return_logprob": True,
            "logprob_start_len": 0,
        }
        body |= placement or {}
        answer = await self._call("POST", "/generate", body, self._timeouts.request_s)
        with self._answer_errors("/generate"):
            entries = answer["meta_info"]["input_token_logprobs"]
            if len(entries) != len(token_ids):
                raise ValueError(f"{len(entries)} log-probs for {len(token_ids)} tokens")
            return np.array([0.0, *(entry[0] for entry in entries[1:])], np.float32)

    async def abort(self, request_ids: Sequence[str]) -> None:
        """End these requests; each then returns what it has. Ids that are not in flight are ignored.

        A request that arrived after ``pause`` is not aborted by SGLang: cancel its ``generate``.
        """
        await asyncio.gather(*(self._control("/abort_request", {"rid": rid + RID_END}) for rid in request_ids))

    async def health(self) -> bool:
        """True where the server produces tokens (takes a second); while paused by us, where it answers.

        Never raises: a server that is gone or late is not healthy.
        """
        if not self.paused and await self._answers("/health_generate"):
            return True
        return self.paused and await self._answers("/model_info")  # also where it was paused meanwhile

    async def metrics(self) -> EngineMetrics:
        """Sums over the server's data-parallel ranks; ``kv_used_share`` is the fullest rank's."""
        answer = await self._call("GET", "/v1/loads", None, self._timeouts.control_s)
        with self._answer_errors("/v1/loads"):
            loads = parse_loads(answer)
        if not self._prometheus:
            return loads
        text = await self._text("/metrics", self._timeouts.control_s)
        with self._answer_errors("/metrics"):
            samples = parse_prometheus(text)
            return dataclasses.replace(loads, kv_host_used_share=host_used_share(samples), raw={**loads.raw, **samples})


async def receive(events: AsyncGenerator[Mapping[str, Any], None], stream: GenerationStream) -> Generation:
    """The generation that is sent in these events, the first of which is asked for now. Also where an event can't be
    read, the connection is let go of at once.

    Raises:
        EngineLost: the connection broke, or the KV cache was lost between two servers; with what had come by then.
    """
    sent = time.monotonic()
    try:
        async with contextlib.aclosing(events):
            async for event in events:
                stream.add(event, time.monotonic() - sent)
        return stream.finish()
    except EngineLost as error:
        raise EngineLost(str(error), stream.partial) from error


def generate_body(token_ids: Sequence[int], sampling: Sampling, request_id: str) -> dict[str, Any]:
    """Request of ``/generate`` that streams."""
    parameters: dict[str, Any] = {
        "temperature": sampling.temperature,
        "max_new_tokens": sampling.max_new_tokens,
        "stream_interval": STREAM_INTERVAL,
        # Said so that no preference of the server's or of the model's restricts the sampling.
        "top_p": 1.0,
        "top_k": -1,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
    }
    if sampling.seed is not None:
        parameters["sampling_seed"] = sampling.seed
    body: dict[str, Any] = {
        "rid": request_id + RID_END,
        "input_ids": [int(token) for token in token_ids],
        "sampling_params": parameters,
        "return_logprob": True,
        "stream": True,
    }
    if sampling.top_logprobs:
        body["top_logprobs_num"] = sampling.top_logprobs
    if sampling.routed_experts_from is not None:
        body |= {"return_routed_experts": True, "routed_experts_start_len": sampling.routed_experts_from}
    return body
