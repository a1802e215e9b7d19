"""Copies of the weights beside an engine, and patches applied to them (``rl.weights.delta``).

A version is a directory ``v<version>`` that the engine can load. It is made in ``partial`` and renamed once the
checksum of every part of every tensor is that of the sender's.
"""

from __future__ import annotations

import json
import shutil
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from rl.weights.changes import Changes, decode
from rl.weights.delta import (
    AHEAD_A_THREAD,
    MODEL,
    DeltaError,
    Layout,
    Part,
    PartHead,
    PatchHead,
    checksum,
    parts,
    threads,
)
from rl.weights.tensor_files import LENGTH, Bytes, Memory, TensorFiles, places, read_header, write_empty

KEPT = 2
"""Versions: the one that the engine has, and the one that it is to have."""
SUFFIX = ".safetensors"
INDEX = f"{SUFFIX}.index.json"
OTHER_WEIGHTS = frozenset({".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx"})
"""The same model again, as some directories have it: as large, and read by no engine here."""


@dataclass(frozen=True)
class Copy:
    """A version that is here."""

    directory: Path
    sender: str


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
        self.versions = {version: Copy(model, MODEL)}

    def patching(self, head: PatchHead) -> Patching:
        """
        Raises:
            DeltaError: the patch's base is not here.
        """
        base = None
        if head.base is not None:
            copy = self.versions.get(head.base)
            if copy is None or copy.sender != head.sender:
                here = sorted(number for number, copy in self.versions.items() if copy.sender == head.sender)
                raise DeltaError(f"the patch is against version {head.base}, here are {here} of this sender")
            base = copy.directory
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
        self.versions[version] = Copy(target, patching.head.sender)  # the newest last, also where a version comes again
        for old in list(self.versions)[:-KEPT]:
            directory = self.versions.pop(old).directory
            if directory != self._model:
                shutil.rmtree(directory)
        return target


class Patching:
    """One patch on its way; its parts are applied by threads. ``close`` it in any case."""

    def __init__(self, head: PatchHead, base: Path | None, model: Path, partial: Path) -> None:
        """
        Raises:
            DeltaError: its tensors are not those of the base.
        """
        self.head = head
        self._partial = partial
        self._expected = parts(head.layout, head.part_bytes)
        self._pending: deque[Future[None]] = deque()
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        for path in (base or model).iterdir():
            small = path.is_file() and path.suffix not in {SUFFIX, *OTHER_WEIGHTS}
            if small and (base is not None or not path.name.endswith(INDEX)):
                shutil.copyfile(path, partial / path.name)
        if base is None:
            _write_header(partial / f"model{SUFFIX}", head.layout)
        else:
            for file in base.glob(f"*{SUFFIX}"):
                header = read_header(file)
                write_empty(partial / file.name, header, file.stat().st_size - len(header))
        self._found = places(partial)
        self._memory = Memory(head.part_bytes)
        if {Layout.of(name, place) for name, place in self._found.items()} != set(head.layout):
            raise DeltaError(f"the patch's tensors are not those of the copy of version {head.base}")
        with ExitStack() as stack:
            self._base = stack.enter_context(TensorFiles(places(base))) if base is not None else None
            self._copy = stack.enter_context(TensorFiles(self._found, writable=True))
            self._pool = stack.enter_context(ThreadPoolExecutor(threads(), "patch"))  # ends before the files close
            self._stack = stack.pop_all()

    @property
    def parts(self) -> int:
        """That a whole patch has."""
        return sum(1 for _ in parts(self.head.layout, self.head.part_bytes))

    def part(self, head: PartHead, body: bytes) -> None:
        """Have the next part applied; returns once few enough are waiting.

        Raises:
            DeltaError: it is not the next part, or the result of an earlier one is not what the sender has.
        """
        part = next(self._expected, None)
        if part is None or (part.name, part.begin) != (head.name, head.begin):
            raise DeltaError(f"{head.name} from byte {head.begin} on is not what comes next in the patch: {part}")
        self._pending.append(self._pool.submit(self._apply, part, head, body))
        self._wait(AHEAD_A_THREAD * threads())

    def _wait(self, remaining: int) -> None:
        while len(self._pending) > remaining:
            self._pending.popleft().result()

    def _apply(self, part: Part, head: PartHead, body: bytes) -> None:
        flat = self._memory.take(0, part.nbytes)
        if self._base is not None:
            self._base.read(part.name, part.begin, flat)
        elif head.encoding != "full":
            raise DeltaError(f"{part.name} comes as changes in a patch that has no base")
        try:
            new = decode(Changes(head.encoding, _split(body, head.sizes)), flat, self._found[part.name].itemsize)
        except ValueError as error:
            raise DeltaError(f"{part.name} from byte {part.begin} on can't be decoded: {error}") from error
        self._check(part, head, new)
        self._copy.write(part.name, part.begin, new)

    def _check(self, part: Part, head: PartHead, new: Bytes) -> None:
        if (found := checksum(new)) != head.checksum:
            raise DeltaError(
                f"{part.name} from byte {part.begin} on has checksum {found} with the patch applied, the sender's has "
                f"{head.checksum}"
            )

    def finish(self) -> Path:
        """
        Raises:
            DeltaError: tensors are missing, or see ``part``.
        """
        self._wait(0)
        missing = list(self._expected)
        if missing:
            raise DeltaError(f"the patch ends without {len(missing)} parts of tensors, {missing[0]} first")
        self.close()
        return self._partial

    def close(self) -> None:
        for future in self._pending:
            future.cancel()
        self._stack.close()


def _split(body: bytes, sizes: tuple[int, ...]) -> tuple[bytes, ...]:
    streams, at = [], 0
    for size in sizes:
        streams.append(body[at : at + size])
        at += size
    return tuple(streams)


def _write_header(file: Path, layout: tuple[Layout, ...]) -> None:
    """A safetensors file of zeros."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    at = 0
    for tensor in layout:
        offsets = [at, at + tensor.nbytes]
        header[tensor.name] = {"dtype": tensor.dtype, "shape": list(tensor.shape), "data_offsets": offsets}
        at += tensor.nbytes
    encoded = json.dumps(header).encode()
    encoded += b" " * (-len(encoded) % 8)
    write_empty(file, LENGTH.pack(len(encoded)) + encoded, at)
