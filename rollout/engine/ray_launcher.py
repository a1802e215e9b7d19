"""Servers on the machines of a Ray cluster: a placement group a server, in it an actor a machine, and under each actor
a server process (never forked inside it).

The model directory, and whatever weights are published from disk, must be readable on every machine by the same path.
A server's output is in ``log_dir`` of its own machine.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util import get_node_ip_address
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from rollout.engine.config import EngineConfig
from rollout.engine.launch import ServerSpec, command, environment
from rollout.engine.launcher import STOP_GRACE_S
from rollout.processes import ManagedProcess, ProcessError, ProcessRegistry, free_ports

PLACE_TIMEOUT_S = 300.0
"""For Ray to come up, and to find room; a cluster that scales itself adds machines meanwhile."""
CALL_TIMEOUT_S = 60.0
"""For one call of an actor; the first one waits for its process."""
LOOK_TIMEOUT_S = 10.0
POLL_S = 0.1


def bundle(config: EngineConfig) -> dict[str, float]:
    """What one machine of one server takes."""
    gpus = config.tensor_parallel // config.nodes_per_server if config.device == "cuda" else 0
    return {"CPU": 1.0} | ({"GPU": float(gpus)} if gpus else {})


def rank_commands(
    config: EngineConfig,
    spec: ServerSpec,
    model_dir: Path,
    version: int,
    addresses: Sequence[str],
    ports: Sequence[int],
) -> list[list[str]]:
    """Command line on each of a server's machines. Pure.

    Args:
        addresses: of the machines; the first serves.
        ports: free ones of the first machine: to serve at, and for the machines to meet at.
    """
    serve, meet = ports
    lines = []
    for rank in range(len(addresses)):
        line = command(config, model_dir, serve, version, spec.index, rank, f"{addresses[0]}:{meet}")
        line += ["--host", addresses[rank]]  # the last one given counts
        if config.device == "cuda":
            line += ["--base-gpu-id", "0"]  # Ray shows the actor its own GPUs only
        lines.append(line)
    return lines


class ServerNode:
    """The actor: one machine's part of one server."""

    def __init__(self) -> None:
        self._registry = ProcessRegistry()
        self._process: ManagedProcess | None = None

    def address(self) -> str:
        return str(get_node_ip_address())

    def free_ports(self, count: int) -> list[int]:
        return free_ports(count, self.address())

    def start(self, name: str, line: Sequence[str], log: str, env: Mapping[str, str]) -> int:
        """Start the process; its pid."""
        self._process = self._registry.start(name, line, Path(log), env, STOP_GRACE_S)
        return self._process.pid

    def failure(self) -> str | None:
        try:
            if self._process is not None:
                self._process.check()
        except ProcessError as error:
            return str(error)
        return None

    def stop(self) -> None:
        self._registry.stop_all()


class RayProcess:
    """Implements ``rollout.engine.launcher.Launched``."""

    def __init__(self, name: str, group: PlacementGroup) -> None:
        self.url = ""
        self.pid = 0
        self.log = ""
        self._name = name
        self._group = group
        self._nodes: list[Any] = []
        self._stopped = False

    async def start(self, config: EngineConfig, spec: ServerSpec, model_dir: Path, version: int, log: Path) -> None:
        """Place the actors and start a process under each.

        Raises:
            ProcessError: something of that failed.
        """
        room = bundle(spec.settings)
        try:
            await _answer(self._group.ready(), PLACE_TIMEOUT_S)
        except ProcessError as error:
            wanted = f"{spec.settings.nodes_per_server} x {room}"
            raise ProcessError(
                f"{self._name}: no room for {wanted} within {PLACE_TIMEOUT_S:g} s; the cluster has "
                f"{ray.cluster_resources()}, of which are free {ray.available_resources()}"
            ) from error
        for rank in range(spec.settings.nodes_per_server):
            where = PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=rank)
            options = {"num_cpus": room["CPU"], "num_gpus": room.get("GPU", 0), "scheduling_strategy": where}
            self._nodes.append(ray.remote(ServerNode).options(**options, max_concurrency=2).remote())
        addresses = [await _answer(node.address.remote(), CALL_TIMEOUT_S) for node in self._nodes]
        ports = await _answer(self._nodes[0].free_ports.remote(2), CALL_TIMEOUT_S)
        lines = rank_commands(config, spec, model_dir, version, addresses, ports)
        pids = [
            await _answer(
                node.start.remote(f"{self._name} on {address}", line, str(log), environment(config, address)),
                CALL_TIMEOUT_S,
            )
            for node, address, line in zip(self._nodes, addresses, lines, strict=True)
        ]
        self.url, self.pid, self.log = f"http://{addresses[0]}:{ports[0]}", pids[0], f"{addresses[0]}:{log}"

    async def failure(self) -> str | None:
        """Of any of its machines. One that does not answer in time is left to the heartbeats."""
        looks = [asyncio.wait_for(_value(node.failure.remote()), LOOK_TIMEOUT_S) for node in self._nodes]
        for found in await asyncio.gather(*looks, return_exceptions=True):
            if isinstance(found, RayError):
                return f"{self._name}: its Ray actor is gone: {str(found).splitlines()[0]}"
            if isinstance(found, str):
                return found
        return None

    async def stop(self) -> None:
        if self._stopped:
            return
        self._stopped = True
        stops = [asyncio.wait_for(_value(node.stop.remote()), LOOK_TIMEOUT_S) for node in self._nodes]
        await asyncio.gather(*stops, return_exceptions=True)  # an actor that is gone took its process with it
        for node in self._nodes:
            ray.kill(node)
        remove_placement_group(self._group)


class RayLauncher:
    """Implements ``rollout.engine.launcher.Launcher``. Ray may still be on its way up when it is first used."""

    def __init__(self, config: EngineConfig, log_dir: Path) -> None:
        self._config = config
        self._log_dir = log_dir.resolve()

    def check(self) -> None:
        if self._config.port is not None:
            raise ProcessError("engine.port: servers that Ray places take free ports of their machines; leave it null")

    async def launch(self, spec: ServerSpec, model_dir: Path, weight_version: int) -> RayProcess:
        deadline = time.monotonic() + PLACE_TIMEOUT_S
        while not ray.is_initialized():
            if time.monotonic() > deadline:
                raise ProcessError(f"{spec.name}: Ray was not there after {PLACE_TIMEOUT_S:g} s")
            await asyncio.sleep(POLL_S)
        nodes = spec.settings.nodes_per_server
        strategy = "STRICT_SPREAD" if nodes > 1 else "STRICT_PACK"
        process = RayProcess(spec.name, placement_group([bundle(spec.settings)] * nodes, strategy=strategy))
        try:
            log = self._log_dir / f"{spec.name}.log"
            await process.start(self._config, spec, _absolute(model_dir), weight_version, log)
        except BaseException:
            await process.stop()
            raise
        return process


def _absolute(path: Path) -> Path:
    """Actors have working directories of their own."""
    return path.resolve()


async def _value(reference: Any) -> Any:
    return await reference


async def _answer(reference: Any, timeout_s: float) -> Any:
    try:
        return await asyncio.wait_for(_value(reference), timeout_s)
    except TimeoutError as error:
        raise ProcessError(f"a Ray actor did not answer within {timeout_s:g} s") from error
    except RayError as error:
        raise ProcessError(f"a Ray actor failed: {error}") from error
