"""What the rest of Atelier knows of an inference engine."""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from jaxtyping import Float32, Int32


class EngineError(RuntimeError):
    """The engine refused a request, died, or did not answer in time; the message names its URL."""


class EngineRefused(EngineError):
    """It answered, with an error: what it was asked for was not done."""


class EngineLost(EngineError):
    """The connection to the engine broke: it died, or was given up because it hangs.

    Nothing is wrong with the request, so it may be sent to another engine. ``partial`` holds what had been sampled and
    received by then (its finish reason is ABORT); None where nothing was. ``role`` says which kind of server it was,
    where prefill and decode are apart.
    """

    def __init__(self, message: str, partial: Generation | None = None, role: str = "both") -> None:
        super().__init__(message)
        self.partial = partial
        self.role = role


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
    top_logprobs: int = 0
    """So many of the likeliest tokens are returned at each position."""
    routed_experts_from: int | None = None
    """Return the experts that a mixture model chose, from this position of prompt and answer on; None: do not."""


@dataclass(frozen=True)
class TopLogprobs:
    """The likeliest tokens at each position, the likeliest first."""

    token_ids: Int32[np.ndarray, "new k"]
    logprobs: Float32[np.ndarray, "new k"]


@dataclass(frozen=True)
class CachedTokens:
    """Prompt tokens that a prefix cache spared, by the tier that held them."""

    hbm: int = 0
    host: int = 0
    storage: int = 0

    @property
    def total(self) -> int:
        return self.hbm + self.host + self.storage


@dataclass(frozen=True)
class Latency:
    """Seconds from sending a request, as its client saw them."""

    first_token_s: float
    total_s: float


@dataclass(frozen=True)
class Generation:
    """Tokens that the engine sampled after a prompt, all arrays of one length."""

    token_ids: Int32[np.ndarray, " new"]
    logprobs: Float32[np.ndarray, " new"]
    """Natural log-probs at the sampling temperature (greedy: at temperature 1)."""
    weight_versions: Int32[np.ndarray, " new"]
    finish_reason: FinishReason
    prompt_tokens: int
    cached: CachedTokens = CachedTokens()
    latency: Latency | None = None
    """None where no token came."""
    top_logprobs: TopLogprobs | None = None
    routed_experts: Int32[np.ndarray, "positions layers top_k"] | None = None
    """From ``Sampling.routed_experts_from`` on. The last token has none: no forward pass has seen it."""


@dataclass(frozen=True)
class EngineMetrics:
    """One server's gauges at one moment."""

    running: int
    waiting: int
    kv_used_share: float
    """Share of the tokens of the KV pool in HBM that are in use, 0..1."""
    tokens_per_second: float
    kv_host_used_share: float | None = None
    """The same of the pool in host memory (HiCache, HiSparse); None where there is none, or it is not reported."""
    prefix_hit_share: float | None = None
    """Share of the prompt tokens of late that the prefix cache spared, as the server sees it."""
    hisparse_hit_share: float | None = None
    """Share of the top-k entries that were in HBM; None where HiSparse is off, or the server does not say."""
    raw: Mapping[str, float] = field(default_factory=dict)
    """Everything else that it reports, by its own names."""


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
