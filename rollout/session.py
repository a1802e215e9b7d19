"""The token record of one episode's conversation: exactly the ids that the engine was given and sampled."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from jaxtyping import Int32

from rollout.chat import ChatRenderer, Message
from rollout.engine.protocol import FinishReason, Generation, TopLogprobs
from rollout.trajectory import NO_VERSION, NOT_RECORDED, StopReason, Trajectory


@dataclass(frozen=True)
class RolloutKey:
    """Which rollout of a run this is."""

    task: str
    epoch: int
    prompt_id: str
    group_id: int
    sample_id: int


@dataclass
class Segment:
    """A conversation that only ever grew; a rewritten one begins another segment."""

    messages: list[Message] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    turn: list[int] = field(default_factory=list)
    experts: list[Int32[np.ndarray, "positions layers top_k"]] = field(default_factory=list)
    """Routed experts of the first positions, where they are recorded: each by the request that first passed it."""
    top: list[TopLogprobs] = field(default_factory=list)
    """Of the sampled tokens, where they are recorded: a row each, in their order."""
    turns: int = 0
    stopped: bool = False
    """Whether the last reply ended with its stop token."""

    def append_context(self, token_ids: Sequence[int]) -> None:
        self.token_ids.extend(token_ids)
        self.logprobs.extend([0.0] * len(token_ids))
        self.versions.extend([NO_VERSION] * len(token_ids))
        self.turn.extend([self.turns] * len(token_ids))

    def append_reply(self, generations: Sequence[Generation], message: Message) -> None:
        for generation in generations:
            self.token_ids.extend(generation.token_ids.tolist())
            self.logprobs.extend(generation.logprobs.tolist())
            self.versions.extend(generation.weight_versions.tolist())
            self.turn.extend([self.turns] * len(generation.token_ids))
            if generation.routed_experts is not None:
                self.experts.append(generation.routed_experts)
            if generation.top_logprobs is not None:
                self.top.append(generation.top_logprobs)
        self.turns += 1
        self.stopped = generations[-1].finish_reason is FinishReason.STOP
        self.messages.append(message)

    @property
    def expert_rows(self) -> int:
        return sum(len(rows) for rows in self.experts)

    def routed_experts(self) -> Int32[np.ndarray, "tokens layers top_k"] | None:
        """A row a token; -1 where no request has passed it, as the last one. None where none were recorded."""
        if not self.experts:
            return None
        known = np.concatenate(self.experts)
        rest = np.full((len(self.token_ids) - len(known), *known.shape[1:]), NOT_RECORDED, np.int32)
        return np.concatenate([known, rest])

    def top_logprobs(self) -> TopLogprobs | None:
        """A row a token, that of a sampled token where it stands. None where none were recorded.

        Raises:
            ValueError: they were recorded for some of the sampled tokens only.
        """
        if not self.top:
            return None
        sampled = np.asarray(self.versions, np.int32) != NO_VERSION
        ids = np.concatenate([top.token_ids for top in self.top])
        if len(ids) != sampled.sum():
            raise ValueError(f"the likeliest tokens of {len(ids)} positions were recorded, of {sampled.sum()} sampled")
        spread = TopLogprobs(
            np.full((len(sampled), ids.shape[1]), NOT_RECORDED, np.int32),
            np.zeros((len(sampled), ids.shape[1]), np.float32),
        )
        spread.token_ids[sampled] = ids
        spread.logprobs[sampled] = np.concatenate([top.logprobs for top in self.top])
        return spread


@dataclass(frozen=True)
class Turn:
    """A request, matched to the record: ``prompt`` is what the engine gets."""

    segment: Segment
    context: list[int]
    """Ids that the segment does not hold yet."""
    messages: list[Message]

    @property
    def prompt(self) -> list[int]:
        return self.segment.token_ids + self.context


class SessionRecord:
    """All segments of one rollout. Not thread-safe; one request at a time extends a segment."""

    def __init__(self, key: RolloutKey, temperature: float) -> None:
        self.key = key
        self.temperature = temperature
        self.segments: list[Segment] = []

    def match(self, messages: Sequence[Message], renderer: ChatRenderer) -> Turn:
        """Find the segment that ``messages`` continue, or begin one. Nothing is changed until ``commit``."""
        for segment in sorted(self.segments, key=lambda s: len(s.messages), reverse=True):
            known = len(segment.messages)
            if len(messages) > known and list(messages[:known]) == segment.messages:
                context = renderer.observation(segment.messages, messages[known:], segment.stopped)
                if context is not None:
                    return Turn(segment, context, list(messages))
        return Turn(Segment(), renderer.prompt(messages), list(messages))

    def commit(self, turn: Turn, generations: Sequence[Generation], reply: str) -> None:
        """Record the turn: its context, and the tokens sampled for it (several generations where one was aborted and
        resumed by prefix)."""
        segment = turn.segment
        if not any(segment is known for known in self.segments):
            self.segments.append(segment)
        segment.append_context(turn.context)
        segment.messages = list(turn.messages)
        segment.append_reply(generations, {"role": "assistant", "content": reply})

    @property
    def turns(self) -> int:
        return sum(segment.turns for segment in self.segments)

    def trajectories(self, reward: float, stop_reason: StopReason, metrics: dict[str, float]) -> list[Trajectory]:
        """One trajectory a segment, in the order they began."""
        return [
            self._trajectory(index, segment, reward, stop_reason, metrics)
            for index, segment in enumerate(self.segments)
        ]

    def _trajectory(
        self, index: int, segment: Segment, reward: float, stop_reason: StopReason, metrics: dict[str, float]
    ) -> Trajectory:
        top = segment.top_logprobs()
        return Trajectory(
            token_ids=np.asarray(segment.token_ids, dtype=np.int32),
            action_mask=np.asarray(segment.versions, dtype=np.int32) != NO_VERSION,
            rollout_logprobs=np.asarray(segment.logprobs, dtype=np.float32),
            weight_versions=np.asarray(segment.versions, dtype=np.int32),
            turn_index=np.asarray(segment.turn, dtype=np.int32),
            temperature=self.temperature,
            reward=reward,
            task=self.key.task,
            epoch=self.key.epoch,
            prompt_id=self.key.prompt_id,
            group_id=self.key.group_id,
            sample_id=self.key.sample_id,
            stop_reason=stop_reason,
            segment=index,
            routed_experts=segment.routed_experts(),
            top_ids=None if top is None else top.token_ids,
            top_logprobs=None if top is None else top.logprobs,
            metrics=metrics,
        )
