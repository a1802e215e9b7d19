"""New weights for a run's engines: the publisher, the fleet it publishes to, and, where trainer and engines share GPUs,
whose turn it is."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import TypeVar

import aiohttp

from rl.config import RunConfig
from rl.weights.choose import choose
from rl.weights.colocation import Colocation, Holder
from rl.weights.publisher import Published, PublishError
from rl.weights.publishing import Source, WeightPublisher
from rl.weights.serialize import directory_shapes
from rollout.engine.fleet import UNKNOWN, EngineFleet
from rollout.engine.launch import server_specs
from rollout.processes import ManagedProcess, ProcessError, ProcessRegistry, free_ports

RECEIVER_START_S = 60.0
POLL_S = 0.2
GPU_IDS_S = 120.0
PRINT_GPU_IDS = (
    "import json, torch; "
    "print(json.dumps([str(torch.cuda.get_device_properties(i).uuid) for i in range(torch.cuda.device_count())]))"
)
"""In a process of its own, which takes memory on every GPU only as long as it lives."""


Of = TypeVar("Of")


class OfServers(Mapping[str, Of]):
    """What belongs to each server of a fleet, by the URL that it has now: whoever serves at the moment, since one may
    be suspect, and wherever it was started first."""

    def __init__(self, fleet: EngineFleet, values: Sequence[Of]) -> None:
        """
        Args:
            values: one for each server, in their order.
        """
        self._fleet = fleet
        self._values = values

    def __getitem__(self, url: str) -> Of:
        return self._values[self._fleet.specs[url].index]

    def __iter__(self) -> Iterator[str]:
        return iter(self._fleet.specs)

    def __len__(self) -> int:
        return len(self._fleet.specs)


class Updates:
    """``publish`` after each step; ``training`` before the trainer does anything, ``borrowed`` around what it does
    between two publications."""

    def __init__(self, publisher: WeightPublisher, fleet: EngineFleet, colocation: Colocation | None) -> None:
        self.publisher = publisher
        self._fleet = fleet
        self._colocation = colocation

    async def publish(self, version: int) -> float:
        """Put the trainer's weights on every engine; returns the seconds in which none generated.

        Raises:
            PublishError: see ``rl.weights.publisher.publish``; engines that died meanwhile are left out, since they
                load the version when they are there again.
        """
        await self.publisher.export(version)
        if self._colocation is not None:
            await self._colocation.wake_weights()
        async with self._fleet.publication() as publication:
            while True:
                engines = publication.engines
                try:
                    done = await self._send(engines, version)
                except PublishError as error:
                    if await publication.lost_any(engines):
                        continue  # once for every engine that dies, at most
                    publication.holds = UNKNOWN if error.mixed else publication.holds
                    raise
                publication.holds = version
                self._fleet.current = self.publisher
                return done.seconds

    async def _send(self, engines: Sequence[object], version: int) -> Published:
        before_resume = self._colocation.to_engines if self._colocation is not None else None
        return await self.publisher.publish(engines, version, before_resume)  # type: ignore[arg-type]

    async def training(self) -> None:
        """The trainer's turn, where the GPUs are shared."""
        if self._colocation is not None:
            await self._colocation.to_trainer()

    @asynccontextmanager
    async def borrowed(self) -> AsyncIterator[None]:
        """The trainer's turn for something that leaves its weights as they are; the engines get back what they had."""
        colocation = self._colocation
        if colocation is None or colocation.holder is Holder.TRAINER:
            yield
            return
        await colocation.to_trainer()
        try:
            yield
        finally:
            await colocation.wake_weights()
            await self.publisher.restore(self._fleet.engines, colocation.to_engines)


async def start_updates(
    config: RunConfig,
    source: Source,
    fleet: EngineFleet,
    model_dir: Path,
    colocation: Colocation | None,
    registry: ProcessRegistry,
    stack: AsyncExitStack,
    logs: Path,
    say: Callable[[str], None],
) -> Updates:
    """Choose the way, say which, and start what it needs; the stack ends that."""
    choice = choose(config.publish.transport, config.topology)
    say(f"weights are published by {choice.way}: {choice.why}")
    devices: Mapping[str, Sequence[str]] = {}
    if choice.way == "ipc" and config.engine.device == "cuda" and config.trainer.world_size > 1:
        devices = await _devices(config, fleet)
    publisher = WeightPublisher(
        config.publish,
        choice,
        source,
        directory_shapes(model_dir),
        config.engine.tensor_parallel,
        "nccl" if config.engine.device == "cuda" else "gloo",
        devices,
        memory_stays=colocation is None,
    )
    stack.push_async_callback(publisher.close)
    if choice.way == "delta":
        publisher.receivers = await _receivers(config, fleet, model_dir, publisher.directory, registry, logs)
    return Updates(publisher, fleet, colocation)


async def _devices(config: RunConfig, fleet: EngineFleet) -> OfServers[list[str]]:
    """GPU ids of each server's ranks."""
    ids = await asyncio.to_thread(_gpu_ids)
    specs = server_specs(config.engine)
    return OfServers(fleet, [ids[spec.first_gpu :][: spec.settings.tensor_parallel] for spec in specs])


def _gpu_ids() -> list[str]:
    command = [sys.executable, "-c", PRINT_GPU_IDS]
    printed = subprocess.run(command, check=True, capture_output=True, text=True, timeout=GPU_IDS_S).stdout
    found: list[str] = json.loads(printed)
    return found


async def _receivers(
    config: RunConfig, fleet: EngineFleet, model_dir: Path, directory: Path, registry: ProcessRegistry, logs: Path
) -> OfServers[str]:
    """URL of the receiver beside each server; those that the config does not name are started here, with their copies
    in the directory, which outlives neither the run nor, after a kill, the next one's start."""
    named = config.publish.receivers
    if named:
        return OfServers(fleet, named)
    urls: list[str] = []
    processes: list[ManagedProcess] = []
    for port in free_ports(len(server_specs(config.engine))):
        name = f"receiver-{len(urls)}"
        command = [sys.executable, "-m", "rl.weights.receiver", "--model", str(model_dir)]
        command += ["--copies", str(directory / name), "--port", str(port)]
        processes.append(registry.start(name, command, logs / f"{name}.log", grace_s=3.0))
        urls.append(f"http://127.0.0.1:{port}")
    deadline = time.monotonic() + RECEIVER_START_S
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=RECEIVER_START_S)) as session:
        for url, process in zip(urls, processes, strict=True):
            while not await _answers(session, url):
                process.check()
                if time.monotonic() > deadline:
                    raise ProcessError(f"no answer from {url} within {RECEIVER_START_S:g} s; see {process.log_path}")
                await asyncio.sleep(POLL_S)
    return OfServers(fleet, urls)


async def _answers(session: aiohttp.ClientSession, url: str) -> bool:
    try:
        async with session.get(f"{url}/versions") as response:
            return response.status == 200
    except (aiohttp.ClientError, TimeoutError):
        return False
