"""Teachers' weights in three tiers, GPU memory, pinned memory and local disk, moved ahead of their use.

``plan`` says in which order teachers will be leased, and loading runs along it in the background (``movers``);
``lease`` waits for what is not there yet, and gives views of the tier's own buffers.

What fails names the teacher and the file, and fails the lease of that teacher alone: one that failed ahead of its use
is tried once more when it is leased, and a copy that is in memory needs no disk.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from teachers.device import Image, Lane
from teachers.errors import MissingTeacherError, TierFullError
from teachers.hbm import STREAM
from teachers.movers import LOOK_SECONDS, Movers
from teachers.reader import DirectReader
from teachers.shard import StoredShard
from teachers.stats import TierStats
from teachers.store import TeacherStore
from teachers.stream import Failed, GroupStream


class TierManager:
    """One rank's teachers.

    Args:
        shard: the key of the parallel layout and rank that they were imported under.
        hbm_bytes: for images on the device, decoding included.
        pinned_bytes: mapped at once.
        teachers: those that can be leased; all of the store by default.

    Raises:
        MissingTeacherError, CorruptTeacherError: a manifest is not there or damaged, a pack is not there or too short.
        ValueError: a budget that is too small for anything.
    """

    def __init__(
        self,
        store: TeacherStore,
        shard: str,
        device: torch.device | str,
        hbm_bytes: int,
        pinned_bytes: int,
        teachers: Sequence[str] | None = None,
        reader: DirectReader | None = None,
    ) -> None:
        self.device = torch.device(device)
        if self.device.type == "cuda" and self.device.index is None:
            # The movers' threads have a current device of their own.
            self.device = torch.device("cuda", torch.cuda.current_device())
        self.shards: Mapping[str, StoredShard] = _open_all(
            store, shard, store.names() if teachers is None else teachers
        )
        self._movers = Movers(self.shards, self.device, hbm_bytes, pinned_bytes, reader or DirectReader())

    def plan(self, schedule: Sequence[str]) -> None:
        """The teachers that will be leased, in order; replaces the plan before. Loading begins at once.

        Raises:
            MissingTeacherError: one of them is unknown.
        """
        for teacher in schedule:
            self._known(teacher)
        with self._movers.changed:
            self._movers.schedule(schedule)

    def prefetch(self, teacher: str) -> None:
        """It will be leased soon: it goes to the head of the plan, unless it is on it.

        Raises:
            MissingTeacherError: it is unknown.
        """
        self._known(teacher)
        with self._movers.changed:
            planned = self._movers.hbm.books.upcoming
            if teacher not in planned:
                self._movers.schedule([teacher, *planned])

    @contextlib.contextmanager
    def lease(self, teacher: str) -> Iterator[Mapping[str, Tensor]]:
        """A teacher's tensors on the device, views that are valid inside of the context, for reading only.

        Raises:
            TierFullError: it is larger than the tier (use ``layers``), or other leases leave no room for it.
            TeacherError: its weights can't be loaded.
        """
        self._known(teacher)
        movers, hbm = self._movers, self._movers.hbm
        if not hbm.fits(teacher):
            raise TierFullError(
                f"teacher {teacher} has {self.shards[teacher].device_bytes} bytes, GPU memory for teachers holds"
                f" {hbm.capacity}: lease it by layers"
            )
        with movers.changed:
            movers.wait_for(teacher, lambda: teacher in hbm.ready)
            hbm.books.lease(teacher)
            movers.changed.notify_all()
            image = hbm.images[teacher]
        started = time.perf_counter()
        try:
            yield image.views
        finally:
            image.mark_use()
            with movers.changed:
                movers.stats.span("lease", teacher, started)
                hbm.books.release(teacher)
                movers.changed.notify_all()

    @contextlib.contextmanager
    def layers(
        self, teacher: str, failed: Failed | None = None
    ) -> Iterator[Iterable[tuple[str, Mapping[str, Tensor]]]]:
        """Group after group of a teacher's tensors (``StoredShard.groups``), in stored order, also of one that is
        larger than the tier: its next group is loaded into a second buffer while one is used. A group's views are
        valid until the next is asked for. It can be iterated more than once, and what of it fits into pinned memory
        stays there meanwhile: only of one that does not are files read while it is iterated.

        Args:
            failed: told of a group that can't be loaded then, in place of an error; it and what follows are NaN.

        Raises:
            TierFullError: not even two groups fit.
            TeacherError: its weights can't be loaded.
        """
        self._known(teacher)
        shard = self.shards[teacher]
        if self._movers.hbm.fits(teacher):
            with self.lease(teacher) as weights:
                yield [(group.name, {name: weights[name] for name in group.tensors}) for group in shard.groups]
            return
        with self._stream(teacher, failed) as stream:
            yield stream

    @contextlib.contextmanager
    def _stream(self, teacher: str, failed: Failed | None) -> Iterator[GroupStream]:
        movers, hbm = self._movers, self._movers.hbm
        with movers.changed:
            movers.wait_for(teacher, lambda: movers.sources_ready(teacher))
            held = movers.hold_sources(teacher)
            try:
                evicted = self._make_stream_room(teacher)
            except TierFullError:
                movers.release_sources(held)
                raise
        buffers: list[Tensor] = []
        lane = Lane(self.device)

        def fill(names: Sequence[str], offsets: Mapping[str, int], data: Tensor) -> None:
            movers.fill(teacher, names, offsets, data, lane)

        def waited(started: float) -> None:
            with movers.changed:
                movers.stats.waited(teacher, started)

        try:
            movers.vacate(evicted)
            size = hbm.largest_group(self.shards[teacher])
            buffers.append(movers.allocate(teacher, size, evicted))
            buffers.append(movers.allocate(teacher, size))
            stream = GroupStream(self.shards[teacher], buffers, fill, waited, failed)
            try:
                yield stream
            finally:
                stream.close()
        finally:
            with movers.changed:
                for buffer in buffers:
                    hbm.recycle(buffer)
                hbm.failed(STREAM + teacher)
                movers.release_sources(held)
                movers.changed.notify_all()

    def _make_stream_room(self, teacher: str) -> list[tuple[str, Image]]:
        """Two buffers of its largest group. Loads that are under way are waited for; leases are not."""
        movers = self._movers
        while True:
            try:
                return movers.hbm.make_room(STREAM + teacher, urgent=True, keep=()) or []
            except TierFullError:
                if not movers.busy:
                    raise
            movers.changed.wait(LOOK_SECONDS)

    def offload(self) -> int:
        """Give the device's memory away, all of it; returns the bytes that it gained. What is worth its place goes to
        pinned memory, where the next teachers are read meanwhile. Until ``onload`` no lease is given. Idempotent.

        Raises:
            TierFullError: a teacher is leased, or waited for; nothing has changed.
        """
        gained = self._movers.offload()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()  # torch keeps what is freed; another process is to have it
        return gained

    def onload(self) -> None:
        """The device's memory may be used again; what comes next on the plan is copied there. Idempotent."""
        self._movers.onload()

    def stats(self) -> TierStats:
        with self._movers.changed:
            return self._movers.stats.snapshot()

    def streams(self, teacher: str) -> bool:
        """Is it larger than the tier in GPU memory, so that only ``layers`` can lease it?"""
        return not self._movers.hbm.fits(teacher)

    def stream_bytes(self, teacher: str) -> tuple[int, int]:
        """What its two buffers take, and what the tier has for them."""
        hbm = self._movers.hbm
        return 2 * hbm.largest_group(self.shards[teacher]), hbm.capacity

    @property
    def in_hbm(self) -> frozenset[str]:
        """The teachers in GPU memory, ready for use (for ``scoring.scoring_order``)."""
        with self._movers.changed:
            return frozenset(self._movers.hbm.ready)

    @property
    def in_pinned(self) -> frozenset[str]:
        with self._movers.changed:
            return frozenset(self._movers.pinned.ready)

    def memory(self) -> tuple[int, int]:
        """Bytes that are held now: on the device, and in frames of pinned memory."""
        with self._movers.changed:
            arena = self._movers.pinned.arena
            return self._movers.hbm.allocated_bytes, (arena.frames - arena.free_frames) * arena.frame_bytes

    def close(self) -> None:
        """Stop moving, and give the memory back."""
        self._movers.close()

    def _known(self, teacher: str) -> None:
        if teacher not in self.shards:
            raise MissingTeacherError(f"no teacher {teacher}; there are {', '.join(self.shards)}")


def _open_all(store: TeacherStore, shard: str, names: Sequence[str]) -> dict[str, StoredShard]:
    """The shards of these teachers, and of what they are based on."""
    shards: dict[str, StoredShard] = {}
    for name in names:
        shards[name] = opened = store.open(name, shard)
        opened.check_packs()
        if opened.base is not None:
            shards.setdefault(opened.base.teacher, opened.base)
    return shards
