"""The calls that publishing weights to a running SGLang server, and sharing its GPU, need.

What a server can do is read once from what it says of itself (``/server_info`` and the list of its routes): 0.5.16 has
no update sessions, does not say which weights sampled a token of a request that lived through an update, and dies when
a cache is to be flushed while retracted requests wait. 0.5.23 does all three.
"""

from __future__ import annotations

import asyncio
import base64
import enum
import io
import operator
import time
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch
import torch.multiprocessing

from rollout.engine.opened_memory import LOADER, Request
from rollout.engine.protocol import EngineError, EngineRefused
from rollout.engine.sglang_http import Connection, Timeouts

UPDATE_IS_OPEN = "session is already open"
IDLE_POLL_S, BUSY_POLL_S = 0.002, 0.02
"""Between two readings of an idle server; of a busy one twice as long each time, up to the second."""
IDLE_S = 0.02
"""How long a server must have said that it is idle, unless it says so of two moments: what it says may be old, or fall
between the last token and the end of its batch. (One that sleeps when idle says nothing new.)"""


class PauseMode(enum.StrEnum):
    """What becomes of the requests in flight when a server is paused."""

    RETRACT = "retract"  # they lose their KV cache and go on after the resume, prefilled again: exact
    IN_PLACE = "in_place"  # they keep it: new weights on old KV
    ABORT = "abort"  # they return what they have, and whoever sent them sends them again with that as prefix


@dataclass(frozen=True)
class Abilities:
    """What a server can do, by what it says of itself."""

    version: str
    sessions: bool
    """Updates stand between ``begin`` and ``end``; such a server also tells the version of every token, and flushes
    while retracted requests wait."""
    hisparse: bool
    memory_saver: bool
    """Its memory can be released and taken back."""
    tensor_parallel: int
    disaggregated: bool = False
    """It is one half of a pair: it prefills, or it decodes."""
    opens_memory: bool = False
    """It was started with our loader, which keeps the trainer's memory open (``rollout.engine.weight_loader``)."""


@dataclass(frozen=True)
class BucketShape:
    """What lies one after another in a flat bucket."""

    names: tuple[str, ...]
    dtypes: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class UpdateGroup:
    """A process group in which rank 0 sends weights."""

    address: str
    port: int
    world_size: int
    name: str
    backend: str
    timeout_s: float
    """For joining it, and for one broadcast."""


class SGLangWeights(Connection):
    """Implements ``rl.weights.target.WeightTarget``, and its sleeping."""

    def __init__(self, url: str, timeouts: Timeouts | None = None) -> None:
        super().__init__(url, timeouts)
        self.paused = False
        """Whether we have paused it."""
        self._open = asyncio.Event()
        self._open.set()
        self._abilities: Abilities | None = None
        self._released: set[str] = set()
        """Memory that we have taken from it."""

    async def close(self) -> None:
        """Close the connections; calls in flight, and those that wait for the end of a pause, fail."""
        await super().close()
        self._open.set()

    async def abilities(self) -> Abilities:
        """Asked for once."""
        if self._abilities is None:
            info = await self._call("GET", "/server_info", None, self._timeouts.control_s)
            routes = await self._call("GET", "/openapi.json", None, self._timeouts.control_s)
            with self._answer_errors("/server_info"):
                self._abilities = Abilities(
                    version=str(info["version"]),
                    sessions="/begin_weight_update" in routes["paths"],
                    hisparse=bool(info.get("enable_hisparse", False)),
                    memory_saver=bool(info.get("enable_memory_saver", False)),
                    tensor_parallel=int(info["tp_size"]),
                    disaggregated=info.get("disaggregation_mode") in ("prefill", "decode"),
                    opens_memory=LOADER in (info.get("custom_weight_loader") or []),
                )
        return self._abilities

    async def pause(self, mode: PauseMode = PauseMode.RETRACT) -> None:
        """Stop generating. Requests that come later wait for ``resume``.

        With ``ABORT`` all that was in flight has come back when this returns (SGLang alone looks for that once a
        second).
        """
        if mode is PauseMode.ABORT:
            self._open.clear()
            await self._control("/abort_request", {"rid": "", "abort_all": True})
            await self.until_idle()
        await self._control("/pause_generation", {"mode": str(mode)})
        self.paused = True

    async def resume(self) -> None:
        """Go on generating. A retracted request is prefilled again, by the weights that are there then."""
        await self._control("/continue_generation", {"torch_empty_cache": False})
        self.paused = False
        self._open.set()

    async def until_open(self) -> None:
        """Until requests may be sent: one sent while all are being aborted would be aborted, too, and cost a second."""
        if self._open.is_set():
            return
        try:
            async with asyncio.timeout(self._timeouts.request_s):
                await self._open.wait()
        except TimeoutError as error:
            raise EngineError(f"{self.url} was still paused after {self._timeouts.request_s:g} s") from error

    async def until_idle(self, waiting: bool = True) -> None:
        """Until nothing runs or, if ``waiting``, waits."""
        since, first, pause = 0.0, None, IDLE_POLL_S
        try:
            async with asyncio.timeout(self._timeouts.control_s):
                while True:
                    answer = await self._call("GET", "/v1/loads", None, self._timeouts.control_s)
                    with self._answer_errors("/v1/loads"):
                        loads = answer["loads"]
                        busy = sum(load["num_running_reqs"] + load["num_waiting_reqs"] * waiting for load in loads)
                        moments = [load.get("timestamp") for load in loads]  # of each data-parallel rank
                        if busy:
                            first = None
                        elif first is None:
                            since, first, pause = time.monotonic(), moments, IDLE_POLL_S
                        elif time.monotonic() - since >= IDLE_S or all(map(operator.ne, first, moments)):
                            return
                    await asyncio.sleep(pause)
                    pause = min(2 * pause, BUSY_POLL_S) if busy else IDLE_POLL_S
        except TimeoutError as error:
            raise EngineError(f"{self.url} was not idle within {self._timeouts.control_s:g} s") from error

    async def flush(self) -> None:
        """Forget all cached prefixes, and free the device's cached memory (0.5 s: an update flushes by itself, without
        that). SGLang refuses it while requests run; retracted ones do not count."""
        await self._control("/flush_cache", {})

    async def weight_version(self) -> int:
        """The version of the weights that the server says it has."""
        info = await self._call("GET", "/model_info", None, self._timeouts.control_s)
        with self._answer_errors("/model_info"):
            return int(info["weight_version"])

    async def begin_weight_update(self) -> None:
        """Open an update, where there is such a thing; one that a failed publication left open is closed first."""
        if not (await self.abilities()).sessions:
            return
        try:
            await self._control("/begin_weight_update", {})
        except EngineError as error:
            if UPDATE_IS_OPEN not in str(error):
                raise
            await self.end_weight_update()
            await self._control("/begin_weight_update", {})

    async def end_weight_update(self) -> None:
        """Close the update: what SGLang derives from the weights is made anew."""
        if (await self.abilities()).sessions:
            await self._control("/end_weight_update", {})

    async def update_weights_from_tensors(
        self, payloads: Sequence[str], version: int | None, flush: bool = True, flat: bool = False
    ) -> None:
        """Load one bucket, between ``begin_weight_update`` and ``end_weight_update``.

        Args:
            payloads: base64 of SGLang's serialised tensors, one for each tensor-parallel rank.
            version: the weights' version, with the last bucket; None before.
            flush: forget all cached prefixes with the last bucket.
            flat: the payloads are one flat tensor and what lies in it, not a list of named tensors.
        """
        body: dict[str, Any] = {"serialized_named_tensors": list(payloads)}
        if flat:
            body["load_format"] = "flattened_bucket"
        await self._control("/update_weights_from_tensor", body | _stamp(version, flush))

    async def update_weights_from_memory(
        self, requests: Sequence[Request], version: int | None, flush: bool = True
    ) -> None:
        """Have our loader copy from the trainer's memory, where ``Abilities.opens_memory``; as with tensors between
        ``begin`` and ``end``. Whether it did is in its answers, not in SGLang's.

        Args:
            requests: one for each tensor-parallel rank.
        """
        body: dict[str, Any] = {
            "serialized_named_tensors": [_as_name(request.model_dump_json()) for request in requests],
            "load_format": LOADER,
        }
        await self._control("/update_weights_from_tensor", body | _stamp(version, flush))

    async def update_weights_from_disk(self, directory: str, version: int, flush: bool = True) -> None:
        """Load an HF directory that the server can read. No begin or end around it."""
        # The format is said: a server that was started with dummy weights would make new ones.
        body = {"model_path": directory, "load_format": "auto"}
        await self._control("/update_weights_from_disk", body | _stamp(version, flush))

    async def join_update_group(self, group: UpdateGroup, rank: int) -> None:
        """Join as ranks ``rank`` and following, one for each tensor-parallel rank; returns when all have joined."""
        body = {
            "master_address": group.address,
            "master_port": group.port,
            "rank_offset": rank,
            "world_size": group.world_size,
            "group_name": group.name,
            "backend": group.backend,
        }
        await self._control("/init_weights_update_group", body)

    async def leave_update_group(self, name: str) -> None:
        await self._control("/destroy_weights_update_group", {"group_name": name})

    async def update_weights_from_group(
        self, name: str, bucket: BucketShape, version: int | None, flush: bool = True
    ) -> None:
        """Load the flat bucket that rank 0 of a group sends; between ``begin`` and ``end`` as with tensors."""
        body = {
            "group_name": name,
            "names": list(bucket.names),
            "dtypes": list(bucket.dtypes),
            "shapes": [list(shape) for shape in bucket.shapes],
            "load_format": "flattened_bucket",
        }
        await self._control("/update_weights_from_distributed", body | _stamp(version, flush))

    async def release_memory(self, tags: Sequence[str]) -> None:
        """Give the memory of ``kv_cache`` or ``weights`` back to the device; their content is lost.

        Raises:
            EngineError: also, before SGLang is asked (which would do nothing, or die), where the server was started
                without ``enable-memory-saver`` or has requests.
        """
        able = await self.abilities()
        if not able.memory_saver:
            raise EngineError(
                f"{self.url} was started without enable-memory-saver, so its memory cannot be released; set it in the "
                "engine's config"
            )
        await self.until_idle(waiting=not (able.sessions and self.paused))  # retracted ones hold no memory
        newly = set(tags) - self._released
        self._released |= newly  # before it has answered: where it never does, it may have done it all the same
        try:
            await self._control("/release_memory_occupation", {"tags": list(tags)})
        except EngineRefused:
            self._released -= newly
            raise

    async def resume_memory(self, tags: Sequence[str]) -> None:
        """Take back what ``release_memory`` gave; weights must be loaded, and the KV cache is empty. A server that was
        started anew since has its memory, and is not asked (SGLang would die of it)."""
        given = [tag for tag in tags if tag in self._released]
        if given:
            await self._control("/resume_memory_occupation", {"tags": given})
            self._released -= set(given)


def _as_name(text: str) -> str:
    """base64 of SGLang's serialised tensors, with a text in place of a tensor's name."""
    stream = io.BytesIO()
    ForkingPickler(stream).dump([(text, torch.empty(0))])  # an empty tensor costs nothing to read, that way
    return base64.b64encode(stream.getvalue()).decode("ascii")


def _stamp(version: int | None, flush: bool) -> dict[str, Any]:
    """Only the last bucket says a version, and only it flushes."""
    if version is None:
        return {"flush_cache": False}
    return {"flush_cache": flush, "weight_version": str(version)}
