"""The store of teachers on local disk: content-addressed, checksummed, and whole or not there.

A teacher is imported shard by shard (a shard is a key of the parallel layout and rank, ``tp0of2.pp0of1.ep0of1``). An
import writes a pack of what is new, puts it on disk, and writes the manifest last: what a crash leaves behind is a pack
that nobody refers to, which ``verify`` reports and ``gc`` removes. The layout is described in ``format``.

Imports may run side by side (ranks); ``gc`` and ``remove`` wait for them, by a lock on ``root/.lock``.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import uuid
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from teachers import codec
from teachers.errors import CorruptTeacherError, ImportFailedError, MissingTeacherError, TeacherError
from teachers.format import (
    CHUNK_BYTES,
    Extent,
    Manifest,
    StoredTensor,
    checksum,
    content_key,
    dtype_name,
    dump_manifest,
    parse_manifest,
    tensor_bytes,
)
from teachers.packs import PackWriter, sync_folder
from teachers.shard import StoredShard

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


def is_name(name: str) -> bool:
    """May a teacher, or a shard, be called so? They are names of files."""
    return _NAME.fullmatch(name) is not None


@dataclass(frozen=True)
class Added:
    """What an import did.

    ``tensor_bytes`` is what it was given, ``new_bytes`` what the disk holds more; ``encodings`` counts tensors.
    """

    tensor_bytes: int
    new_bytes: int
    encodings: Mapping[str, int]
    fp8_error: float
    """The largest relative RMS error of an fp8 tensor; 0 without."""


@dataclass(frozen=True)
class Entry:
    """One line of ``list``."""

    teacher: str
    shard: str
    tensors: int
    device_bytes: int
    stored_bytes: int
    base: str | None
    encodings: Mapping[str, int]
    """Tensors by how they are kept."""
    meta: Mapping[str, Any]


class TeacherStore:
    """Teachers under one folder, which is made when it is not there.

    Raises:
        TeacherError: it can't be made.
    """

    def __init__(self, root: Path | str) -> None:
        self.root = Path(root)
        self.packs = self.root / "packs"
        self.teachers = self.root / "teachers"
        for folder in (self.packs, self.teachers):
            try:
                folder.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise TeacherError(f"{self.root} can't be a store of teachers: {folder}: {error.strerror}") from error

    def add(
        self,
        name: str,
        shard: str,
        tensors: Iterable[tuple[str, Tensor]],
        meta: Mapping[str, Any] | None = None,
        base: str | None = None,
        *,
        fp8: bool = False,
        replace: bool = False,
        written: Callable[[int], None] | None = None,
    ) -> Added:
        """Import one shard of a teacher. The order of the tensors is the order in which layers stream.

        Args:
            base: a teacher of the same shard; what is equal to its tensors is not kept again, and what differs little
                is kept as a delta. Without effect where all tensors differ much.
            fp8: keep matrices as float8_e4m3 with a scale a row where no delta is kept: half the bytes, not exact.
            replace: the teacher may be there already.
            written: called with the bytes of each piece that was written.

        Raises:
            ImportFailedError: a name that can't be one, a teacher that is there, a full disk; nothing has changed.
        """
        path = self._manifest_path(name, shard)
        with self._locked(shared=True):  # what is looked at here can't be removed meanwhile
            if path.exists() and not replace:
                raise ImportFailedError(f"teacher {name} has shard {shard} already ({path}); remove it, or replace it")
            if path.exists():
                self._refuse_if_base(name, shard)
            digest = self._digest(base, shard)
            base_shard = self._open_base(name, base, shard) if base is not None else None
            pack = self._new_pack(name, written)
            importer = _Importer(name, pack, self._known_extents(), base_shard, fp8, self.packs)
            try:
                entries = [importer.add(tensor_name, tensor) for tensor_name, tensor in tensors]
                manifest = importer.manifest(shard, dict(meta or {}), base, digest, entries)
                if manifest.base is not None and self._digest(base, shard) != digest:
                    raise ImportFailedError(f"teacher {name}, shard {shard}: its base {base} was replaced meanwhile")
                pack.commit()
                self._write_manifest(path, dump_manifest(manifest))
            except OSError as error:
                raise ImportFailedError(f"teacher {name}, shard {shard}: {pack.path}: {error.strerror}") from error
            finally:
                pack.discard()
        return importer.summary(entries)

    def _new_pack(self, name: str, written: Callable[[int], None] | None) -> PackWriter:
        try:
            return PackWriter(self.packs, written)
        except OSError as error:
            raise ImportFailedError(f"teacher {name}: {self.packs}: {error.strerror}") from error

    def _write_manifest(self, path: Path, data: bytes) -> None:
        if not path.parent.exists():
            path.parent.mkdir(exist_ok=True)
            sync_folder(path.parent.parent)
        partial = path.with_name(f".{path.name}.{uuid.uuid4().hex}.partial")
        try:
            with partial.open("wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            partial.rename(path)
        finally:
            partial.unlink(missing_ok=True)
        sync_folder(path.parent)

    def _open_base(self, name: str, base: str, shard: str) -> StoredShard:
        opened = self.open(base, shard)
        if not opened.is_plain:
            raise ImportFailedError(
                f"teacher {name}: its base {base} is kept as a delta or in fp8; a base must be kept whole"
            )
        return opened

    def open(self, name: str, shard: str) -> StoredShard:
        """
        Raises:
            MissingTeacherError: there is no such teacher or shard, or its base is gone.
            CorruptTeacherError: the manifest is damaged, or the base is not the one it was imported against.
        """
        manifest = self._read_manifest(self._manifest_path(name, shard))
        base = None
        if manifest.base is not None:
            if self._digest(manifest.base, shard) != manifest.base_digest:
                raise CorruptTeacherError(f"teacher {name}, shard {shard}: its base {manifest.base} was replaced since")
            base = self.open(manifest.base, shard)
        return StoredShard(manifest, self.packs, base)

    def list(self, damaged: Callable[[TeacherError], None] | None = None) -> Sequence[Entry]:
        """
        Args:
            damaged: told of what can't be listed, in place of an error.

        Raises:
            CorruptTeacherError: a manifest is damaged, or its base was replaced.
        """
        entries = []
        for path in self._manifest_paths():
            try:
                entries.append(_entry(self.open(path.parent.name, path.name.removesuffix(".json"))))
            except TeacherError as error:
                if damaged is None:
                    raise
                damaged(error)
        return entries

    def remove(self, name: str) -> None:
        """Forget a teacher, all its shards; ``gc`` then frees what nobody else shares.

        Raises:
            MissingTeacherError: there is none.
            TeacherError: it is the base of others.
        """
        folder = self._folder(name)
        with self.exclusively():
            if not folder.is_dir():
                raise MissingTeacherError(
                    f"no teacher {name} in {self.root}; there are {', '.join(self.names()) or 'none'}"
                )
            self._refuse_if_base(name)
            for path in folder.iterdir():
                path.unlink()
            folder.rmdir()
            sync_folder(self.teachers)

    def forget(self, name: str, shard: str) -> None:
        """Remove one shard of a teacher, if it is there.

        Raises:
            TeacherError: it is the base of others.
        """
        path = self._manifest_path(name, shard)
        with self._locked(shared=True):
            self._refuse_if_base(name, shard)
            path.unlink(missing_ok=True)
            if path.parent.is_dir():
                sync_folder(path.parent)

    def annotate(self, name: str, shard: str, notes: Mapping[str, Any]) -> None:
        """Add to what is said of a shard (``meta``).

        Raises:
            TeacherError: there is no such shard, or it is the base of others, which know it by its manifest.
        """
        path = self._manifest_path(name, shard)
        with self._locked(shared=True):
            manifest = self._read_manifest(path)
            self._refuse_if_base(name, shard)
            self._write_manifest(path, dump_manifest(manifest.model_copy(update={"meta": {**manifest.meta, **notes}})))

    def names(self) -> tuple[str, ...]:
        return tuple(sorted({path.parent.name for path in self._manifest_paths()}))

    def shards(self, name: str) -> tuple[str, ...]:
        return tuple(path.name.removesuffix(".json") for path in sorted(self._folder(name).glob("[!.]*.json")))

    def manifests(self) -> Iterator[tuple[Path, Manifest | CorruptTeacherError]]:
        """All of them, and an error in place of one that is damaged. Ranks remove theirs at the same time."""
        for path in self._manifest_paths():
            try:
                yield path, self._read_manifest(path)
            except MissingTeacherError:
                continue
            except CorruptTeacherError as error:
                yield path, error

    def _manifest_paths(self) -> Sequence[Path]:
        return sorted(self.teachers.glob("*/[!.]*.json"))

    def _folder(self, name: str) -> Path:
        if not is_name(name):
            raise ImportFailedError(f"a teacher's or shard's name is letters, digits, . _ -, not {name!r}")
        return self.teachers / name

    def _manifest_path(self, name: str, shard: str) -> Path:
        return self._folder(name) / f"{self._folder(shard).name}.json"

    def _read_manifest(self, path: Path) -> Manifest:
        teacher, shard = path.parent.name, path.name.removesuffix(".json")
        try:
            manifest = parse_manifest(path.read_bytes())
        except FileNotFoundError as error:
            known = ", ".join(self.names()) or "none"
            raise MissingTeacherError(f"no teacher {teacher} with shard {shard} ({path}); teachers: {known}") from error
        except ValueError as error:
            raise CorruptTeacherError(f"teacher {teacher}: {path} is damaged: {error}") from error
        if (manifest.teacher, manifest.shard) != (teacher, shard):
            raise CorruptTeacherError(f"teacher {teacher}: {path} is of {manifest.teacher}, {manifest.shard}")
        return manifest

    def _digest(self, base: str | None, shard: str) -> str:
        if base is None:
            return ""
        path = self._manifest_path(base, shard)
        return checksum(path.read_bytes()) if path.exists() else ""

    def _refuse_if_base(self, name: str, shard: str | None = None) -> None:
        manifests = [manifest for _, manifest in self.manifests() if isinstance(manifest, Manifest)]
        users = sorted({m.teacher for m in manifests if m.base == name and shard in (None, m.shard)})
        if users:
            raise TeacherError(f"teacher {name} is the base of {', '.join(users)}: remove or replace those first")

    def _known_extents(self) -> dict[str, Extent]:
        known: dict[str, Extent] = {}
        for _, manifest in self.manifests():
            if isinstance(manifest, Manifest):
                known.update(manifest.extents)
        return known

    def exclusively(self, *, wait: bool = True) -> contextlib.AbstractContextManager[None]:
        """Nobody imports inside of this.

        Raises:
            TeacherError: somebody does, and ``wait`` is false.
        """
        return self._locked(shared=False, wait=wait)

    @contextlib.contextmanager
    def _locked(self, *, shared: bool, wait: bool = True) -> Iterator[None]:
        path = self.root / ".lock"
        with path.open("a") as file:
            try:
                fcntl.flock(file, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | (0 if wait else fcntl.LOCK_NB))
            except BlockingIOError as error:
                raise TeacherError(f"{self.root} is being imported to just now ({path} is locked)") from error
            yield


def _entry(shard: StoredShard) -> Entry:
    manifest = shard.manifest
    return Entry(
        manifest.teacher,
        manifest.shard,
        len(manifest.tensors),
        shard.device_bytes,
        shard.stored_bytes,
        manifest.base,
        _counted(manifest.tensors),
        manifest.meta,
    )


class _Importer:
    """One import: which form each tensor is kept in, and the extents that it refers to."""

    def __init__(
        self,
        teacher: str,
        pack: PackWriter,
        known: dict[str, Extent],
        base: StoredShard | None,
        fp8: bool,
        packs: Path,
    ) -> None:
        self.teacher, self.pack, self.known, self.base, self.fp8, self.packs = teacher, pack, known, base, fp8, packs
        self.extents: dict[str, Extent] = {}
        self.seen: set[str] = set()
        self.new_bytes = 0

    def add(self, name: str, tensor: Tensor) -> StoredTensor:
        if name in self.seen:
            raise ImportFailedError(f"teacher {self.teacher}: tensor {name} was given twice")
        self.seen.add(name)
        raw = tensor_bytes(tensor)
        stored = StoredTensor(name=name, shape=tuple(tensor.shape), dtype=dtype_name(tensor.dtype), encoding="raw")
        smaller = self._against_base(stored, raw)
        if smaller is not None:
            return smaller
        if self.fp8 and codec.fp8_fits(stored.shape, tensor.dtype):
            data, error = codec.encode_fp8(tensor)
            if error < 1:  # also false for what is not finite: that is kept as it is
                return stored.model_copy(update={"encoding": "fp8", "extent": self._keep(data), "error": error})
        return stored.model_copy(update={"extent": self._keep(raw)})

    def _against_base(self, stored: StoredTensor, raw: Tensor) -> StoredTensor | None:
        """The same, or a delta that is smaller than the tensor, or neither."""
        if self.base is None:
            return None
        theirs = self.base.tensors.get(stored.name)
        if theirs is None or (theirs.shape, theirs.dtype) != (stored.shape, stored.dtype) or not stored.numel:
            return None
        old = self._read(self.base, stored.name)
        if torch.equal(old, raw):
            return stored.model_copy(update={"encoding": "same"})
        itemsize = raw.nbytes // stored.numel
        if itemsize not in (1, 2, 4, 8):
            return None
        data, counts = codec.encode_delta(raw, old, itemsize)
        if data.nbytes >= raw.nbytes:
            return None
        self._check_delta(stored, data, counts, old, raw, itemsize)
        return stored.model_copy(update={"encoding": "delta", "extent": self._keep(data), "counts": counts})

    def _check_delta(
        self, stored: StoredTensor, data: Tensor, counts: tuple[int, ...], old: Tensor, raw: Tensor, itemsize: int
    ) -> None:
        for piece in codec.delta_pieces(stored.numel, itemsize, counts):
            codec.apply_delta(
                old[piece.start * itemsize : piece.stop * itemsize],
                data[slice(*piece.head)],
                data[slice(*piece.body)],
                itemsize,
            )
        if not torch.equal(old, raw):
            raise ImportFailedError(f"teacher {self.teacher}: the delta of {stored.name} does not give it back")

    def _read(self, shard: StoredShard, name: str) -> Tensor:
        found = shard.extent_of(name)
        assert found is not None  # a base is plain
        return read_extent(shard.teacher, self.packs, found[1])

    def _keep(self, data: Tensor) -> str:
        """Write these bytes unless they are there; equality is by the bytes, the key only finds them."""
        view = memoryview(data.numpy())
        key = content_key(view)
        if key in self.extents:
            return key
        there = self.known.get(key) if data.nbytes else None  # nothing is not worth a reference to another pack
        if there is not None and self._is_there(there, data):
            self.extents[key] = there
            return key
        self.extents[key] = self.known[key] = self.pack.append(view)
        self.new_bytes += self.extents[key].padded_bytes
        return key

    def _is_there(self, extent: Extent, data: Tensor) -> bool:
        try:
            return torch.equal(read_extent(self.teacher, self.packs, extent), data)
        except TeacherError:
            return False  # another teacher's copy is damaged: this one gets its own

    def manifest(
        self, shard: str, meta: dict[str, Any], base: str | None, digest: str, entries: list[StoredTensor]
    ) -> Manifest:
        json.dumps(meta)  # what can't be read back is refused here
        if not any(entry.encoding in ("same", "delta") for entry in entries):
            base, digest = None, ""  # it need not be in memory beside this one
        return Manifest(
            teacher=self.teacher,
            shard=shard,
            meta=meta,
            base=base,
            base_digest=digest,
            extents=self.extents,
            tensors=tuple(entries),
        )

    def summary(self, entries: list[StoredTensor]) -> Added:
        return Added(
            tensor_bytes=sum(entry.nbytes for entry in entries),
            new_bytes=self.new_bytes,
            encodings=_counted(entries),
            fp8_error=max((entry.error for entry in entries), default=0.0),
        )


def _counted(tensors: Sequence[StoredTensor]) -> dict[str, int]:
    return dict(sorted(Counter(tensor.encoding for tensor in tensors).items()))


def read_extent(teacher: str, packs: Path, extent: Extent) -> Tensor:
    """An extent's bytes by plain reads, checked.

    Raises:
        MissingTeacherError: the pack is not there.
        CorruptTeacherError: it ends too early, or its bytes are not those that were written.
    """
    path = packs / f"{extent.pack}.pack"
    data = bytearray(extent.padded_bytes)
    try:
        with path.open("rb", buffering=0) as file:
            got, view = 0, memoryview(data)
            while got < len(data):
                count = os.preadv(file.fileno(), [view[got:]], extent.offset + got)
                if not count:
                    raise CorruptTeacherError(f"teacher {teacher}: {path} ends at byte {extent.offset + got}")
                got += count
    except FileNotFoundError as error:
        raise MissingTeacherError(f"teacher {teacher}: {path} is missing") from error
    for index, expected in enumerate(extent.checksums):
        if checksum(view[index * CHUNK_BYTES : (index + 1) * CHUNK_BYTES]) != expected:
            at = extent.offset + index * CHUNK_BYTES
            raise CorruptTeacherError(f"teacher {teacher}: {path} is damaged at byte {at} (checksum)")
    return torch.frombuffer(data, dtype=torch.uint8)[: extent.nbytes] if data else torch.empty(0, dtype=torch.uint8)
