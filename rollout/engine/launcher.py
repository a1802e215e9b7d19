"""How the fleet starts a server's process: here, or anywhere that implements ``Launcher`` (``ray_launcher``)."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Protocol

from rollout.engine.config import EngineConfig
from rollout.engine.disaggregation import transfer_problem
from rollout.engine.launch import ServerSpec, command, environment, server_specs
from rollout.processes import ManagedProcess, ProcessError, ProcessRegistry, free_port, require_free_port

STOP_GRACE_S = 0.0
"""A server holds nothing that is worth waiting for: at SIGTERM it only sleeps 5 s, and what SIGKILL leaves in /dev/shm
(16 KiB) SGLang's next start removes."""


class Launched(Protocol):
    """A server's process, or its processes on several machines."""

    @property
    def url(self) -> str: ...

    @property
    def pid(self) -> int:
        """Of the first machine's process."""
        ...

    @property
    def log(self) -> str:
        """Where its output is."""
        ...

    async def failure(self) -> str | None:
        """Why it ended, with the end of its log; None while it runs. Never raises."""
        ...

    async def stop(self) -> None:
        """Kill it and all that it started; may be called again. Raises ProcessError where something outlives that."""
        ...


class Launcher(Protocol):
    def check(self) -> None:
        """Before anything is launched. Raises ProcessError where a server could not be."""
        ...

    async def launch(self, spec: ServerSpec, model_dir: Path, weight_version: int) -> Launched:
        """Start one server; returns at once. Raises ProcessError."""
        ...


class LocalProcess:
    """A server on this machine."""

    def __init__(self, process: ManagedProcess, registry: ProcessRegistry, url: str) -> None:
        self.url = url
        self._process = process
        self._registry = registry

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def log(self) -> str:
        return str(self._process.log_path)

    async def failure(self) -> str | None:
        try:
            self._process.check()
        except ProcessError as error:
            return str(error)
        return None

    async def stop(self) -> None:
        await asyncio.to_thread(self._registry.stop, self._process)


class LocalLauncher:
    """Servers as children of this process."""

    def __init__(self, config: EngineConfig, registry: ProcessRegistry, log_dir: Path) -> None:
        self._config = config
        self._registry = registry
        self._log_dir = log_dir
        self._ports: dict[int, int] = {}
        """A server that starts again keeps its URL."""

    def check(self) -> None:
        for spec in server_specs(self._config):
            if self._config.port is not None:
                require_free_port(spec.name, self._config.port + spec.index)
            if spec.bootstrap_port is not None:
                require_free_port(f"{spec.name} (engine.disaggregation.bootstrap_port)", spec.bootstrap_port)
        apart = self._config.disaggregation
        if apart is not None and (problem := transfer_problem(apart.transfer_backend)) is not None:
            raise ProcessError(f"engine.{problem}")

    async def launch(self, spec: ServerSpec, model_dir: Path, weight_version: int) -> LocalProcess:
        chosen = self._config.port
        port = self._ports.setdefault(spec.index, free_port() if chosen is None else chosen + spec.index)
        line = command(self._config, model_dir, port, weight_version, spec.index)
        log = self._log_dir / f"{spec.name}.log"
        process = self._registry.start(spec.name, line, log, environment(self._config), STOP_GRACE_S)
        return LocalProcess(process, self._registry, f"http://127.0.0.1:{port}")
