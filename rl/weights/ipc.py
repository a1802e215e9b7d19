"""Weights for engines on the trainer's own GPUs: the engine opens the trainer's memory and copies on the device.

Each tensor-parallel rank of an engine gets the handle of the memory that lies on its own GPU. On a CPU the same goes
through shared memory.

    engine with our loader   opens the memory once and copies by a plan (``rollout.engine.weight_loader``)
        all fits              staged side by side while the engine still generates; then one request
        it does not           bucket by bucket through the same memory
    another engine           opens a handle for each bucket, and its own loader goes through the tensors
"""

from __future__ import annotations

import functools
import tempfile
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rl.weights.archive import SHARED_MEMORY
from rl.weights.flat import bucket_nbytes, side_by_side, spans
from rl.weights.sender import Sender
from rl.weights.serialize import Bucket, check_complete
from rl.weights.target import WeightTarget, in_session, on_all
from rollout.engine.opened_memory import Answer, Layout, Placed, Request, answers
from rollout.engine.protocol import EngineError
from rollout.engine.sglang_weights import BucketShape


@dataclass(frozen=True)
class Held:
    """What an engine has of ours."""

    speaker: WeightTarget
    """Who speaks to it: a server that was started anew has another."""
    layout_id: str = ""
    memory_ids: tuple[str, ...] = ()
    """Of its ranks; none where they closed it."""


class Openings:
    """What engines have open, from one publication to the next, and what they answered last. ``close`` it."""

    def __init__(self, resident_bytes: int, keep: bool = True, parent: Path | None = None) -> None:
        """
        Args:
            resident_bytes: of weights that are staged side by side; more go bucket by bucket.
            keep: False where the trainer gives its memory away between publications.
            parent: of the folder for answers, which engines can write to; None: this machine's shared memory.
        """
        self.resident_bytes = resident_bytes
        self.keep = keep
        self.last: dict[str, list[Answer]] = {}
        """By the engine's URL, of the last load."""
        self._held: dict[str, Held] = {}
        self._answers = tempfile.TemporaryDirectory(
            prefix="atelier-answers-", dir=SHARED_MEMORY if parent is None else parent
        )

    def held(self, engine: WeightTarget) -> Held:
        held = self._held.get(engine.url)
        return held if held is not None and held.speaker is engine else Held(engine)

    def set(self, engine: WeightTarget, held: Held | None) -> None:
        """What it has now; None: that is not known."""
        self._held.pop(engine.url, None)
        if held is not None:
            self._held[engine.url] = held

    def answer_file(self) -> Path:
        return Path(self._answers.name) / uuid.uuid4().hex

    def close(self) -> None:
        self._answers.cleanup()


@dataclass
class IpcTransport:
    """The weights that the trainer has now: it can load no earlier version."""

    sender: Sender
    plan: Sequence[BucketShape]
    """What ``sender.plan_weights`` said."""
    devices: Mapping[str, Sequence[str]]
    """By an engine's URL, the device id (``rl.weights.flat.device_id``) of each of its tensor-parallel ranks; an engine
    that is not listed has all ranks on the trainer's only device."""
    openings: Openings
    checksums: bool = False
    """Whether engines also say the checksum of every parameter; see ``Openings.last``."""
    _ids: dict[str, str] = field(default_factory=dict)
    """Of the sender's memories, by device."""
    _handles: dict[str, str] = field(default_factory=dict)
    """That open them; for one attempt."""

    @functools.cached_property
    def nbytes(self) -> int:
        return sum(map(bucket_nbytes, self.plan))

    @property
    def resident(self) -> bool:
        """Whether all buckets are staged side by side."""
        return self.nbytes <= self.openings.resident_bytes

    def check(self, expected: Mapping[str, tuple[int, ...]]) -> None:
        check_plan(self.plan, expected)

    async def prepare(self, engines: Sequence[WeightTarget], version: int) -> None:
        """Stage the weights, where all fit, and know all that need not be asked for while the engines stand."""
        if not await self._all_open(engines):
            return
        _ = self.layout.checksum
        if self.resident:
            await self.sender.stage_weights()
            self._ids = await self.sender.memory_ids()
            await self._ask_handles(engines)

    async def _ask_handles(self, engines: Sequence[WeightTarget]) -> None:
        """Once for all engines: the sender's ranks answer together."""
        if not self._handles and any(await on_all(engines, self._lacks_memory)):
            self._handles = await self.sender.memory_handles()

    async def load(self, engines: Sequence[WeightTarget], version: int, flush: bool) -> None:
        send = self._copy if await self._all_open(engines) else self._send
        try:
            await in_session(engines, functools.partial(send, engines, version, flush))
        finally:
            self._handles = {}

    async def _all_open(self, engines: Sequence[WeightTarget]) -> bool:
        """Whether all have our loader."""
        return all(able.opens_memory for able in await on_all(engines, lambda engine: engine.abilities()))

    async def _copy(self, engines: Sequence[WeightTarget], version: int, flush: bool) -> None:
        """Have the engines copy from memory that they have open."""
        rounds = [tuple(range(len(self.plan)))] if self.resident else [(index,) for index in range(len(self.plan))]
        if not self.resident:
            await self.sender.rewind_weights()
            self._ids = await self.sender.memory_ids()
        await self._ask_handles(engines)
        for number, of_round in enumerate(rounds):
            last = number == len(rounds) - 1
            if not self.resident:
                await self.sender.fill_bucket()
            said = version if last else None
            keep = self.openings.keep or not last
            asked = functools.partial(Request, rounds=of_round, keep=keep, checksums=self.checksums and last)
            await on_all(engines, functools.partial(self._take, asked, said, flush))

    async def _take(
        self, asked: Callable[..., Request], version: int | None, flush: bool, engine: WeightTarget
    ) -> None:
        """One engine's part of a round.

        Args:
            asked: makes the request, from what differs between engines and ranks.
            version: the weights', with the last round; None before.
        """
        ranks = (await engine.abilities()).tensor_parallel
        memory_ids, layout_id = self._of_ranks(engine.url, ranks, self._ids), self.layout.checksum
        knows = self.openings.held(engine).layout_id == layout_id
        handles: Sequence[str | None] = [None] * ranks
        if await self._lacks_memory(engine):
            handles = self._of_ranks(engine.url, ranks, self._handles)
        file = self.openings.answer_file()
        requests = [
            asked(
                layout_id=layout_id,
                memory_id=memory_id,
                answers=file,
                layout=None if knows else self.layout,
                handle=handle,
            )
            for memory_id, handle in zip(memory_ids, handles, strict=True)
        ]
        self.openings.set(engine, None)  # until it has answered
        await engine.update_weights_from_memory(requests, version, flush)
        self.openings.last[engine.url] = checked_answers(engine.url, file, ranks)
        file.unlink()
        kept = tuple(memory_ids) if requests[0].keep else ()
        self.openings.set(engine, Held(engine, layout_id, kept))

    async def _lacks_memory(self, engine: WeightTarget) -> bool:
        ranks = (await engine.abilities()).tensor_parallel
        return self.openings.held(engine).memory_ids != tuple(self._of_ranks(engine.url, ranks, self._ids))

    @functools.cached_property
    def layout(self) -> Layout:
        """Of each bucket's tensors in the sender's memory."""
        begins = side_by_side(self.plan)[:-1] if self.resident else [0] * len(self.plan)
        return Layout(
            rounds=tuple(
                tuple(
                    Placed(name=name, dtype=dtype, shape=shape, begin=begin + at)
                    for name, dtype, shape, (at, _) in zip(
                        bucket.names, bucket.dtypes, bucket.shapes, spans(bucket), strict=True
                    )
                )
                for begin, bucket in zip(begins, self.plan, strict=True)
            )
        )

    async def _send(self, engines: Sequence[WeightTarget], version: int, flush: bool) -> None:
        """Hand the engines a handle for each bucket."""
        await self.sender.rewind_weights()
        for index in range(len(self.plan)):
            await self.sender.fill_bucket()
            handles = await self.sender.bucket_handles()
            said = version if index == len(self.plan) - 1 else None

            async def send(engine: WeightTarget, handles: dict[str, str] = handles, said: int | None = said) -> None:
                ranks = (await engine.abilities()).tensor_parallel
                payloads = self._of_ranks(engine.url, ranks, handles)
                await engine.update_weights_from_tensors(payloads, said, flush, flat=True)

            await on_all(engines, send)

    def _of_ranks(self, url: str, ranks: int, by_device: Mapping[str, str]) -> list[str]:
        """What is there for each device, for each rank of an engine."""
        if url not in self.devices:
            if len(by_device) > 1:
                raise EngineError(f"{url}: it is not known on which of the trainer's {len(by_device)} GPUs it runs")
            return list(by_device.values()) * ranks
        missing = [device for device in self.devices[url] if device not in by_device]
        if missing:
            raise EngineError(f"{url} runs on {missing}, where no trainer rank is; publish.transport=collective can")
        return [by_device[device] for device in self.devices[url]]


def checked_answers(url: str, file: Path, ranks: int) -> list[Answer]:
    """The loaders' answers.

    Raises:
        EngineError: one failed, or did not answer; SGLang's own answer says nothing of that.
    """
    found = list(answers(file))
    errors = [answer.error for answer in found if answer.error]
    if errors:
        raise EngineError(f"{url} could not copy the weights: {errors[0]}")
    if len(found) < ranks:
        raise EngineError(f"{url}: {len(found)} of {ranks} ranks said in {file} that they copied the weights")
    return found


def check_plan(plan: Sequence[BucketShape], expected: Mapping[str, tuple[int, ...]]) -> None:
    """Raises ValueError where the buckets do not hold each tensor of the model once."""
    check_complete([Bucket(dict(zip(b.names, b.shapes, strict=True)), "", 0) for b in plan], expected)
