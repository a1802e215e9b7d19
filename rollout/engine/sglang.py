"""One SGLang server, spoken to over HTTP."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import Float32

from rollout.engine.protocol import EngineMetrics, Generation, Sampling
from rollout.engine.sglang_answers import parse_generation, parse_loads
from rollout.engine.sglang_http import Timeouts
from rollout.engine.sglang_weights import SGLangWeights

__all__ = ["SGLangEngine", "Timeouts"]

RID_END = "#"
"""Ends every request id on the wire: SGLang aborts all requests whose id *begins* with the one given."""


class SGLangEngine(SGLangWeights):
    """Implements ``rollout.engine.protocol.Engine``; what publishing weights calls is in ``SGLangWeights``."""

    async def generate(self, token_ids: Sequence[int], sampling: Sampling, request_id: str) -> Generation:
        """Sample a continuation. ``request_id`` must be unique among the requests in flight."""
        parameters: dict[str, Any] = {
            "temperature": sampling.temperature,
            "max_new_tokens": sampling.max_new_tokens,
            # Said so that no preference of the server's or of the model's restricts the sampling.
            "top_p": 1.0,
            "top_k": -1,
            "min_p": 0.0,
            "repetition_penalty": 1.0,
        }
        if sampling.seed is not None:
            parameters["sampling_seed"] = sampling.seed
        body = {
            "rid": request_id + RID_END,
            "input_ids": [int(token) for token in token_ids],
            "sampling_params": parameters,
            "return_logprob": True,
        }
        answer = await self._call("POST", "/generate", body, self._timeouts.request_s)
        with self._answer_errors("/generate"):
            return parse_generation(answer, prompt_tokens=len(token_ids))

    async def score(self, token_ids: Sequence[int]) -> Float32[np.ndarray, " tokens"]:
        """Log-prob of each token given those before it, at temperature 1; position 0 is 0."""
        body = {
            "input_ids": [int(token) for token in token_ids],
            "sampling_params": {"temperature": 1.0, "max_new_tokens": 0},
            "return_logprob": True,
            "logprob_start_len": 0,
        }
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
            return parse_loads(answer)
