"""The reward curve of a run as a picture."""

from __future__ import annotations

import json
from pathlib import Path


def plot_rewards(metrics: Path, picture: Path) -> None:
    """Reward by step, a line a task, with the evaluations as points."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows = [json.loads(line) for line in metrics.read_text().splitlines()]
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
