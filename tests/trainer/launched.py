"""Ranks in processes of their own, for tests that share one start of them.

PyTorch and Megatron take seconds to import: one process does that, and the ranks are its forks.
"""

from __future__ import annotations

import multiprocessing
import os
import time
import warnings
from collections.abc import Callable, Iterable
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch

from rollout.processes import free_port

# A fork of a process that has looked for a GPU could not use it.
_PROCESSES = multiprocessing.get_context("spawn" if torch.cuda.is_available() else "forkserver")
_PROCESSES.set_forkserver_preload(["rl.trainer.worker", "tests.trainer.common"])

Main = Callable[[int, int, list[int], Path, Path], None]
"""What a rank does: ``main(rank, world, ports, models, output)`` leaves what rank 0 found in ``output/CASE.pt``."""


def run_ranks(
    main: Main,
    cases: Iterable[str],
    models: Path,
    output: Path,
    timeout_s: float,
    world: int = 2,
    extra_ports: int = 0,
    ends_with: int = 0,
) -> dict[str, Any]:
    """What rank 0 found in each case.

    Args:
        main: a function of a module, which the ranks import.
        cases: in the order in which the ranks run them; each has a port.
        extra_ports: for what the ranks do after the cases.
        ends_with: exit code of every rank.
    """
    cases = list(cases)
    arguments = (world, [free_port() for _ in range(len(cases) + extra_ports)], models, output)
    logs = [output / f"{rank}.log" for rank in range(world)]
    ranks = [start(log, main, rank, *arguments) for rank, log in enumerate(logs)]
    try:
        deadline = time.monotonic() + timeout_s
        while (codes := [rank.exitcode for rank in ranks]) != [ends_with] * world:
            assert time.monotonic() < deadline, "the ranks take too long"
            if any(code not in (None, ends_with) for code in codes):  # the others wait in vain
                break
            time.sleep(0.05)
    finally:
        for rank in ranks:
            rank.kill()
            rank.join()
    assert codes == [ends_with] * world, "".join(log.read_text()[-3000:] for log in logs if log.exists())
    return {name: torch.load(output / f"{name}.pt", weights_only=False) for name in cases}


def start(log: Path, function: Callable[..., object], *arguments: Any) -> BaseProcess:
    """Call a function of a module in a process of its own, which ends with the caller's; ``log`` gets what it says.

    Its exit code is 0, or that of a ``SystemExit``, or the signal's that killed it, below 0.
    """
    process = _PROCESSES.Process(target=_call, args=(log, function, arguments), daemon=True)
    process.start()
    return process


def _call(log: Path, function: Callable[..., object], arguments: tuple[Any, ...]) -> None:
    with log.open("w") as opened:
        for stream in (1, 2):
            os.dup2(opened.fileno(), stream)
    warnings.simplefilter("ignore")
    function(*arguments)
