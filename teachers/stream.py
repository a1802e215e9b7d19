"""A teacher that is larger than GPU memory for teachers: group after group through two buffers.

Ranks that compute together can't stop in the midst of a pass: the others would wait for them. So one whose group can't
be loaded may go on, of numbers that are none, until all can agree that it failed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import torch
from torch import Tensor

from teachers.device import Image
from teachers.shard import StoredShard

Fill = Callable[[Sequence[str], Mapping[str, int], Tensor], None]
Failed = Callable[[Exception], None]
_NAN = 0xFF
"""Each byte of a number that is none, in every floating-point format that teachers have."""


class GroupStream:
    """While a group is used, the next is loaded by a thread. Each iteration begins with the first group, and ends the
    one before.

    Args:
        buffers: two, of the largest group.
        fill: puts tensors into a buffer at these offsets, and returns when they are there.
        waited: told since when a group was waited for, as soon as it is there.
        failed: told of the first group that can't be loaded. Groups go on then, of NaN and without ``fill``; without it
            the error is raised.
    """

    def __init__(
        self,
        shard: StoredShard,
        buffers: Sequence[Tensor],
        fill: Fill,
        waited: Callable[[float], None],
        failed: Failed | None = None,
    ) -> None:
        self._shard, self._fill, self._waited, self._failed = shard, fill, waited, failed
        self._images = [Image(buffer) for buffer in buffers]
        self._loader = ThreadPoolExecutor(1, thread_name_prefix=f"stream {shard.teacher}")
        self._broken = False

    def __iter__(self) -> Iterator[tuple[str, Mapping[str, Tensor]]]:
        for image in self._images:
            image.mark_use()
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
        names = self._shard.groups[index].tensors
        offsets, _ = self._shard.place(names)
        self._put(names, offsets, image)
        image.views = self._shard.views(image.data, offsets)
        return image

    def _put(self, names: Sequence[str], offsets: Mapping[str, int], image: Image) -> None:
        if not self._broken:
            try:
                self._fill(names, offsets, image.data)
                return
            except Exception as error:
                if self._failed is None:
                    raise
                self._broken = True
                self._failed(error)
        image.data.fill_(_NAN)
        if image.data.is_cuda:
            torch.cuda.current_stream(image.data.device).synchronize()

    def close(self) -> None:
        """Nothing touches the buffers any more after this."""
        self._loader.shutdown(wait=True, cancel_futures=True)
        for image in self._images:
            image.mark_use()
            image.wait_unused()
