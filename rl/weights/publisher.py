"""Publishing weights: version v is on all engines or on none, and no token of another version is sampled meanwhile.

    check -> prepare -> pause all -> load into all -> every engine says v -> resume all
                |          |             | failed `attempts` times
                |          |             '-> load the fallback into all -> resume all, raise (none has v)
                |          |                             | failed, or no fallback
                |          |                             '-> all stay paused, raise with mixed=True
                '----------'-> resume all, raise (nothing was touched)

What becomes of the requests in flight (``in_flight``):

    exact      Retracted: after the resume they are prefilled again by the new weights and go on. Loading drops the
               prefixes cached by the old weights. Every token is sampled by the weights its version says. A server that
               cannot (SGLang 0.5.16; with HiSparse; where it only prefills or only decodes) has them aborted; the
               gateway sends each again with what it had as prefix, which is as exact.
    in_place   They keep their KV cache, and the cached prefixes stay: new weights on old keys and values. Nothing is
               prefilled again, and log-probs are those of no single version. Aborted, too, where a server cannot tell
               the version of each token.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from rl.weights.target import WeightTarget, on_all
from rl.weights.transports import Transport
from rollout.engine.protocol import EngineError
from rollout.engine.sglang_weights import Abilities, PauseMode

log = logging.getLogger(__name__)

InFlight = Literal["exact", "in_place"]


class PublishError(RuntimeError):
    """A version was not published; the message names the engines that failed."""

    def __init__(self, message: str, mixed: bool) -> None:
        super().__init__(message)
        self.mixed = mixed
        """True where the engines may hold different weights; they are then left paused, and no token is sampled."""


@dataclass(frozen=True)
class Published:
    """One publication."""

    version: int
    seconds: float
    """From the pause to the resume: the time in which no engine generates."""
    load_seconds: float
    """Of these, loading."""
    verify_seconds: float
    """Of these, asking every engine which version it has."""
    nbytes: int
    """Of the tensors, for one engine."""
    attempts: int


@dataclass(frozen=True)
class Fallback:
    """The weights to go back to: what the engines hold before the publication."""

    transport: Transport
    version: int


async def publish(
    engines: Sequence[WeightTarget],
    transport: Transport,
    version: int,
    expected: Mapping[str, tuple[int, ...]],
    fallback: Fallback | None = None,
    attempts: int = 2,
    in_flight: InFlight = "exact",
    before_resume: Callable[[], Awaitable[None]] | None = None,
) -> Published:
    """Put one version of the weights on all engines.

    Args:
        expected: shape of each of the model's tensors by HF name (``directory_shapes``).
        attempts: how often loading is tried.
        in_flight: what becomes of the requests in flight; see the module's docstring.
        before_resume: awaited when all engines hold the same weights again and still stand.

    Raises:
        ValueError: before anything is touched, where the weights do not fit the model.
        PublishError: where an engine failed; see ``mixed``.
    """
    transport.check(expected)
    if fallback is not None:
        fallback.transport.check(expected)
    flush = in_flight == "exact"
    modes = await _pause_modes(engines, transport, version, in_flight)
    started = time.monotonic()
    resumable = True  # all engines hold the same weights
    try:
        await on_all(engines, lambda engine: engine.pause(modes[engine.url]))
        resumable = False
        load_started = time.monotonic()
        used, verify_seconds = await _load(engines, transport, version, attempts, flush)
        load_seconds = time.monotonic() - load_started - verify_seconds
        resumable = True
    except EngineError as error:
        message = f"version {version} was not published: {error}"
        if not resumable:
            resumable, outcome = await _fall_back(engines, fallback, flush)
            message += f"; {outcome}"
        raise PublishError(message, mixed=not resumable) from error
    finally:
        if resumable:
            if before_resume is not None:
                await before_resume()
            await _resume(engines, version)
    return Published(version, time.monotonic() - started, load_seconds, verify_seconds, transport.nbytes, used)


def pause_mode(able: Abilities, in_flight: InFlight) -> PauseMode:
    """How this server is paused."""
    if able.hisparse or not able.sessions:
        return PauseMode.ABORT
    if able.disaggregated and in_flight == "exact":  # what is on its way from prefill to decode is never retracted
        return PauseMode.ABORT
    return PauseMode.RETRACT if in_flight == "exact" else PauseMode.IN_PLACE


async def _pause_modes(
    engines: Sequence[WeightTarget], transport: Transport, version: int, in_flight: InFlight
) -> dict[str, PauseMode]:
    """By URL. Also what can be done before the pause: nothing is touched when it fails."""
    try:
        abilities = await on_all(engines, lambda engine: engine.abilities())
        await transport.prepare(engines, version)
    except EngineError as error:
        raise PublishError(f"version {version} was not published: {error}", mixed=False) from error
    return {engine.url: pause_mode(able, in_flight) for engine, able in zip(engines, abilities, strict=True)}


async def _load(
    engines: Sequence[WeightTarget], transport: Transport, version: int, attempts: int, flush: bool
) -> tuple[int, float]:
    """Load and verify; returns the number of attempts it took, and the seconds of verifying."""
    failures: list[EngineError] = []
    for attempt in range(1, attempts + 1):
        try:
            await transport.load(engines, version, flush)
            loaded = time.monotonic()
            await on_all(engines, lambda engine: _verify(engine, version))
        except EngineError as error:
            log.warning("loading version %d failed, attempt %d of %d: %s", version, attempt, attempts, error)
            failures.append(error)
        else:
            return attempt, time.monotonic() - loaded
    raise EngineError(f"{attempts} attempts failed: {'; then '.join(map(str, failures))}") from failures[0]


async def _verify(engine: WeightTarget, version: int) -> None:
    found = await engine.weight_version()
    if found != version:
        raise EngineError(f"{engine.url} says that it has version {found} after loading {version}")


async def _fall_back(engines: Sequence[WeightTarget], fallback: Fallback | None, flush: bool) -> tuple[bool, str]:
    """Go back; returns whether all engines hold the fallback's weights, and what to say of it."""
    if fallback is None:
        return False, "there is nothing to fall back to, so the engines stay paused"
    try:
        await fallback.transport.prepare(engines, fallback.version)
        await _load(engines, fallback.transport, fallback.version, attempts=1, flush=flush)
    except EngineError as error:
        return False, f"falling back to version {fallback.version} failed too, so the engines stay paused: {error}"
    return True, f"all engines are back at version {fallback.version}"


async def _resume(engines: Sequence[WeightTarget], version: int) -> None:
    try:
        await on_all(engines, lambda engine: engine.resume())
    except EngineError as error:
        raise PublishError(f"resuming around version {version} failed: {error}", mixed=False) from error
