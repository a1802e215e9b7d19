"""A batch that twelve teachers score in turn: how long the scoring waits for weights.

(a) is what public frameworks do: whole models in pinned memory, copied to the device when their turn comes, while
    nothing else runs; what does not fit into the same pinned budget is read then (by our reader, past the page cache,
    into one more pinned buffer that (a) gets for it).
(b) loads safetensors files, which are dropped from the page cache before.
Both load while nothing is scored, so that their wait is the same at any length of scoring, and a sum over the teachers:
of (a) all of a batch is measured once, and then in each round a part of it, ``PART`` teachers from disk and as many
from pinned memory; of (b) one teacher a round.
Ours keeps two on the device and as much in pinned memory as (a) keeps; its wait is the batch's wall time, less the time
that the same scoring takes when nothing is moved. Batches follow each other without a pause, in ``scoring_order``.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.teachers.made import SHARD, Architecture, names
from benchmarks.teachers.raw import Ours
from teachers.arena import LARGEST_FRAME
from teachers.device import Lane, Source
from teachers.scoring import scoring_order
from teachers.stats import Span
from teachers.store import TeacherStore
from teachers.tiers import TierManager

IN_HBM, IN_PINNED = 2, 4
PART = 2
LOOKS = {"cpu": 9, "cuda": 3}
"""At how long scoring takes alone."""
_PRODUCT = 8192


@dataclass(frozen=True)
class Alone:
    """The scoring of one teacher, how long it takes while nothing is moved, and how far apart the middle half of the
    looks at that were (of three, all)."""

    run: Callable[[], None]
    seconds: float
    spread: float


class Scoring:
    """Work of a known duration: matrix products on the GPU, sleep on the CPU (whose cores the movers need)."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        if device.type == "cuda":
            self._a = torch.randn(_PRODUCT, _PRODUCT, device=device, dtype=torch.bfloat16)
            self._out = torch.empty_like(self._a)
            self._products(20)
            self._each = self._products(200) / 200

    def _products(self, count: int) -> float:
        torch.cuda.synchronize()
        started = time.perf_counter()
        for _ in range(count):
            torch.mm(self._a, self._a, out=self._out)
        torch.cuda.synchronize()
        return time.perf_counter() - started

    def make(self, seconds: float) -> Alone:
        """Something that takes about so long."""
        count = 0 if self.device.type != "cuda" else max(1, round(seconds / self._each))

        def run() -> None:
            if count:
                self._products(count)
            else:
                time.sleep(seconds)

        looks = []
        for _ in range(LOOKS[self.device.type]):
            started = time.perf_counter()
            run()
            looks.append(time.perf_counter() - started)
        low, middle, high = statistics.quantiles(looks)
        return Alone(run, middle, high - low)


class PinnedCopies:
    """(a)."""

    def __init__(self, store: TeacherStore, teachers: list[str], device: torch.device) -> None:
        self.device, self.teachers = device, teachers
        self.sides = {name: Ours([store.open(name, SHARD)], device.type == "cuda") for name in teachers[:IN_PINNED]}
        for side in self.sides.values():
            side.read()
        self.shards = {name: store.open(name, SHARD) for name in teachers}
        self.staging = Ours([self.shards[teachers[-1]]], device.type == "cuda")
        self.image = torch.empty(self.staging.nbytes, dtype=torch.uint8, device=device)
        self.lane = Lane(device)

    def batch(self) -> float:
        """Seconds in which nothing can be scored."""
        started = time.perf_counter()
        for name in self.teachers:
            self._load(name)
        return time.perf_counter() - started

    def part(self, turn: int) -> float:
        """The seconds of a batch, by some of its teachers, others each turn."""
        total = 0.0
        for kept in (True, False):
            names = [name for name in self.teachers if (name in self.sides) == kept]
            chosen = [names[(turn * PART + index) % len(names)] for index in range(PART)]
            started = time.perf_counter()
            for name in chosen:
                self._load(name)
            total += (time.perf_counter() - started) * len(names) / PART
        return total

    def _load(self, name: str) -> None:
        side, shard = self.sides.get(name), self.shards[name]
        if side is None:
            side = self.staging
            side.shards = [shard]
            side.read()
        source = Source(side.arena, side.frames, shard.stored_offsets)
        self.lane.fill(shard, shard.names, shard.device_offsets, self.image, source, None)
        self.lane.synchronize()

    def close(self) -> None:
        for side in [*self.sides.values(), self.staging]:
            side.arena.close()


class Safetensors:
    """(b), one teacher a call."""

    def __init__(self, folder: Path, architecture: Architecture, device: torch.device) -> None:
        from safetensors.torch import save_file

        folder.mkdir(parents=True, exist_ok=True)
        self.device, self.path = device, folder / "teacher.safetensors"
        save_file({name: tensor.cpu() for name, tensor in architecture.tensors(0, device)}, self.path)

    def load(self) -> float:
        from safetensors.torch import load_file

        with self.path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        started = time.perf_counter()
        loaded = load_file(self.path, device=str(self.device))
        # On the CPU the tensors are a mapping of the file: reading them is what loads them.
        _ = [tensor.view(torch.int16).max() for tensor in loaded.values()] if self.device.type == "cpu" else None
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - started


class Tiers:
    """Ours."""

    def __init__(
        self, store: TeacherStore, teachers: list[str], architecture: Architecture, device: torch.device
    ) -> None:
        self.teachers, self.architecture, self.device = teachers, architecture, device
        size = store.open(teachers[0], SHARD).device_bytes
        self.hbm_bytes = IN_HBM * (-(-size // LARGEST_FRAME) * LARGEST_FRAME)
        self.pinned_bytes = IN_PINNED * (-(-size // LARGEST_FRAME) * LARGEST_FRAME)
        self.tiers = TierManager(store, SHARD, device, self.hbm_bytes, self.pinned_bytes, teachers)
        self.most = [0, 0]

    def batch(self, score: Callable[[], object], check: bool = False) -> dict[str, Any]:
        order = scoring_order(dict.fromkeys(self.teachers, 1), self.tiers.in_hbm, self.tiers.in_pinned)
        before = self.tiers.stats()
        started = time.perf_counter()
        self.tiers.plan(order)
        for name in order:
            with self.tiers.lease(name) as weights:
                score()
                if check:
                    self._compare(name, weights)
            self.most = [max(a, b) for a, b in zip(self.most, self.tiers.memory(), strict=True)]
        wall = time.perf_counter() - started
        after = self.tiers.stats()
        spans = [span for span in after.spans if span.start >= started]
        return {
            "wall": wall,
            "waited": after.exposed_seconds - before.exposed_seconds,
            "disk_loads": after.disk_loads - before.disk_loads,
            "demotions": after.demotions - before.demotions,
            "disk_seconds": sum(span.stop - span.start for span in spans if span.kind == "read"),
            "copy_seconds": sum(span.stop - span.start for span in spans if span.kind in ("copy", "demote")),
            "spans": [_row(span, started) for span in spans],
        }

    def _compare(self, name: str, weights: Any) -> None:
        """Every bit against the weights made anew."""
        for tensor_name, tensor in self.architecture.tensors(names(len(self.teachers)).index(name), self.device):
            if not torch.equal(weights[tensor_name].view(torch.int16), tensor.view(torch.int16)):
                raise RuntimeError(f"{name}: {tensor_name} is not what was imported")

    def close(self) -> None:
        self.tiers.close()


def _row(span: Span, zero: float) -> tuple[str, str, float, float]:
    return span.kind, span.teacher, round(span.start - zero, 4), round(span.stop - zero, 4)
