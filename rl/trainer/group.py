"""All ranks of the trainer, as Ray actors, seen from the driver. Light: nothing here imports Megatron.

A call goes to every rank at once, because every operation is a collective. When one rank fails, the others get a moment
to end as well; if any then is gone or still inside the operation, the ranks are out of step, and the group refuses
further calls.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import ray
from ray.exceptions import RayActorError, RayTaskError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from algorithms.types import Algorithm
from rl.batch import RolloutKey
from rl.teachers.teaching import TeacherSetup, Teaching
from rl.trainer.actor import RankActor
from rl.trainer.config import OptimizerConfig, TrainerConfig
from rl.trainer.result import UpdateResult
from rl.weights.serialize import Bucket
from rollout.engine.sglang_weights import BucketShape, UpdateGroup
from rollout.trajectory import Trajectory

GRACE_S = 10.0
"""For the other ranks to end an operation after one has failed."""


class TrainerGroupError(RuntimeError):
    """A rank is gone, late or out of step, and the group cannot go on. The message names the rank."""


class TrainerGroup:
    """Made by ``start``; ``close`` ends every rank.

    The methods do on all ranks what ``TrainerWorker``'s of the same name do. What a rank raises is raised here, with a
    note that names the rank.
    """

    def __init__(self, config: TrainerConfig) -> None:
        self.config = config
        self._placement: PlacementGroup | None = None
        self._ranks: list[Any] = []
        self._broken: str | None = None

    @classmethod
    async def start(cls, config: TrainerConfig) -> TrainerGroup:
        """Place the ranks and let them join their process group. Ray must be initialised.

        Raises:
            TrainerGroupError: the cluster has no room for the ranks, or a rank did not come up.
        """
        group = cls(config)
        try:
            await group._start()
        except BaseException:
            await group.close()
            raise
        return group

    async def _start(self) -> None:
        config = self.config
        bundle = {"CPU": config.cpus_per_rank} | ({"GPU": config.gpus_per_rank} if config.gpus_per_rank else {})
        self._placement = placement_group([bundle] * config.world_size, strategy="PACK")
        try:
            await asyncio.wait_for(_value(self._placement.ready()), config.start_timeout_s)
        except TimeoutError as error:
            raise TrainerGroupError(
                f"no room for {config.world_size} trainer ranks of {bundle} within {config.start_timeout_s} s; "
                f"the cluster has {ray.cluster_resources()}, of which are free {ray.available_resources()}"
            ) from error
        self._ranks = [
            ray.remote(RankActor)
            .options(
                num_cpus=config.cpus_per_rank,
                num_gpus=config.gpus_per_rank,
                scheduling_strategy=PlacementGroupSchedulingStrategy(self._placement, index),
            )
            .remote(index)
            for index in range(config.world_size)
        ]
        endpoint = self._ranks[0].endpoint.remote()
        address, port = (await self._outcome("endpoint", [endpoint], config.start_timeout_s))[0]
        joined = [rank.start.remote(config, address, port) for rank in self._ranks]
        await self._outcome("start", joined, config.start_timeout_s)

    async def close(self) -> None:
        """End every rank. Idempotent."""
        self._broken = self._broken or "it is closed"
        ranks, self._ranks = self._ranks, []
        for rank in ranks:
            ray.kill(rank)
        if self._placement is not None:
            remove_placement_group(self._placement)
            self._placement = None

    async def load_model(self, hf_dir: Path) -> str:
        return await self._call("load_model", hf_dir)

    async def set_optimizer(self, options: OptimizerConfig, total_steps: int) -> None:
        await self._call("set_optimizer", options, total_steps)

    async def update(
        self,
        trajectories: Sequence[Trajectory],
        current_version: int,
        algorithm: Algorithm,
        dropped: Collection[RolloutKey] = (),
        teaching: Teaching | None = None,
    ) -> UpdateResult:
        shared = ray.put(list(trajectories))  # once, not once a rank
        return await self._call("update", shared, current_version, algorithm, list(dropped), ray.put(teaching))

    async def load_teachers(self, setup: TeacherSetup) -> str:
        return await self._call("load_teachers", setup)

    async def prefetch_teachers(self, counts: Mapping[str, int]) -> None:
        await self._call("prefetch_teachers", dict(counts))

    async def logprobs(self, trajectories: Sequence[Trajectory]) -> list[np.ndarray]:
        return await self._call("logprobs", ray.put(list(trajectories)))

    async def topk_logprobs(self, trajectories: Sequence[Trajectory], k: int) -> list[tuple[np.ndarray, np.ndarray]]:
        return await self._call("topk_logprobs", ray.put(list(trajectories)), k)

    async def update_indexer(self, trajectories: Sequence[Trajectory], current_version: int) -> UpdateResult:
        return await self._call("update_indexer", ray.put(list(trajectories)), current_version)

    async def reset_moments(self) -> None:
        await self._call("reset_moments")

    async def weight_buckets(self, bucket_bytes: int = 512 * 2**20) -> list[Bucket]:
        return await self._call("weight_buckets", bucket_bytes)

    async def plan_weights(self, bucket_bytes: int) -> list[BucketShape]:
        return await self._call("sending.plan", bucket_bytes)

    async def stage_weights(self) -> None:
        await self._call("sending.stage")

    async def memory_ids(self) -> dict[str, str]:
        return await self._call("sending.memory_ids")

    async def memory_handles(self) -> dict[str, str]:
        return await self._call("sending.memory_handles")

    async def rewind_weights(self) -> None:
        await self._call("sending.rewind")

    async def fill_bucket(self) -> None:
        await self._call("sending.fill")

    async def bucket_handles(self) -> dict[str, str]:
        return await self._call("sending.handles")

    async def group_endpoint(self) -> tuple[str, int]:
        """Address of rank 0's node, and a port that is free on it."""
        return (await self._outcome("endpoint", [self._ranks[0].endpoint.remote()], self.config.call_timeout_s))[0]

    async def open_group(self, group: UpdateGroup) -> None:
        await self._call("sending.join", group)

    async def broadcast_bucket(self) -> None:
        await self._call("sending.broadcast")

    async def close_group(self) -> None:
        await self._call("sending.leave")

    async def release_bucket(self) -> None:
        await self._call("sending.release")

    async def save_hf(self, directory: Path) -> None:
        await self._call("save_hf", directory)

    async def offload(self) -> int:
        """The bytes are rank 0's."""
        return await self._call("offload")

    async def onload(self) -> None:
        await self._call("onload")

    async def save_checkpoint(self, directory: Path, extra: Mapping[str, Any], background: bool = False) -> None:
        await self._call("save_checkpoint", directory, dict(extra), background)

    async def wait_for_checkpoint(self) -> None:
        await self._call("wait_for_checkpoint")

    async def load_checkpoint(self, directory: Path) -> Mapping[str, Any]:
        return await self._call("load_checkpoint", directory)

    async def _call(self, method: str, *arguments: Any) -> Any:
        if self._broken is not None:
            raise TrainerGroupError(f"{method}: the trainer group cannot be used, {self._broken}")
        references = [rank.call.remote(method, *arguments) for rank in self._ranks]
        return (await self._outcome(method, references, self.config.call_timeout_s))[0]

    async def _outcome(self, method: str, references: Sequence[ray.ObjectRef], timeout_s: float) -> list[Any]:
        """Each rank's result, or the error that explains the others."""
        tasks = [asyncio.ensure_future(_value(reference)) for reference in references]
        try:
            done, pending = await asyncio.wait(tasks, timeout=timeout_s, return_when=asyncio.FIRST_EXCEPTION)
            if not pending and all(task.exception() is None for task in tasks):
                return [task.result() for task in tasks]
            if not any(task.exception() for task in done):
                late = [rank for rank, task in enumerate(tasks) if not task.done()]
                self._broken = f"ranks {late} did not finish {method} within {timeout_s} s"
                raise TrainerGroupError(self._broken)
            await asyncio.wait(tasks, timeout=GRACE_S)
            raise self._explain(method, tasks)
        except asyncio.CancelledError:
            self._broken = f"{method} was cancelled while the ranks were inside it"
            raise
        finally:
            for task in tasks:
                task.cancel()

    def _explain(self, method: str, tasks: Sequence[asyncio.Future[Any]]) -> BaseException:
        errors = {rank: task.exception() for rank, task in enumerate(tasks) if task.done() and task.exception()}
        for rank, error in errors.items():
            # A death is the cause; the other ranks only see a connection break.
            if isinstance(error, RayActorError):
                self._broken = f"rank {rank} died during {method}"
                failure = TrainerGroupError(f"{self._broken}: {error}")
                failure.__cause__ = error
                return failure
        if len(errors) < len(tasks):
            others = [rank for rank in range(len(tasks)) if rank not in errors]
            self._broken = f"ranks {sorted(errors)} failed in {method}, ranks {others} did not"
        rank, error = next(iter(errors.items()))
        assert error is not None
        cause = error.cause if isinstance(error, RayTaskError) else error
        cause.add_note(f"raised by trainer rank {rank} in {method}:\n{error}")
        return cause


async def _value(reference: ray.ObjectRef) -> Any:
    return await reference
