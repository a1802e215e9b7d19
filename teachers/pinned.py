"""The tier in pinned memory: which stored images it holds, in which frames. Its caller holds the lock of the books."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

from teachers.arena import Arena
from teachers.device import Source
from teachers.errors import StalledReadError, TierFullError
from teachers.format import Extent
from teachers.reader import DirectReader, blocks
from teachers.residency import Admission, Residency
from teachers.shard import StoredShard

WINDOW = "window of "
"""A teacher that is larger than the tier passes through a window; it has a line of its own in the books."""
_WINDOW_BYTES = 64 << 20


class PinnedTier:
    """
    Raises:
        TierFullError: a teacher and its base don't fit side by side.
    """

    def __init__(self, budget: int, shards: Mapping[str, StoredShard], reader: DirectReader, register: bool) -> None:
        self.shards, self.reader = shards, reader
        self.arena = Arena(budget, register)
        sizes = {name: self._whole_frames(shard.stored_bytes) for name, shard in shards.items()}
        for name, shard in shards.items():
            if sizes[name] > self.arena.nbytes:
                largest = max(extent.padded_bytes for extent in shard.manifest.extents.values())
                wanted = min(max(largest, _WINDOW_BYTES), max(largest, self.arena.nbytes // 2))
                sizes[WINDOW + name] = self._whole_frames(wanted)
        self.books = Residency(self.arena.nbytes, sizes)
        try:
            self._check_bases()
        except TierFullError:
            self.arena.close()
            raise
        self.ready: set[str] = set()
        self.frames: dict[str, list[int]] = {}
        self.stalled: set[str] = set()
        """Given up, but a thread that hangs may still write into its frames."""

    def _check_bases(self) -> None:
        sizes = self.books.sizes
        for name, shard in self.shards.items():
            if shard.base is None:
                continue
            base, own = shard.base.teacher, sizes[name if self.fits(name) else WINDOW + name]
            if sizes[base] + own > self.arena.nbytes:
                raise TierFullError(
                    f"teacher {name} takes {own} bytes of pinned memory and, at the same time, its base {base} takes "
                    f"{sizes[base]}; there are {self.arena.nbytes}"
                )

    def _whole_frames(self, nbytes: int) -> int:
        return self.arena.frames_for(nbytes) * self.arena.frame_bytes

    def fits(self, name: str) -> bool:
        return self.books.sizes[name] <= self.arena.nbytes

    def make_room(self, name: str, urgent: bool, cheap: Collection[str], keep: Collection[str]) -> bool:
        """Book frames for it, leased until ``loaded`` or ``failed``; false when that has to wait.

        Raises:
            TierFullError: it is urgent, and can't be.
            StalledReadError: frames of an earlier attempt are still held by a thread that hangs.
        """
        if name in self.stalled:
            raise StalledReadError(f"teacher {name}: an earlier read of it still hangs")
        return self._give(name, self.books.fetch(name, cheap, keep) if urgent else self.books.ahead(name, cheap, keep))

    def make_spare_room(self, name: str, sooner: Iterable[str], cheap: Collection[str], keep: Collection[str]) -> bool:
        """The same, only in a place that none of those that will be read ``sooner`` takes."""
        return self._give(name, self.books.spare(name, sooner, cheap, keep))

    def _give(self, name: str, admission: Admission | None) -> bool:
        if admission is None:
            return False
        for victim in admission.evict:
            self._forget(victim)
        self.frames[name] = self.arena.allocate(self.books.sizes[name])
        self.books.lease(name)
        return True

    def _forget(self, name: str) -> None:
        self.ready.discard(name)
        self.arena.give_back(self.frames.pop(name))

    def loaded(self, name: str) -> None:
        self.ready.add(name)
        self.books.release(name)

    def failed(self, name: str) -> None:
        self.stalled.discard(name)
        self.books.release(name)
        self.books.drop(name)
        self._forget(name)

    def source(self, name: str) -> Source:
        return Source(self.arena, self.frames[name], self.shards[name].stored_offsets)

    def window(self, name: str, run: Sequence[tuple[str, Extent]]) -> Source:
        offsets, at = {}, 0
        for key, extent in run:
            offsets[key] = at
            at += extent.padded_bytes
        if at > self.books.sizes[WINDOW + name]:
            raise TierFullError(
                f"teacher {name}: a tensor of {at} bytes is larger than what pinned memory has for it"
                f" ({self.books.sizes[WINDOW + name]} bytes)"
            )
        return Source(self.arena, self.frames[WINDOW + name], offsets)

    def read(
        self, name: str, source: Source, idle: Callable[[], None], arrived: Callable[[int, int], None] = lambda *_: None
    ) -> int:
        """From disk, checked; returns the bytes. Not under the lock.

        Args:
            idle, arrived: see ``DirectReader.read``.
        """
        shard = self.shards[name]
        extents = shard.manifest.extents
        wanted = list(blocks((shard.pack_path(extents[key]), extents[key], at) for key, at in source.offsets.items()))

        def target(begin: int, end: int) -> list[memoryview]:
            return [self.arena.view[a:b] for a, b in self.arena.spans(source.frames, begin, end)]

        self.reader.read(name, wanted, target, idle, arrived)
        return sum(block.nbytes for block in wanted)
