"""Two threads that move teachers' weights: one from disk into pinned memory, one from there to the device.

Each asks again and again, under one lock, for the first teacher in the order of use that is not where it should be and
that may take the place of others (``residency``), and moves it without the lock.

Nothing is held twice for long: what is on the device goes first from pinned memory, and what leaves the device goes
back there when it is worth more than what it replaces, so both memories together count as cache for the disk.

A teacher that somebody waits for is copied on while the rest of it is still read.
"""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from teachers.arrival import Arrival
from teachers.device import Image, Lane, Resident, Source
from teachers.errors import StalledReadError, TeacherError, TierFullError
from teachers.hbm import HbmTier
from teachers.pinned import WINDOW, PinnedTier
from teachers.reader import DirectReader, windows
from teachers.shard import StoredShard
from teachers.stats import TierStats

LOOK_SECONDS = 1.0
"""Whoever waits looks this often whether the movers live; what it waits for wakes it."""

Job = Callable[[], None]


class Movers:
    """The books of both tiers, and the threads.

    ``changed`` is the lock of all that is here. Names with an underscore in front of them are the threads' own.
    """

    def __init__(
        self,
        shards: Mapping[str, StoredShard],
        device: torch.device,
        hbm_bytes: int,
        pinned_bytes: int,
        reader: DirectReader,
    ) -> None:
        self.shards = shards
        self.hbm = HbmTier(hbm_bytes, shards, device)
        self.pinned = PinnedTier(pinned_bytes, shards, reader, device.type == "cuda")
        self.changed = threading.Condition()
        self.stats = TierStats()
        self._bases = {shard.base.teacher for shard in shards.values() if shard.base is not None}
        self._lane = Lane(device)
        self._wanted: list[str] = []
        """Somebody waits for these."""
        self._errors: dict[str, TeacherError] = {}
        self._moving: set[str] = set()
        self._arriving: dict[str, Arrival] = {}
        """Whole stored images that are being read."""
        self._fatal: BaseException | None = None
        self._closed = False
        self._away = False
        """GPU memory for teachers is somebody else's just now."""
        self._threads = [
            threading.Thread(target=self._move, args=("disk", self._next_read), name="teachers: disk", daemon=True),
            threading.Thread(target=self._move, args=("device", self._next_copy), name="teachers: device", daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        with self.changed:
            self._closed = True
            self.changed.notify_all()
        for thread in self._threads:
            thread.join(self.pinned.reader.stall_seconds + 10)
        for image in self.hbm.images.values():
            image.wait_unused()
        self.hbm.clear()
        self.pinned.arena.close()

    def offload(self) -> int:
        """See ``TierManager.offload``."""
        with self.changed:
            if self._away:
                return 0
            self._away = True  # no copy begins from here on
            try:
                if self._wanted:
                    raise TierFullError(f"GPU memory for teachers can't be given away: {self._wanted} are waited for")
                while "device" in self._moving:
                    self._check_alive("offload")
                    self.changed.wait(LOOK_SECONDS)
                gained = self.hbm.allocated_bytes
                images = self.hbm.take_all()
            except TeacherError:
                self._away = False
                self.changed.notify_all()
                raise
            upcoming = self.hbm.books.upcoming
            images.sort(key=lambda item: upcoming.index(item[0]) if item[0] in upcoming else len(upcoming))
            demoted = {name for name, _ in images if self._may_demote(name, ())}
        self.vacate(images, demoted)
        images.clear()
        with self.changed:
            self.changed.notify_all()
        return gained

    def onload(self) -> None:
        """See ``TierManager.onload``."""
        with self.changed:
            self._away = False
            self.changed.notify_all()

    # Under the lock.

    def _check_alive(self, who: str) -> None:
        """
        Raises:
            TeacherError: nothing is moved any more.
        """
        if self._fatal is not None or self._closed:
            raise TeacherError(f"{who}: the tiers were closed, or a mover failed") from self._fatal

    def sources(self, teacher: str) -> list[str]:
        """Stored images that its weights are made of."""
        base = self.shards[teacher].base
        return [base.teacher, teacher] if base is not None else [teacher]

    def schedule(self, schedule: Sequence[str]) -> None:
        self.hbm.books.schedule(schedule)
        self.pinned.books.schedule([source for teacher in schedule for source in self.sources(teacher)])
        self._errors.clear()
        self.changed.notify_all()

    @property
    def busy(self) -> bool:
        return bool(self._moving)

    def _upcoming(self) -> list[str]:
        return list(dict.fromkeys([*self._wanted, *self.hbm.books.upcoming]))

    def _failed(self, teacher: str) -> TeacherError | None:
        return next((self._errors[name] for name in self.sources(teacher) if name in self._errors), None)

    def wait_for(self, teacher: str, ready: Callable[[], bool]) -> None:
        """Until ``ready``; then it counts as used.

        Raises:
            TeacherError: it can't be loaded.
        """
        if self._away:
            raise TeacherError(f"teacher {teacher}: GPU memory for teachers was given away; take it back with onload")
        started = time.perf_counter()
        for name in self.sources(teacher):
            self._errors.pop(name, None)
        self.stats.leases += 1
        self.stats.hbm_hits += teacher in self.hbm.ready
        self.stats.pinned_hits += teacher not in self.hbm.ready and teacher in self.pinned.ready
        self._wanted.append(teacher)
        self.changed.notify_all()
        try:
            while not ready():
                error = self._failed(teacher)
                if error is not None:
                    raise error
                self._check_alive(f"teacher {teacher}")
                self.changed.wait(LOOK_SECONDS)
        finally:
            self._wanted.remove(teacher)
            self.stats.waited(teacher, started)
        self.hbm.books.use(teacher)
        for name in self.sources(teacher):
            self.pinned.books.use(name)

    def sources_ready(self, teacher: str) -> bool:
        return all(name in self.pinned.ready or not self.pinned.fits(name) for name in self.sources(teacher))

    def _cheap(self) -> set[str]:
        """In pinned memory, but on the device too."""
        return self.hbm.ready - self._bases

    def _kept(self, sources: Sequence[str]) -> set[str]:
        """What must not leave pinned memory for them: these themselves, and what somebody waits for just now."""
        waiting = [teacher for teacher in self._wanted if teacher not in self.hbm.ready]
        return {*sources, *(name for teacher in waiting for name in self.sources(teacher))}

    def _refuse(self, teacher: str, error: TeacherError) -> None:
        """An urgent move found no room: final, unless a move that is under way, or whoever waits longer, makes some."""
        if not isinstance(error, TierFullError) or (not self._moving and teacher == self._wanted[0]):
            self._errors[teacher] = error
            self.changed.notify_all()

    def _next_read(self) -> Job | None:
        for teacher in self._upcoming():
            if teacher in self.hbm.books.resident or self._failed(teacher) is not None:
                continue
            sources = self.sources(teacher)
            stalled = [name for name in sources if name in self.pinned.stalled]
            for name in [*stalled, *self._missing(teacher)][:1]:
                try:
                    if self.pinned.make_room(name, teacher in self._wanted, self._cheap(), self._kept(sources)):
                        self._arriving[name] = Arrival(self.changed, self.pinned.source(name))
                        self.changed.notify_all()  # the device's thread may follow it
                        return functools.partial(self._read, name, self._arriving[name])
                except TeacherError as error:
                    self._refuse(teacher, error)
                return None
        return None

    def _next_copy(self) -> Job | None:
        if self._away:
            return None
        for teacher in self._upcoming():
            if teacher in self.hbm.books.resident or not self.hbm.fits(teacher) or self._failed(teacher) is not None:
                continue
            if not self.sources_ready(teacher) and not self._may_follow(teacher):
                return None
            try:
                return self._book_copy(teacher)
            except TeacherError as error:
                self._refuse(teacher, error)
                return None
        return None

    def _may_follow(self, teacher: str) -> bool:
        """Is it being read, to be copied on meanwhile? For somebody who waits: the device's thread waits too then."""
        return teacher in self._arriving and teacher in self._wanted and self.shards[teacher].is_plain

    def _book_copy(self, teacher: str) -> Job | None:
        """
        Raises:
            TierFullError: somebody waits for it, and there is no room.
        """
        held = self.hold_sources(teacher)
        try:
            evicted = self.hbm.make_room(teacher, teacher in self._wanted, self._wanted)
        except TierFullError:
            self.release_sources(held)
            raise
        if evicted is None:
            self.release_sources(held)
            return None
        demoted = {name for name, _ in evicted if self._may_demote(name, held)}
        base = self.hbm.lease_base(self.shards[teacher])
        return functools.partial(self._copy, teacher, held, evicted, demoted, self._arriving.get(teacher), base)

    def hold_sources(self, teacher: str) -> list[str]:
        """Leases on what is read from pinned memory: stored images, or a window for one that is too large."""
        held = []
        for name in self.sources(teacher):
            if self.pinned.fits(name):
                self.pinned.books.lease(name)
                held.append(name)
        if not self.pinned.fits(teacher):
            try:
                self.pinned.make_room(WINDOW + teacher, True, self._cheap(), self._kept(held))
            except TierFullError:
                self.release_sources(held)
                raise
            held.append(WINDOW + teacher)
        return held

    def release_sources(self, held: Sequence[str]) -> None:
        for name in held:
            if not name.startswith(WINDOW):
                self.pinned.books.release(name)
            elif name not in self.pinned.stalled:
                self.pinned.failed(name)

    def _may_demote(self, name: str, keep: Sequence[str]) -> bool:
        """Is there a place in pinned memory for an image that leaves the device? Then it is booked. Not one that a read
        before its next use will take: it would have gone there for nothing, and held up that read."""
        if not self.shards[name].is_plain or not self.pinned.fits(name):
            return False
        if name in self.pinned.frames:
            return False
        return self.pinned.make_spare_room(name, self._reads_before(name), self._cheap(), self._kept(keep))

    def _reads_before(self, name: str) -> Iterator[str]:
        """What has yet to be read from disk, up to the next use of this one, in order."""
        for teacher in self._upcoming():
            if teacher == name:
                return
            if teacher not in self.hbm.books.resident and self._failed(teacher) is None:
                yield from self._missing(teacher)

    def _missing(self, teacher: str) -> list[str]:
        """Of what it is made of: not in pinned memory, nor on its way there."""
        return [name for name in self.sources(teacher) if name not in self.pinned.frames and self.pinned.fits(name)]

    # Without the lock, by the threads.

    def _move(self, kind: str, find: Callable[[], Job | None]) -> None:
        try:
            while True:
                with self.changed:
                    job = find()
                    while job is None and not self._closed:
                        self.changed.wait()
                        job = find()
                    if job is None or self._closed:
                        return
                    self._moving.add(kind)
                try:
                    job()
                finally:
                    with self.changed:
                        self._moving.discard(kind)
                        self.changed.notify_all()
        except BaseException as error:  # noqa: BLE001 (raised from whoever waits)
            with self.changed:
                self._fatal = error
                self.changed.notify_all()

    def _read(self, name: str, arrival: Arrival) -> None:
        started = time.perf_counter()
        failure: TeacherError | None = TeacherError(f"teacher {name}: its read broke off")
        try:
            count = self._read_into(name, name, arrival.source, arrival.add)
            failure = None
        except TeacherError as error:
            failure = error
        finally:
            with self.changed:
                del self._arriving[name]
                arrival.end(failure)
                if failure is None:
                    self.pinned.loaded(name)
                    self._count_read(name, count, started)
                else:
                    self._errors[name] = failure
                    if name not in self.pinned.stalled:
                        self.pinned.failed(name)

    def _count_read(self, name: str, count: int, started: float) -> None:
        self.stats.disk_loads += 1
        self.stats.read_bytes += count
        self.stats.read_seconds += self.stats.span("read", name, started)

    def _read_into(
        self, item: str, name: str, source: Source, arrived: Callable[[int, int], None] = lambda *_: None
    ) -> int:
        """From disk. ``item``: whose frames these are in the books. They stay booked while a thread hangs."""
        finished = threading.Event()

        def idle() -> None:
            finished.set()
            with self.changed:
                if item in self.pinned.stalled:
                    self.pinned.failed(item)
                    self.changed.notify_all()

        try:
            return self.pinned.read(name, source, idle, arrived)
        except StalledReadError:
            with self.changed:
                if not finished.is_set():
                    self.pinned.stalled.add(item)
            raise

    def _copy(
        self,
        teacher: str,
        held: Sequence[str],
        evicted: list[tuple[str, Image]],
        demote: set[str],
        arrival: Arrival | None,
        base: Resident | None,
    ) -> None:
        """``arrival``: it was being read when this was booked. ``base``: leased on the device."""
        shard = self.shards[teacher]
        self.vacate(evicted, demote)
        try:
            data = self.allocate(teacher, shard.device_bytes, evicted)
            started = time.perf_counter()
            if arrival is None:
                moved = self.fill(teacher, shard.names, shard.device_offsets, data, self._lane, base)
            else:
                moved, started = self._follow(arrival, data)
        except TeacherError as error:
            with self.changed:
                # A read's failure has been told by who read, and may be tried again by now.
                if arrival is None or error is not arrival.error:
                    self._errors[teacher] = error
                self.hbm.failed(teacher)
        else:
            with self.changed:
                self.hbm.loaded(teacher, Image(data, shard.views(data, shard.device_offsets)))
                self.stats.copies += 1
                self.stats.copied_bytes += moved
                self.stats.copy_seconds += self.stats.span("copy", teacher, started)
        finally:
            with self.changed:
                self.release_sources(held)
                if base is not None:
                    self.hbm.books.release(base.teacher)

    def _follow(self, arrival: Arrival, data: Tensor) -> tuple[int, float]:
        """Copy what has been read while the rest still is; returns the bytes, and when this would have begun if the
        copies had been made in one go.

        Raises:
            TeacherError: the rest can't be read.
        """
        moved, seconds = 0, 0.0
        for spans in arrival.pieces():
            started = time.perf_counter()
            for begin, end in spans:
                moved += self._lane.take(begin, end, data, arrival.source)
            self._lane.synchronize()
            seconds += time.perf_counter() - started
        return moved, time.perf_counter() - seconds

    def vacate(self, evicted: Iterable[tuple[str, Image]], demote: Collection[str] = ()) -> None:
        """Wait until nobody uses these images any more; those to ``demote`` go to pinned memory."""
        for name, image in evicted:
            image.wait_unused()
            if name in demote:
                self._demote(name, image)

    def allocate(self, teacher: str, nbytes: int, evicted: list[tuple[str, Image]] | None = None) -> Tensor:
        """Memory of the device that was booked, in the place of images that nobody uses any more. These are taken off
        the caller's list: as long as it held one, its memory would be taken beside the new one's.

        Raises:
            TierFullError: the device has less than the budget.
        """
        with self.changed:
            while evicted:
                self.hbm.recycle(evicted.pop()[1].data)
            try:
                return self.hbm.allocate(nbytes)
            except torch.OutOfMemoryError as error:
                raise TierFullError(
                    f"teacher {teacher}: the device has no {nbytes} bytes left, though the budget has: {error}"
                ) from error

    def _demote(self, name: str, image: Image) -> None:
        started = time.perf_counter()
        self._lane.to_host(image.data[: self.shards[name].stored_bytes], self.pinned.arena, self.pinned.frames[name])
        self._lane.synchronize()
        with self.changed:
            self.pinned.loaded(name)
            self.stats.demotions += 1
            self.stats.span("demote", name, started)
            self.changed.notify_all()  # its place may be given to a read now

    def fill(
        self,
        teacher: str,
        names: Sequence[str],
        offsets: Mapping[str, int],
        data: Tensor,
        lane: Lane,
        base: Source | Resident | None = None,
    ) -> int:
        """Some of a teacher's tensors into memory of the device; returns the bytes that were copied there.

        Args:
            base: where its base is, if not in pinned memory.

        Raises:
            TeacherError: what has to be read from disk for it can't be.
        """
        shard = self.shards[teacher]
        if base is None and shard.base is not None:
            base = self.pinned.source(shard.base.teacher)

        def put(part: Sequence[str], source: Source) -> int:
            with self.hbm.workspace(shard) as workspace:
                moved = lane.fill(shard, part, offsets, data, source, base, workspace)
                lane.synchronize()
            return moved

        if self.pinned.fits(teacher):
            return put(names, self.pinned.source(teacher))
        used = dict.fromkeys(key for name in names if (key := shard.tensors[name].extent) is not None)
        whole = [name for name in names if shard.tensors[name].extent is None]
        moved = put(whole, Source(self.pinned.arena, (), {}))
        extents = [(key, shard.manifest.extents[key]) for key in used]
        for run in windows(extents, self.pinned.books.sizes[WINDOW + teacher]):
            started = time.perf_counter()
            source = self.pinned.window(teacher, run)
            count = self._read_into(WINDOW + teacher, teacher, source)
            with self.changed:
                self._count_read(teacher, count, started)
            moved += put([name for name in names if shard.tensors[name].extent in source.offsets], source)
        return moved
