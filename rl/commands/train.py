"""``atelier train``, which is ``python train.py``: compose the config, check it, run the stage."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
from collections.abc import Coroutine, Sequence
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.markup import escape

from rl.commands.exits import EXIT_BAD_CONFIG, EXIT_FAILED, EXIT_INTERRUPTED
from rl.compose import compose_config
from rl.config import STAGES, ConfigError, check
from rl.signals import cancel_on_signals

if TYPE_CHECKING:
    from rl.preflight import Plan
    from rl.run_folder import RunFolder

SUMMARY = "run a stage (as python train.py)"
OPTIONS = ("--cfg", "--check")
USAGE = f"""usage: python train.py +stage=NAME [key=value ...] [--cfg | --check]

stages: {", ".join(STAGES)}
  --cfg    print the whole composed config and stop
  --check  check all that is checked before a run starts anything, say what the run would be, and stop
Keys are those of configs/*.yaml (Hydra): run_dir=runs/mine seed=1 task=[calculator,sorting] algorithm=grpo ..."""


def main(arguments: Sequence[str]) -> int:
    """Compose, check, run; returns the exit code. Bad input costs seconds and starts nothing."""
    if "-h" in arguments or "--help" in arguments:
        print(USAGE)
        return 0
    console = Console(highlight=False)
    errors = Console(stderr=True, highlight=False)
    try:
        composed = compose_config([argument for argument in arguments if argument not in OPTIONS])
        config = check(composed)
        if "--cfg" in arguments:
            import yaml

            print(yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False))
            return 0
        from rl.preflight import check_run  # the imports from here on take seconds
        from rl.runner import prepare_config

        plan = check_run(prepare_config(config))
        if "--check" in arguments:
            from rl.outline import outline

            lines = dict(outline(plan))
            for name, value in lines.items():
                console.print(f"{name:{max(map(len, lines)) + 2}}{value}", markup=False, soft_wrap=True)
            return 0
    except ConfigError as error:
        errors.print(f"[bold red]config error:[/] {escape(str(error))}", soft_wrap=True)
        return EXIT_BAD_CONFIG
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    return _run(plan, console, errors)


def _run(plan: Plan, console: Console, errors: Console) -> int:
    from rl.runner import run_stage

    try:
        summary = asyncio.run(_until_signalled(run_stage(plan, console)))
    except ConfigError as error:
        errors.print(f"[bold red]config error:[/] {escape(str(error))}", soft_wrap=True)
        return EXIT_BAD_CONFIG
    except (KeyboardInterrupt, asyncio.CancelledError):
        errors.print(f"interrupted; {_how_to_go_on(plan.folder)}", markup=False, soft_wrap=True)
        return EXIT_INTERRUPTED
    except Exception as error:
        logging.getLogger(__name__).debug("the run failed", exc_info=True)
        errors.print_exception() if not _is_plain(error) else None
        errors.print(f"[bold red]run failed:[/] {escape(_said(error, plan.folder))}", soft_wrap=True)
        errors.print(_how_to_go_on(plan.folder), markup=False, soft_wrap=True)
        return EXIT_FAILED
    _report(summary, console)
    return 0


def _how_to_go_on(folder: RunFolder) -> str:
    checkpoint = folder.newest_checkpoint()
    if checkpoint is None:
        return f"no checkpoint was saved yet: resume=auto run_dir={folder.path} begins the run anew"
    return f"go on with resume=auto run_dir={folder.path}, after {checkpoint.name}"


def _said(error: Exception, folder: RunFolder) -> str:
    if not _is_full(error):
        return str(error)
    where = error.filename if isinstance(error, OSError) and error.filename else folder.path
    return f"no space left where {where} is; make some, or lower checkpoint.keep"


def _is_full(error: Exception) -> bool:
    """Of a disk or a quota; safetensors has an error of its own that says so in its text alone."""
    numbers = (errno.ENOSPC, errno.EDQUOT)
    return (isinstance(error, OSError) and error.errno in numbers) or any(
        os.strerror(number) in str(error) for number in numbers
    )


def _is_plain(error: Exception) -> bool:
    """Errors whose message says all: no traceback is needed."""
    from rl.trainer.group import TrainerGroupError
    from rl.trainer.manifest import CheckpointError
    from rl.trainer.result import NonFiniteUpdateError
    from rl.weights.publisher import PublishError
    from rollout.engine.protocol import EngineError
    from rollout.episode import RolloutsFailed
    from rollout.processes import ProcessError
    from rollout.task_client import TaskServerError
    from teachers.errors import TeacherError

    if _is_full(error):
        return True
    rollouts = EngineError | ProcessError | TaskServerError | RolloutsFailed | PublishError
    return isinstance(error, rollouts | TeacherError | TrainerGroupError | CheckpointError | NonFiniteUpdateError)


async def _until_signalled(work: Coroutine[Any, Any, dict[str, Any]]) -> dict[str, Any]:
    cancel_on_signals()
    return await work


def _report(summary: dict[str, Any], console: Console) -> None:
    console.print(f"done in {summary['seconds']:.0f} s: {summary['model']}")
    for task, after in summary["reward_after"].items():
        before = summary["reward_before"][task]
        parts = [f"{name} {before[name]:.2f} -> {after[name]:.2f}" for name in after]
        console.print(f"  {task}: reward {', '.join(parts)}")
