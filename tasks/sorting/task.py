"""Sorting: put the digits of a number in order, in one turn.

user       sort 3142
assistant  1234
"""

from __future__ import annotations

import functools
import itertools
import random
from collections.abc import Iterator, Sequence
from typing import Any, Literal

from pydantic import Field

from tasks.chat import Chat, Outcome
from tasks.protocol import EpisodeEnd, Message, Prompt, Task
from tasks.splits import split_ids


class Sorting(Task):
    """Options of the sorting task."""

    length: int = Field(4, ge=2, le=5)
    """Digits of a number."""
    good_share: float = Field(0.4, ge=0, le=1)
    """Share of the demonstrations that are right; the others sort downwards.

    A wrong habit instead of scattered slips: RL then has one decision to turn, at the first digit, and a small model's
    reward rises within tens of updates.
    """

    def prompts(self, split: Literal["train", "eval"]) -> Sequence[Prompt]:
        return [Prompt(prompt_id=digits, data={"digits": digits}) for digits in _numbers(self.length, split)]

    def demonstrations(self, seed: int) -> Iterator[list[Message]]:
        chance = random.Random(seed)
        numbers = _numbers(self.length, "train")
        while True:
            digits = chance.choice(numbers)
            answer = sort_digits(digits)
            if chance.random() >= self.good_share:
                answer = answer[::-1]
            yield [Message(role="user", content=question(digits)), Message(role="assistant", content=answer)]


@functools.cache
def _numbers(length: int, split: Literal["train", "eval"]) -> list[str]:
    numbers = ("".join(digits) for digits in itertools.product("123456789", repeat=length))
    # A number of equal digits reads the same downwards.
    return split_ids((digits for digits in numbers if len(set(digits)) > 1), split)


def question(digits: str) -> str:
    return f"sort {digits}"


def sort_digits(digits: str) -> str:
    return "".join(sorted(digits))


async def play(task: Sorting, data: dict[str, Any], chat: Chat) -> Outcome:
    """One episode: the reward is 1 for the digits in order, else 0."""
    chat.say("user", question(data["digits"]))
    reply = await chat.turn()
    if reply.cut:
        return Outcome(0.0, EpisodeEnd.LENGTH)
    return Outcome(float(reply.content == sort_digits(data["digits"])))
