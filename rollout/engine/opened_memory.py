"""What a trainer and the loader inside a server say to each other about memory that the server opens once and copies
from at each update: a request (JSON, in place of a tensor's name, which is all that SGLang hands to a loader) and lines
of answer in a file of both's machine.
"""

from __future__ import annotations

import functools
import hashlib
import math
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import BaseModel, ConfigDict

if TYPE_CHECKING:
    import torch
    from torch import Tensor

LOADER = "rollout.engine.weight_loader.load"
"""As SGLang is told of it (``--custom-weight-loader``)."""


class _Message(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Placed(_Message):
    """A tensor in the memory, contiguous."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    """Byte."""

    def view(self, memory: Tensor) -> Tensor:
        import torch  # seconds, which a command that reads a config needn't wait for

        dtype: torch.dtype = getattr(torch, self.dtype)
        end = self.begin + math.prod(self.shape) * dtype.itemsize
        return memory[self.begin : end].view(dtype).view(self.shape)


class Layout(_Message):
    """What lies in the memory in each round. Rounds follow one another in the same place, or lie side by side."""

    rounds: tuple[tuple[Placed, ...], ...]

    @functools.cached_property
    def checksum(self) -> str:
        return hashlib.blake2b(self.model_dump_json().encode(), digest_size=16).hexdigest()


class Request(_Message):
    """Copy what lies in the memory into the model."""

    layout_id: str
    """Its checksum."""
    memory_id: str
    """Of one allocation: another trainer has another."""
    rounds: tuple[int, ...]
    """Which are there now."""
    answers: Path
    """File that a line is added to."""
    layout: Layout | None = None
    """Where the server may not know it."""
    handle: str | None = None
    """Where the server may not have the memory open: base64 of a pickled flat tensor of bytes, by CUDA IPC or as a file
    in shared memory."""
    keep: bool = True
    """Whether the memory stays open; else its owner may free it once this is answered."""
    checksums: bool = False


class Answer(_Message):
    """Of one model of one rank. It also says what failed: a loader that raised would end SGLang's scheduler."""

    began: float
    """Of ``time.monotonic``, which all processes of a machine share."""
    ended: float
    how: str = ""
    """plan, or SGLang's own loader."""
    why: str = ""
    """There is no plan."""
    error: str = ""
    seconds: dict[str, float] = {}
    copies: int = 0
    checksums: dict[str, str] = {}


def answers(file: Path) -> Iterator[Answer]:
    """Of all that have answered."""
    if file.exists():
        for line in file.read_text().splitlines():
            yield Answer.model_validate_json(line)
