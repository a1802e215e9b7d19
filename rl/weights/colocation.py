"""Trainer and engines on the same GPUs: who has the memory, and how it changes hands.

    engines ── sleep engines ─► onload trainer ──► TRAINER ── (update) ─► (export) ─► wake weights ─► (publish)
       ▲                                                                                                  │
       └── resume ◄─ wake KV ◄─ offload trainer ◄─────────────────────────────────────────────────────────┘

Only between waking the weights and offloading the trainer do both hold weights: that is when they are copied. The KV
pool and the trainer are never there together. Engines stay paused all the while, so that no request meets memory that
is not there.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from typing import Protocol

from rl.weights.publisher import pause_mode
from rl.weights.target import WeightTarget, on_all

KV = ("kv_cache",)
WEIGHTS = ("weights",)


class Sleeper(WeightTarget, Protocol):
    """An engine whose memory can be taken."""

    async def release_memory(self, tags: Sequence[str]) -> None: ...

    async def resume_memory(self, tags: Sequence[str]) -> None: ...


class Movable(Protocol):
    """The trainer."""

    async def offload(self) -> int: ...

    async def onload(self) -> None: ...

    async def release_bucket(self) -> None: ...


class Holder(enum.StrEnum):
    ENGINES = "engines"
    TRAINER = "trainer"
    BOTH = "both"  # the engines' weights and the trainer: while weights are copied


class ColocationError(RuntimeError):
    """A step was asked for when the memory was not where that step needs it."""


class Colocation:
    """At the start the engines have it, the trainer is not yet there or holds nothing."""

    def __init__(self, engines: Callable[[], Sequence[Sleeper]], trainer: Movable | None = None) -> None:
        """
        Args:
            engines: those that there are now.
            trainer: may be set later, before the memory changes hands between the two.
        """
        self._engines = engines
        self.trainer = trainer
        self.holder = Holder.ENGINES

    async def clear_for_trainer(self) -> None:
        """Put the engines to sleep before there is a trainer, which then starts in the memory that they gave."""
        self._must_be(Holder.ENGINES)
        await self._sleep()
        self.holder = Holder.TRAINER

    async def to_trainer(self) -> None:
        """Before anything that the trainer does. Without effect where it has the memory."""
        if self.holder is Holder.TRAINER:
            return
        self._must_be(Holder.ENGINES)
        await self._sleep()
        await self._there().onload()
        self.holder = Holder.TRAINER

    async def wake_weights(self) -> None:
        """Before weights are loaded into the engines, which have none then."""
        self._must_be(Holder.TRAINER)
        await on_all(self._engines(), lambda engine: engine.resume_memory(WEIGHTS))
        self.holder = Holder.BOTH

    async def to_engines(self) -> None:
        """After weights were loaded, before the engines resume. Without effect where they have the memory."""
        if self.holder is Holder.ENGINES:
            return
        self._must_be(Holder.BOTH)
        trainer = self._there()
        await trainer.release_bucket()
        await trainer.offload()
        await on_all(self._engines(), lambda engine: engine.resume_memory(KV))
        self.holder = Holder.ENGINES

    def _there(self) -> Movable:
        if self.trainer is None:
            raise ColocationError("there is no trainer yet that could have the GPUs' memory")
        return self.trainer

    async def _sleep(self) -> None:
        async def sleep(engine: Sleeper) -> None:
            await engine.pause(pause_mode(await engine.abilities(), "exact"))
            await engine.release_memory((*KV, *WEIGHTS))

        await on_all(self._engines(), sleep)

    def _must_be(self, holder: Holder) -> None:
        if self.holder is not holder:
            raise ColocationError(f"the GPUs' memory is with {self.holder}, this step needs it with {holder}")
