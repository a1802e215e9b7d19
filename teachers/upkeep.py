"""Looking after a store: is every byte what was written, and what does nobody need any more.

``gc`` deletes packs that no manifest refers to and what broken imports left, and punches holes into packs that are used
in part (where the file system can): the extents that stay keep their places.
"""

from __future__ import annotations

import ctypes
import functools
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from teachers.arena import Arena
from teachers.errors import CorruptTeacherError, TeacherError
from teachers.format import Extent, Manifest
from teachers.reader import Block, DirectReader, blocks
from teachers.store import TeacherStore

UNUSED = "no teacher refers to it: an import broke off, or what it was of was replaced; gc removes it"
_VERIFY_BYTES = 32 << 20
_PUNCH_HOLE, _KEEP_SIZE = 2, 1  # linux/falloc.h


@dataclass(frozen=True)
class Problem:
    """``teacher`` is empty for a file that belongs to none."""

    teacher: str
    path: Path
    what: str


def verify(
    store: TeacherStore, names: Iterable[str] | None = None, read: Callable[[int], None] = lambda _: None
) -> list[Problem]:
    """Read every byte of these teachers (of all by default) from disk, past the page cache, and compare checksums."""
    chosen = None if names is None else set(names)
    arena, reader = Arena(_VERIFY_BYTES, register=False), DirectReader()
    problems: list[Problem] = []
    checked: set[tuple[str, int]] = set()
    for path, manifest in store.manifests():
        teacher = path.parent.name
        if chosen is not None and teacher not in chosen:
            continue
        if isinstance(manifest, CorruptTeacherError):
            problems.append(Problem(teacher, path, str(manifest)))
            continue
        try:
            store.open(teacher, manifest.shard)
        except TeacherError as error:
            problems.append(Problem(teacher, path, str(error)))
        fresh = [e for e in manifest.extents.values() if (e.pack, e.offset) not in checked]
        checked |= {(extent.pack, extent.offset) for extent in fresh}
        problems += _verify_extents(store, teacher, fresh, arena, reader, read)
    if chosen is None:
        problems += [Problem("", path, UNUSED) for path in leftovers(store)]
    return problems


def _verify_extents(
    store: TeacherStore,
    teacher: str,
    extents: list[Extent],
    arena: Arena,
    reader: DirectReader,
    read: Callable[[int], None],
) -> list[Problem]:
    """One problem a pack at most."""
    problems = []
    for pack in sorted({extent.pack for extent in extents}):
        path, at, placed = store.packs / f"{pack}.pack", 0, []
        for extent in sorted((e for e in extents if e.pack == pack), key=lambda e: e.offset):
            placed.append((path, extent, at))
            at += extent.padded_bytes
        try:
            for batch in _batches(blocks(placed), arena.nbytes):
                reader.read(teacher, batch, functools.partial(_part, arena.view, batch[0].image_offset))
                read(sum(block.nbytes for block in batch))
        except TeacherError as error:
            problems.append(Problem(teacher, path, str(error)))
    return problems


def _part(view: memoryview, start: int, begin: int, end: int) -> list[memoryview]:
    return [view[begin - start : end - start]]


def _batches(wanted: Iterable[Block], limit: int) -> Iterable[list[Block]]:
    batch: list[Block] = []
    for block in wanted:
        if batch and block.image_offset + block.nbytes - batch[0].image_offset > limit:
            yield batch
            batch = []
        batch.append(block)
    if batch:
        yield batch


def leftovers(store: TeacherStore) -> list[Path]:
    """Packs that no manifest refers to, and files that were being written. While an import runs, its own are among
    them."""
    used = {extent.pack for _, m in store.manifests() if isinstance(m, Manifest) for extent in m.extents.values()}
    packs = [path for path in sorted(store.packs.glob("*.pack")) if path.stem not in used]
    return packs + sorted(store.packs.glob("*.partial")) + sorted(store.teachers.glob("*/.*.partial"))


@dataclass(frozen=True)
class Freed:
    """``holes``: bytes of packs that stay; ``kept``: unused bytes that could not be given back."""

    files: int
    file_bytes: int
    holes: int
    kept: int


def gc(store: TeacherStore, *, wait: bool = True) -> Freed:
    """
    Args:
        wait: for imports that run.

    Raises:
        CorruptTeacherError: a manifest is damaged, so nobody knows what it refers to; nothing was freed.
        TeacherError: an import runs, and ``wait`` is false.
    """
    with store.exclusively(wait=wait):
        used: dict[str, dict[int, int]] = {}
        for _, manifest in store.manifests():
            if isinstance(manifest, CorruptTeacherError):
                raise CorruptTeacherError(
                    f"{manifest}. Nobody knows what it refers to, so nothing was freed: import that teacher again, or"
                    " remove it too"
                ) from manifest
            for extent in manifest.extents.values():
                sizes = used.setdefault(extent.pack, {})  # an empty extent lies where the next begins
                sizes[extent.offset] = max(sizes.get(extent.offset, 0), extent.padded_bytes)
        files = leftovers(store)
        file_bytes = sum(path.stat().st_size for path in files)
        for path in files:
            path.unlink()
        holes = kept = 0
        for pack, extents in used.items():
            path = store.packs / f"{pack}.pack"
            if path.exists():
                punched, left = _punch(path, extents)
                holes, kept = holes + punched, kept + left
    return Freed(len(files), file_bytes, holes, kept)


def _punch(path: Path, extents: dict[int, int]) -> tuple[int, int]:
    """Give the gaps between extents back to the file system: bytes that it took, and bytes that it did not."""
    size, gaps, at = path.stat().st_size, [], 0
    for offset in [*sorted(extents), size]:
        if offset > at:
            gaps.append((at, offset - at))
        at = offset + extents.get(offset, 0)
    if not gaps:
        return 0, 0
    before = path.stat().st_blocks
    descriptor = os.open(path, os.O_RDWR)
    try:
        punched = all(_fallocate(descriptor, start, length) for start, length in gaps)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    freed = max(0, before - path.stat().st_blocks) * 512
    return freed, 0 if punched else sum(length for _, length in gaps) - freed


def _fallocate(descriptor: int, start: int, length: int) -> bool:
    libc = ctypes.CDLL(None, use_errno=True)
    call = libc.fallocate
    call.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]
    return bool(call(descriptor, _PUNCH_HOLE | _KEEP_SIZE, start, length) == 0)
