"""Teachers' weights in GPU memory, pinned memory and on disk, moved ahead of their use."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from teachers.residency import Residency
from teachers.shard import StoredShard
from teachers.store import TeacherStore, read_extent


@dataclass
class TierStats:
    """Since the manager was made. ``exposed_seconds``: what leases waited."""

    leases: int = 0
    hbm_hits: int = 0
    pinned_hits: int = 0
    disk_loads: int = 0
    exposed_seconds: float = 0.0
    exposed_by_teacher: dict[str, float] = field(default_factory=dict)


class TierManager:
    def __init__(
        self,
        store: TeacherStore,
        shard: str,
        device: torch.device | str,
        hbm_bytes: int,
        pinned_bytes: int,
        teachers: Sequence[str] | None = None,
    ) -> None:
        names = store.names() if teachers is None else teachers
        self.shards: dict[str, StoredShard] = {name: store.open(name, shard) for name in names}
        self.device = torch.device(device)
        self._hbm = Residency(hbm_bytes, {n: s.device_bytes for n, s in self.shards.items()})
        self._images: dict[str, Tensor] = {}
        self._stats = TierStats()

    @property
    def in_hbm(self) -> frozenset[str]:
        return self._hbm.resident

    @property
    def in_pinned(self) -> frozenset[str]:
        """Beside those in GPU memory."""
        return frozenset()

    def plan(self, schedule: Sequence[str]) -> None:
        self._hbm.schedule(schedule)

    def prefetch(self, teacher: str) -> None:
        pass

    @contextlib.contextmanager
    def lease(self, teacher: str) -> Iterator[Mapping[str, Tensor]]:
        started = time.perf_counter()
        moved = self._hbm.need(teacher)
        for victim in moved.evict:
            del self._images[victim]
        shard = self.shards[teacher]
        if moved.load:
            image = torch.empty(shard.device_bytes, dtype=torch.uint8, device=self.device)
            for key, extent in shard.manifest.extents.items():
                at = shard.stored_offsets[key]
                image[at : at + extent.nbytes].copy_(read_extent(teacher, shard.packs, extent))
            self._images[teacher] = image
        self._stats.leases += 1
        self._stats.exposed_seconds += time.perf_counter() - started
        self._hbm.lease(teacher)
        try:
            yield shard.views(self._images[teacher], shard.device_offsets)
        finally:
            self._hbm.release(teacher)

    @contextlib.contextmanager
    def layers(self, teacher: str) -> Iterator[Iterator[tuple[str, Mapping[str, Tensor]]]]:
        """Group after group of a teacher's tensors (``StoredShard.groups``), in stored order; also of one that is larger
        than the tier. A group's views are valid until the next is asked for."""
        with self.lease(teacher) as weights:
            groups = self.shards[teacher].groups
            yield ((group.name, {name: weights[name] for name in group.tensors}) for group in groups)

    def stats(self) -> TierStats:
        return self._stats

    def close(self) -> None:
        self._images.clear()
