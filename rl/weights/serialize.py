"""Named tensors as payloads that SGLang loads, in buckets of bounded size; and what a model's tensors must be.

Pure functions of their input, so that a trainer's process can make the payloads and another can send them.
"""

from __future__ import annotations

import base64
import pickle
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from rl.weights.tensor_files import places

ATTENTION = ".self_attn."


@dataclass(frozen=True)
class Bucket:
    """Some named tensors, serialised."""

    shapes: Mapping[str, tuple[int, ...]]
    """By HF name; whole tensors, not shards."""
    payload: str
    """base64 of the pickled list of (name, CPU tensor)."""
    nbytes: int
    """Of the tensors."""


def may_part(before: str, name: str) -> bool:
    """Whether a bucket may end between two tensors. Those of one attention stay together: SGLang puts some of them
    together as they come (MLA's ``q_a_proj`` and ``kv_a_proj_with_mqa``), and drops one that comes alone."""
    at = name.find(ATTENTION)
    return at < 0 or not before.startswith(name[: at + len(ATTENTION)])


def make_buckets(named: Iterable[tuple[str, torch.Tensor]], bucket_bytes: int) -> Iterator[Bucket]:
    """Serialise tensors in order, as many a bucket as fit.

    Args:
        named: HF names and tensors, on any device; taken one bucket at a time.
        bucket_bytes: bound of a bucket's tensors; a larger tensor has a bucket to itself, and what must not part may
            exceed it.

    Raises:
        ValueError: where ``bucket_bytes`` is not positive, or a name comes twice in one bucket.
    """
    if bucket_bytes <= 0:
        raise ValueError(f"bucket_bytes is {bucket_bytes}, it must be positive")
    pending: list[tuple[str, torch.Tensor]] = []
    pending_bytes = 0
    for name, tensor in named:
        full = pending_bytes + tensor.nbytes > bucket_bytes
        if pending and full and may_part(pending[-1][0], name):
            yield _bucket(pending)
            pending, pending_bytes = [], 0
        pending.append((name, tensor))
        pending_bytes += tensor.nbytes
    if pending:
        yield _bucket(pending)


def _bucket(named: Sequence[tuple[str, torch.Tensor]]) -> Bucket:
    shapes = {name: tuple(tensor.shape) for name, tensor in named}
    if len(shapes) != len(named):
        raise ValueError(f"a tensor's name comes twice among {[name for name, _ in named]}")
    # clone: pickling a view would take its whole storage along
    tensors = [(name, tensor.detach().cpu().clone(memory_format=torch.contiguous_format)) for name, tensor in named]
    return Bucket(
        shapes=shapes,
        payload=base64.b64encode(pickle.dumps(tensors, protocol=pickle.HIGHEST_PROTOCOL)).decode("ascii"),
        nbytes=sum(tensor.nbytes for _, tensor in tensors),
    )


def directory_shapes(directory: Path) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor of an HF directory, from the headers of its safetensors files.

    Raises:
        FileNotFoundError: where it has none.
    """
    return {name: place.shape for name, place in places(directory).items()}


def check_complete(buckets: Iterable[Bucket], expected: Mapping[str, tuple[int, ...]]) -> None:
    """Check that the buckets hold each tensor of the model once. SGLang would not say: it skips a name that it does not
    know, keeps the old values of one that is missing, and dies of a wrong shape.

    Raises:
        ValueError: names what is unknown, missing, twice there, or of another shape.
    """
    seen: dict[str, tuple[int, ...]] = {}
    faults: list[str] = []
    for bucket in buckets:
        for name, shape in bucket.shapes.items():
            if name in seen:
                faults.append(f"{name} comes twice")
            elif name not in expected:
                faults.append(f"{name} is not a tensor of the model")
            elif shape != tuple(expected[name]):
                faults.append(f"{name} has shape {shape}, the model's has {tuple(expected[name])}")
            seen[name] = shape
    faults += [f"{name} is missing" for name in expected if name not in seen]
    if faults:
        more = f" and {len(faults) - 5} more" if len(faults) > 5 else ""
        raise ValueError(f"these weights do not fit the model: {'; '.join(faults[:5])}{more}")
