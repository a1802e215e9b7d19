"""Starts the inference servers, watches them, and spreads requests over them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from rollout.engine.config import EngineConfig
from rollout.engine.launch import command, environment
from rollout.engine.protocol import EngineError, Generation, Sampling
from rollout.engine.routing import Router
from rollout.engine.sglang import SGLangEngine, Timeouts
from rollout.processes import ManagedProcess, ProcessError, ProcessRegistry, free_ports, require_free_port

DEATH_POLL_S = 0.5
"""How often it is looked whether a server's process still runs."""
START_POLL_S = 0.25
PROGRESS_S = 5.0
STOP_GRACE_S = 0.0
"""A server holds nothing that is worth waiting for: at SIGTERM it only sleeps 5 s, and what SIGKILL leaves in /dev/shm
(16 KiB) SGLang's next start removes."""
HEALTH_TIMEOUT_S = 30.0
"""SGLang itself gives up after 20 s, and then says so."""
FAILURES_UNTIL_LOST = 2
"""One failed health check may be a stall; two in a row are not."""


@dataclass
class _Server:
    index: int
    name: str
    process: ManagedProcess
    engine: SGLangEngine
    lost: str | None = None
    """Why it takes no requests; None where it does."""


class EngineFleet:
    """The servers of one ``EngineConfig``.

    ``start``, then ``generate``, then ``stop``; whoever owns the registry stops the processes in any case. Weights are
    published, and metrics read, through ``engines``.
    """

    def __init__(
        self,
        config: EngineConfig,
        registry: ProcessRegistry,
        log_dir: Path,
        on_progress: Callable[[str], None] = lambda message: None,
    ) -> None:
        self.config = config
        self._registry = registry
        self._log_dir = log_dir
        self._on_progress = on_progress
        self._servers: list[_Server] = []
        self._router = Router(config.servers)
        self._requests: dict[str, int] = {}
        self._watches: list[asyncio.Task[None]] = []
        self.weight_version = 0
        """Of the last publication; whoever publishes sets it."""

    @property
    def engines(self) -> Sequence[SGLangEngine]:
        """Those that take requests. A lost one comes back only with the weights that these have.

        Raises:
            EngineError: none is left.
        """
        live = [server.engine for server in self._servers if server.lost is None]
        if not live:
            raise EngineError(f"no inference server is left: {self.lost or 'none was started'}")
        return live

    @property
    def processes(self) -> Sequence[ManagedProcess]:
        return [server.process for server in self._servers]

    @property
    def lost(self) -> dict[str, str]:
        """Why servers take no requests, in a line each, by server name; empty where all do."""
        return {server.name: server.lost.splitlines()[0] for server in self._servers if server.lost is not None}

    async def start(self, model_dir: Path, weight_version: int = 0) -> None:
        """Start all servers together and wait until each has generated a token; on failure none is left running.

        Args:
            model_dir: HF directory.
            weight_version: version of its weights.

        Raises:
            ProcessError: where a configured port is taken (before anything is launched), or a server died, with the end
                of its log.
            EngineError: where a server generates nothing within ``start_timeout_s``.
        """
        ports = self._ports()
        self.weight_version = weight_version
        try:
            for index, port in enumerate(ports):
                self._servers.append(self._launch(index, port, model_dir, weight_version))
            await self._wait_until_all_generate()
        except BaseException:
            await self.stop()
            raise
        for server in self._servers:
            self._watches.append(asyncio.create_task(self._watch_process(server), name=f"{server.name}-process"))
            self._watches.append(asyncio.create_task(self._watch_health(server), name=f"{server.name}-health"))

    async def stop(self) -> None:
        """Stop watching, close the connections, stop the servers; may be called again."""
        watches, self._watches = self._watches, []
        for watch in watches:
            watch.cancel()
        await asyncio.gather(*watches, return_exceptions=True)
        servers, self._servers = self._servers, []
        for server in reversed(servers):
            await server.engine.close()
        await asyncio.gather(*(asyncio.to_thread(self._registry.stop, server.process) for server in servers))

    async def generate(self, token_ids: Sequence[int], sampling: Sampling, request_id: str, session: str) -> Generation:
        """Generate on the session's server.

        Raises:
            EngineError: also, and at once, where no server is left.
        """
        index = self._router.pick(session)
        if index is None or index >= len(self._servers):
            raise EngineError(f"no inference server takes requests: {self.lost or 'none was started'}")
        self._requests[request_id] = index
        try:
            with self._router.request(index):
                return await self._servers[index].engine.generate(token_ids, sampling, request_id)
        finally:
            self._requests.pop(request_id, None)

    async def abort(self, request_ids: Sequence[str]) -> None:
        """End these requests; ids that are not in flight are ignored."""
        for server in list(self._servers):
            mine = [request for request in request_ids if self._requests.get(request) == server.index]
            if mine and server.lost is None:
                await server.engine.abort(mine)

    def end_session(self, session: str) -> None:
        """The session sends nothing more."""
        self._router.end_session(session)

    def _ports(self) -> list[int]:
        if self.config.port is None:
            return free_ports(self.config.servers)
        ports = [self.config.port + index for index in range(self.config.servers)]
        for index, port in enumerate(ports):
            require_free_port(f"engine-{index}", port)
        return ports

    def _launch(self, index: int, port: int, model_dir: Path, weight_version: int) -> _Server:
        name = f"engine-{index}"
        process = self._registry.start(
            name,
            command(self.config, model_dir, port, weight_version, index),
            self._log_dir / f"{name}.log",
            environment(self.config),
            STOP_GRACE_S,
        )
        timeouts = Timeouts(self.config.request_timeout_s, self.config.control_timeout_s, HEALTH_TIMEOUT_S)
        return _Server(index, name, process, SGLangEngine(f"http://127.0.0.1:{port}", timeouts))

    async def _wait_until_all_generate(self) -> None:
        waits = {asyncio.create_task(self._wait_until_generating(server)): server for server in self._servers}
        try:
            done, pending = await asyncio.wait(
                waits, timeout=self.config.start_timeout_s, return_when=asyncio.FIRST_EXCEPTION
            )
            for task in done:
                task.result()
            if pending:
                late = ", ".join(f"{waits[task].name} (see {waits[task].process.log_path})" for task in pending)
                raise EngineError(f"no token from {late} within {self.config.start_timeout_s:g} s of the start")
        finally:
            for task in waits:
                task.cancel()
            await asyncio.gather(*waits, return_exceptions=True)

    async def _wait_until_generating(self, server: _Server) -> None:
        started = time.monotonic()
        said = 0.0
        while True:
            server.process.check()
            try:
                await server.engine.generate([0], Sampling(temperature=0.0, max_new_tokens=1), f"start-{server.name}")
            except EngineError:  # it does not listen yet; start_timeout_s bounds this
                await asyncio.sleep(START_POLL_S)
            else:
                self._on_progress(f"{server.name} serves {server.engine.url} after {time.monotonic() - started:.1f} s")
                return
            if (waited := time.monotonic() - started) - said >= PROGRESS_S:
                said = waited
                self._on_progress(f"{server.name} is starting, {waited:.0f} s so far")

    async def _watch_process(self, server: _Server) -> None:
        while True:
            try:
                server.process.check()
            except ProcessError as error:
                await self._lose(server, str(error))
                return
            await asyncio.sleep(DEATH_POLL_S)

    async def _watch_health(self, server: _Server) -> None:
        failures = 0
        while server.process.exit_code is None:
            await asyncio.sleep(self.config.health_interval_s)
            if await server.engine.health():
                failures = 0
                if server.lost is not None and await self._is_current(server):
                    server.lost = None
                    self._router.set_healthy(server.index, True)
                    self._on_progress(f"{server.name} is healthy again")
            else:
                failures += 1
                if failures == FAILURES_UNTIL_LOST:
                    await self._lose(server, f"{server.name} at {server.engine.url} does not generate")

    async def _is_current(self, server: _Server) -> bool:
        """Whether a server that was lost may take requests again: nothing was published without it."""
        if server.process.exit_code is not None:
            return False
        try:
            return await server.engine.weight_version() == self.weight_version
        except EngineError:
            return False

    async def _lose(self, server: _Server, reason: str) -> None:
        """Take a server out of routing and fail what it has in flight, which would else wait for its timeout."""
        server.lost = reason
        self._router.set_healthy(server.index, False)
        self._on_progress(f"lost {reason}")
        await server.engine.close()
