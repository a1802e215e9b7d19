"""Tasks by name: each is a folder ``tasks/NAME`` whose ``task.py`` holds one ``Task`` subclass and ``play``."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from tasks.chat import Chat, Outcome
from tasks.protocol import Task

Play = Callable[[Any, dict[str, Any], Chat], Awaitable[Outcome]]
"""``async def play(task, data, chat)``: one episode. ``task`` is the options, ``data`` a prompt's."""


class TaskError(ValueError):
    """A task's name, file or options are wrong; the text is one line that says what to change."""


@dataclass(frozen=True)
class LoadedTask:
    name: str
    options: Task
    play: Play


def task_names() -> list[str]:
    """The tasks that exist, sorted."""
    return sorted(path.parent.name for path in Path(__file__).parent.glob("*/task.py"))


def load_task(name: str, options: Mapping[str, Any]) -> LoadedTask:
    """Import a task and check its options.

    Raises:
        TaskError: where there is no such task, its file lacks something, or an option is unknown or has a bad value.
    """
    if name not in task_names():
        raise TaskError(f"task {name!r} does not exist; there are: {', '.join(task_names())}")
    module = importlib.import_module(f"tasks.{name}.task")
    classes = [
        value
        for value in vars(module).values()
        if inspect.isclass(value) and issubclass(value, Task) and value.__module__ == module.__name__
    ]
    if len(classes) != 1:
        found = ", ".join(cls.__name__ for cls in classes) or "none"
        raise TaskError(f"tasks/{name}/task.py must define one subclass of Task; found: {found}")
    play = getattr(module, "play", None)
    if not inspect.iscoroutinefunction(play):
        raise TaskError(f"tasks/{name}/task.py must define `async def play(task, data, chat)`")
    try:
        return LoadedTask(name, classes[0](**options), play)
    except ValidationError as error:
        raise TaskError(_option_errors(name, classes[0], error)) from error


def _option_errors(name: str, task: type[Task], error: ValidationError) -> str:
    lines = []
    for item in error.errors(include_url=False):
        path = ".".join(map(str, ("tasks", name, "options", *item["loc"])))
        if item["type"] == "extra_forbidden":
            lines.append(f"{path}: unknown option; there are: {', '.join(task.model_fields) or 'none'}")
        else:
            lines.append(f"{path}: {item['msg']}")
    return "; ".join(lines)
