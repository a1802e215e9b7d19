"""One episode: a session at the gateway, played by a task server, returned as trajectories."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rollout.gateway import Gateway
from rollout.session import RolloutKey
from rollout.task_client import TaskClient
from rollout.trajectory import StopReason, Trajectory
from tasks.protocol import EpisodeEnd, EpisodeRequest, EpisodeState

STOP_REASONS = {
    EpisodeEnd.STOP: StopReason.STOP,
    EpisodeEnd.LENGTH: StopReason.LENGTH,
    EpisodeEnd.MAX_TURNS: StopReason.MAX_TURNS,
}


class RolloutsFailed(RuntimeError):
    """Episodes only fail, or are only dropped; the message names the task and the last reason."""


@dataclass(frozen=True)
class EpisodeSettings:
    """Limits of one task's episodes."""

    max_tokens: int
    """Of one turn."""
    timeout_s: float


@dataclass(frozen=True)
class EpisodeOutcome:
    """``trajectories`` is empty where the model was never asked; ``error`` says why an episode failed."""

    valid: bool
    reward: float
    turns: int
    trajectories: list[Trajectory]
    error: str | None = None


class EpisodeRunner:
    """Plays episodes of all tasks."""

    def __init__(
        self, gateway: Gateway, clients: Mapping[str, TaskClient], settings: Mapping[str, EpisodeSettings]
    ) -> None:
        self.gateway = gateway
        self.clients = clients
        self.settings = settings

    async def run(
        self, key: RolloutKey, data: Mapping[str, Any], temperature: float, seed: int | None
    ) -> EpisodeOutcome:
        """Play one episode to its end. Cancelling it closes its session and the server's episode.

        Raises:
            TaskServerRefused: no server took it.
            TaskServerError: the server was lost or answered garbage.
        """
        session_id = uuid.uuid4().hex
        limits = self.settings[key.task]
        url = self.gateway.open(session_id, key, temperature, seed)
        try:
            status = await self.clients[key.task].play(
                EpisodeRequest(
                    episode_id=session_id,
                    gateway_url=url,
                    data=dict(data),
                    max_tokens=limits.max_tokens,
                    timeout_s=limits.timeout_s,
                )
            )
        finally:
            record = await self.gateway.close(session_id)
        if status.state is not EpisodeState.COMPLETED:
            return EpisodeOutcome(False, 0.0, record.turns, [], status.error or status.state)
        if not record.segments:
            return EpisodeOutcome(
                False, 0.0, 0, [], "it ended without a token: the prompt does not fit into the context"
            )
        reward = status.reward or 0.0
        stop_reason = STOP_REASONS[status.end or EpisodeEnd.STOP]
        metrics = dict(status.metrics) | {"turns": float(record.turns)}
        return EpisodeOutcome(True, reward, record.turns, record.trajectories(reward, stop_reason, metrics))
