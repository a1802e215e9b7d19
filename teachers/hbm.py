"""The tier in GPU memory (a host buffer on the CPU): whole images within a byte budget. Its caller holds the lock.

An image is one allocation of torch. The one that was evicted last is used again when the sizes are equal (shards of one
architecture), so that switching neither allocates nor waits for the device's allocator.

All is allocated on a stream of the tier's own, on which nothing is ever queued. torch gives memory that was freed to
whoever allocates on the same stream, at once: from the trainer's it could be memory that a kernel there has yet to use.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Collection, Iterator, Mapping

import torch
from torch import Tensor

from teachers import codec
from teachers.device import Image, Lane, Resident
from teachers.errors import TierFullError
from teachers.residency import Residency
from teachers.shard import StoredShard

STREAM = "stream of "
"""The two buffers of a teacher that is larger than the tier; they have a line of their own in the books."""
_CUDA_GRANULE = 2 << 20
"""torch's allocator takes large blocks from the device in multiples of this."""


class HbmTier:
    """
    Raises:
        ValueError: the budget does not even hold what decoding needs.
    """

    def __init__(self, budget: int, shards: Mapping[str, StoredShard], device: torch.device) -> None:
        self.device = device
        self._granule = _CUDA_GRANULE if device.type == "cuda" else 1
        encoded = [t.numel for s in shards.values() for t in s.manifest.tensors if t.encoding in ("delta", "fp8")]
        needed = codec.workspace_bytes(max(encoded, default=0))
        self.workspace_bytes = self._rounded(needed) if needed else 0
        if budget <= self.workspace_bytes:
            raise ValueError(f"an HBM budget of {budget} bytes is less than decoding needs ({self.workspace_bytes})")
        self.capacity = budget - self.workspace_bytes
        self._workspace: Tensor | None = None
        self._decoding = threading.Lock()
        self._allocator = Lane(device)
        sizes = {name: self._rounded(shard.device_bytes) for name, shard in shards.items()}
        for name, shard in shards.items():
            if sizes[name] > self.capacity:
                sizes[STREAM + name] = 2 * self.largest_group(shard)
        self.books = Residency(self.capacity, sizes)
        self.images: dict[str, Image] = {}
        self.ready: set[str] = set()
        self._spare: list[Tensor] = []

    def _rounded(self, nbytes: int) -> int:
        return -(-max(nbytes, 1) // self._granule) * self._granule

    def largest_group(self, shard: StoredShard) -> int:
        return max((self._rounded(shard.place(group.tensors)[1]) for group in shard.groups), default=0)

    def fits(self, name: str) -> bool:
        return self.books.sizes[name] <= self.capacity

    @property
    def allocated_bytes(self) -> int:
        """All that is held, spare buffers and the workspace included."""
        workspace = [] if self._workspace is None else [self._workspace]
        return sum(data.nbytes for data in [*(image.data for image in self.images.values()), *self._spare, *workspace])

    def make_room(self, name: str, urgent: bool, keep: Collection[str]) -> list[tuple[str, Image]] | None:
        """Book it, leased until ``loaded`` or ``failed``; what was evicted, or None when it has to wait.

        Raises:
            TierFullError: it is urgent, and can't be.
        """
        admission = self.books.fetch(name, keep=keep) if urgent else self.books.ahead(name, keep=keep)
        if admission is None:
            return None
        self.books.lease(name)
        self.ready.difference_update(admission.evict)
        return [(victim, self.images.pop(victim)) for victim in admission.evict]

    def allocate(self, nbytes: int) -> Tensor:
        """Memory that was booked. What is evicted has to be ``recycle``d before."""
        nbytes = self._rounded(nbytes)
        fitting = [spare for spare in self._spare if spare.nbytes == nbytes][:1]
        self._spare = [] if not fitting else [spare for spare in self._spare if spare is not fitting[0]]
        return fitting[0] if fitting else self._empty(nbytes)

    def _empty(self, nbytes: int) -> Tensor:
        with self._allocator.use():
            return torch.empty(nbytes, dtype=torch.uint8, device=self.device)

    @contextlib.contextmanager
    def workspace(self, shard: StoredShard) -> Iterator[Tensor]:
        """What decoding this one takes, for one caller at a time, who is done with it at the end. Not under the lock of
        the books. On the CPU it is empty: what is decoded there allocates what it needs.

        Raises:
            TierFullError: the device has less than the budget.
        """
        if shard.is_plain:
            yield torch.empty(0, dtype=torch.uint8)
            return
        with self._decoding:
            if self._workspace is None:
                try:
                    self._workspace = self._empty(self.workspace_bytes if self.device.type == "cuda" else 0)
                except torch.OutOfMemoryError as error:
                    raise TierFullError(
                        f"teacher {shard.teacher}: the device has no {self.workspace_bytes} bytes for decoding: {error}"
                    ) from error
            yield self._workspace

    def lease_base(self, shard: StoredShard) -> Resident | None:
        """Its base, if that is on the device. It is leased then: its caller releases it when it has been read."""
        base = shard.base
        if base is None or base.teacher not in self.ready:
            return None
        self.books.lease(base.teacher)
        return Resident(base.teacher, self.images[base.teacher].data, base.stored_offsets)

    def recycle(self, data: Tensor) -> None:
        self._spare.append(data)

    def loaded(self, name: str, image: Image) -> None:
        self.images[name] = image
        self.ready.add(name)
        self.books.release(name)

    def failed(self, name: str) -> None:
        self.books.release(name)
        self.books.drop(name)

    def take_all(self) -> list[tuple[str, Image]]:
        """Forget every image, and the spare buffers: whoever is given the images frees them.

        Raises:
            TierFullError: some are in use.
        """
        if leased := self.books.leased:
            raise TierFullError(f"GPU memory for teachers can't be given away: {sorted(leased)} are in use")
        images = list(self.images.items())
        for name in self.books.resident:
            self.books.drop(name)
        self.clear()
        return images

    def clear(self) -> None:
        self.ready.clear()
        self.images.clear()
        self._spare.clear()
        self._workspace = None
