"""One server of a fleet, from its launch to its end; it starts again under the same name."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable
from pathlib import Path

from rollout.engine.config import EngineConfig
from rollout.engine.launch import ServerSpec
from rollout.engine.launcher import Launched, Launcher
from rollout.engine.pd import Rendezvous, rendezvous
from rollout.engine.protocol import EngineError, EngineLost, Sampling
from rollout.engine.sglang import SGLangEngine
from rollout.engine.sglang_http import Timeouts
from rollout.processes import ProcessError

START_POLL_S = 0.25
PROGRESS_S = 5.0


class Server:
    """``bring_up``, then ``engine``, then ``end``; and again."""

    def __init__(
        self,
        spec: ServerSpec,
        config: EngineConfig,
        launcher: Launcher,
        say: Callable[[str], None],
        experts_shape: tuple[int, int],
    ) -> None:
        self.spec = spec
        self.launched: Launched | None = None
        self.client: SGLangEngine | None = None
        self.watch: asyncio.Task[None] | None = None
        """The fleet's heartbeats of it."""
        self._config = config
        self._launcher = launcher
        self._say = say
        self._experts_shape = experts_shape
        self._ending = asyncio.Lock()
        self._rng = random.Random()

    @property
    def name(self) -> str:
        return self.spec.name

    @property
    def engine(self) -> SGLangEngine:
        """Raises:
        EngineLost: it does not run."""
        if self.client is None:
            raise EngineLost(f"{self.name} is not running")
        return self.client

    def rendezvous(self) -> Rendezvous:
        """Where a request to this prefill server meets its decode server: a new one each time."""
        assert self.spec.bootstrap_port is not None, "a prefill server has a bootstrap port"
        return rendezvous(self.engine.url, self.spec.bootstrap_port, self._rng)

    async def bring_up(self, model_dir: Path, weight_version: int) -> None:
        """Launch it and wait for its first token.

        Raises:
            ProcessError: it died, with the end of its log.
            EngineError: it generated nothing within ``start_timeout_s``.
        """
        launched = self.launched = await self._launcher.launch(self.spec, model_dir, weight_version)
        self.client = SGLangEngine(
            launched.url, Timeouts.of(self._config), experts_shape=self._experts_shape, metrics=self._config.metrics
        )
        try:
            async with asyncio.timeout(self._config.start_timeout_s):
                await self._until_generating(launched, self.client)
        except TimeoutError as error:
            waited = f"{self._config.start_timeout_s:g} s"
            raise EngineError(f"no token from {self.name} (see {launched.log}) within {waited} of the start") from error

    async def _until_generating(self, launched: Launched, client: SGLangEngine) -> None:
        started = time.monotonic()
        said = 0.0
        while True:
            if (reason := await launched.failure()) is not None:
                raise ProcessError(reason)
            if await self._first_token(client):
                self._say(f"{self.name} serves {client.url} after {time.monotonic() - started:.1f} s")
                return
            await asyncio.sleep(START_POLL_S)
            if (waited := time.monotonic() - started) - said >= PROGRESS_S:
                said = waited
                self._say(f"{self.name} is starting, {waited:.0f} s so far")

    async def _first_token(self, client: SGLangEngine) -> bool:
        """Whether it generates. One that has only half of the work (PD) is asked by its own check, and then has to hand
        over (``pd.hand_over``)."""
        if self.spec.role != "both":
            return await client.health()
        try:
            await client.generate([0], Sampling(temperature=0.0, max_new_tokens=1), f"start-{self.name}")
        except EngineError:  # it does not listen yet; start_timeout_s bounds this
            return False
        return True

    async def end(self) -> None:
        """Break its connections, so that what it has in flight goes elsewhere, and kill it; nothing happens where it
        does not run."""
        async with self._ending:  # nothing starts in its place while it is being killed
            client, self.client = self.client, None
            launched, self.launched = self.launched, None
            if client is not None:
                await client.close()
            if launched is not None:
                await launched.stop()
