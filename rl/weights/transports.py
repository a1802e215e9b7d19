"""Ways in which one version's weights reach the engines. Collectives (NCCL) and CUDA IPC fit the same protocol."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeVar

from rl.weights.serialize import Bucket, check_complete, directory_shapes
from rollout.engine.protocol import EngineError

Result = TypeVar("Result")


class WeightTarget(Protocol):
    """An engine that takes new weights. Every call raises ``EngineError`` and has a timeout."""

    @property
    def url(self) -> str: ...

    async def pause(self) -> None: ...

    async def resume(self) -> None: ...

    async def weight_version(self) -> int: ...

    async def begin_weight_update(self) -> None: ...

    async def update_weights_from_tensors(self, payloads: Sequence[str], version: int | None) -> None: ...

    async def end_weight_update(self) -> None: ...

    async def update_weights_from_disk(self, directory: str, version: int) -> None: ...


class Transport(Protocol):
    """One version's weights on their way."""

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors, for one engine."""
        ...

    def check(self, expected: Mapping[str, tuple[int, ...]]) -> None:
        """Called before anything is paused. Raises ValueError where the weights do not fit the model."""
        ...

    async def load(self, engines: Sequence[WeightTarget], version: int) -> None:
        """Load them into paused engines, all at once, and drop their cached prefixes. May be called again after it
        failed.

        Raises:
            EngineError: naming every engine that failed.
        """
        ...


async def on_all(engines: Iterable[WeightTarget], call: Callable[[WeightTarget], Awaitable[Result]]) -> list[Result]:
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


@dataclass(frozen=True)
class TensorTransport:
    """Serialised tensors over HTTP, bucket by bucket."""

    buckets: Sequence[Bucket]
    tensor_parallel: int = 1
    """Ranks of one engine. Each gets the whole tensors, and SGLang's loader cuts out its shard."""

    @property
    def nbytes(self) -> int:
        return sum(bucket.nbytes for bucket in self.buckets)

    def check(self, expected: Mapping[str, tuple[int, ...]]) -> None:
        check_complete(self.buckets, expected)

    async def load(self, engines: Sequence[WeightTarget], version: int) -> None:
        begun: list[WeightTarget] = []
        failures: list[EngineError] = []

        async def begin(engine: WeightTarget) -> None:
            await engine.begin_weight_update()
            begun.append(engine)

        try:
            await on_all(engines, begin)
            await self._send(engines, version)
        except EngineError as error:
            failures.append(error)
        # Also after a failure: an update left open would make the engine refuse the next attempt.
        try:
            await on_all(begun, lambda engine: engine.end_weight_update())
        except EngineError as error:
            failures.append(error)
        if failures:
            raise EngineError("; ".join(map(str, failures))) from failures[0]

    async def _send(self, engines: Sequence[WeightTarget], version: int) -> None:
        for index, bucket in enumerate(self.buckets):
            payloads = [bucket.payload] * self.tensor_parallel
            # An engine counts as updated with the last bucket, not before.
            said = version if index == len(self.buckets) - 1 else None
            send = functools.partial(_send_bucket, payloads=payloads, version=said)
            await on_all(engines, send)


async def _send_bucket(engine: WeightTarget, payloads: Sequence[str], version: int | None) -> None:
    await engine.update_weights_from_tensors(payloads, version)


@dataclass(frozen=True)
class DiskTransport:
    """An HF directory that every engine can read."""

    directory: Path

    @property
    def nbytes(self) -> int:
        return sum(file.stat().st_size for file in self.directory.glob("*.safetensors"))

    def check(self, expected: Mapping[str, tuple[int, ...]]) -> None:
        """Raises ValueError also where the directory holds no weights."""
        try:
            found = directory_shapes(self.directory)
        except FileNotFoundError as error:
            raise ValueError(str(error)) from error
        check_complete([Bucket(found, payload="", nbytes=0)], expected)

    async def load(self, engines: Sequence[WeightTarget], version: int) -> None:
        await on_all(engines, lambda engine: engine.update_weights_from_disk(str(self.directory.resolve()), version))
