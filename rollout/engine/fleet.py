"""Starts the inference servers, keeps them serving, and spreads requests over them.

``supervisor`` has the servers' lives, ``dispatch`` the requests; what happens to a server is decided in ``recovery``,
which server a request goes to in ``routing``. Both are pure.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
from jaxtyping import Float32

from rollout.engine.config import EngineConfig
from rollout.engine.dispatch import Dispatch
from rollout.engine.launch import ServerSpec, server_specs
from rollout.engine.launcher import Launched, Launcher, LocalLauncher
from rollout.engine.protocol import EngineError, EngineMetrics, Generation, Sampling
from rollout.engine.recovery import UNKNOWN, Phase
from rollout.engine.routing import Routes
from rollout.engine.server import Server
from rollout.engine.sglang import SGLangEngine
from rollout.engine.supervisor import CurrentWeights, Supervisor
from rollout.processes import ProcessRegistry


class Publication:
    """One publication in progress; see ``EngineFleet.publication``."""

    def __init__(self, supervisor: Supervisor, participants: Sequence[int]) -> None:
        self._supervisor = supervisor
        self._participants = participants
        self.holds = supervisor.version
        """Version that the engines are left with; whoever publishes sets it: the new one, or ``UNKNOWN``."""

    @property
    def engines(self) -> Sequence[SGLangEngine]:
        """Engines to publish to; those that died since it began are no longer among them, so it may be empty: servers
        that start again then load the new version."""
        return self._supervisor.engines_in(self._participants)

    async def lost_any(self, engines: Sequence[SGLangEngine]) -> bool:
        """Whether one of these died since: publishing to the rest is then worth another try. One that does not answer
        is waited for, until it does or counts as dead."""
        await self._supervisor.settle(self._participants)
        return len(self.engines) < len(engines)


class EngineFleet:
    """The servers of one ``EngineConfig``.

    ``start``, then ``generate``, then ``stop``; whoever owns the registry stops the processes in any case. Weights are
    published within ``publication``.
    """

    def __init__(
        self,
        config: EngineConfig,
        registry: ProcessRegistry,
        log_dir: Path,
        on_progress: Callable[[str], None] = lambda message: None,
        launcher: Launcher | None = None,
        experts_shape: tuple[int, int] = (0, 0),
    ) -> None:
        self.config = config
        self._launcher = launcher or LocalLauncher(config, registry, log_dir)
        specs = server_specs(config)
        self._servers = [Server(spec, config, self._launcher, on_progress, experts_shape) for spec in specs]
        routes = Routes(
            [spec.index for spec in specs if spec.role != "prefill"],
            [spec.index for spec in specs if spec.role == "prefill"],
        )
        self.supervisor = Supervisor(config, self._servers, routes, registry, log_dir, on_progress)
        self._dispatch = Dispatch(self.supervisor, routes)

    @property
    def current(self) -> CurrentWeights | None:
        """From where a server that starts again has the fleet's weights; None while its model directory has them."""
        return self.supervisor.current

    @current.setter
    def current(self, weights: CurrentWeights | None) -> None:
        self.supervisor.current = weights

    @property
    def weight_version(self) -> int:
        """Of the last publication."""
        return self.supervisor.version

    @property
    def engines(self) -> Sequence[SGLangEngine]:
        """Those that take requests; none while all are being started again.

        Raises:
            EngineError: none will any more.
        """
        self.supervisor.require_hope()
        return [self._servers[index].engine for index in self.supervisor.serving]

    @property
    def processes(self) -> Mapping[str, Launched]:
        """By server name; those that run."""
        return {server.name: server.launched for server in self._servers if server.launched is not None}

    @property
    def specs(self) -> Mapping[str, ServerSpec]:
        """By URL; those that run. One that is started again may have another."""
        return {server.launched.url: server.spec for server in self._servers if server.launched is not None}

    @property
    def lost(self) -> Mapping[str, str]:
        """Why servers take no requests, in a line each, by server name; empty where all do."""
        return self.supervisor.lost

    async def start(self, model_dir: Path, weight_version: int = 0) -> None:
        """Start all servers together and wait until each has generated a token, one that only prefills or only decodes
        together with another; on failure none is left running.

        Args:
            model_dir: HF directory; also where a server that dies is started from again.
            weight_version: version of its weights.

        Raises:
            ProcessError: where a configured port is taken or a KV cache could not be sent (before anything is
                launched), or a server died, with the end of its log.
            EngineError: where a server generates nothing within ``start_timeout_s``.
        """
        self._launcher.check()
        await self.supervisor.start(model_dir, weight_version)

    async def stop(self) -> None:
        """Stop watching, close the connections, stop the servers; may be called again."""
        await self.supervisor.stop()

    async def generate(self, token_ids: Sequence[int], sampling: Sampling, request_id: str, session: str) -> Generation:
        """Generate on the session's server; where none takes requests but one is being started again, wait for that.

        Raises:
            EngineLost: the server died; with what it had sampled. Sent again, the request goes to another.
            EngineError: also, and at once, where no server is left.
        """
        return await self._dispatch.generate(token_ids, sampling, request_id, session)

    async def score(self, token_ids: Sequence[int]) -> Float32[np.ndarray, " tokens"]:
        """Log-prob of each token given those before it, at temperature 1; position 0 is 0. By the server with
        least to do; where they are apart, by one that prefills, which sends the KV cache nowhere.

        Raises:
            EngineError: none takes requests now, or it failed.
        """
        return await self._dispatch.score(token_ids)

    async def abort(self, request_ids: Sequence[str]) -> None:
        """End these requests; ids that are not in flight are ignored. Behind sglang-router every server is told, since
        nobody knows which has them."""
        await self._dispatch.abort(request_ids)

    def end_session(self, session: str) -> None:
        """The session sends nothing more."""
        self._dispatch.end_session(session)

    async def metrics(self) -> Mapping[str, EngineMetrics]:
        """Of the servers that take requests and answer, by name."""

        async def read(server: Server) -> tuple[str, EngineMetrics | None]:
            try:
                return server.name, await server.engine.metrics()
            except EngineError:
                return server.name, None

        answers = await asyncio.gather(*(read(self._servers[index]) for index in self.supervisor.serving))
        return {name: metrics for name, metrics in answers if metrics is not None}

    def states(self) -> Mapping[str, tuple[Phase, int]]:
        """Phase and restarts in a row of each server, by name."""
        return self.supervisor.states()

    @contextlib.asynccontextmanager
    async def publication(self) -> AsyncIterator[Publication]:
        """Publish within this: meanwhile no server joins. Set ``Publication.holds`` and ``current`` before it ends."""
        publication = Publication(self.supervisor, self.supervisor.publish_begun())
        try:
            yield publication
        finally:
            self.supervisor.publish_ended(publication.holds)


__all__ = ["UNKNOWN", "CurrentWeights", "EngineFleet", "Publication"]
