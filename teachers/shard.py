"""A teacher's shard as the tiers see it: what lies where, stored and on the device.

Two images of the same tensors, both laid out in the order in which they were imported:

    stored   the extents, each padded to 4 KiB: what is on disk and in pinned memory
    device   the tensors as they are used, each at a multiple of 4 KiB; without delta or fp8 it is the stored image
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from teachers.errors import CorruptTeacherError, MissingTeacherError
from teachers.format import Extent, Manifest, StoredTensor, dtype_of, padded

_LAYER = re.compile(r"^(.*?\blayers?\.\d+)\.")


@dataclass(frozen=True)
class Group:
    """Tensors that are used together, a layer for one: the unit that streams."""

    name: str
    tensors: tuple[str, ...]


@dataclass(frozen=True)
class StoredShard:
    """One shard of one teacher.

    Args:
        packs: the folder of the packs.
        base: the shard that deltas refer to.
    """

    manifest: Manifest
    packs: Path
    base: StoredShard | None = field(default=None, repr=False)

    @property
    def teacher(self) -> str:
        return self.manifest.teacher

    @property
    def meta(self) -> Mapping[str, Any]:
        return self.manifest.meta

    @cached_property
    def tensors(self) -> Mapping[str, StoredTensor]:
        return {tensor.name: tensor for tensor in self.manifest.tensors}

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self.tensors)

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return {name: tensor.shape for name, tensor in self.tensors.items()}

    @property
    def dtypes(self) -> Mapping[str, torch.dtype]:
        return {name: dtype_of(tensor.dtype) for name, tensor in self.tensors.items()}

    @cached_property
    def stored_offsets(self) -> Mapping[str, int]:
        """Content key to offset in the stored image."""
        offsets: dict[str, int] = {}
        at = 0
        for key, extent in self.manifest.extents.items():
            offsets[key] = at
            at += extent.padded_bytes
        return offsets

    @cached_property
    def stored_bytes(self) -> int:
        return sum(extent.padded_bytes for extent in self.manifest.extents.values())

    @cached_property
    def device_offsets(self) -> Mapping[str, int]:
        return self.place(self.names)[0]

    @cached_property
    def device_bytes(self) -> int:
        return self.place(self.names)[1]

    @property
    def bytes(self) -> int:
        """What the tensors take in GPU memory."""
        return self.device_bytes

    def place(self, names: tuple[str, ...]) -> tuple[dict[str, int], int]:
        """Offsets of some tensors in an image of only these, and its size; equal contents lie in one place."""
        offsets: dict[str, int] = {}
        by_content: dict[tuple[str, ...], int] = {}
        at = 0
        for name in names:
            tensor = self.tensors[name]
            theirs = self.base.tensors[name].extent if self.base is not None and tensor.encoding != "raw" else None
            content = (tensor.encoding, tensor.extent or "", theirs or "", tensor.dtype)
            if content in by_content:
                offsets[name] = by_content[content]
                continue
            by_content[content] = offsets[name] = at
            at += padded(tensor.nbytes)
        return offsets, at

    @cached_property
    def groups(self) -> tuple[Group, ...]:
        """Layers, by ``layers.N`` in the names, and what stands before, between and behind them, in stored order."""
        groups: list[tuple[str, list[str]]] = []
        for name in self.names:
            match = _LAYER.match(name)
            label = match.group(1) if match else ""
            if not groups or groups[-1][0] != label:
                groups.append((label, []))
            groups[-1][1].append(name)
        return tuple(Group(label or names[0], tuple(names)) for label, names in groups)

    def extent_of(self, name: str) -> tuple[str, Extent] | None:
        key = self.tensors[name].extent
        return None if key is None else (key, self.manifest.extents[key])

    def pack_path(self, extent: Extent) -> Path:
        return self.packs / f"{extent.pack}.pack"

    def check_packs(self) -> None:
        """Are the files there, and as long as they have to be? Nothing is read.

        Raises:
            MissingTeacherError, CorruptTeacherError: names teacher and file.
        """
        ends: dict[Path, int] = {}
        for extent in self.manifest.extents.values():
            path = self.pack_path(extent)
            ends[path] = max(ends.get(path, 0), extent.offset + extent.padded_bytes)
        for path, end in ends.items():
            try:
                size = path.stat().st_size
            except FileNotFoundError as error:
                raise MissingTeacherError(f"teacher {self.teacher}: {path} is missing") from error
            if size < end:
                raise CorruptTeacherError(f"teacher {self.teacher}: {path} ends at byte {size}, and has to have {end}")
        if self.base is not None:
            self.base.check_packs()

    @property
    def is_plain(self) -> bool:
        """Without delta or fp8: the device image is the stored image."""
        return all(tensor.encoding == "raw" for tensor in self.manifest.tensors)

    def views(self, image: Tensor, offsets: Mapping[str, int]) -> dict[str, Tensor]:
        """Tensors that are views of a device image (flat uint8)."""
        found = {}
        for name, at in offsets.items():
            tensor = self.tensors[name]
            flat = image[at : at + tensor.nbytes].view(dtype_of(tensor.dtype))
            found[name] = flat.view(tensor.shape)
        return found
