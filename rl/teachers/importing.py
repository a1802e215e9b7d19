"""Teachers' weights into the store, cut for this rank: from HF directories, and from checkpoints of finished stages.

A rank reads its own part alone: of an HF directory one tensor at a time, of a checkpoint all of its part, once. Ranks
of one host with the same part import it once.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException

from rl.teachers.modules import TeacherModel, shard_name
from rl.teachers.sources import TeacherSource
from rl.trainer import platform
from rl.trainer.collective import gather_objects, on_every_rank
from rl.trainer.config import TrainerConfig
from rl.trainer.manifest import CheckpointError
from rl.trainer.piece_planner import PieceLoadPlanner
from teachers.errors import MissingTeacherError
from teachers.store import TeacherStore

platform.install()

# ruff: noqa: E402  (Megatron needs the platform installed first)
from rl.trainer.convert import rank_state, read_weights
from rl.trainer.model import build_chunks
from rl.trainer.pieces import weight_pieces

FINGERPRINT = "fingerprint"


def import_teachers(
    store: TeacherStore, sources: Sequence[tuple[TeacherSource, TeacherModel]], config: TrainerConfig
) -> list[str]:
    """Import what the store does not have yet, or has of other files; returns the names of these. A collective of all
    ranks.

    Raises:
        ImportFailedError, WeightMismatchError, CheckpointError: on every rank; the store has no half of a teacher.
    """
    shard = shard_name(config)
    everyone = gather_objects((socket.gethostname(), shard))
    mine = everyone.index(everyone[dist.get_rank()]) == dist.get_rank()
    imported = []
    for source, model in sources:

        def write(source: TeacherSource = source, model: TeacherModel = model) -> bool:
            wanted = mine and _fingerprint(store, source.name, shard) != source.fingerprint
            if wanted:
                meta = {FINGERPRINT: source.fingerprint, "source": str(source.checkpoint or source.model)}
                store.add(source.name, shard, _tensors(source, model), meta, replace=True)
            return wanted

        if any(on_every_rank(write)):
            imported.append(source.name)
    return imported


def _fingerprint(store: TeacherStore, name: str, shard: str) -> str | None:
    try:
        found: str | None = store.open(name, shard).meta.get(FINGERPRINT)
    except MissingTeacherError:
        return None
    return found


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
    dtype, and what was not trained.

    Raises:
        CheckpointError: a tensor is missing or has another shape.
    """
    parts = build_chunks(model.hf, model.config)
    reader = dcp.FileSystemReader(directory)
    planner = PieceLoadPlanner(weight_pieces(parts, reader.read_metadata().state_dict_metadata))
    try:
        with torch.no_grad():
            dcp.load({}, storage_reader=reader, planner=planner, no_dist=True)
    except CheckpointException as error:
        _, (cause, _) = next(iter(error.failures.items()))
        raise CheckpointError(f"{directory} does not fit the model: {cause}") from error
    for part in parts:
        for name, tensor in rank_state(part).items():
            yield f"{part.stage}/{name}", tensor.detach()
