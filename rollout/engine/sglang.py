"""One SGLang server, spoken to over HTTP."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import aiohttp
import numpy as np
from jaxtyping import Float32

from rollout.engine.protocol import EngineError, EngineMetrics, Generation, Sampling
from rollout.engine.sglang_answers import parse_generation, parse_loads

SHOWN_CHARACTERS = 500
"""How much of an error answer's body an error shows."""
UPDATE_IS_OPEN = "session is already open"
RID_END = "#"
"""Ends every request id on the wire: SGLang aborts all requests whose id *begins* with the one given."""


@dataclass(frozen=True)
class Timeouts:
    """Seconds until a call is given up."""

    request_s: float = 600.0
    """One generation or scoring, the wait in the server's queue included."""
    control_s: float = 60.0
    """Pause, resume, abort, metrics, each step of a weight update."""
    health_s: float = 30.0
    connect_s: float = 5.0


class SGLangEngine:
    """Implements ``rollout.engine.protocol.Engine`` and the calls that publishing weights needs.

    One connection pool, made at the first call and bound to that event loop; ``close`` it, or use ``async with``.
    Every method raises ``EngineError``, which names the URL, where the server refuses, is gone, or is late.
    """

    def __init__(self, url: str, timeouts: Timeouts | None = None) -> None:
        self.url = url.rstrip("/")
        self._timeouts = timeouts or Timeouts()
        self._session: aiohttp.ClientSession | None = None
        self._paused = False

    async def __aenter__(self) -> SGLangEngine:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connections; calls in flight fail."""
        if self._session is not None:
            await self._session.close()
            self._session = None

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

    async def pause(self) -> None:
        """Stop generating; requests in flight lose their KV cache, are kept, and go on after ``resume``."""
        await self._control("/pause_generation", {"mode": "retract"})
        self._paused = True

    async def resume(self) -> None:
        """Go on generating. A retracted request is prefilled again, by the weights that are there then."""
        await self._control("/continue_generation", {"torch_empty_cache": False})
        self._paused = False

    async def flush(self) -> None:
        """Forget all cached prefixes, and free the device's cached memory (0.5 s: an update flushes by itself, without
        that). SGLang refuses it while requests run; retracted ones do not count."""
        await self._control("/flush_cache", {})

    async def health(self) -> bool:
        """True where the server produces tokens (takes a second); while paused by us, where it answers.

        Never raises: a server that is gone or late is not healthy.
        """
        if not self._paused and await self._answers("/health_generate"):
            return True
        return self._paused and await self._answers("/model_info")  # also where it was paused meanwhile

    async def metrics(self) -> EngineMetrics:
        """Sums over the server's data-parallel ranks; ``kv_used_share`` is the fullest rank's."""
        answer = await self._call("GET", "/v1/loads", None, self._timeouts.control_s)
        with self._answer_errors("/v1/loads"):
            return parse_loads(answer)

    async def weight_version(self) -> int:
        """The version of the weights that the server says it has."""
        info = await self._call("GET", "/model_info", None, self._timeouts.control_s)
        with self._answer_errors("/model_info"):
            return int(info["weight_version"])

    async def begin_weight_update(self) -> None:
        """Open an update. One that a failed publication left open is closed first."""
        try:
            await self._control("/begin_weight_update", {})
        except EngineError as error:
            if UPDATE_IS_OPEN not in str(error):
                raise
            await self.end_weight_update()
            await self._control("/begin_weight_update", {})

    async def end_weight_update(self) -> None:
        """Close the update: what SGLang derives from the weights is made anew."""
        await self._control("/end_weight_update", {})

    async def update_weights_from_tensors(self, payloads: Sequence[str], version: int | None) -> None:
        """Load one bucket, between ``begin_weight_update`` and ``end_weight_update``.

        Args:
            payloads: base64 of SGLang's serialised named tensors, one for each tensor-parallel rank.
            version: the weights' version, with the last bucket, after which all cached prefixes are forgotten; None
                before.
        """
        body = {"serialized_named_tensors": list(payloads), "flush_cache": version is not None}
        await self._control("/update_weights_from_tensor", body | _version_field(version))

    async def update_weights_from_disk(self, directory: str, version: int) -> None:
        """Load an HF directory that the server can read, and forget all cached prefixes. No begin or end around it."""
        await self._control("/update_weights_from_disk", {"model_path": directory} | _version_field(version))

    async def _answers(self, path: str) -> bool:
        try:
            await self._call("GET", path, None, self._timeouts.health_s)
        except EngineError:
            return False
        return True

    async def _control(self, path: str, body: Mapping[str, Any]) -> None:
        await self._call("POST", path, body, self._timeouts.control_s)

    async def _call(self, method: str, path: str, body: Mapping[str, Any] | None, timeout_s: float) -> Any:
        """The answer's JSON, or None where it is not JSON."""
        where = f"{method} {self.url}{path}"
        if self._session is None:
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0),  # SGLang queues better than a pool does
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=self._timeouts.connect_s),
            )
        try:
            async with (
                asyncio.timeout(timeout_s),
                self._session.request(method, self.url + path, json=body) as response,
            ):
                text = await response.text()
                if response.status != 200:
                    raise EngineError(f"{where} answered {response.status}: {text[:SHOWN_CHARACTERS]}")
                return json.loads(text) if response.content_type == "application/json" else None
        except TimeoutError as error:
            raise EngineError(f"{where} did not answer within {timeout_s:g} s") from error
        except (aiohttp.ClientError, OSError, ValueError) as error:
            raise EngineError(f"{where} failed: {type(error).__name__}: {error}") from error

    @contextlib.contextmanager
    def _answer_errors(self, path: str) -> Iterator[None]:
        try:
            yield
        except (KeyError, TypeError, ValueError, IndexError) as error:
            raise EngineError(f"{self.url}{path} answered what we cannot read: {error!r}") from error


def _version_field(version: int | None) -> dict[str, str]:
    return {} if version is None else {"weight_version": str(version)}
