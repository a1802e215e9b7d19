"""Twelve teachers of one architecture with random weights, that can be made again to compare with."""

from __future__ import annotations

import contextlib
import shutil
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from teachers.store import TeacherStore

SHARD = "tp0of1.pp0of1.ep0of1"
LAYERS = 16
_WRITERS = 4


@dataclass(frozen=True)
class Architecture:
    """Width 2048 has 1.0 B parameters, 512 has 63 M; bfloat16."""

    width: int

    def shapes(self) -> dict[str, tuple[int, int]]:
        w = self.width
        shapes = {"embedding.weight": (32 * w, w)}
        for layer in range(LAYERS):
            for name in ("q", "k", "v", "o"):
                shapes[f"decoder.layers.{layer}.attention.{name}"] = (w, w)
            for name in ("gate", "up", "down"):
                shapes[f"decoder.layers.{layer}.mlp.{name}"] = (3 * w, w)
        return shapes

    @property
    def nbytes(self) -> int:
        return 2 * sum(rows * columns for rows, columns in self.shapes().values())

    def tensors(self, seed: int, device: torch.device) -> Iterator[tuple[str, Tensor]]:
        generator = torch.Generator(device).manual_seed(seed)
        for name, shape in self.shapes().items():
            bits = torch.randint(-(2**15), 2**15, shape, dtype=torch.int16, device=device, generator=generator)
            yield name, bits.view(torch.bfloat16)


def names(count: int) -> list[str]:
    return [f"teacher{index:02d}" for index in range(count)]


@contextlib.contextmanager
def own_folder(parent: Path, name: str) -> Iterator[Path]:
    """A folder that is empty, and gone afterwards. What else lies beside it stays: ``parent`` may be a whole disk."""
    folder = parent / name
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def write_store(
    root: Path, teachers: Sequence[str], architecture: Architecture, device: torch.device
) -> tuple[TeacherStore, float]:
    """The store, and the seconds that the import took. A teacher's place in the list is its seed."""
    if root.exists():
        shutil.rmtree(root)
    store = TeacherStore(root)
    started = time.perf_counter()
    with ThreadPoolExecutor(_WRITERS if device.type == "cuda" else 1) as pool:
        list(
            pool.map(
                lambda seed: store.add(teachers[seed], SHARD, architecture.tensors(seed, device)), range(len(teachers))
            )
        )
    return store, time.perf_counter() - started
