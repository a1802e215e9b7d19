"""Which teachers a prompt belongs to. Pure.

value(prompt)   its task's name, or a column of its data
shares(prompt)  {teacher: weight} of all teachers that teach this value
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from rl.teachers.config import BY_TASK, TeacherConfig
from tasks.protocol import Prompt

SHOWN = 5
"""Values that a message names."""

Shares = Mapping[str, float]
"""By teacher."""


class RouteError(ValueError):
    """A prompt without a teacher, or a teacher without prompts; the message names the key."""


class Routing:
    """The teachers of every value of the route."""

    def __init__(self, teachers: Mapping[str, TeacherConfig], route: str) -> None:
        self.route = route
        self._shares: dict[str, dict[str, float]] = {}
        for name, teacher in sorted(teachers.items()):
            for value in teacher.prompts or (name,):
                self._shares.setdefault(value, {})[name] = teacher.weight

    def value(self, task: str, data: Mapping[str, Any]) -> str:
        """
        Raises:
            RouteError: the prompt has no such column.
        """
        if self.route == BY_TASK:
            return task
        if self.route not in data:
            raise RouteError(
                f"distillation.route={self.route}: the prompts of task {task} have no such column, they have "
                f"{', '.join(sorted(data))}; or route by task"
            )
        return str(data[self.route])

    def shares(self, value: str) -> Shares:
        return self._shares[value]

    def check(self, prompts: Mapping[str, Iterable[Prompt]]) -> None:
        """Every prompt has a teacher, and every teacher a prompt.

        Args:
            prompts: by task.

        Raises:
            RouteError: one has not.
        """
        found = Counter(self.value(task, prompt.data) for task, of_task in prompts.items() for prompt in of_task)
        orphans = {value: count for value, count in found.items() if value not in self._shares}
        if orphans:
            some = ", ".join(f"{value!r} ({count} prompts)" for value, count in sorted(orphans.items())[:SHOWN])
            raise RouteError(
                f"teachers: none teaches {self.route} {some}; name a teacher so, list the value in a teacher's "
                "prompts, or leave those prompts out"
            )
        for value, shares in sorted(self._shares.items()):
            if value not in found:
                known = ", ".join(sorted(found)[: 4 * SHOWN])
                raise RouteError(
                    f"teachers.{next(iter(shares))}.prompts: no prompt of this run has {self.route} {value!r}; there "
                    f"are {known}"
                )
