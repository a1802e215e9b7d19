"""Each copy alone: disk to pinned memory against a grid of dd (and fio), pinned memory to the device against one copy.

All sides read the same packs, past the page cache, in turn.
"""

from __future__ import annotations

import itertools
import shutil
import statistics
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.teachers.made import SHARD
from teachers.arena import Arena
from teachers.device import Lane, Source
from teachers.reader import DirectReader, blocks
from teachers.shard import StoredShard
from teachers.store import TeacherStore

_TIMEOUT = 120
GRID = tuple(itertools.product((8, 16, 32), (1, 4, 8)))
"""Block sizes in MiB, and readers at a time."""
LOOK_BYTES = 512 << 20
"""What each cell of the grid reads once; the two fastest then read all, in turn with ours."""


def _parts(packs: Sequence[Path], limit: int) -> Iterator[tuple[Path, int]]:
    """The first ``limit`` bytes of these files."""
    for pack in packs:
        size = min(pack.stat().st_size, limit)
        limit -= size
        if size:
            yield pack, size


def _dd(packs: Sequence[Path], block_mib: int, readers: int, limit: int) -> float:
    """Seconds; each file is split evenly among the readers."""
    block = block_mib << 20
    started = time.perf_counter()
    for pack, size in _parts(packs, limit):
        total = -(-size // block)
        share = -(-total // readers)
        running = [
            subprocess.Popen(
                ["dd", f"if={pack}", "of=/dev/null", f"bs={block}", f"skip={at}", f"count={share}", "iflag=direct"],
                stderr=subprocess.DEVNULL,
            )
            for at in range(0, total, share)
        ]
        if any(process.wait(_TIMEOUT) for process in running):
            raise RuntimeError(f"dd failed on {pack}")
    return time.perf_counter() - started


def _fio(packs: Sequence[Path], block_mib: int, readers: int, limit: int) -> float:
    started = time.perf_counter()
    for pack, whole in _parts(packs, limit):
        size = whole // readers // 4096 * 4096
        subprocess.run(
            f"fio --name=read --filename={pack} --rw=read --direct=1 --bs={block_mib}m --numjobs={readers}"
            f" --size={size} --offset_increment={size} --ioengine=psync --thread".split(),
            check=True,
            capture_output=True,
            timeout=_TIMEOUT,
        )
    return time.perf_counter() - started


class Ours:
    """The tiers' own reader, into an arena that holds one teacher."""

    def __init__(self, shards: Sequence[StoredShard], register: bool) -> None:
        self.shards = shards
        self.nbytes = shards[0].stored_bytes
        self.arena = Arena(self.nbytes + (8 << 20), register)
        self.frames = self.arena.allocate(self.nbytes)
        self.reader = DirectReader()

    def read(self) -> tuple[float, float]:
        """Seconds, and CPU seconds of all threads."""
        started, cpu = time.perf_counter(), time.process_time()
        for shard in self.shards:
            extents = shard.manifest.extents
            wanted = list(
                blocks((shard.pack_path(extents[k]), extents[k], at) for k, at in shard.stored_offsets.items())
            )
            self.reader.read(shard.teacher, wanted, self._target)
        return time.perf_counter() - started, time.process_time() - cpu

    def _target(self, begin: int, end: int) -> list[memoryview]:
        return [self.arena.view[a:b] for a, b in self.arena.spans(self.frames, begin, end)]


def disk(store: TeacherStore, teachers: Sequence[str], repeats: int, register: bool) -> dict[str, Any]:
    shards = [store.open(name, SHARD) for name in teachers]
    packs = [shard.pack_path(next(iter(shard.manifest.extents.values()))) for shard in shards]
    total = sum(pack.stat().st_size for pack in packs)
    ours = Ours(shards, register)
    ours.read()
    tools: dict[str, Callable[[Sequence[Path], int, int, int], float]] = {"dd": _dd}
    if shutil.which("fio"):
        tools["fio"] = _fio
    look = min(total, LOOK_BYTES)
    grid = {(tool, *cell): run(packs, *cell, look) for tool, run in tools.items() for cell in GRID}
    best = sorted(grid, key=lambda cell: grid[cell])[:2]
    times: dict[Any, list[float]] = {cell: [] for cell in best}
    mine, cpu = [], []
    for _ in range(repeats):
        for cell in best:
            times[cell].append(tools[cell[0]](packs, cell[1], cell[2], total))
        seconds, used = ours.read()
        mine.append(seconds)
        cpu.append(used / (total / 1e9))
    ours.arena.close()
    fastest = min(times, key=lambda cell: statistics.median(times[cell]))
    theirs = statistics.median(times[fastest])
    return {
        "bytes": total,
        "direct": ours.reader.direct,
        "huge_pages": ours.arena.huge_pages,
        "ours_gb_s": total / 1e9 / statistics.median(mine),
        "best_tool": f"{fastest[0]} {fastest[1]} MiB × {fastest[2]}",
        "best_tool_gb_s": total / 1e9 / theirs,
        "share_of_best": theirs / statistics.median(mine),
        "cpu_s_per_gb": statistics.median(cpu),
        "grid_gb_s": {f"{tool} {size} MiB × {n}": look / 1e9 / s for (tool, size, n), s in grid.items()},
        "repeats": repeats,
    }


def device(store: TeacherStore, teacher: str, where: torch.device, repeats: int) -> dict[str, Any]:
    """A whole teacher from its frames to the device, against one copy of as much from one pinned tensor."""
    shard = store.open(teacher, SHARD)
    cuda = where.type == "cuda"
    ours = Ours([shard], cuda)
    ours.read()
    image = torch.empty(shard.device_bytes, dtype=torch.uint8, device=where)
    one = torch.empty(shard.device_bytes, dtype=torch.uint8, pin_memory=cuda)
    one.copy_(ours.arena.memory[: len(one)])
    lane = Lane(where)
    source = Source(ours.arena, ours.frames, shard.stored_offsets)

    def mine() -> None:
        lane.fill(shard, shard.names, shard.device_offsets, image, source, None)
        lane.synchronize()

    def theirs() -> None:
        image.copy_(one, non_blocking=True)
        if cuda:
            torch.cuda.synchronize()

    seconds: dict[str, list[float]] = {"ours": [], "one": []}
    for turn in range(repeats + 1):
        for name, run in (("ours", mine), ("one", theirs)):
            started = time.perf_counter()
            run()
            if turn:
                seconds[name].append(time.perf_counter() - started)
    ours.arena.close()
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    return {
        "bytes": shard.device_bytes,
        "ours_gb_s": shard.device_bytes / 1e9 / medians["ours"],
        "one_copy_gb_s": shard.device_bytes / 1e9 / medians["one"],
        "share_of_one_copy": medians["one"] / medians["ours"],
        "repeats": repeats,
    }
