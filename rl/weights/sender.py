"""A trainer rank's side of publishing: its weights, a flat bucket at a time, in one buffer that is kept.

    plan ─► stage                       (all buckets side by side, in memory that an engine on this device keeps open)
      └─► rewind ─► fill ─► handle      (one bucket at a time, in memory that an engine on this device can open)
                     │  └─► broadcast   (to the engines that joined rank 0's group)
                     └─ next bucket

Every call is made on all ranks at once, because exporting is a collective.
"""

from __future__ import annotations

import datetime
import itertools
import time
import uuid
from collections.abc import Callable, Iterator
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d as c10d

from rl.weights.flat import (
    TensorSpec,
    bucket_nbytes,
    device_id,
    fill,
    handle_payload,
    memory_handle,
    plan_buckets,
    side_by_side,
)
from rollout.engine.sglang_weights import BucketShape, UpdateGroup

Export = Callable[[], Iterator[tuple[str, Tensor]]]
POLL_S = 0.0005


class Sender(Protocol):
    """All ranks' senders, seen from the driver."""

    async def plan_weights(self, bucket_bytes: int) -> list[BucketShape]: ...

    async def stage_weights(self) -> None:
        """Put all buckets side by side into the buffer."""
        ...

    async def memory_ids(self) -> dict[str, str]:
        """Which buffer it is, by the id of the device that it lies on."""
        ...

    async def memory_handles(self) -> dict[str, str]:
        """What opens the buffer, by the id of the device."""
        ...

    async def rewind_weights(self) -> None: ...

    async def fill_bucket(self) -> None: ...

    async def bucket_handles(self) -> dict[str, str]:
        """Payload of the filled bucket by the id of the device that it lies on."""
        ...

    async def group_endpoint(self) -> tuple[str, int]:
        """Address of the rank that broadcasts, and a port that is free on it."""
        ...

    async def open_group(self, group: UpdateGroup) -> None: ...

    async def broadcast_bucket(self) -> None: ...

    async def close_group(self) -> None: ...


class WeightSender:
    """One rank's. ``export`` gives every tensor of the model, in the same order each time."""

    def __init__(self, export: Export, device: torch.device, leads: bool = True) -> None:
        """
        Args:
            leads: whether this rank is the one that broadcasts.
        """
        self._export = export
        self._device = device
        self._timeout_s = 0.0
        self._leads = leads
        self._plan: list[BucketShape] = []
        self._next = 0
        self._weights: Iterator[tuple[str, Tensor]] = iter(())
        self._buffer = torch.empty(0, dtype=torch.uint8)
        self._memory_id = ""
        self._filled = self._buffer
        self._group: dist.ProcessGroup | None = None

    def plan(self, bucket_bytes: int) -> list[BucketShape]:
        """The buckets that will come; goes through an export without keeping anything of it."""
        specs = (TensorSpec(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in self._export())
        self._plan = plan_buckets(specs, bucket_bytes)
        return self._plan

    def stage(self) -> None:
        """Put all buckets of the weights as they are now into the buffer, as ``flat.side_by_side`` says."""
        *offsets, end = side_by_side(self._plan)
        self.rewind(end)
        for offset in offsets:
            self._fill(self._buffer[offset:])
        self._wait()

    def memory_id(self) -> tuple[str, str]:
        """This device's id, and which allocation of the buffer it is; never another sender's."""
        return device_id(self._device), self._memory_id

    def memory_handle(self) -> tuple[str, str]:
        """This device's id, and what an engine on it needs to open the buffer."""
        return device_id(self._device), memory_handle(self._buffer)

    def rewind(self, nbytes: int = 0) -> None:
        """Begin with the first bucket of the weights as they are now.

        Args:
            nbytes: that the buffer must have; at least the largest bucket's.
        """
        nbytes = max(nbytes, *map(bucket_nbytes, self._plan))
        if self._buffer.nbytes < nbytes:
            self.release()
            self._buffer = torch.empty(nbytes, dtype=torch.uint8, device=self._device)
            self._memory_id = uuid.uuid4().hex
        for _ in self._weights:  # a failed attempt's: the other ranks are in the same export
            pass
        self._weights = self._export()
        self._next = 0

    @property
    def bucket(self) -> BucketShape:
        """The one that was filled last."""
        return self._plan[self._next - 1]

    def fill(self) -> None:
        """Put the next bucket into the buffer; the last one also ends the export."""
        self._fill(self._buffer)
        self._wait()

    def _fill(self, place: Tensor) -> None:
        bucket = self._plan[self._next]
        # one at a time: only one tensor exists in whole
        self._filled = fill(place, bucket, itertools.islice(self._weights, len(bucket.names)))
        self._next += 1
        if self._next == len(self._plan):
            for name, _ in self._weights:
                raise ValueError(f"{name} comes after the last tensor of the plan")

    def _wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def handle(self) -> tuple[str, str]:
        """This device's id, and what an engine on it needs to open the filled bucket."""
        return device_id(self._device), handle_payload(self._filled, self.bucket)

    def release(self) -> None:
        """Give the buffer's memory back; the next ``rewind`` takes it anew."""
        self._buffer = self._filled = torch.empty(0, dtype=torch.uint8)
        if self._device.type == "cuda":
            torch.cuda.ipc_collect()  # memory that was handed on stays until somebody looks whether it is still in use

    def join(self, group: UpdateGroup) -> None:
        """As rank 0; returns when all have joined. Nothing on the ranks that do not lead."""
        self.leave()
        if not self._leads:
            return
        self._timeout_s = group.timeout_s
        timeout = datetime.timedelta(seconds=group.timeout_s)
        store = dist.TCPStore(group.address, group.port, group.world_size, is_master=True, timeout=timeout)
        # A group beside the trainer's own. torch makes those only of the default group's ranks; SGLang joins the same
        # way: the same prefix of the store, and a group that is named but has no global ranks.
        made, _ = c10d._new_process_group_helper(
            group.world_size,
            0,
            [],
            dist.Backend(group.backend),
            dist.PrefixStore(group.name, store),
            group_name=group.name,
            timeout=timeout,
        )
        c10d._world.pg_group_ranks[made] = {rank: rank for rank in range(group.world_size)}
        self._group = made

    def broadcast(self) -> None:
        """Send the filled bucket. Nothing on the ranks that do not lead.

        Raises:
            TimeoutError: an engine did not take it; the group is gone then.
        """
        if not self._leads:
            return
        if self._group is None:
            raise RuntimeError("no group was joined")
        work = dist.broadcast(self._filled, 0, group=self._group, async_op=True)
        deadline = time.monotonic() + self._timeout_s
        while not work.is_completed():
            if time.monotonic() > deadline:
                self.leave()
                raise TimeoutError(f"the engines did not take a bucket of weights within {self._timeout_s:g} s")
            time.sleep(POLL_S)
        work.wait()
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def leave(self) -> None:
        """Leave the group, also one whose other ranks are gone."""
        group, self._group = self._group, None
        if group is not None:
            group.abort()
            dist.destroy_process_group(group)
