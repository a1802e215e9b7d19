"""What publishing asks of an engine."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Protocol, TypeVar

from rollout.engine.opened_memory import Request
from rollout.engine.protocol import EngineError
from rollout.engine.sglang_weights import Abilities, BucketShape, PauseMode, UpdateGroup

Result = TypeVar("Result")
Target = TypeVar("Target", bound="WeightTarget")


class WeightTarget(Protocol):
    """An engine that takes new weights. Every call raises ``EngineError`` and has a timeout. What each does is said in
    ``SGLangWeights``."""

    @property
    def url(self) -> str: ...

    async def abilities(self) -> Abilities: ...

    async def pause(self, mode: PauseMode) -> None: ...

    async def resume(self) -> None: ...

    async def weight_version(self) -> int: ...

    async def begin_weight_update(self) -> None: ...

    async def end_weight_update(self) -> None: ...

    async def update_weights_from_tensors(
        self, payloads: Sequence[str], version: int | None, flush: bool, flat: bool
    ) -> None: ...

    async def update_weights_from_memory(
        self, requests: Sequence[Request], version: int | None, flush: bool
    ) -> None: ...

    async def update_weights_from_disk(self, directory: str, version: int, flush: bool) -> None: ...

    async def join_update_group(self, group: UpdateGroup, rank: int) -> None: ...

    async def leave_update_group(self, name: str) -> None: ...

    async def update_weights_from_group(
        self, name: str, bucket: BucketShape, version: int | None, flush: bool
    ) -> None: ...


async def on_all(engines: Iterable[Target], call: Callable[[Target], Awaitable[Result]]) -> list[Result]:
    """Call all engines together and wait for every one, also when one fails: none is left busy behind our back.

    Raises:
        EngineError: with the messages of all that failed.
    """
    results = await asyncio.gather(*(call(engine) for engine in engines), return_exceptions=True)
    failures = [result for result in results if isinstance(result, BaseException)]
    for failure in failures:
        if not isinstance(failure, EngineError):
            raise failure
    if failures:
        raise EngineError("; ".join(map(str, failures))) from failures[0]
    return [result for result in results if not isinstance(result, BaseException)]


async def in_session(engines: Sequence[WeightTarget], send: Callable[[], Awaitable[None]]) -> None:
    """Open an update on all engines, send, and close it on all that opened it, also after a failure: an update left
    open would make an engine refuse the next attempt.

    Raises:
        EngineError: naming every engine that failed.
    """
    begun: list[WeightTarget] = []
    failures: list[EngineError] = []

    async def begin(engine: WeightTarget) -> None:
        await engine.begin_weight_update()
        begun.append(engine)

    try:
        await on_all(engines, begin)
        await send()
    except EngineError as error:
        failures.append(error)
    try:
        await on_all(begun, lambda engine: engine.end_weight_update())
    except EngineError as error:
        failures.append(error)
    if failures:
        raise EngineError("; ".join(map(str, failures))) from failures[0]
