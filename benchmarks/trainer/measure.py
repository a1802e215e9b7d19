"""Clocks and peaks of memory, on CUDA and on the CPU."""

from __future__ import annotations

import gc
import statistics
import threading
import time
from collections.abc import Callable

import psutil
import torch


def settle() -> None:
    """Collect what is garbage, and wait for the device."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
        torch.cuda.empty_cache()


def seconds(action: Callable[[], object]) -> float:
    """Wall time until the device is done."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    begin = time.perf_counter()
    action()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - begin


STEPS = 3


def consecutive_seconds(action: Callable[[], object]) -> list[float]:
    """Of a few in a row, as in training, after one that meets what was run before it in the caches."""
    return [wall for wall, _ in consecutive_times(action)]


def consecutive_times(action: Callable[[], object]) -> list[tuple[float, float]]:
    """Likewise, with the CPU time of the process: on a machine that others load, it says more than the wall time."""
    action()
    found = []
    for _ in range(STEPS):
        begin = time.process_time()
        wall = seconds(action)
        found.append((wall, time.process_time() - begin))
    return found


def median_seconds(action: Callable[[], object], repeats: int, warmup: int = 2) -> float:
    for _ in range(warmup):
        action()
    return statistics.median(seconds(action) for _ in range(repeats))


def in_use() -> int:
    """Bytes that are taken now: of the device, with what CUDA graphs keep for their next replay, or the resident size
    of the process."""
    settle()
    return torch.cuda.memory_reserved() if torch.cuda.is_available() else psutil.Process().memory_info().rss


def peak_bytes(action: Callable[[], object]) -> int:
    """Most memory in use during ``action`` beyond what was in use before it.

    On CUDA what the allocator handed out; on the CPU the process's resident size, sampled, which misses what is
    shorter than a millisecond and counts what the allocator kept from before as free: a rough floor.
    """
    settle()
    if torch.cuda.is_available():
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        action()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before
    process, stop = psutil.Process(), threading.Event()
    before = peak = process.memory_info().rss

    def sample() -> None:
        nonlocal peak
        while not stop.wait(0.001):
            peak = max(peak, process.memory_info().rss)

    sampler = threading.Thread(target=sample)
    sampler.start()
    try:
        action()
    finally:
        stop.set()
        sampler.join()
    return peak - before


def matmul_flops(size: int, dtype: torch.dtype, device: str) -> float:
    """Multiply-adds, twice, a second of a square matrix product of random numbers: the ceiling for the MFU."""
    a, b = torch.randn(2, size, size, dtype=dtype, device=device)
    return 2.0 * size**3 / median_seconds(lambda: a @ b, 10, 3)
