"""What the benchmark is told, and the schedule that follows from it."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import get_args

import torch

from benchmarks.engine.checkpoint import ModelSizes
from benchmarks.engine.servers import Side

SECTIONS = ("probe", "kernels", "steady", "agentic")
IDLE_GPU = ("probe", "kernels")
"""That want CUDA, and no server."""
PREFILL_TOKENS_PER_S = 80_000.0
"""For the plan alone: a guess for the default model on one H200."""
START_S, COLD_START_S = 110, 260


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


def schedule(options: argparse.Namespace, plain_requests: int, cold: bool) -> list[tuple[str, float]]:
    """(What, estimated seconds)."""
    steps: list[tuple[str, float]] = [("checkpoint and localities", 12)]
    start = COLD_START_S if cold else START_S
    first = [side for side in options.sides if side != "hicache"]
    if "probe" in options.sections:
        steps.append(("probe", 6))
    if "kernels" in options.sections:
        steps.append(("kernels", 60 if cold else 30))
    if first and {"steady", "agentic"} & set(options.sections):
        steps += [(f"start {' and '.join(first)}, side by side", start), ("first requests", 8)]
    point = options.window + 3
    if "steady" in options.sections:
        for side in first:
            most = options.concurrency[-1] if side == "hisparse" else min(plain_requests, options.concurrency[-1])
            points = sum(count <= 2 * most for count in options.concurrency)
            seconds = most * options.prompt / PREFILL_TOKENS_PER_S + points * point
            seconds += (len(options.localities) - 1) * (point + 4) if side == "hisparse" else 0
            steps.append((f"steady, {side}: {most} prompts, {points} points", seconds))
    if "agentic" in options.sections:
        each = len(options.agentic_concurrency) * (options.agentic_window + 6)
        steps += [(f"agentic, {side}", each) for side in first]
        if "hicache" in options.sides:
            steps += [("start hicache", START_S), ("agentic, hicache", each)]
    return steps


def _words(text: str) -> list[str]:
    return [word for word in text.split(",") if word]


def _integers(text: str) -> list[int]:
    return [int(word) for word in _words(text)]


def _floats(text: str) -> list[float]:
    return [float(word) for word in _words(text)]
