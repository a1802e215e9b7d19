"""The wire protocol between the orchestrator and a task server, and what a task tells the trainer's side.

An *episode server* owns rollout and reward. The orchestrator POSTs an ``EpisodeRequest`` to ``/episodes``; the server
plays the episode against ``gateway_url`` with any OpenAI client and keeps its ``EpisodeStatus``:

    POST   /episodes              202 EpisodeStatus; 429 when full; 422 for a bad body; the same id again answers with
                                  the same episode, or 409 when the rest of the request differs
    GET    /episodes/{id}?wait_s  EpisodeStatus, as soon as it has ended or after wait_s seconds; 404 when unknown
    DELETE /episodes/{id}         204, cancels and forgets; idempotent
    GET    /health                Health
    GET    /metadata              Metadata

Every answer of 400 and above carries a ``Refusal``. An ended episode is kept until it is deleted, or for the server's
retention time when nobody does. Task data travels in the request: servers keep no data set.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator, Sequence
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

PROTOCOL_VERSION = 1


class Wire(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class EpisodeState(enum.StrEnum):
    RUNNING = "running"
    COMPLETED = "completed"
    FAILED = "failed"  # the environment or the gateway failed: the reward means nothing
    CANCELLED = "cancelled"


class EpisodeEnd(enum.StrEnum):
    """Why a completed episode ended."""

    STOP = "stop"
    LENGTH = "length"  # the model's answer was cut by a token limit
    MAX_TURNS = "max_turns"


class EpisodeRequest(Wire):
    episode_id: str = Field(pattern=r"^[A-Za-z0-9._~:-]{1,200}$")
    """Chosen by the caller; it stands in a URL's path as it is."""
    gateway_url: str = Field(pattern=r"^https?://")
    """Base URL for an OpenAI client (ends in /v1); it names the episode's session at the gateway."""
    data: dict[str, Any]
    """The prompt's data, as the task's own ``prompts`` made it."""
    max_tokens: int = Field(gt=0)
    """Token limit of one turn."""
    timeout_s: float = Field(gt=0, allow_inf_nan=False)
    """The server fails the episode after this many seconds."""


class EpisodeStatus(Wire):
    episode_id: str
    state: EpisodeState
    reward: float | None = None
    """Set when, and only when, ``state`` is completed."""
    end: EpisodeEnd | None = None
    error: str | None = None
    metrics: dict[str, float] = {}


class Health(Wire):
    status: Literal["ok"] = "ok"
    slots: int
    free_slots: int
    ended: dict[EpisodeState, int] = {}
    """Episodes that ended since the server started, by state."""


class Refusal(Wire):
    error: str
    """One line that names what is wrong."""


class Metadata(Wire):
    """Of any version of the protocol, so that another one can be named: what it adds is passed over."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    task: str
    protocol: Literal["episode"] = "episode"
    version: int = PROTOCOL_VERSION


class Message(Wire):
    role: Literal["system", "user", "assistant", "tool"]
    content: str


class Prompt(Wire):
    """One item of a task's data set."""

    prompt_id: str
    data: dict[str, Any]


class Task(BaseModel):
    """A task's options, and its data: ``tasks/NAME/task.py`` holds one subclass.

    Options are given in ``configs/task/NAME.yaml``; unknown ones are refused by name. It runs where the data is needed
    (the trainer's side) and in the server, and imports nothing heavy.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    def prompts(self, split: Literal["train", "eval"]) -> Sequence[Prompt]:
        """All prompts of a split, in a fixed order, with unique ``prompt_id``."""
        raise NotImplementedError(f"{type(self).__name__} has no prompts")

    def demonstrations(self, seed: int) -> Iterator[list[Message]]:
        """Endless conversations for SFT; the assistant's messages are trained on."""
        raise NotImplementedError(f"{type(self).__name__} has no demonstrations for SFT")
