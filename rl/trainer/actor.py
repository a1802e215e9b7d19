"""A Ray actor around one ``TrainerWorker``. Light to import: Megatron is imported inside the actor's process."""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING, Any

import ray

from rl.trainer.config import TrainerConfig
from rollout.processes import free_port

if TYPE_CHECKING:
    from rl.trainer.worker import TrainerWorker


class RankActor:
    """One rank. Only rank 0's results travel back; every rank's are the same."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self._worker: TrainerWorker | None = None

    def endpoint(self) -> tuple[str, int]:
        """This node's address and a port that is free on it now."""
        return ray.util.get_node_ip_address(), free_port("")

    def start(self, config: TrainerConfig, address: str, port: int) -> None:
        """Join the process group; returns when all ranks have."""
        from rl.trainer.worker import TrainerWorker

        self._worker = TrainerWorker(config, self.rank, config.world_size, address, port)

    def call(self, method: str, *arguments: Any) -> Any:
        """Call a method of the worker, or of a part of it (``part.method``), by name."""
        if self._worker is None:
            raise RuntimeError(f"rank {self.rank} has not joined the process group")
        result = operator.attrgetter(method)(self._worker)(*arguments)
        return result if self.rank == 0 else None
