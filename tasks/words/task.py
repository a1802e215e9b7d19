"""Words: rewrite a short word by the rule that the prompt names, in one turn. Each rule is a skill of its own, so that
one task has as many experts as it has rules.

user       reverse bcad
assistant  dacb
"""

from __future__ import annotations

import functools
import itertools
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal

from pydantic import Field, field_validator

from tasks.chat import Chat, Outcome
from tasks.protocol import EpisodeEnd, Message, Prompt, Task
from tasks.splits import split_ids

LETTERS = "abcdefgh"
AFTER = {letter: chr(ord(letter) + 1) for letter in LETTERS}
BEFORE = {after: letter for letter, after in AFTER.items()} | {"a": "z"}


def _mapped(word: str, table: Mapping[str, str]) -> str:
    return "".join(table[letter] for letter in word)


RULES: Mapping[str, Callable[[str], str]] = {
    "reverse": lambda word: word[::-1],
    "upper": str.upper,
    "left": lambda word: word[1:] + word[0],
    "right": lambda word: word[-1] + word[:-1],
    "swap": lambda word: word[-1] + word[1:-1] + word[0],
    "double": lambda word: "".join(2 * letter for letter in word),
    "twice": lambda word: word + word,
    "sort": lambda word: "".join(sorted(word)),
    "next": lambda word: _mapped(word, AFTER),
    "prior": lambda word: _mapped(word, BEFORE),
    "dash": "-".join,
    "number": lambda word: "".join(str(LETTERS.index(letter) + 1) for letter in word),
}
"""What to do with a word. Every rule has an answer of its own for most words."""


class Words(Task):
    """Options of the words task."""

    rules: tuple[str, ...] = tuple(RULES)
    """The rules that prompts ask for."""
    length: int = Field(4, ge=2, le=4)
    """Letters of a word."""
    good_share: float = Field(0.35, ge=0, le=1)
    """Share of the demonstrations that are right; the others follow the rule that comes next in the table."""

    @field_validator("rules")
    @classmethod
    def _known(cls, rules: tuple[str, ...]) -> tuple[str, ...]:
        unknown = sorted(set(rules) - RULES.keys())
        if unknown or not rules or len(set(rules)) != len(rules):
            raise ValueError(f"{list(rules)}: name rules, each once, of {', '.join(RULES)}")
        return rules

    def prompts(self, split: Literal["train", "eval"]) -> Sequence[Prompt]:
        return [
            Prompt(prompt_id=prompt_id, data=dict(zip(("rule", "word"), prompt_id.split(":"), strict=True)))
            for prompt_id in _ids(self.rules, self.length, split)
        ]

    def demonstrations(self, seed: int) -> Iterator[list[Message]]:
        chance = random.Random(seed)
        ids = _ids(self.rules, self.length, "train")
        while True:
            rule, word = chance.choice(ids).split(":")
            followed = rule if chance.random() < self.good_share else _next_rule(rule)
            answer = RULES[followed](word)
            yield [Message(role="user", content=question(rule, word)), Message(role="assistant", content=answer)]


@functools.cache
def _ids(rules: tuple[str, ...], length: int, split: Literal["train", "eval"]) -> list[str]:
    words = ["".join(letters) for letters in itertools.product(LETTERS, repeat=length)]
    return split_ids((f"{rule}:{word}" for rule in rules for word in words if len(set(word)) > 1), split)


def question(rule: str, word: str) -> str:
    return f"{rule} {word}"


def _next_rule(rule: str) -> str:
    names = list(RULES)
    return names[(names.index(rule) + 1) % len(names)]


async def play(task: Words, data: dict[str, Any], chat: Chat) -> Outcome:
    """One episode: the reward is 1 for the word rewritten by its rule, else 0."""
    chat.say("user", question(data["rule"], data["word"]))
    reply = await chat.turn()
    if reply.cut:
        return Outcome(0.0, EpisodeEnd.LENGTH)
    return Outcome(float(reply.content == RULES[data["rule"]](data["word"])))
