"""A sender in this process, of one rank and given tensors: what benchmarks and tests publish from."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import torch
from torch import Tensor

from rl.weights.sender import WeightSender
from rollout.engine.sglang_weights import BucketShape, UpdateGroup
from rollout.processes import free_port


class LocalSender:
    """Implements ``rl.weights.sender.Sender``. ``named`` may be set to other tensors of the same names and shapes."""

    def __init__(self, named: Sequence[tuple[str, Tensor]], device: str = "cpu") -> None:
        self.named = named
        self._rank = WeightSender(lambda: iter(self.named), torch.device(device))

    def plan(self, bucket_bytes: int) -> list[BucketShape]:
        return self._rank.plan(bucket_bytes)

    async def plan_weights(self, bucket_bytes: int) -> list[BucketShape]:
        return self.plan(bucket_bytes)

    async def stage_weights(self) -> None:
        await asyncio.to_thread(self._rank.stage)

    async def memory_ids(self) -> dict[str, str]:
        return dict([self._rank.memory_id()])

    async def memory_handles(self) -> dict[str, str]:
        return dict([await asyncio.to_thread(self._rank.memory_handle)])

    async def rewind_weights(self) -> None:
        self._rank.rewind()

    async def fill_bucket(self) -> None:
        await asyncio.to_thread(self._rank.fill)

    async def bucket_handles(self) -> dict[str, str]:
        return dict([await asyncio.to_thread(self._rank.handle)])

    async def group_endpoint(self) -> tuple[str, int]:
        return "127.0.0.1", free_port()

    async def open_group(self, group: UpdateGroup) -> None:
        await asyncio.to_thread(self._rank.join, group)

    async def broadcast_bucket(self) -> None:
        await asyncio.to_thread(self._rank.broadcast)

    async def close_group(self) -> None:
        await asyncio.to_thread(self._rank.leave)

    async def release(self) -> None:
        """Give the memory back in which weights are staged."""
        await asyncio.to_thread(self._rank.release)
