"""How Megatron's tensors are made of Hugging Face's, and how they are cut over ranks.

Each Megatron tensor is made of one or more Hugging Face tensors in a *whole* form of which tensor-parallel rank ``r``
holds the ``r``-th equal piece along one axis:

    copied       the tensor itself, no axis
    vocabulary   rows padded with zeros to a multiple of the ranks, axis 0
    qkv          [kv_heads, (queries per kv head + 2) · head_dim, ...], axis 0
    gate_up      [2, intermediate, hidden], axis 1
    column       the tensor itself, axis 0
    row          the tensor itself, axis 1
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum

import torch
from torch import Tensor


class Form(StrEnum):
    COPIED = "copied"
    VOCABULARY = "vocabulary"
    QKV = "qkv"
    GATE_UP = "gate_up"
    COLUMN = "column"
    ROW = "row"


AXIS = {Form.COPIED: None, Form.VOCABULARY: 0, Form.QKV: 0, Form.GATE_UP: 1, Form.COLUMN: 0, Form.ROW: 1}


@dataclass(frozen=True)
class Weight:
    """One Megatron tensor of the whole model and the Hugging Face tensors that it is made of."""

    megatron: str
    """Its name in the module of its stage; in the experts' case with the expert's number in the whole layer."""
    hf: Mapping[str, tuple[int, ...]]
    """Names and shapes."""
    form: Form
    whole: tuple[int, ...]
    """Shape of the whole form."""
    stage: int = 0
    """Pipeline stage that has it."""
    expert: int | None = None
    """Number of the routed expert that it is part of: one expert-parallel rank has it, in expert-tensor pieces."""
    exported: bool = True
    """False for the last stage's copy of a tied embedding."""
    float32: bool = False
    """True where it has this type in a model of any type."""

    def placed(self, megatron: str, hf: str, stage: int) -> Weight:
        """This weight of a layer under the layer's prefixes."""
        names = {hf + name: shape for name, shape in self.hf.items()}
        return dataclasses.replace(self, megatron=megatron + self.megatron, hf=names, stage=stage)

    def fuse(self, tensors: list[Tensor]) -> Tensor:
        """The whole form of the Hugging Face tensors, in their order."""
        match self.form:
            case Form.QKV:
                heads = self.whole[0]
                return torch.cat([t.view(heads, -1, *self.whole[2:]) for t in tensors], dim=1)
            case Form.GATE_UP:
                return torch.stack(tensors)
            case Form.VOCABULARY:
                padding = tensors[0].new_zeros(self.whole[0] - len(tensors[0]), self.whole[1])
                return torch.cat([tensors[0], padding])
            case Form.COPIED | Form.COLUMN | Form.ROW:
                return tensors[0]

    def split(self, whole: Tensor) -> Iterator[tuple[str, Tensor]]:
        """The Hugging Face tensors, each with its name."""
        shapes = list(self.hf.values())
        match self.form:
            case Form.QKV:
                heads, rest = self.whole[0], self.whole[2:]
                parts = whole.split([shape[0] // heads for shape in shapes], dim=1)
                tensors = [part.reshape(-1, *rest) for part in parts]
            case Form.GATE_UP:
                tensors = list(whole)
            case Form.VOCABULARY:
                tensors = [whole[: shapes[0][0]]]
            case Form.COPIED | Form.COLUMN | Form.ROW:
                tensors = [whole]
        yield from zip(self.hf, (t.contiguous() for t in tensors), strict=True)

    def piece(self, whole: Tensor, rank: int, ranks: int) -> Tensor:
        axis = AXIS[self.form]
        return whole if axis is None else whole.chunk(ranks, dim=axis)[rank]

    def piece_shape(self, ranks: int) -> tuple[int, ...]:
        axis = AXIS[self.form]
        return tuple(size // ranks if dim == axis else size for dim, size in enumerate(self.whole))


def copied(megatron: str, hf: str, *shape: int, float32: bool = False) -> Weight:
    """A tensor that every rank has in whole."""
    return Weight(megatron, {hf: shape}, Form.COPIED, shape, float32=float32)


def column(megatron: str, hf: str, rows: int, columns: int) -> Weight:
    """A matrix whose rows (output features) are spread over the ranks."""
    return Weight(megatron, {hf: (rows, columns)}, Form.COLUMN, (rows, columns))


def row(megatron: str, hf: str, rows: int, columns: int, expert: int | None = None) -> Weight:
    """A matrix whose columns (input features) are spread over the ranks."""
    return Weight(megatron, {hf: (rows, columns)}, Form.ROW, (rows, columns), expert=expert)


def gate_up(megatron: str, gate: str, up: str, intermediate: int, hidden: int, expert: int | None = None) -> Weight:
    """Gate and up projection of a gated MLP, one above the other."""
    shape = (intermediate, hidden)
    return Weight(megatron, {gate: shape, up: shape}, Form.GATE_UP, (2, *shape), expert=expert)
