"""Sends requests to a fleet's servers: to the session's, to a pair of servers that prefill and decode, or through
``sglang-router``; and ends them there."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Float32

from rollout.engine.pd import NOWHERE, generate_apart
from rollout.engine.protocol import EngineError, EngineLost, Generation, Sampling
from rollout.engine.routing import Routes
from rollout.engine.sglang_router import SGLangRouter
from rollout.engine.supervisor import DEATH_POLL_S, Supervisor

CHECK_UP_S = 5.0
"""How long a request that was lost behind sglang-router waits to learn which server it was."""


class Dispatch:
    """Which server has which request. ``generate`` waits for a server that is being started again, and fails at once
    where none is left; ``score`` takes what serves now."""

    def __init__(self, supervisor: Supervisor, routes: Routes) -> None:
        self._supervisor = supervisor
        self._servers = supervisor.servers
        self._routes = routes
        self._generating_on: dict[str, int] = {}
        """By request: the server that generates."""
        self._check_up: asyncio.Task[None] | None = None

    async def generate(self, token_ids: Sequence[int], sampling: Sampling, request_id: str, session: str) -> Generation:
        """See ``EngineFleet.generate``."""
        if (router := self._supervisor.in_front) is not None:
            return await self._behind(router, token_ids, sampling, request_id, session)
        generating, *prefill = await self._supervisor.first(lambda: self._routes.pick(session, token_ids))
        self._generating_on[request_id] = generating
        try:
            with self._routes.request(generating):
                if prefill:
                    return await self._apart(prefill[0], generating, token_ids, sampling, request_id)
                return await self._on(generating, token_ids, sampling, request_id)
        finally:
            self._generating_on.pop(request_id, None)

    async def score(self, token_ids: Sequence[int]) -> Float32[np.ndarray, " tokens"]:
        """See ``EngineFleet.score``."""
        able = self._routes.prefill or self._routes.generating
        serving = [index for index in self._supervisor.serving if index in able]
        if not serving:
            raise EngineError(f"no inference server takes requests: {self._supervisor.lost or 'none was started'}")
        index = min(serving, key=self._routes.in_flight)
        with self._routes.request(index):
            return await self._servers[index].engine.score(
                token_ids, NOWHERE.fields() if self._routes.prefill else None
            )

    async def abort(self, request_ids: Sequence[str]) -> None:
        """See ``EngineFleet.abort``."""
        everywhere = self._supervisor.in_front is not None
        aborts = []
        for index, server in enumerate(self._servers):
            mine = [request for request in request_ids if everywhere or self._generating_on.get(request) == index]
            if mine and server.client is not None:
                aborts.append(server.client.abort(mine))
        for failure in await asyncio.gather(*aborts, return_exceptions=True):
            if isinstance(failure, BaseException) and not isinstance(failure, EngineLost):  # what is lost has none
                raise failure

    def end_session(self, session: str) -> None:
        """The session sends nothing more."""
        self._routes.end_session(session)

    async def _on(
        self,
        index: int,
        token_ids: Sequence[int],
        sampling: Sampling,
        request_id: str,
        placement: Mapping[str, Any] | None = None,
    ) -> Generation:
        try:
            return await self._servers[index].engine.generate(token_ids, sampling, request_id, placement)
        except EngineLost as error:
            self._supervisor.suspected(index)
            raise EngineLost(str(error), error.partial, self._servers[index].spec.role) from error

    async def _apart(
        self, prefill: int, decode: int, token_ids: Sequence[int], sampling: Sampling, request_id: str
    ) -> Generation:
        """Prefill on one server, decode on another. The first to fail ends both."""
        meeting = self._servers[prefill].rendezvous().fields()
        with self._routes.request(prefill):
            return await generate_apart(
                self._on(prefill, token_ids, sampling, f"{request_id}.prefill", meeting),
                self._on(decode, token_ids, sampling, request_id, meeting),
            )

    async def _behind(
        self, router: SGLangRouter, token_ids: Sequence[int], sampling: Sampling, request_id: str, session: str
    ) -> Generation:
        """Generate on a server of the router's choice."""
        supervisor = self._supervisor
        await supervisor.first(lambda: True if router.takes else None)
        await asyncio.gather(*(self._servers[index].engine.until_open() for index in supervisor.serving))
        try:
            return await router.generate(token_ids, sampling, request_id, session)
        except EngineLost:
            if not supervisor.running:
                raise
            # Nobody says which server it was, and sent again at once it could go there again.
            if self._check_up is None or self._check_up.done():
                self._check_up = supervisor.spawn(self._examine(), "check-up")
            await asyncio.wait({self._check_up}, timeout=CHECK_UP_S)
            raise

    async def _examine(self) -> None:
        await asyncio.sleep(DEATH_POLL_S)  # a connection may break a moment before its process has ended
        await self._supervisor.settle(self._supervisor.serving)
