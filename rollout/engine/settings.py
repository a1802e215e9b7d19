"""What the engine's config sections share."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict

Argument = bool | int | float | str
"""Value of one of SGLang's arguments; true is a bare flag, false leaves it out."""


class Settings(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


def flags(options: dict[str, Argument]) -> list[str]:
    """Arguments by name (underscores or dashes) as a command line."""
    line: list[str] = []
    for name, value in options.items():
        flag = f"--{name.replace('_', '-')}"
        if value is True:
            line.append(flag)
        elif value is not False:
            line += [flag, str(value)]
    return line
