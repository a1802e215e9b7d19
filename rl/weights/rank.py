"""What the trainer's ranks do together of ``rl.weights.sender``: each call on all of them at once."""

from __future__ import annotations

import torch
import torch.distributed as dist

from rl.trainer.collective import gather_objects, on_rank_zero
from rl.weights.sender import Export, WeightSender
from rollout.engine.sglang_weights import BucketShape, UpdateGroup


class RankSender:
    """One rank's. A failure on one rank is raised on all, so that they stay in step."""

    def __init__(self, export: Export, device: torch.device) -> None:
        self._sender = WeightSender(export, device, leads=dist.get_rank() == 0)

    def plan(self, bucket_bytes: int) -> list[BucketShape]:
        return self._sender.plan(bucket_bytes)

    def stage(self) -> None:
        self._sender.stage()

    def memory_ids(self) -> dict[str, str]:
        return _first_of_each(self._sender.memory_id())

    def memory_handles(self) -> dict[str, str]:
        return _first_of_each(self._sender.memory_handle())

    def rewind(self) -> None:
        self._sender.rewind()

    def fill(self) -> None:
        self._sender.fill()

    def handles(self) -> dict[str, str]:
        return _first_of_each(self._sender.handle())

    def join(self, group: UpdateGroup) -> None:
        on_rank_zero(lambda: self._sender.join(group))

    def broadcast(self) -> None:
        on_rank_zero(self._sender.broadcast)

    def leave(self) -> None:
        on_rank_zero(self._sender.leave)

    def release(self) -> None:
        """Give back the memory of the buffer that buckets are put into."""
        self._sender.release()


def _first_of_each(own: tuple[str, str]) -> dict[str, str]:
    """All ranks' by the device's id; of ranks that share a device, the first's."""
    found: dict[str, str] = {}
    for device, value in gather_objects(own):
        found.setdefault(device, value)
    return found
