"""How PyTorch's distributed checkpoint writes and reads ``Piece``s: each rank its own, any layout from any other."""

from __future__ import annotations

import io
import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import create_default_global_save_plan
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from rl.trainer.checkpoint_pieces import Piece
from rl.trainer.manifest import CheckpointError


def _index(piece: Piece) -> MetadataIndex:
    return MetadataIndex(piece.key, piece.offset)


def _chunk(piece: Piece) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(torch.Size(piece.offset), piece.tensor.size())


class PieceSavePlanner(SavePlanner):
    """Writes the pieces that are this rank's to write."""

    def __init__(self, pieces: Sequence[Piece]) -> None:
        self._pieces = {_index(piece): piece for piece in pieces if piece.written}

    def set_up_planner(
        self, state_dict: dict[str, Any], storage_meta: Any = None, is_coordinator: bool = False
    ) -> None: ...

    def create_local_plan(self) -> SavePlan:
        return SavePlan(
            [
                WriteItem(
                    index,
                    WriteItemType.SHARD,
                    tensor_data=TensorWriteData(
                        _chunk(piece), TensorProperties.create_from_tensor(piece.tensor), torch.Size(piece.shape)
                    ),
                )
                for index, piece in self._pieces.items()
            ]
        )

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        return create_default_global_save_plan(all_plans)

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        return new_plan

    def resolve_data(self, write_item: WriteItem) -> Tensor:
        return self._pieces[write_item.index].tensor


class PieceLoadPlanner(LoadPlanner):
    """Fills the pieces of this rank in place; parts of a padded tensor that were not saved become zero."""

    def __init__(self, pieces: Sequence[Piece]) -> None:
        self._pieces = {_index(piece): piece for piece in pieces}

    def set_up_planner(
        self, state_dict: dict[str, Any], metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        assert metadata is not None
        self._saved = metadata.state_dict_metadata

    def create_local_plan(self) -> LoadPlan:
        by_key: dict[str, list[Piece]] = {}
        for piece in self._pieces.values():
            by_key.setdefault(piece.key, []).append(piece)
        items = [item for key, pieces in by_key.items() for item in self._reads(key, pieces)]
        found = Counter[MetadataIndex]()
        for item in items:
            found[item.dest_index] += math.prod(item.lengths)
        for index, piece in self._pieces.items():
            if found[index] != piece.tensor.numel():
                if not piece.padded:
                    raise CheckpointError(
                        f"{piece.key}: {found[index]} of {piece.tensor.numel()} elements at {piece.offset} were saved"
                    )
                piece.tensor.zero_()
        return LoadPlan(items)

    def _reads(self, key: str, pieces: Sequence[Piece]) -> list[ReadItem]:
        saved, wanted = self._saved.get(key), pieces[0]
        if not isinstance(saved, TensorStorageMetadata):
            raise CheckpointError(f"the checkpoint has no tensor {key}")
        if tuple(saved.size) != wanted.shape and not wanted.padded:
            raise CheckpointError(f"{key} was saved with shape {tuple(saved.size)}, the model has {wanted.shape}")
        return create_read_items_for_chunk_list(key, saved, [_chunk(piece) for piece in pieces])

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        return global_plan

    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        return central_plan

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        raise CheckpointError(f"{read_item.dest_index.fqn} is not a tensor")

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        tensor = self._pieces[read_item.dest_index].tensor
        for axis, (start, length) in enumerate(zip(read_item.dest_offsets, read_item.lengths, strict=True)):
            tensor = tensor.narrow(axis, start, length)
        return tensor

    def commit_tensor(self, read_item: ReadItem, tensor: Tensor) -> None: ...
