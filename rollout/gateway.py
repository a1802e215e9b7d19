"""OpenAI-compatible endpoint between task servers and engines that records tokens, log-probs and weight versions.

Each episode has a session, named in the base URL that its task server is handed (``/sessions/ID/v1``). Sampling is the
run's, not the client's: a request that asks for another temperature, top_p, ... is refused.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from rollout.chat import ChatRenderer
from rollout.engine.protocol import EngineError, EngineLost, EngineMetrics, FinishReason, Generation, Sampling
from rollout.engine.recovery import Phase
from rollout.session import RolloutKey, SessionRecord, Turn
from rollout.telemetry import GatewayStats, Telemetry

log = logging.getLogger(__name__)

MAX_RESUMPTIONS = 64
"""How often the engine may abort one reply, to be resumed by prefix."""
MAX_LOSSES = 4
"""How often a reply's engine may die, and the reply be resumed on another: one that kills every engine it meets (a bug
in the server) must not take the whole fleet down. Counted by role where prefill and decode are apart."""

NEUTRAL = {"top_p": 1, "n": 1, "presence_penalty": 0, "frequency_penalty": 0, "stream": False, "logprobs": False}
"""Request fields that may be given with this value only."""


class Engines(Protocol):
    """The engines behind one address; a session stays on the one that has its prefix cached."""

    async def generate(
        self, token_ids: Sequence[int], sampling: Sampling, request_id: str, session: str
    ) -> Generation: ...

    async def abort(self, request_ids: Sequence[str]) -> None: ...

    def end_session(self, session: str) -> None: ...

    async def metrics(self) -> Mapping[str, EngineMetrics]: ...

    def states(self) -> Mapping[str, tuple[Phase, int]]: ...


class ChatMessage(BaseModel):
    model_config = ConfigDict(extra="ignore")

    role: str
    content: str


class ChatRequest(BaseModel):
    model_config = ConfigDict(extra="forbid")

    model: str
    messages: list[ChatMessage] = Field(min_length=1)
    max_tokens: int | None = Field(None, gt=0)
    max_completion_tokens: int | None = Field(None, gt=0)
    temperature: float | None = None
    top_p: float | None = None
    n: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    stream: bool | None = None
    logprobs: bool | None = None
    seed: int | None = None
    user: str | None = None


@dataclass
class Session:
    record: SessionRecord
    seed: int | None
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    in_flight: set[str] = field(default_factory=set)
    closed: bool = False


def _error(status: int, message: str, code: str) -> web.Response:
    body = {"error": {"message": message, "type": "invalid_request_error" if status < 500 else "engine", "code": code}}
    return web.json_response(body, status=status)


class Gateway:
    """The HTTP endpoint and its sessions. Lives in one asyncio loop; ``start`` and ``stop`` frame its life."""

    def __init__(
        self,
        engines: Engines,
        renderer: ChatRenderer,
        context_length: int,
        model_name: str,
        routed_experts: bool = False,
        top_logprobs: int = 0,
    ) -> None:
        self.engines = engines
        self.renderer = renderer
        self.context_length = context_length
        self.model_name = model_name
        self.routed_experts = routed_experts
        """Record which experts computed each token."""
        self.top_logprobs = top_logprobs
        """Record so many of the likeliest tokens at each position that is sampled."""
        self.telemetry = Telemetry()
        self._sessions: dict[str, Session] = {}
        self._runner: web.AppRunner | None = None
        self._url = ""

    async def start(self, host: str, port: int) -> None:
        """Listen; port 0 takes a free one."""
        app = web.Application(client_max_size=64 * 2**20)
        app.router.add_post("/sessions/{session}/v1/chat/completions", self._chat)
        app.router.add_get("/sessions/{session}/v1/models", self._models)
        app.router.add_get("/health", self._health)
        app.router.add_get("/metrics", self._metrics)
        # A client that is gone must not have a turn recorded that its environment never saw.
        self._runner = web.AppRunner(
            app, access_log=None, handle_signals=False, shutdown_timeout=1.0, handler_cancellation=True
        )
        await self._runner.setup()
        site = web.TCPSite(self._runner, host, port, backlog=4096)
        await site.start()
        bound_host, bound_port = self._runner.addresses[0][:2]
        self._url = f"http://{bound_host}:{bound_port}"

    @property
    def stats(self) -> GatewayStats:
        return self.telemetry.stats

    async def stop(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    def open(self, session_id: str, key: RolloutKey, temperature: float, seed: int | None) -> str:
        """Begin a session; returns the base URL for an OpenAI client."""
        if session_id in self._sessions:
            raise ValueError(f"session {session_id} is open already")
        self._sessions[session_id] = Session(SessionRecord(key, temperature), seed)
        return f"{self._url}/sessions/{session_id}/v1"

    async def close(self, session_id: str) -> SessionRecord:
        """End a session: its requests in flight are aborted, later ones get 404."""
        session = self._sessions.pop(session_id)
        session.closed = True
        if session.in_flight:
            await self._abort(sorted(session.in_flight))
        self.engines.end_session(session_id)
        return session.record

    async def _abort(self, request_ids: Sequence[str]) -> None:
        try:
            await self.engines.abort(request_ids)
        except EngineError as error:
            log.warning("requests that nobody waits for were not aborted, they end at their token limit: %s", error)

    @property
    def sessions(self) -> int:
        return len(self._sessions)

    async def _health(self, request: web.Request) -> web.Response:
        return web.json_response({"status": "ok", "sessions": self.sessions})

    async def _metrics(self, request: web.Request) -> web.Response:
        text = self.telemetry.prometheus(self.sessions, await self.engines.metrics(), self.engines.states())
        return web.Response(body=text, headers={"Content-Type": CONTENT_TYPE_LATEST})

    async def _models(self, request: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": self.model_name, "object": "model"}]})

    async def _chat(self, request: web.Request) -> web.Response:
        session_id = request.match_info["session"]
        session = self._sessions.get(session_id)
        if session is None:
            return _error(404, f"no open session {session_id}", "session_not_found")
        try:
            chat = ChatRequest.model_validate(json.loads(await request.read()))
        except (ValidationError, json.JSONDecodeError) as error:
            return _error(400, f"request body: {_first_problem(error)}", "invalid_body")
        problem = self._refusal(chat, session.record.temperature)
        if problem is not None:
            return _error(400, problem, "unsupported_sampling")
        async with session.lock:  # a segment is extended by one request at a time
            if session.closed:
                return _error(404, f"session {session_id} was closed", "session_not_found")
            return await self._reply(session_id, session, chat)

    def _refusal(self, chat: ChatRequest, temperature: float) -> str | None:
        if chat.temperature is not None and chat.temperature != temperature:
            return f"temperature={chat.temperature}: this run samples at {temperature}; leave it out"
        for name, neutral in NEUTRAL.items():
            given = chat.model_dump()[name]
            if given is not None and given != neutral:
                return f"{name}={given}: only {name}={neutral} is served, since log-probs are recorded for training"
        return None

    async def _reply(self, session_id: str, session: Session, chat: ChatRequest) -> web.Response:
        turn = session.record.match([message.model_dump() for message in chat.messages], self.renderer)
        prompt = turn.prompt
        room = self.context_length - len(prompt)
        if room <= 0:
            return _error(
                400,
                f"the conversation has {len(prompt)} tokens, the context holds {self.context_length}",
                "context_length_exceeded",
            )
        limit = min(room, chat.max_completion_tokens or chat.max_tokens or room)
        try:
            generations = await self._generate(session_id, session, turn, limit)
        except EngineError as error:
            self.stats.errors += 1
            return _error(502, str(error), "engine_error")
        if session.closed:
            return _error(404, f"session {session_id} was closed", "session_not_found")
        token_ids = [token for generation in generations for token in generation.token_ids.tolist()]
        reply = self.renderer.text(token_ids)
        session.record.commit(turn, generations, reply)
        self.stats.turns += 1
        return web.json_response(self._body(session_id, reply, generations, len(prompt), len(token_ids)))

    async def _generate(self, session_id: str, session: Session, turn: Turn, limit: int) -> list[Generation]:
        """Sample one reply, resuming by prefix whenever the engine aborts it or dies.

        Every token was sampled after exactly those before it, by the version that it carries; what a dead engine had
        sampled and not yet sent is lost, and sampled anew.
        """
        generations: list[Generation] = []
        sampled: list[int] = []
        rows = turn.segment.expert_rows
        turns, losses = session.record.turns, Counter[str]()
        for attempt in range(MAX_RESUMPTIONS + 1):
            sampling = Sampling(
                temperature=session.record.temperature,
                max_new_tokens=limit - len(sampled),
                seed=None if session.seed is None else _turn_seed(session.seed, turns, attempt),
                top_logprobs=self.top_logprobs,
                routed_experts_from=rows if self.routed_experts else None,
            )
            try:
                generation = await self._request(
                    session_id, session, turn.prompt + sampled, sampling, f"{session_id}.{turns}.{attempt}"
                )
            except EngineLost as error:
                losses[error.role] += 1
                self.stats.lost += 1
                if losses[error.role] > MAX_LOSSES:
                    died = f"{losses[error.role]} engines"
                    raise EngineError(f"{died} died of one reply of session {session_id}: {error}") from error
                if error.partial is None:
                    continue
                generation = error.partial
            generations.append(generation)
            sampled += generation.token_ids.tolist()
            rows += 0 if generation.routed_experts is None else len(generation.routed_experts)
            self.telemetry.generated(generation)
            if generation.finish_reason is not FinishReason.ABORT or session.closed or len(sampled) >= limit:
                return generations
            self.stats.resumptions += 1
        raise EngineError(f"a reply of session {session_id} was aborted {MAX_RESUMPTIONS} times")

    async def _request(
        self, session_id: str, session: Session, token_ids: list[int], sampling: Sampling, request_id: str
    ) -> Generation:
        session.in_flight.add(request_id)
        try:
            return await self.engines.generate(token_ids, sampling, request_id, session_id)
        except asyncio.CancelledError:
            await asyncio.shield(self._abort([request_id]))
            raise
        finally:
            session.in_flight.discard(request_id)

    def _body(
        self, session_id: str, reply: str, generations: list[Generation], prompt_tokens: int, new_tokens: int
    ) -> Mapping[str, Any]:
        stopped = generations[-1].finish_reason is FinishReason.STOP
        return {
            "id": f"chatcmpl-{session_id}",
            "object": "chat.completion",
            "created": int(time.time()),
            "model": self.model_name,
            "choices": [
                {
                    "index": 0,
                    "message": {"role": "assistant", "content": reply},
                    "finish_reason": "stop" if stopped else "length",
                }
            ],
            "usage": {
                "prompt_tokens": prompt_tokens,
                "completion_tokens": new_tokens,
                "total_tokens": prompt_tokens + new_tokens,
            },
        }


def _turn_seed(seed: int, turn: int, attempt: int) -> int:
    digest = hashlib.blake2b(f"{seed}/{turn}/{attempt}".encode(), digest_size=4).digest()
    return int.from_bytes(digest, "big") & 0x7FFFFFFF


def _first_problem(error: ValidationError | json.JSONDecodeError) -> str:
    if isinstance(error, json.JSONDecodeError):
        return f"not JSON ({error})"
    first = error.errors()[0]
    return f"{'.'.join(str(part) for part in first['loc'])}: {first['msg']}"
