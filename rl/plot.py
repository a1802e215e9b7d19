"""Reward curves as pictures."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")  # no screen is needed
from matplotlib import pyplot

SMOOTHING = 5
"""Steps that a comparison's curves are averaged over."""


def _rows(metrics: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in metrics.read_text().splitlines()]


def compare_runs(runs: Sequence[Path], picture: Path) -> None:
    """Training rewards of several runs side by side, a panel a task, a line a run (named after its folder)."""
    curves = {run.name: [row for row in _rows(run / "metrics.jsonl") if row["phase"] == "rl"] for run in runs}
    tasks = sorted({key for rows in curves.values() for row in rows for key in row if key.startswith("reward/")})
    figure, panels = pyplot.subplots(1, len(tasks), figsize=(5 * len(tasks), 3.8), dpi=120, sharey=True, squeeze=False)
    for axes, task in zip(panels[0], tasks, strict=True):
        for name, rows in curves.items():
            points = [(row["step"], row[task]) for row in rows if task in row]
            smooth = [
                sum(reward for _, reward in points[max(0, i - SMOOTHING + 1) : i + 1]) / min(i + 1, SMOOTHING)
                for i in range(len(points))
            ]
            axes.plot([step for step, _ in points], smooth, label=name)
        axes.set_title(task.removeprefix("reward/"))
        axes.set_xlabel("step (weight updates)")
        axes.set_ylim(0, 1.03)
        axes.grid(alpha=0.3)
    panels[0][0].set_ylabel(f"mean reward of training batches ({SMOOTHING}-step mean)")
    panels[0][-1].legend(loc="lower right", fontsize=8)
    figure.tight_layout()
    figure.savefig(picture)
    pyplot.close(figure)


def plot_rewards(metrics: Path, picture: Path) -> None:
    """Reward by step of one run, a line a task, with the evaluations as points."""
    rows = _rows(metrics)
    training = [row for row in rows if row["phase"] == "rl"]
    evaluations = [row for row in rows if row["phase"] == "eval"]
    tasks = sorted({key.partition("/")[2] for row in training for key in row if key.startswith("reward/")})
    figure, axes = pyplot.subplots(figsize=(7, 4), dpi=120)
    for index, task in enumerate(tasks):
        color = f"C{index}"
        points = [(row["step"], row[f"reward/{task}"]) for row in training if f"reward/{task}" in row]
        axes.plot([p[0] for p in points], [p[1] for p in points], color=color, label=f"{task}: training batches")
        for name, marker in (("sampled", "o"), ("greedy", "*")):
            marks = [(row["step"], row[f"{task}/{name}"]) for row in evaluations if f"{task}/{name}" in row]
            axes.plot(
                [m[0] for m in marks], [m[1] for m in marks], marker, color=color, label=f"{task}: held out, {name}"
            )
    axes.set_xlabel("step (weight updates)")
    axes.set_ylabel("mean reward")
    axes.set_ylim(0, 1.03)
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right", fontsize=8)
    figure.tight_layout()
    figure.savefig(picture)
    pyplot.close(figure)
