"""Has SGLang's own parser judge ``extra_args``, before a server is launched with them.

The parser lives in a package that takes seconds to import and wants a GPU, so a process of its own reads it (through
the stand-ins where there is no GPU), once for the same arguments, and not at all where there are none:

    python -m rollout.engine.arguments --page-size 64 ...
"""

from __future__ import annotations

import argparse
import difflib
import functools
import json
import subprocess
import sys
from typing import NoReturn

import torch

from rollout.engine import cpu_stand_ins
from rollout.engine.config import EngineConfig
from rollout.engine.settings import flags

READ_TIMEOUT_S = 180.0
"""The import alone takes 8 s on an idle core."""


class ArgumentsError(ValueError):
    """SGLang does not take these arguments."""


def check_extra_args(config: EngineConfig) -> None:
    """Check the ``extra_args`` of all roles.

    Raises:
        ArgumentsError: naming the argument, and the nearest that there is.
    """
    for role in config.roles:
        extra = config.for_role(role).extra_args
        if not extra:
            continue
        problem = _judge(tuple(flags(extra)))
        if problem is not None:
            raise ArgumentsError(f"engine.extra_args: {problem}")


@functools.cache
def _judge(line: tuple[str, ...]) -> str | None:
    """What SGLang has against these arguments."""
    command = [sys.executable, "-m", __name__, *line]
    done = subprocess.run(command, capture_output=True, text=True, timeout=READ_TIMEOUT_S, check=False)
    last = done.stdout.strip().rpartition("\n")[2]
    if done.returncode or not last.startswith("{"):
        raise ArgumentsError(f"engine.extra_args: SGLang's parser can't be asked: {done.stderr.strip()[-500:]}")
    problem: str | None = json.loads(last)["problem"]
    return problem


def explain(error: str, unknown: list[str], known: list[str]) -> str | None:
    """The first problem in a line, or None; ``error`` is argparse's own."""
    for argument in unknown:
        if argument.startswith("--"):
            name = argument.partition("=")[0]
            close = difflib.get_close_matches(name, known, n=1)
            hint = f"; did you mean {close[0][2:]}?" if close else ""
            return f"SGLang has no argument {name[2:]}{hint}"
    if unknown:
        return f"SGLang does not know what to do with {unknown[0]!r}: does the argument before it take a value?"
    return error or None


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise argparse.ArgumentError(None, message)


def main(line: list[str]) -> None:
    """Print what SGLang's parser has against the arguments, as JSON."""
    if not torch.cuda.is_available():
        cpu_stand_ins.install()
    from sglang.srt.server_args import ServerArgs

    parser = _Parser(add_help=False, allow_abbrev=False)
    ServerArgs.add_cli_args(parser)
    known = sorted(option for action in parser._actions for option in action.option_strings)
    error = ""
    unknown: list[str] = []
    try:
        _, unknown = parser.parse_known_args(["--model-path", "none", *line])
    except argparse.ArgumentError as refused:
        error = str(refused)
    print(json.dumps({"problem": explain(error, unknown, known)}))


if __name__ == "__main__":
    main(sys.argv[1:])
