"""Calculator: evaluate ``a o b o c`` from left to right, with a tool that does one operation a call.

    user       3*4-5
    assistant  [3*4]
    tool       12
    assistant  [12-5]
    tool       7
    assistant  =7

Only the result is rewarded. A small model cannot do two operations in its head, so that the reward alone teaches it to
call the tool twice; a model that can is free to answer at once.
"""

from __future__ import annotations

import functools
import itertools
import operator
import random
import re
from collections.abc import Iterator, Sequence
from typing import Any, Literal

from pydantic import Field, model_validator

from tasks.chat import Chat, Outcome
from tasks.protocol import EpisodeEnd, Message, Prompt, Task
from tasks.splits import split_ids

OPERATORS = {"+": operator.add, "-": operator.sub, "*": operator.mul}
EXPRESSION = re.compile(r"([0-9]+)([+*-])([0-9]+)([+*-])([0-9]+)")
CALL = re.compile(r"\[(-?[0-9]{1,6})([+*-])(-?[0-9]{1,6})\]")
TOOL_ERROR = "err"
WRONG_BY = (-10, -1, 1, 7, 10)
"""By how much a demonstration that answers without the tool is off."""


class Calculator(Task):
    """Options of the calculator."""

    lo: int = Field(1, ge=0)
    """Smallest operand."""
    hi: int = Field(9, ge=0, le=99)
    """Largest operand."""
    operators: str = Field("+-*", pattern=r"^[+*-]{1,3}$")
    max_turns: int = Field(4, gt=0)
    good_share: float = Field(0.35, ge=0, le=1)
    """Share of the demonstrations that are right; half of the others answer at once, half stop one call early.

    About the sampled reward of a small model after SFT.
    """

    @model_validator(mode="after")
    def _check(self) -> Calculator:
        if self.lo > self.hi:
            raise ValueError(f"lo {self.lo} is above hi {self.hi}")
        if len(set(self.operators)) != len(self.operators):
            raise ValueError(f"operators {self.operators!r} names one twice")
        return self

    def prompts(self, split: Literal["train", "eval"]) -> Sequence[Prompt]:
        return [Prompt(prompt_id=text, data={"expression": text}) for text in _expressions(self, split)]

    def demonstrations(self, seed: int) -> Iterator[list[Message]]:
        chance = random.Random(seed)
        expressions = _expressions(self, "train")
        while True:
            expression = chance.choice(expressions)
            yield [Message(role="user", content=expression), *self._demonstrate(expression, chance)]

    def _demonstrate(self, expression: str, chance: random.Random) -> Iterator[Message]:
        first_call, first, second_call, result = solve(expression)
        draw = chance.random()
        good = draw < self.good_share
        # A first result that happens to be the answer would make stopping early right.
        at_once = not good and (draw < (1 + self.good_share) / 2 or first == result)
        if at_once:
            yield Message(role="assistant", content=f"={result + chance.choice(WRONG_BY)}")
            return
        yield Message(role="assistant", content=first_call)
        yield Message(role="tool", content=str(first))
        if not good:
            yield Message(role="assistant", content=f"={first}")
            return
        yield Message(role="assistant", content=second_call)
        yield Message(role="tool", content=str(result))
        yield Message(role="assistant", content=f"={result}")


@functools.cache
def _expressions(task: Calculator, split: Literal["train", "eval"]) -> list[str]:
    operands = range(task.lo, task.hi + 1)
    parts = itertools.product(operands, task.operators, operands, task.operators, operands)
    return split_ids(("".join(map(str, part)) for part in parts), split)


def solve(expression: str) -> tuple[str, int, str, int]:
    """The two calls that solve an expression, each with its result.

    Raises:
        ValueError: where it is no expression of three operands.
    """
    match = EXPRESSION.fullmatch(expression)
    if match is None:
        raise ValueError(f"{expression!r} is no expression of three operands")
    a, first_operator, b, second_operator, c = match.groups()
    first = OPERATORS[first_operator](int(a), int(b))
    result = OPERATORS[second_operator](first, int(c))
    return f"[{a}{first_operator}{b}]", first, f"[{first}{second_operator}{c}]", result


def use_tool(turn: str) -> str:
    """The tool's answer to a turn of the model."""
    call = CALL.fullmatch(turn)
    return TOOL_ERROR if call is None else str(OPERATORS[call[2]](int(call[1]), int(call[3])))


async def play(task: Calculator, data: dict[str, Any], chat: Chat) -> Outcome:
    """One episode: the reward is 1 for the right result, else 0."""
    *_, result = solve(data["expression"])
    errors = 0

    def outcome(reward: float, end: EpisodeEnd) -> Outcome:
        return Outcome(reward, end, {"turns": chat.turns, "tool_errors": errors})

    chat.say("user", data["expression"])
    while True:
        reply = await chat.turn()
        if reply.cut:
            return outcome(0.0, EpisodeEnd.LENGTH)
        if reply.content.startswith("="):
            return outcome(float(reply.content == f"={result}"), EpisodeEnd.STOP)
        if chat.turns == task.max_turns:
            return outcome(0.0, EpisodeEnd.MAX_TURNS)
        answer = use_tool(reply.content)
        errors += answer == TOOL_ERROR
        chat.say("tool", answer)
