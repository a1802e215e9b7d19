"""What a task's ``play`` works with: the conversation with the policy, and the outcome it returns.

It imports no client, so that a task's file is cheap to import where only its options and data are needed.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from tasks.protocol import EpisodeEnd


class GatewayError(RuntimeError):
    """The policy could not be asked: the episode fails, and its reward means nothing."""


@dataclass(frozen=True)
class Reply:
    """One turn of the policy."""

    content: str
    finish_reason: str
    """As in the OpenAI API: ``stop``, or ``length`` when a token limit cut the turn."""

    @property
    def cut(self) -> bool:
        """The turn hit a token limit: there is no sense in going on."""
        return self.finish_reason == "length"


@dataclass(frozen=True)
class Outcome:
    """How an episode ended.

    Raises:
        ValueError: where the reward or a metric is not a finite number.
    """

    reward: float
    end: EpisodeEnd = EpisodeEnd.STOP
    metrics: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, value in {"reward": self.reward, **self.metrics}.items():
            if not math.isfinite(value):
                raise ValueError(f"{name} is {value}, it must be finite")


Complete = Callable[[Sequence[Mapping[str, str]]], Awaitable[Reply]]
"""Asks the policy for the next turn of a list of messages; raises GatewayError."""


class Chat:
    """One episode's conversation. What was said is never changed: the gateway records it token by token."""

    def __init__(self, complete: Complete) -> None:
        self._complete = complete
        self.messages: list[dict[str, str]] = []
        self.turns = 0
        """Turns that the policy has taken."""

    def say(self, role: Literal["system", "user", "tool"], content: str) -> None:
        """Add a message; the policy sees it at its next turn."""
        self.messages.append({"role": role, "content": content})

    async def turn(self) -> Reply:
        """Let the policy speak, and add what it said.

        Raises:
            GatewayError: where the gateway refuses, breaks, or does not answer in time.
        """
        reply = await self._complete(self.messages)
        self.messages.append({"role": "assistant", "content": reply.content})
        self.turns += 1
        return reply
