"""A teacher that is larger than GPU memory for teachers: group after group through two buffers."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from torch import Tensor

from teachers.device import Image
from teachers.shard import StoredShard

Fill = Callable[[Sequence[str], Mapping[str, int], Tensor], None]


class GroupStream:
    """Iterate once. While a group is used, the next is loaded by a thread.

    Args:
        fill: puts tensors into a buffer at these offsets, and returns when they are there.
        waited: told since when a group was waited for, as soon as it is there.
    """

    def __init__(
        self, shard: StoredShard, buffers: tuple[Tensor, Tensor], fill: Fill, waited: Callable[[float], None]
    ) -> None:
        self._shard, self._fill, self._waited = shard, fill, waited
        self._images = [Image(buffer) for buffer in buffers]
        self._loader = ThreadPoolExecutor(1, thread_name_prefix=f"stream {shard.teacher}")

    def __iter__(self) -> Iterator[tuple[str, Mapping[str, Tensor]]]:
        groups = self._shard.groups
        pending = self._load(0)
        for index, group in enumerate(groups):
            started = time.perf_counter()
            image = pending.result()
            self._waited(started)
            if index + 1 < len(groups):
                pending = self._load(index + 1)
            yield group.name, image.views
            image.mark_use()

    def _load(self, index: int) -> Future[Image]:
        return self._loader.submit(self._fill_group, index)

    def _fill_group(self, index: int) -> Image:
        image = self._images[index % 2]
        image.wait_unused()
        offsets, _ = self._shard.place(self._shard.groups[index].tensors)
        self._fill(self._shard.groups[index].tensors, offsets, image.data)
        image.views = self._shard.views(image.data, offsets)
        return image

    def close(self) -> None:
        """Nothing touches the buffers any more after this."""
        self._loader.shutdown(wait=True, cancel_futures=True)
        for image in self._images:
            image.mark_use()
            image.wait_unused()
