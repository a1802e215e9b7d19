"""What the rest of Atelier knows of an inference engine."""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from jaxtyping import Float32, Int32


class EngineError(RuntimeError):
    """The engine refused a request, died, or did not answer in time; the message names its URL."""


class FinishReason(enum.StrEnum):
    """Why one generation ended."""

    STOP = "stop"  # a stop token, which is the last of token_ids
    LENGTH = "length"
    ABORT = "abort"  # aborted by us (weights published, episode cancelled): token_ids holds what there was


@dataclass(frozen=True)
class Sampling:
    """How to sample. Training needs unrestricted sampling, so there is no top_p, top_k or penalty here:
    the engine's log-probs are taken before those cuts. Greedy is temperature 0."""

    temperature: float
    max_new_tokens: int
    seed: int | None = None
    """Makes this generation reproducible where the engine runs deterministically; else ignored."""


@dataclass(frozen=True)
class Generation:
    """Tokens that the engine sampled after a prompt, all arrays of one length."""

    token_ids: Int32[np.ndarray, " new"]
    logprobs: Float32[np.ndarray, " new"]
    """Natural log-probs at the sampling temperature (greedy: at temperature 1)."""
    weight_versions: Int32[np.ndarray, " new"]
    finish_reason: FinishReason
    prompt_tokens: int
    cached_tokens: int
    """Prompt tokens that a prefix cache spared."""


@dataclass(frozen=True)
class EngineMetrics:
    """One server's gauges at one moment."""

    running: int
    waiting: int
    kv_used_share: float
    """Share of the KV pool's tokens in use, 0..1."""
    tokens_per_second: float
    raw: Mapping[str, float]


class Engine(Protocol):
    """One inference server. Every call has a timeout and raises ``EngineError``."""

    async def generate(self, token_ids: Sequence[int], sampling: Sampling, request_id: str) -> Generation: ...

    async def score(self, token_ids: Sequence[int]) -> Float32[np.ndarray, " tokens"]:
        """Log-prob of each token given those before it, at temperature 1; position 0 is 0."""
        ...

    async def abort(self, request_ids: Sequence[str]) -> None: ...

    async def pause(self) -> None:
        """Stop generating; requests in flight are kept and go on after ``resume``."""
        ...

    async def resume(self) -> None: ...

    async def health(self) -> bool:
        """True where the server can generate."""
        ...

    async def metrics(self) -> EngineMetrics: ...
