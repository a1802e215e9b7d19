"""Weights for engines across a slow network: what changed goes to a receiver beside each engine while it still
generates, is checked there, and is loaded from that machine's memory once all are paused.

    receiver has the version of this sender ─► nothing is sent
    both have the base, and the result's checksums are ours ─► the patch
    else ─► all values
"""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

from rl.weights.delta import patch
from rl.weights.serialize import Bucket, check_complete, directory_shapes
from rl.weights.target import WeightTarget, on_all
from rollout.engine.protocol import EngineError

READ_BYTES = 8 << 20


@dataclass(frozen=True)
class Held:
    """A version as an HF directory on this machine."""

    version: int
    directory: Path


@dataclass(frozen=True)
class Sent:
    """What one receiver was sent."""

    how: str
    """nothing, patch, or all."""
    nbytes: int
    directory: str
    """On the engine's machine."""


@dataclass
class DeltaTransport:
    """One version; ``base`` is the one before it, for the patch."""

    new: Held
    base: Held | None
    receivers: Mapping[str, str]
    """URL of the receiver by URL of the engine beside it."""
    work: Path
    """Where patches are kept while they are sent."""
    timeout_s: float
    """For one receiver to take one patch."""
    sender: str
    """Whose versions these are. A receiver may have served another run before, and a run's version 0 needn't be the
    model that its servers were started with."""
    sent: dict[str, Sent] = field(default_factory=dict)
    """By URL of the engine."""
    encoding_seconds: float = 0.0
    """Of all patches that were made."""
    _patches: dict[str, Path] = field(default_factory=dict)
    _encoding: asyncio.Lock = field(default_factory=asyncio.Lock)

    @property
    def nbytes(self) -> int:
        return sum(file.stat().st_size for file in self.new.directory.glob("*.safetensors"))

    @property
    def compression(self) -> float | None:
        """Bytes of the weights for each byte that was sent to the receiver that was sent the most; None: none was."""
        most = max((sent.nbytes for sent in self.sent.values()), default=0)
        return self.nbytes / most if most else None

    def check(self, expected: Mapping[str, tuple[int, ...]]) -> None:
        try:
            found = directory_shapes(self.new.directory)
        except FileNotFoundError as error:
            raise ValueError(str(error)) from error
        check_complete([Bucket(found, payload="", nbytes=0)], expected)

    async def prepare(self, engines: Sequence[WeightTarget], version: int) -> None:
        """Have every receiver hold the version."""
        timeout = aiohttp.ClientTimeout(total=self.timeout_s)
        async with aiohttp.ClientSession(timeout=timeout) as session:
            try:
                await on_all(engines, functools.partial(self._provide, session))
            finally:
                for file in self._patches.values():
                    file.unlink()
                self._patches.clear()

    async def load(self, engines: Sequence[WeightTarget], version: int, flush: bool) -> None:
        missing = [engine for engine in engines if engine.url not in self.sent]
        if missing:
            await self.prepare(missing, version)
        await on_all(
            engines,
            lambda engine: engine.update_weights_from_disk(self.sent[engine.url].directory, version, flush),
        )

    async def _provide(self, session: aiohttp.ClientSession, engine: WeightTarget) -> None:
        self.sent.pop(engine.url, None)
        if engine.url not in self.receivers:
            raise EngineError(f"{engine.url} has no receiver beside it; name one in publish.receivers")
        receiver = self.receivers[engine.url]
        _, answer = await _call(session, "GET", f"{receiver}/versions")
        held = {int(v): copy["directory"] for v, copy in answer["versions"].items() if copy["sender"] == self.sender}
        if self.new.version in held:
            self.sent[engine.url] = Sent("nothing", 0, held[self.new.version])
            return
        # Of an older version, which engines go back to, the base is gone here by now.
        patched = self.base is not None and self.base.version in held and self.base.directory.is_dir()
        for way in ["patch", "all"] if patched else ["all"]:
            file = await self._encoded(way)
            status, answer = await _call(session, "POST", f"{receiver}/patch", file)
            if status == 200:
                self.sent[engine.url] = Sent(way, file.stat().st_size, answer["directory"])
                return
        raise EngineError(f"{receiver}/patch refused all values: {answer}")

    async def _encoded(self, way: str) -> Path:
        """A file with the frames, made once for all receivers."""
        async with self._encoding:
            if way not in self._patches:
                base = self.base if way == "patch" else None
                old, number = (base.directory, base.version) if base is not None else (None, None)
                self.work.mkdir(parents=True, exist_ok=True)
                file = self.work / f"v{self.new.version}-{way}.patch"
                frames = functools.partial(patch, self.new.directory, self.new.version, old, number, sender=self.sender)
                begin = time.perf_counter()
                await asyncio.to_thread(_write, file, frames)
                self.encoding_seconds += time.perf_counter() - begin
                self._patches[way] = file
            return self._patches[way]


def _write(file: Path, frames: Any) -> None:
    with file.open("wb") as stream:
        for frame in frames():
            stream.write(frame)


async def _call(session: aiohttp.ClientSession, method: str, url: str, file: Path | None = None) -> tuple[int, Any]:
    """Status and JSON of an answer: 200, or 409 where all values are needed."""
    body = _chunks(file) if file is not None else None
    try:
        async with session.request(method, url, data=body) as response:
            if response.status not in (200, 409):
                raise EngineError(f"{method} {url} answered {response.status}: {(await response.text())[:500]}")
            return response.status, await response.json()
    except (aiohttp.ClientError, TimeoutError, OSError) as error:
        raise EngineError(f"{method} {url} failed: {type(error).__name__}: {error}") from error


async def _chunks(file: Path) -> AsyncIterator[bytes]:
    with file.open("rb") as stream:
        while chunk := await asyncio.to_thread(stream.read, READ_BYTES):
            yield chunk
