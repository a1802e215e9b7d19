"""The ``atelier`` command: picks the subcommand."""

from __future__ import annotations

import difflib
import importlib
import sys
from collections.abc import Sequence
from types import ModuleType

from rl.commands.exits import EXIT_BAD_CONFIG

COMMANDS = ("train", "plan", "check-engine", "plot", "teachers")
"""Modules of ``rl.commands``, with underscores there."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run ``atelier NAME ...``; the exit code."""
    name, *rest = [*(sys.argv[1:] if argv is None else argv)] or ["--help"]
    if name in ("-h", "--help"):
        print(_usage())
        return 0
    if name not in COMMANDS:
        close = difflib.get_close_matches(name, COMMANDS, n=1)
        hint = f"did you mean {close[0]}?" if close else f"known: {', '.join(COMMANDS)}"
        print(f"atelier {name}: no such command; {hint}", file=sys.stderr)
        return EXIT_BAD_CONFIG
    return _module(name).main(rest)


def _module(name: str) -> ModuleType:
    return importlib.import_module(f"rl.commands.{name.replace('-', '_')}")


def _usage() -> str:
    lines = [f"  {name:12} {_module(name).SUMMARY}" for name in COMMANDS]
    return "\n".join(["usage: atelier COMMAND ...", "", *lines])


if __name__ == "__main__":
    sys.exit(main())
