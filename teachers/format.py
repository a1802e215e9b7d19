"""What is written of a teacher: a manifest a shard, and extents in packs.

    packs/<id>.pack                extents one after another, each at a multiple of 4 KiB and padded to one with zeros
    teachers/<name>/<shard>.json   the manifest: a line with the checksum of all that follows, then JSON

An extent is found by its content (xxh3 of 128 bits, and the length), so a tensor that several teachers share, or that
one teacher has under two names, is kept once. Each chunk of an extent, padding included, has an xxh3 of 64 bits of its
own: a reader checks what it has just read, and no bit of a pack is left out.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
import xxhash
from pydantic import BaseModel, ConfigDict, ValidationError
from torch import Tensor

ALIGN = 4096
CHUNK_BYTES = 8 << 20
FORMAT = 1

Encoding = Literal["raw", "same", "delta", "fp8"]
"""raw: the tensor's bytes. same: as the base has it. delta: bitmap and changed values. fp8: scales and float8_e4m3."""


def padded(nbytes: int) -> int:
    return -(-nbytes // ALIGN) * ALIGN


def checksum(data: Any) -> str:
    return xxhash.xxh3_64_hexdigest(data)


def content_key(data: memoryview) -> str:
    return f"{xxhash.xxh3_128_hexdigest(data)}-{data.nbytes}"


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def dtype_of(name: str) -> torch.dtype:
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{name} is not a torch dtype")
    return dtype


def tensor_bytes(tensor: Tensor) -> Tensor:
    """The bytes of a tensor as a flat uint8 view (a copy when it is not contiguous or not on the CPU)."""
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Extent(_Record):
    """Where bytes lie in a pack; ``checksums`` are those of its chunks, padding included."""

    pack: str
    offset: int
    nbytes: int
    checksums: tuple[str, ...]

    @property
    def padded_bytes(self) -> int:
        return padded(self.nbytes)


class StoredTensor(_Record):
    """One tensor of a shard.

    ``extent`` is the key of its bytes in the manifest's table (none when the base has the same). ``counts`` are a
    delta's changed values in each piece (``codec.PIECE_ELEMENTS``), ``error`` the relative RMS error of an fp8 tensor.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    encoding: Encoding
    extent: str | None = None
    counts: tuple[int, ...] = ()
    error: float = 0.0

    @property
    def numel(self) -> int:
        return int(torch.Size(self.shape).numel())

    @property
    def nbytes(self) -> int:
        return self.numel * dtype_of(self.dtype).itemsize


class Manifest(_Record):
    format: Literal[1] = 1
    teacher: str
    shard: str
    meta: dict[str, Any]
    base: str | None = None
    base_digest: str = ""
    """Checksum of the base's manifest when this was written: a base that was replaced since is noticed."""
    extents: dict[str, Extent]
    tensors: tuple[StoredTensor, ...]


def dump_manifest(manifest: Manifest) -> bytes:
    body = manifest.model_dump_json(indent=1).encode() + b"\n"
    return checksum(body).encode() + b"\n" + body


def parse_manifest(data: bytes) -> Manifest:
    """
    Raises:
        ValueError: these are not the bytes that ``dump_manifest`` gave.
    """
    head, _, body = data.partition(b"\n")
    if head != checksum(body).encode():
        raise ValueError("its checksum does not match")
    try:
        return Manifest.model_validate_json(body)
    except ValidationError as error:
        raise ValueError(f"it does not read as a manifest of format {FORMAT}: {error}") from error
