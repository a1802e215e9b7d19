"""Teachers' weights into the store, cut for this rank: from HF directories, and from checkpoints of finished stages.

A rank reads its own part alone: of an HF directory one tensor at a time, of a checkpoint all of its part, once. Ranks
of one host with the same part import it once.
"""

from __future__ import annotations

import logging
import socket
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException

from rl.teachers.modules import TeacherModel, shard_name
from rl.teachers.sources import TeacherSource
from rl.trainer import platform
from rl.trainer.checkpoint_planner import PieceLoadPlanner
from rl.trainer.collective import gather_objects, on_every_rank
from rl.trainer.config import TrainerConfig
from rl.trainer.manifest import CheckpointError
from teachers.errors import CorruptTeacherError, MissingTeacherError
from teachers.format import Manifest
from teachers.shard import StoredShard
from teachers.store import Added, TeacherStore

platform.install()

# ruff: noqa: E402  (Megatron needs the platform installed first)
from rl.trainer.checkpoint_pieces import weight_pieces
from rl.trainer.convert import read_weights

FINGERPRINT = "fingerprint"
Read = Callable[[int], None]
"""Told the bytes of each tensor that was read."""

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Part:
    """This rank's part of every teacher."""

    shard: str
    mine: bool
    """Of the ranks of this host with the same part, this one imports it."""
    first: bool
    """The first rank of this host."""

    @classmethod
    def of(cls, config: TrainerConfig) -> Part:
        """A collective of all ranks."""
        shard, host, rank = shard_name(config), socket.gethostname(), dist.get_rank()
        everyone = gather_objects((host, shard))
        hosts = [name for name, _ in everyone]
        return cls(shard, everyone.index((host, shard)) == rank, hosts.index(host) == rank)


def import_teachers(
    store: TeacherStore, sources: Sequence[TeacherSource], models: Mapping[str, TeacherModel], part: Part
) -> list[str]:
    """Import what the store does not have yet, or has of other files or in another form; returns the names of these. A
    collective of all ranks.

    Args:
        sources: bases first (``with_bases``).

    Raises:
        ImportFailedError, WeightMismatchError, CheckpointError: on every rank; the store has no half of a teacher.
    """

    def forget() -> None:
        if part.mine:
            forget_outdated(store, sources, part.shard)

    on_every_rank(forget)
    imported = []
    for source in sources:

        def write(source: TeacherSource = source) -> bool:
            if not part.mine or has_part(store, source, part.shard):
                return False
            import_part(store, source, models[source.name], part.shard)
            return True

        if any(on_every_rank(write)):
            imported.append(source.name)
    return imported


def forget_outdated(store: TeacherStore, sources: Sequence[TeacherSource], shard: str) -> None:
    """Shards that are kept as differences to a base, and will be imported again: the base may be replaced then."""
    for _, manifest in store.manifests():
        if not isinstance(manifest, Manifest) or manifest.base is None or manifest.shard != shard:
            continue
        for source in sources:
            if source.name == manifest.teacher and not has_part(store, source, shard):
                store.forget(source.name, shard)


def has_part(store: TeacherStore, source: TeacherSource, shard: str) -> bool:
    """Is there nothing to import?"""
    stored = _stored(store, source.name, shard)
    return stored is not None and stored.meta.get(FINGERPRINT) == source.mark


def import_part(
    store: TeacherStore, source: TeacherSource, model: TeacherModel, shard: str, read: Read = lambda _: None
) -> Added:
    """One shard of a teacher, in the place of what the store has of it; its base comes before. No collective.

    Raises:
        ImportFailedError, WeightMismatchError, CheckpointError: the store has no half of a teacher.
    """
    return store.add(
        source.name,
        shard,
        _counted(_tensors(source, model), read),
        {FINGERPRINT: source.mark, "source": str(source.checkpoint or source.model)},
        base=source.base.name if source.base is not None else None,
        fp8=source.codec == "fp8",
        replace=True,
    )


def _stored(store: TeacherStore, name: str, shard: str) -> StoredShard | None:
    """None too where its files are damaged, as far as can be told without reading them."""
    if shard not in store.shards(name):
        return None
    try:
        stored = store.open(name, shard)
        stored.check_packs()
    except (MissingTeacherError, CorruptTeacherError) as error:
        log.warning("imported again: %s", error)
        return None
    return stored


def _counted(tensors: Iterable[tuple[str, Tensor]], read: Read) -> Iterator[tuple[str, Tensor]]:
    for name, tensor in tensors:
        read(tensor.nbytes)
        yield name, tensor


def _tensors(source: TeacherSource, model: TeacherModel) -> Iterator[tuple[str, Tensor]]:
    """This rank's tensors, by stage and name, in the model's dtype."""
    if source.checkpoint is not None:
        yield from _checkpoint_tensors(source.checkpoint, model)
        return
    for part in model.models:
        for name, tensor in read_weights(part, model.hf, source.model):
            key = f"{part.stage}/{name}"
            yield key, tensor.to(model.dtypes[key])


def _checkpoint_tensors(directory: Path, model: TeacherModel) -> Iterator[tuple[str, Tensor]]:
    """The weights of a checkpoint, whatever layout saved it: the optimizer's main weights, rounded to the model's
    dtype, and what was not trained; in host memory.

    Raises:
        CheckpointError: a tensor is missing or has another shape.
    """
    tensors = {name: torch.empty(shape, dtype=model.dtypes[name]) for name, shape in model.shapes.items()}
    reader = dcp.FileSystemReader(directory)
    with torch.no_grad(), model.bound(tensors):
        planner = PieceLoadPlanner(weight_pieces(model.models, reader.read_metadata().state_dict_metadata))
        try:
            dcp.load({}, storage_reader=reader, planner=planner, no_dist=True)
        except CheckpointException as error:
            _, (cause, _) = next(iter(error.failures.items()))
            raise CheckpointError(f"{directory} does not fit the model: {cause}") from error
    yield from tensors.items()
