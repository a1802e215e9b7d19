"""Speed and memory of the trainer: ``python -m benchmarks.trainer [--json FILE] [--device cpu|cuda] [--profile]``.

One process, one device: an update by ours, by Hugging Face with torch's AdamW, and by trl's GRPO trainer, on the same
batches in turn; the output head against the naive one; and our own options against each other. On CUDA in bfloat16,
with the MFU (see ``Shape.flops``) against a large matrix product measured in the same run. Each section's result is
written when it is done; a section that fails leaves its error there, and the next one runs.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from rl.trainer import platform

platform.install()

# ruff: noqa: E402  (Megatron needs the platform installed first)
from benchmarks.trainer import sides
from benchmarks.trainer.head import head_section
from benchmarks.trainer.measure import (
    consecutive_seconds,
    consecutive_times,
    in_use,
    matmul_flops,
    peak_bytes,
    seconds,
    settle,
)
from benchmarks.trainer.shapes import Shape, shapes, write_model

BASELINE_MFU = 0.176
"""Of the same model code with nothing fused, on one H200 (185M parameters, 8,192 tokens)."""
BAR_TRL, BAR_HF, BAR_MFU = 1.3, 1.0, 1.5 * BASELINE_MFU
BAR_HEAD_MEMORY, BAR_HEAD_TIME = 0.25, 1.7
WARMUP = 3
GAPS = 15
Started = tuple[sides.Step, dict[str, float]]
"""A side's step, and what its first one gave."""
PROFILED = 2
"""Shapes, from the first on, that the head comes after and that ``--profile`` looks into."""


class Report:
    """Sections by name, on disk after each."""

    def __init__(self, path: Path | None, deadline: float, only: str) -> None:
        self.path, self.deadline, self.only = path, deadline, only
        self.sections: dict[str, Any] = {}

    def run(self, name: str, section: Callable[[], Any]) -> None:
        begin = time.monotonic()
        if name != "machine" and self.only not in name:
            return
        if begin > self.deadline:
            self.sections[name] = {"skipped": "out of time"}
        else:
            try:
                self.sections[name] = section()
            except Exception:  # noqa: BLE001  (it is written down, and the other sections run)
                self.sections[name] = {"error": traceback.format_exc()}
            if isinstance(self.sections[name], dict):
                self.sections[name]["section_seconds"] = round(time.monotonic() - begin, 1)
        settle()
        print(f"== {name}\n{json.dumps(self.sections[name], indent=1)}", flush=True)
        if self.path is not None:
            self.path.write_text(json.dumps(self.sections, indent=1) + "\n")


def _step_section(shape: Shape, worker: sides.TrainerWorker, device: str, peak_flops: float | None) -> dict[str, Any]:
    """Times of the sides' steps, taken in turn; the memory that each adds, its weights and optimizer included."""
    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder) / "model"
        write_model(shape, directory, torch.bfloat16 if device == "cuda" else torch.float32, device)
        makers: dict[str, Callable[[], Started]] = {
            "ours": lambda: _first_that_runs(worker, shape, directory),
            "hf": lambda: _started(sides.hugging_face(shape, directory, device)),
            "trl": lambda: _started(sides.trl(shape, directory, device, checkpointing=False)),
            "trl, default": lambda: _started(sides.trl(shape, directory, device, checkpointing=True)),
        }
        result: dict[str, Any] = {"tokens": shape.tokens, "scored": shape.scored, "flops": shape.flops(), "sides": {}}
        steps: dict[str, sides.Step] = {}
        worker._loaded = None  # or the last shape's model would count as this one's memory
        for name, make in makers.items():
            side = result["sides"][name] = {}
            try:
                begin, before = time.perf_counter(), in_use()
                steps[name], side["first_step"] = make()
                for _ in range(WARMUP):
                    steps[name]()
                side["step_bytes"] = peak_bytes(steps[name])
                side["resident_bytes"] = in_use() - before
                side["peak_bytes"] = side["resident_bytes"] + side["step_bytes"]
                side["warmup_seconds"] = round(time.perf_counter() - begin, 1)
            except Exception:  # noqa: BLE001  (as above)
                steps.pop(name, None)
                side["error"] = traceback.format_exc()
        times: dict[str, list[tuple[float, float]]] = {name: [] for name in steps}
        for _ in range(shape.repeats):
            for name, step in steps.items():
                times[name] += consecutive_times(step)
        for name, taken in times.items():
            wall, cpu = zip(*taken, strict=True)
            side, median = result["sides"][name], statistics.median(wall)
            side |= {"seconds": median, "fastest": min(wall), "tokens_per_second": shape.tokens / median}
            side["cpu_seconds"] = statistics.median(cpu)
            if peak_flops:
                side["mfu"] = shape.flops() / median / peak_flops
        _compare(result)
        return result


def _started(step: sides.Step) -> Started:
    return step, step()


def _first_that_runs(worker: sides.TrainerWorker, shape: Shape, directory: Path) -> Started:
    """Of a shape's variants; what was wrong with those before it is printed."""
    for variant in shape.variants[:-1]:
        try:
            return _started(sides.ours(worker, shape, directory, variant))
        except Exception:  # noqa: BLE001  (the next one is tried)
            print(f"{shape.name}, {variant.name}:\n{traceback.format_exc()}", flush=True)
    return _started(sides.ours(worker, shape, directory, shape.variants[-1]))


def _compare(result: dict[str, Any]) -> None:
    for ratio, what in (("speedup", "seconds"), ("cpu_speedup", "cpu_seconds")):
        taken = {name: side[what] for name, side in result["sides"].items() if what in side}
        if "ours" in taken:
            result[ratio] = {name: value / taken["ours"] for name, value in taken.items() if name != "ours"}


def _variants(shape: Shape, worker: sides.TrainerWorker, device: str, peak_flops: float | None) -> dict[str, Any]:
    """Our options against each other, one after the other."""
    result: dict[str, Any] = {"variants": {}}
    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder) / "model"
        write_model(shape, directory, torch.bfloat16 if device == "cuda" else torch.float32, device)
        for variant in shape.variants:
            found = result["variants"][variant.name] = {}
            try:
                begin = time.perf_counter()
                step = sides.ours(worker, shape, directory, variant)
                for _ in range(WARMUP):
                    found["warmed_up"] = step()
                found["warmup_seconds"] = round(time.perf_counter() - begin, 1)
                found["seconds"] = statistics.median(t for _ in range(shape.repeats) for t in consecutive_seconds(step))
                if peak_flops:
                    found["mfu"] = shape.flops() / found["seconds"] / peak_flops
            except Exception:  # noqa: BLE001  (as above)
                found["error"] = traceback.format_exc()
    return result


def _profile(shape: Shape, worker: sides.TrainerWorker, device: str) -> dict[str, Any]:
    """Where our step's time goes: its phases, how long the device is busy, and the most expensive operations."""
    with tempfile.TemporaryDirectory() as folder:
        write_model(shape, Path(folder) / "model", torch.bfloat16 if device == "cuda" else torch.float32, device)
        step, _ = _first_that_runs(worker, shape, Path(folder) / "model")
        for _ in range(WARMUP):
            step()
        phases = dict(worker.update(sides.trajectories(shape), 0, sides.objective()).seconds)
        found: dict[str, Any] = {"phases": phases, "seconds": seconds(step)}
        with torch.profiler.profile() as profiler:
            found["profiled_seconds"] = seconds(step)
        averages = profiler.key_averages()
        orders = ["self_cpu_time_total"]
        if device == "cuda":
            orders.insert(0, "self_device_time_total")
            on_device = torch.autograd.DeviceType.CUDA
            kernels = [e for e in averages if e.device_type == on_device and not e.is_user_annotation]
            found["device_seconds"] = sum(event.self_device_time_total for event in kernels) / 1e6
            found["kernels"] = sum(event.count for event in kernels)
            found["gaps"] = _gaps(
                [e for e in profiler.events() if e.device_type == on_device and not e.is_user_annotation]
            )
        tables = {order: averages.table(sort_by=order, row_limit=30, max_name_column_width=70) for order in orders}
        return found | {name: table.splitlines() for name, table in tables.items()}


def _gaps(events: list[Any]) -> list[str]:
    """The longest times in which the device did nothing, and what it did before and after; in order of time."""
    ordered = sorted(events, key=lambda event: event.time_range.start)
    gaps, end = [], ordered[0].time_range.start if ordered else 0.0
    for before, event in itertools.pairwise(ordered):
        end = max(end, before.time_range.end)
        gaps.append((event.time_range.start - end, event.time_range.start, before.name[:50], event.name[:50]))
    longest = sorted(sorted(gaps)[-GAPS:], key=lambda gap: gap[1])
    start = ordered[0].time_range.start if ordered else 0.0
    return [f"{gap:7.0f} us at {(at - start) / 1000:6.1f} ms, {a} .. {b}" for gap, at, a, b in longest]


def _summary(report: Report) -> list[str]:
    lines = []
    for name, section in report.sections.items():
        if not isinstance(section, dict):
            continue
        if "speedup" in section:
            faster = ", ".join(f"{side} ×{ratio:.2f}" for side, ratio in section["speedup"].items())
            faster += "; in CPU time " + ", ".join(f"×{ratio:.2f}" for ratio in section["cpu_speedup"].values())
            mine = section["sides"]["ours"]
            mfu = f", MFU {mine['mfu']:.1%} (bar {BAR_MFU:.1%})" if "mfu" in mine else ""
            lines.append(f"{name}: {mine['tokens_per_second']:,.0f} tokens/s{mfu}; faster than {faster}")
        for chunk, found in section.get("chunks", {}).items():
            line = f"{name}, chunk {chunk}: time {found['seconds_over_bare']:.2f}× bare (bar {BAR_HEAD_TIME})"
            if "peak_over_naive" in found:
                line += f", memory {found['peak_over_naive']:.3f}× naive (bar {BAR_HEAD_MEMORY})"
            lines.append(line)
        for variant, found in section.get("variants", {}).items():
            outcome = found["error"].splitlines()[-1] if "error" in found else f"{found['seconds'] * 1000:.1f} ms"
            outcome += f", MFU {found['mfu']:.1%}" if "mfu" in found else ""
            lines.append(f"{name}, {variant}: {outcome}")
        if "phases" in section:
            phases = ", ".join(f"{phase} {1000 * taken:.1f}" for phase, taken in section["phases"].items())
            lines.append(f"{name}: ms a phase: {phases}")
        if "device_seconds" in section:
            busy, whole = section["device_seconds"], section["seconds"]
            lines.append(
                f"{name}: device busy {busy * 1000:.1f} of {whole * 1000:.1f} ms, {section['kernels']} kernels"
            )
        if "error" in section or "skipped" in section:
            lines.append(f"{name}: {section.get('skipped') or section['error'].splitlines()[-1]}")
    lines.append(f"bars: ours over trl ×{BAR_TRL} on CUDA, over hf ×{BAR_HF} on the CPU")
    return lines


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.trainer", description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--budget", type=float, default=225.0, help="seconds after which no section begins")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="PyTorch's, on the CPU")
    parser.add_argument("--only", default="", help="sections whose names contain it, and what the machine is")
    parser.add_argument("--profile", action="store_true", help="add the profiler's tables for the first shapes")
    options = parser.parse_args(arguments)
    device, cuda = options.device, options.device == "cuda"
    if cuda != torch.cuda.is_available():
        parser.error(f"--device {device}, but CUDA is {'not ' if cuda else ''}available")
    report = Report(options.json, time.monotonic() + options.budget, options.only)
    peak = None
    report.run("machine", lambda: _machine(device))
    if cuda and "matmul_flops" in report.sections["machine"]:
        peak = report.sections["machine"]["matmul_flops"]
    worker = sides.make_worker(device, options.threads)
    try:
        _run_sections(report, worker, device, peak, options.profile)
    finally:
        worker.close()
    print("\n".join(_summary(report)), flush=True)
    return 0


def _run_sections(report: Report, worker: sides.TrainerWorker, device: str, peak: float | None, profile: bool) -> None:
    """What the bars ask for first, then what explains it, then the rest."""
    cuda, made = device == "cuda", shapes(device)
    heads = [(8192, 2048, 151_936), (8192, 4096, 151_936)] if cuda else [(512, 256, 8192)]
    dtype = torch.bfloat16 if cuda else torch.float32

    def compare(shape: Shape) -> None:
        report.run(shape.name, lambda: _step_section(shape, worker, device, peak))

    for shape in made[:PROFILED]:
        compare(shape)
    for tokens, hidden, vocab in heads:
        name = f"head, hidden {hidden}"
        report.run(name, lambda t=tokens, h=hidden, v=vocab: head_section(t, h, v, dtype, device))
    for shape in made[:PROFILED]:
        if profile:
            report.run(f"profile, {shape.name}", lambda shape=shape: _profile(shape, worker, device))
    for shape in made[:PROFILED]:
        if len(shape.variants) > 1:
            report.run(f"variants, {shape.name}", lambda shape=shape: _variants(shape, worker, device, peak))
    for shape in made[PROFILED:]:
        compare(shape)


def _machine(device: str) -> dict[str, Any]:
    found: dict[str, Any] = {"torch": torch.__version__, "python": sys.version.split()[0]}
    if device == "cuda":
        found |= {
            "name": torch.cuda.get_device_name(),
            "matmul_flops": matmul_flops(8192, torch.bfloat16, device),
        }
    return found


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
