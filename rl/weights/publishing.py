"""The publisher of a run: exports the trainer's weights, takes them to the engines the chosen way, and keeps what the
engines hold, for a publication that fails and for an engine that was started anew (``CurrentWeights`` of the fleet)."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from rl.config import PublishConfig
from rl.weights.archive import Archive
from rl.weights.choose import Choice
from rl.weights.collective import Broadcasts, CollectiveTransport
from rl.weights.delta_transport import DeltaTransport, Held
from rl.weights.ipc import IpcTransport, Openings
from rl.weights.publisher import Fallback, Published, publish
from rl.weights.sender import Sender
from rl.weights.serialize import Bucket
from rl.weights.target import WeightTarget
from rl.weights.transports import DiskTransport, TensorTransport, Transport
from rollout.engine.protocol import EngineError
from rollout.engine.sglang_weights import BucketShape


class Source(Sender, Protocol):
    """The trainer, as far as its weights are concerned."""

    async def weight_buckets(self, bucket_bytes: int) -> list[Bucket]: ...

    async def save_hf(self, directory: Path) -> None: ...


@dataclass
class WeightPublisher:
    """One run's. ``close`` it."""

    config: PublishConfig
    choice: Choice
    source: Source
    shapes: Mapping[str, tuple[int, ...]]
    """Of the engines' tensors, by HF name."""
    tensor_parallel: int
    backend: str
    """Of collectives: nccl or gloo."""
    devices: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """See ``IpcTransport``."""
    receivers: Mapping[str, str] = field(default_factory=dict)
    """See ``DeltaTransport``; those that are started here are named once they are there."""
    memory_stays: bool = True
    """The trainer keeps its memory between publications, so that engines may keep it open."""
    current: Fallback | None = None
    """What the engines hold."""
    _sender: str = field(default_factory=lambda: uuid.uuid4().hex)
    """See ``DeltaTransport``."""
    _archive: Archive = field(init=False)
    _exported: tuple[int, Transport, Transport] | None = None
    """Version, the way to the engines, and the way back to it later."""
    _plan: list[BucketShape] = field(default_factory=list)
    _broadcasts: Broadcasts = field(init=False)
    _openings: Openings = field(init=False)

    def __post_init__(self) -> None:
        self._archive = Archive(self.config.directory)
        self._broadcasts = Broadcasts(self.source, self.backend, self.config.timeout_s)
        self._openings = Openings(self.config.resident_bytes, self.memory_stays, self.directory)

    @property
    def directory(self) -> Path:
        """Of what is kept while the run goes on; it goes with the run, or with the next one where that was killed."""
        return self._archive.root

    async def export(self, version: int) -> None:
        """Take the trainer's weights out of it, as far as the way to the engines and the way back need that. No engine
        notices."""
        if self.choice.way == "tensors":
            tensors = TensorTransport(await self.source.weight_buckets(self.config.bucket_bytes), self.tensor_parallel)
            self._exported = (version, tensors, tensors)
            return
        base = (
            None if self.current is None else Held(self.current.version, self._archive.directory(self.current.version))
        )
        target = self._archive.target(version, None if base is None else base.version)
        await self.source.save_hf(target)
        new, disk = Held(version, target), DiskTransport(target)
        if self.choice.way == "disk":
            self._exported = (version, disk, disk)
        elif self.choice.way == "delta":
            work = self.directory / "patches"
            delta = DeltaTransport(new, base, self.receivers, work, self.config.timeout_s, self._sender)
            self._exported = (version, delta, delta)
        else:
            self._plan = self._plan or await self.source.plan_weights(self._round_bytes)
            self._exported = (version, self._direct(), disk)

    @property
    def _round_bytes(self) -> int:
        """Of the buffer that weights go through where they do not fit it in whole: each round costs a request."""
        config = self.config
        return max(config.bucket_bytes, config.resident_bytes) if self.choice.way == "ipc" else config.bucket_bytes

    def _direct(self) -> Transport:
        if self.choice.way == "ipc":
            return IpcTransport(self.source, self._plan, self.devices, self._openings)
        return CollectiveTransport(self._broadcasts, self._plan)

    async def publish(
        self,
        engines: Sequence[WeightTarget],
        version: int,
        before_resume: Callable[[], Awaitable[None]] | None = None,
    ) -> Published:
        """Put the exported version on all engines; see ``publisher.publish``.

        Raises:
            ValueError: another version was exported.
        """
        if self._exported is None or self._exported[0] != version:
            raise ValueError(f"version {version} is to be published, but was not exported")
        _, transport, back = self._exported
        done = await publish(
            engines,
            transport,
            version,
            self.shapes,
            self.current,
            self.config.attempts,
            self.config.in_flight,
            before_resume,
        )
        self.current = Fallback(back, version)
        return done

    async def restore(
        self, engines: Sequence[WeightTarget], before_resume: Callable[[], Awaitable[None]] | None = None
    ) -> None:
        """Put the current version on all engines again, whose memory was taken meanwhile.

        Raises:
            PublishError: see ``publisher.publish``.
        """
        if self.current is None:
            raise ValueError("nothing was published yet")
        await publish(
            engines,
            self.current.transport,
            self.current.version,
            self.shapes,
            attempts=self.config.attempts,
            before_resume=before_resume,
        )

    async def load(self, engine: WeightTarget) -> None:
        """Load the current version into one engine that takes no requests, such as one that was started anew. From what
        is kept, not from the trainer, which may have gone on.

        Raises:
            EngineError: nothing was published yet, or the engine failed.
        """
        current = self.current
        if current is None:
            raise EngineError(f"{engine.url}: nothing was published yet")
        await current.transport.prepare([engine], current.version)
        await current.transport.load([engine], current.version, flush=True)

    async def close(self) -> None:
        """Remove what was kept."""
        self._openings.close()
        await asyncio.to_thread(self._archive.close)
