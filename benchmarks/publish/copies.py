"""What a device can do: plain copies of a model's tensors, in this process alone."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.publish.models import Weights

REPEATS = 7


def copy_speed(weights: Weights, device: str) -> dict[str, Any]:
    """Tensor by tensor, many tensors a kernel, and all in one piece; medians."""
    nbytes = sum(tensor.nbytes for tensor in weights.values())
    sources = list(weights.values())
    targets = [torch.empty_like(tensor) for tensor in sources]

    def each() -> None:
        for target, source in zip(targets, sources, strict=True):
            target.copy_(source)

    row = {"one_by_one": _timed(each, nbytes, device)}
    row["batched"] = _timed(lambda: torch._foreach_copy_(targets, sources), nbytes, device)
    targets.clear()
    if torch.device(device).type == "cuda":
        torch.cuda.empty_cache()
    flat = torch.zeros(nbytes, dtype=torch.uint8, device=device)
    other = torch.empty_like(flat)
    row["in_one_piece"] = _timed(lambda: other.copy_(flat), nbytes, device)
    del flat, other
    if torch.device(device).type == "cuda":
        torch.cuda.empty_cache()
    return row


def _timed(copy: Callable[[], object], nbytes: int, device: str) -> dict[str, float]:
    times = []
    for _ in range(REPEATS + 1):
        _synchronize(device)
        begin = time.perf_counter()
        copy()
        _synchronize(device)
        times.append(time.perf_counter() - begin)
    seconds = statistics.median(times[1:])
    return {"seconds": round(seconds, 6), "gb_per_s": round(nbytes / seconds / 1e9, 2)}


def _synchronize(device: str) -> None:
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize(device)
