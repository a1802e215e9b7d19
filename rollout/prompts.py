"""The order in which prompts are taken: one endless, reproducible stream a task."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from pydantic import BaseModel, ConfigDict


@dataclass(frozen=True, order=True)
class PromptRef:
    """One prompt of one epoch: what is trained exactly once."""

    task: str
    epoch: int
    prompt_id: str


class StreamState(BaseModel):
    """Position of a stream, as a checkpoint keeps it."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    epoch: int
    position: int
    """Prompts of this epoch that were handed out."""


class PromptStream:
    """Prompts of one task, shuffled anew each epoch by (seed, task, epoch)."""

    def __init__(self, task: str, prompt_ids: Sequence[str], seed: int) -> None:
        if not prompt_ids:
            raise ValueError(f"task {task}: its train split has no prompts")
        if len(set(prompt_ids)) != len(prompt_ids):
            raise ValueError(f"task {task}: prompt ids of the train split are not unique")
        self.task = task
        self.prompt_ids = list(prompt_ids)
        self.seed = seed
        self.epoch = 0
        self.position = 0
        self._order = self._permutation()

    def _permutation(self) -> list[int]:
        generator = np.random.default_rng([self.seed, zlib.crc32(self.task.encode()), self.epoch])
        return generator.permutation(len(self.prompt_ids)).tolist()

    def next(self) -> PromptRef:
        if self.position == len(self._order):
            self.epoch += 1
            self.position = 0
            self._order = self._permutation()
        ref = PromptRef(self.task, self.epoch, self.prompt_ids[self._order[self.position]])
        self.position += 1
        return ref

    def state(self) -> StreamState:
        return StreamState(epoch=self.epoch, position=self.position)

    def restore(self, state: StreamState) -> None:
        if state.position > len(self.prompt_ids):
            raise ValueError(
                f"task {self.task}: the checkpoint stands at prompt {state.position} of epoch {state.epoch}, "
                f"but the train split has {len(self.prompt_ids)}: it is not the data set of that run"
            )
        self.epoch = state.epoch
        self.position = state.position
        self._order = self._permutation()
