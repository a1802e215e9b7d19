"""Ways in which one version's weights reach the engines: the protocol, tensors over HTTP, and a directory.

Handles to a GPU's memory are in ``ipc``, broadcasts in ``collective``, changes alone in ``delta``.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from rl.weights.serialize import Bucket, check_complete, directory_shapes
from rl.weights.target import WeightTarget, in_session, on_all


class Transport(Protocol):
    """One version's weights on their way."""

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors, for one engine."""
        ...

    def check(self, expected: Mapping[str, tuple[int, ...]]) -> None:
        """Called before anything is paused. Raises ValueError where the weights do not fit the model."""
        ...

    async def prepare(self, engines: Sequence[WeightTarget], version: int) -> None:
        """Bring near the engines, while they still generate, what can be; may do nothing.

        Raises:
            EngineError: naming every engine that failed.
        """
        ...

    async def load(self, engines: Sequence[WeightTarget], version: int, flush: bool) -> None:
        """Load them into paused engines, all at once, and drop their cached prefixes if ``flush``. May be called again
        after it failed.

        Raises:
            EngineError: naming every engine that failed.
        """
        ...


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

    async def prepare(self, engines: Sequence[WeightTarget], version: int) -> None:
        """Nothing: an engine takes tensors only to load them."""

    async def load(self, engines: Sequence[WeightTarget], version: int, flush: bool) -> None:
        await in_session(engines, functools.partial(self._send, engines, version, flush))

    async def _send(self, engines: Sequence[WeightTarget], version: int, flush: bool) -> None:
        for index, bucket in enumerate(self.buckets):
            payloads = [bucket.payload] * self.tensor_parallel
            # An engine counts as updated with the last bucket, not before.
            said = version if index == len(self.buckets) - 1 else None
            await on_all(engines, functools.partial(_send_bucket, payloads=payloads, version=said, flush=flush))


async def _send_bucket(engine: WeightTarget, payloads: Sequence[str], version: int | None, flush: bool) -> None:
    await engine.update_weights_from_tensors(payloads, version, flush, flat=False)


@dataclass(frozen=True)
class DiskTransport:
    """An HF directory that every engine can read, on a disk or in shared memory."""

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

    async def prepare(self, engines: Sequence[WeightTarget], version: int) -> None:
        """Nothing: the engines read it themselves."""

    async def load(self, engines: Sequence[WeightTarget], version: int, flush: bool) -> None:
        directory = str(self.directory.resolve())
        await on_all(engines, lambda engine: engine.update_weights_from_disk(directory, version, flush))
