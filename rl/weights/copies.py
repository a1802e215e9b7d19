"""Copies of the weights beside an engine, and patches applied to them (``rl.weights.delta``).

A version is a directory ``v<version>`` that the engine can load. It is made in ``partial`` and renamed once the
checksum of every tensor is that of the sender's.
"""

from __future__ import annotations

import json
import shutil
from contextlib import ExitStack
from pathlib import Path

import torch
import zstandard
from torch import Tensor

from rl.weights.delta import (
    ITEMSIZE,
    LENGTH,
    DeltaError,
    Layout,
    MappedFiles,
    PatchHead,
    Place,
    TensorHead,
    aligned,
    checksum,
    places,
)
from teachers.codec import apply_delta, delta_pieces

KEPT = 2
"""Versions: the one that the engine has, and the one that it is to have."""


class Copies:
    """The versions that are here."""

    def __init__(self, root: Path, model: Path, version: int) -> None:
        """
        Args:
            root: where copies are made; in shared memory, an engine reads them without a disk.
            model: HF directory; its config and tokenizer go with every copy.
            version: of the weights in ``model``.
        """
        self._root = root
        self._model = model
        self.versions: dict[int, Path] = {version: model}

    def patching(self, head: PatchHead) -> Patching:
        """
        Raises:
            DeltaError: the patch's base is not here.
        """
        base = None
        if head.base is not None:
            if head.base not in self.versions:
                raise DeltaError(f"the patch is against version {head.base}, here are {sorted(self.versions)}")
            base = self.versions[head.base]
        return Patching(head, base, self._model, self._root / "partial")

    def add(self, patching: Patching) -> Path:
        """Keep a finished patch's result, and forget what is older than the newest ones.

        Raises:
            DeltaError: tensors are missing.
        """
        version = patching.head.version
        target = self._root / f"v{version}"
        partial = patching.finish()
        shutil.rmtree(target, ignore_errors=True)
        partial.rename(target)
        self.versions.pop(version, None)
        self.versions[version] = target  # the newest last, also where a version comes again
        for old in list(self.versions)[:-KEPT]:
            directory = self.versions.pop(old)
            if directory != self._model:
                shutil.rmtree(directory)
        return target


class Patching:
    """One patch on its way. ``close`` it in any case."""

    def __init__(self, head: PatchHead, base: Path | None, model: Path, partial: Path) -> None:
        self.head = head
        self._partial = partial
        self._missing = {tensor.name: tensor for tensor in head.layout}
        self._stack = ExitStack()
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        for path in (base or model).iterdir():
            if path.is_file() and (base is not None or not _is_weights(path)):
                shutil.copyfile(path, partial / path.name)
        if base is None:
            _make_empty(partial / "model.safetensors", head.layout)
        self._found: dict[str, Place] = places(partial)
        self._mapped = self._stack.enter_context(MappedFiles(self._found, writable=True))

    def tensor(self, head: TensorHead, body: bytes) -> None:
        """
        Raises:
            DeltaError: it is not a tensor of the copy, or the result is not what the sender has.
        """
        layout, place = self._missing.pop(head.name, None), self._found.get(head.name)
        if layout is None or place is None or (place.dtype, place.shape) != (layout.dtype, layout.shape):
            raise DeltaError(f"{head.name} as the patch has it is not a tensor of the copy, or comes twice")
        flat = self._mapped.bytes_of(head.name)
        _apply(flat, head, place.dtype, body)
        if (found := checksum(flat)) != head.checksum:
            raise DeltaError(
                f"{head.name} has checksum {found} with the patch applied, the sender's has {head.checksum}"
            )

    def finish(self) -> Path:
        """
        Raises:
            DeltaError: tensors are missing.
        """
        if self._missing:
            raise DeltaError(f"the patch ends without {len(self._missing)} tensors, {next(iter(self._missing))} first")
        self.close()
        return self._partial

    def close(self) -> None:
        self._stack.close()


def _is_weights(path: Path) -> bool:
    return path.suffix == ".safetensors" or path.name.endswith(".safetensors.index.json")


def _apply(flat: Tensor, head: TensorHead, dtype: str, body: bytes) -> None:
    """Make the new bytes of the old ones in place."""
    if head.encoding == "same":
        return
    raw = torch.frombuffer(bytearray(zstandard.ZstdDecompressor().decompress(body)), dtype=torch.uint8)
    if head.encoding == "full":
        if len(raw) != len(flat):
            raise DeltaError(f"{head.name} comes with {len(raw)} bytes, the copy's has {len(flat)}")
        flat.copy_(raw)
        return
    itemsize = ITEMSIZE.get(dtype, 1)
    target = aligned(flat)
    for piece in delta_pieces(len(flat) // itemsize, itemsize, head.counts):
        out = target[piece.start * itemsize : piece.stop * itemsize]
        apply_delta(out, raw[slice(*piece.head)], raw[slice(*piece.body)], itemsize)
    if target is not flat:
        flat.copy_(target)


def _make_empty(file: Path, layout: tuple[Layout, ...]) -> None:
    """A safetensors file of zeros."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    at = 0
    for tensor in layout:
        header[tensor.name] = {
            "dtype": tensor.dtype,
            "shape": list(tensor.shape),
            "data_offsets": [at, at + tensor.nbytes],
        }
        at += tensor.nbytes
    encoded = json.dumps(header).encode()
    encoded += b" " * (-len(encoded) % 8)
    with file.open("wb") as stream:
        stream.write(LENGTH.pack(len(encoded)) + encoded)
        stream.truncate(LENGTH.size + len(encoded) + at)
