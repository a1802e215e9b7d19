"""A teacher cut for a parallel layout by one process, which stands in for its ranks one after another.

Megatron's groups are made as in a run, over PyTorch's ``fake`` backend, which knows ranks and sizes and sends nothing:
cutting needs no other rank. What is imported is a run's own, key by key, so that a run finds it and imports nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from rl.teachers.importing import Read, forget_outdated, has_part, import_part
from rl.teachers.modules import TeacherModel, shard_name
from rl.teachers.sources import TeacherSource, with_bases
from rl.trainer import platform
from rl.trainer.config import TrainerConfig
from rl.trainer.model import read_hf_config
from teachers.store import Added, TeacherStore

Begin = Callable[[str, str, int], Read]
"""``(teacher, shard, bytes)``: an import of so many begins; returns what is told of its progress."""


@dataclass(frozen=True)
class Cut:
    """What was done for one shard of one teacher; ``added`` is None where the store had it."""

    teacher: str
    shard: str
    added: Added | None


def smallest_world(config: TrainerConfig) -> TrainerConfig:
    """The same layout with as few ranks as have all of its parts: data and context ranks repeat them."""
    parallel = config.parallel.model_copy(update={"context": 1, "sequence_parallel": False})
    ranks = math.lcm(parallel.tensor, parallel.expert * parallel.expert_tensor) * parallel.pipeline
    return config.model_copy(update={"parallel": parallel, "world_size": ranks})


def import_for_layout(
    store: TeacherStore, sources: Sequence[TeacherSource], config: TrainerConfig, begin: Begin
) -> Iterator[Cut]:
    """Import all parts of these teachers, and of what they are kept as differences to, that the store lacks.

    Raises:
        RuntimeError: this process is a rank already.
        UnsupportedModelError, WeightMismatchError, CheckpointError, TeacherError: names the teacher or the file.
    """
    config = smallest_world(config)
    done: set[str] = set()
    for rank in range(config.world_size):
        with _standing_in(rank, config):
            shard = shard_name(config)
            if shard in done:
                continue
            done.add(shard)
            forget_outdated(store, with_bases(sources), shard)
            for source in with_bases(sources):
                if has_part(store, source, shard):
                    yield Cut(source.name, shard, None)
                    continue
                model = TeacherModel(read_hf_config(source.model), config)
                read = begin(source.name, shard, model.nbytes)
                yield Cut(source.name, shard, import_part(store, source, model, shard, read))


@contextmanager
def _standing_in(rank: int, config: TrainerConfig) -> Iterator[None]:
    if dist.is_initialized():
        raise RuntimeError("this process is a rank of a process group already; import in one of its own")
    dist.init_process_group("fake", rank=rank, world_size=config.world_size, store=FakeStore())
    try:
        platform.init_model_parallel(config.parallel, config.timeout_s, config.seed)
        yield
    finally:
        platform.shutdown_distributed()
