"""What the benchmark is told, and the schedule that follows from it."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

import psutil
import torch

from benchmarks.engine.checkpoint import ModelSizes
from benchmarks.engine.servers import Side

SECTIONS = ("probe", "kernels", "steady", "agentic")
IDLE_GPU = ("probe", "kernels")
"""That want CUDA, and no server."""
PREFILL_TOKENS_PER_S = 80_000.0
"""For the plan alone: a guess for the default model on one H200."""
START_S, COLD_START_S = 110, 260
AGENTIC_CONTEXT = 11_000
"""Tokens of a session, on average."""


@dataclass(frozen=True)
class Memory:
    gpu_bytes: int
    host_bytes: int

    @classmethod
    def here(cls) -> Memory:
        """What servers may fill of this machine, or, to plan without a GPU, of one with an H200 and 128 GiB."""
        if not torch.cuda.is_available():
            return cls(gpu_bytes=130 * 10**9, host_bytes=100 * 10**9)
        gpu_bytes = torch.cuda.get_device_properties(0).total_memory
        return cls(gpu_bytes=gpu_bytes * 9 // 10, host_bytes=psutil.virtual_memory().available * 3 // 4)


def parser() -> argparse.ArgumentParser:
    found = argparse.ArgumentParser(prog="python -m benchmarks.engine", description=__doc__)
    add = found.add_argument
    add("--json", type=Path, required=True, help="a JSON line for each point, appended as it is measured")
    add("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    add("--work", type=Path, default=Path("/tmp/engine-benchmark"), help="checkpoints, logs")
    add("--plan", action="store_true", help="print the schedule and the pools, and stop")
    add("--sections", type=_words, default=["probe", "steady", "agentic"], help=f"of {','.join(SECTIONS)}")
    add("--sides", type=_words, default=list(get_args(Side)), help="plain,hisparse,hicache; hicache is agentic only")
    add("--concurrency", type=_integers, help="of the steady section (cuda: 8 to 256)")
    add("--localities", type=_floats, default=[0.95, 0.99, 0.8, 0.5], help="the sweep's, then those at the highest")
    add("--prompt", type=int, help="tokens (cuda: 28,672)")
    add("--growth", type=int, default=3072, help="mean tokens that a request generates, for the pools' size")
    add("--buffer", type=int, default=2048, help="HiSparse's device buffer; 2,048 is the top k")
    add("--window", type=float, default=4.0, help="seconds that a steady point is measured")
    add("--agentic-concurrency", type=_integers, help="sessions (cuda: 32,128)")
    add("--agentic-window", type=float, default=15.0, help="seconds that an agentic point is measured")
    add("--price", type=float, default=3.5, help="US dollars a GPU hour, for the cost")
    add("--layers", type=int, default=ModelSizes.layers)
    add("--experts", type=int, default=ModelSizes.experts)
    add("--expert-size", type=int, default=ModelSizes.expert_size)
    add("--default-tiles", action="store_true", help="leave the experts' kernel to SGLang's rule of thumb")
    add("--start-timeout", type=float, default=330.0)
    add("--budget", type=float, default=520.0, help="seconds after which nothing new is begun")
    add("--jit-cache", type=Path, help="pack the compiled kernels' caches to this file once the servers are warm")
    return found


def parse(arguments: list[str]) -> argparse.Namespace:
    """Ends the process with an error that names the option where one is wrong."""
    options = parser().parse_args(arguments)
    cuda = options.device == "cuda"
    options.concurrency = options.concurrency or ([8, 16, 32, 64, 128, 256] if cuda else [1, 2, 4])
    options.agentic_concurrency = options.agentic_concurrency or ([32, 128] if cuda else [2])
    options.prompt = options.prompt or (28_672 if cuda else 64)
    for name, known in (("sections", SECTIONS), ("sides", get_args(Side))):
        unknown = set(getattr(options, name)) - set(known)
        if unknown:
            parser().error(f"--{name}: {sorted(unknown)} not among {known}")
    if sorted(options.concurrency) != options.concurrency:
        parser().error(f"--concurrency: {options.concurrency} must grow")
    if not cuda:
        options.sides = ["plain"]
        options.sections = [section for section in options.sections if section not in IDLE_GPU]
    return options


def together(sides: Sequence[Side], each: Memory, device: Memory) -> list[list[Side]]:
    """The sides in groups whose servers fit on the device at once, so that they start side by side; in their order, as
    few groups as that allows. One that does not fit by itself is left to fail with SGLang's own words.

    Args:
        each: what a server takes.
        device: what there is.
    """
    room = max(1, min(device.gpu_bytes // each.gpu_bytes, device.host_bytes // max(1, each.host_bytes)))
    return [list(sides[first : first + room]) for first in range(0, len(sides), room)]


def schedule(
    options: argparse.Namespace, groups: Sequence[Sequence[Side]], plain_requests: int, cold: bool
) -> list[tuple[str, float]]:
    """(What, estimated seconds)."""
    steps: list[tuple[str, float]] = [("checkpoint and localities", 12)]
    start = COLD_START_S if cold else START_S
    if "probe" in options.sections:
        steps.append(("probe", 6))
    if "kernels" in options.sections:
        steps.append(("kernels", 60 if cold else 30))
    for sides in groups:
        steps += [(f"start {', '.join(sides)}, side by side", start), ("first requests", 8)]
        if "steady" in options.sections:
            steps += [_steady_step(options, side, plain_requests) for side in sides if side != "hicache"]
        if "agentic" in options.sections:
            warm = sum(options.agentic_concurrency) * AGENTIC_CONTEXT / PREFILL_TOKENS_PER_S
            each = warm + len(options.agentic_concurrency) * (options.agentic_window + 2)
            steps += [(f"agentic, {side}", each) for side in sides]
    return steps


def _steady_step(options: argparse.Namespace, side: Side, plain_requests: int) -> tuple[str, float]:
    most = options.concurrency[-1] if side == "hisparse" else min(plain_requests, options.concurrency[-1])
    points, point = sum(count <= 2 * most for count in options.concurrency), options.window + 3
    seconds = most * options.prompt / PREFILL_TOKENS_PER_S + points * point
    seconds += (len(options.localities) - 1) * (point + 4) if side == "hisparse" else 0
    return f"steady, {side}: {most} prompts, {points} points", seconds


def _words(text: str) -> list[str]:
    return [word for word in text.split(",") if word]


def _integers(text: str) -> list[int]:
    return [int(word) for word in _words(text)]


def _floats(text: str) -> list[float]:
    return [float(word) for word in _words(text)]
