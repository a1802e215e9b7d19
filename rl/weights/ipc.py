"""Weights for engines on the trainer's own GPUs: the engine opens the trainer's memory and copies on the device.

Each tensor-parallel rank of an engine gets the handle of the bucket that lies on its own GPU. On a CPU the same goes
through shared memory.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rl.weights.flat import bucket_nbytes
from rl.weights.sender import Sender
from rl.weights.serialize import Bucket, check_complete
from rl.weights.target import WeightTarget, in_session, on_all
from rollout.engine.protocol import EngineError
from rollout.engine.sglang_weights import BucketShape


@dataclass(frozen=True)
class IpcTransport:
    """The weights that the trainer has now: it can load no earlier version."""

    sender: Sender
    plan: Sequence[BucketShape]
    """What ``sender.plan_weights`` said."""
    devices: Mapping[str, Sequence[str]]
    """By an engine's URL, the device id (``rl.weights.flat.device_id``) of each of its tensor-parallel ranks; an engine
    that is not listed has all ranks on the trainer's only device."""

    @property
    def nbytes(self) -> int:
        return sum(map(bucket_nbytes, self.plan))

    def check(self, expected: Mapping[str, tuple[int, ...]]) -> None:
        check_plan(self.plan, expected)

    async def prepare(self, engines: Sequence[WeightTarget], version: int) -> None:
        """Nothing: a bucket is filled when the one before it has been taken."""

    async def load(self, engines: Sequence[WeightTarget], version: int, flush: bool) -> None:
        await in_session(engines, functools.partial(self._send, engines, version, flush))

    async def _send(self, engines: Sequence[WeightTarget], version: int, flush: bool) -> None:
        await self.sender.rewind_weights()
        for index in range(len(self.plan)):
            await self.sender.fill_bucket()
            handles = await self.sender.bucket_handles()
            said = version if index == len(self.plan) - 1 else None

            async def send(engine: WeightTarget, handles: dict[str, str] = handles, said: int | None = said) -> None:
                ranks = (await engine.abilities()).tensor_parallel
                payloads = self._payloads(engine.url, ranks, handles)
                await engine.update_weights_from_tensors(payloads, said, flush, flat=True)

            await on_all(engines, send)

    def _payloads(self, url: str, ranks: int, handles: Mapping[str, str]) -> list[str]:
        if url not in self.devices:
            if len(handles) > 1:
                raise EngineError(f"{url}: it is not known on which of the trainer's {len(handles)} GPUs it runs")
            return list(handles.values()) * ranks
        missing = [device for device in self.devices[url] if device not in handles]
        if missing:
            raise EngineError(f"{url} runs on {missing}, where no trainer rank is; publish.transport=collective can")
        return [handles[device] for device in self.devices[url]]


def check_plan(plan: Sequence[BucketShape], expected: Mapping[str, tuple[int, ...]]) -> None:
    """Raises ValueError where the buckets do not hold each tensor of the model once."""
    check_complete([Bucket(dict(zip(b.names, b.shapes, strict=True)), "", 0) for b in plan], expected)
