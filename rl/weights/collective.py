"""Weights for engines on other GPUs: the trainer's first rank broadcasts flat buckets (NCCL; gloo on CPUs).

    rank 0 the trainer's, then each engine's tensor-parallel ranks in the order of the engines

The group is kept. It is made anew when the set of engines has changed, when one was restarted, and after a failure: a
broadcast that one member missed leaves the others waiting.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass

from rl.weights.flat import bucket_nbytes
from rl.weights.ipc import check_plan
from rl.weights.sender import Sender
from rl.weights.target import WeightTarget, in_session, on_all
from rollout.engine.protocol import EngineError
from rollout.engine.sglang_weights import BucketShape, UpdateGroup


@dataclass
class Broadcasts:
    """The group of the trainer and its engines, from one publication to the next."""

    sender: Sender
    backend: str
    timeout_s: float
    """For joining, and for one broadcast: as long as that, paused engines may wait for one that died."""
    made: int = 0
    """Groups so far; part of their names, so that a new one never meets an old one's members."""
    group: UpdateGroup | None = None
    members: tuple[WeightTarget, ...] = ()
    """Who speaks to its engines: a server that was started anew has another."""

    async def join(self, engines: Sequence[WeightTarget]) -> UpdateGroup:
        """The group of these engines, made where there is none.

        Raises:
            EngineError: naming every engine that did not join.
        """
        wanted = tuple(engines)
        if self.group is not None and wanted == self.members:
            return self.group
        await self.leave(engines)
        sizes = [(await engine.abilities()).tensor_parallel for engine in engines]
        address, port = await self.sender.group_endpoint()
        self.made += 1
        group = UpdateGroup(address, port, 1 + sum(sizes), f"weights-{self.made}", self.backend, self.timeout_s)
        ranks = {engine.url: 1 + sum(sizes[:index]) for index, engine in enumerate(engines)}
        self.group = group  # also when joining fails: those that did join leave it then
        await _together(
            self.sender.open_group(group),
            on_all(engines, lambda engine: engine.join_update_group(group, ranks[engine.url])),
        )
        self.members = wanted
        return group

    async def leave(self, engines: Sequence[WeightTarget]) -> None:
        """Take the group down, on engines that may never have joined it, too."""
        group, self.group, self.members = self.group, None, ()
        if group is None:
            return
        await self.sender.close_group()

        async def leave(engine: WeightTarget) -> None:
            try:
                await engine.leave_update_group(group.name)
            except EngineError as error:
                if "does not exist" not in str(error):
                    raise

        await on_all(engines, leave)


async def _together(trainer: Awaitable[None], engines: Awaitable[object]) -> None:
    """Wait for both sides of a collective. When the engines fail, the trainer's side ends by its timeout.

    Raises:
        EngineError: either side failed.
    """
    sent, taken = await asyncio.gather(trainer, engines, return_exceptions=True)
    failures = [outcome for outcome in (taken, sent) if isinstance(outcome, BaseException)]
    for failure in failures:
        if not isinstance(failure, EngineError | TimeoutError | RuntimeError):
            raise failure
    if failures:
        raise EngineError("; ".join(map(str, failures))) from failures[0]


@dataclass(frozen=True)
class CollectiveTransport:
    """The weights that the trainer has now: it can load no earlier version."""

    broadcasts: Broadcasts
    plan: Sequence[BucketShape]
    """What ``sender.plan_weights`` said."""

    @property
    def nbytes(self) -> int:
        return sum(map(bucket_nbytes, self.plan))

    def check(self, expected: Mapping[str, tuple[int, ...]]) -> None:
        check_plan(self.plan, expected)

    async def prepare(self, engines: Sequence[WeightTarget], version: int) -> None:
        """Join, while the engines still generate."""
        await self.broadcasts.join(engines)

    async def load(self, engines: Sequence[WeightTarget], version: int, flush: bool) -> None:
        try:
            group = await self.broadcasts.join(engines)
            await in_session(engines, functools.partial(self._send, engines, group, version, flush))
        except EngineError as error:
            try:
                await self.broadcasts.leave(engines)
            except EngineError as second:
                raise EngineError(f"{error}; taking the group down failed, too: {second}") from error
            raise

    async def _send(self, engines: Sequence[WeightTarget], group: UpdateGroup, version: int, flush: bool) -> None:
        sender = self.broadcasts.sender
        await sender.rewind_weights()
        for index, bucket in enumerate(self.plan):
            await sender.fill_bucket()
            said = version if index == len(self.plan) - 1 else None
            take = functools.partial(_take, name=group.name, bucket=bucket, version=said, flush=flush)
            await _together(sender.broadcast_bucket(), on_all(engines, take))


async def _take(engine: WeightTarget, name: str, bucket: BucketShape, version: int | None, flush: bool) -> None:
    await engine.update_weights_from_group(name, bucket, version, flush)
