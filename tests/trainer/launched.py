"""Ranks in processes of their own, for tests that share one start of them."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from rollout.processes import free_port

RANKS = 2


def run_ranks(module: str, cases: Iterable[str], models: Path, output: Path, timeout_s: float) -> dict[str, Any]:
    """What rank 0 found in each case: ``python -m MODULE RANK PORTS MODELS OUTPUT`` leaves it in ``OUTPUT/CASE.pt``.

    Args:
        cases: in the order in which the ranks run them; each has a port.
    """
    cases = list(cases)
    ports = ",".join(str(free_port()) for _ in cases)
    command = [sys.executable, "-W", "ignore", "-m", module]
    logs = [(output / f"{rank}.log").open("w") for rank in range(RANKS)]
    processes = [
        subprocess.Popen([*command, str(rank), ports, str(models), str(output)], stdout=log, stderr=subprocess.STDOUT)
        for rank, log in enumerate(logs)
    ]
    try:
        deadline = time.monotonic() + timeout_s
        while (codes := [process.poll() for process in processes]) != [0] * RANKS:
            assert time.monotonic() < deadline, "the ranks take too long"
            if any(codes):  # the others wait in vain
                break
            time.sleep(0.2)
    finally:
        for process, opened in zip(processes, logs, strict=True):
            process.kill()
            opened.close()
    said = "".join((output / f"{rank}.log").read_text()[-3000:] for rank in range(RANKS))
    assert codes == [0] * RANKS, said
    return {name: torch.load(output / f"{name}.pt", weights_only=False) for name in cases}
