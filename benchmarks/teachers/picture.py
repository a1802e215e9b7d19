"""The timeline of one batch as a picture."""

from __future__ import annotations

from pathlib import Path
from typing import Any

LANES = {
    "read": "disk → pinned",
    "demote": "device → pinned",
    "copy": "pinned → device",
    "wait": "waiting",
    "lease": "scoring",
}


def draw(results: dict[str, Any], ratio: str, path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    batch = results["ratios"][ratio]["timeline"]
    figure, axes = pyplot.subplots(figsize=(9, 2.9), dpi=120)
    for kind, teacher, start, stop in batch:
        lane = list(LANES).index(kind)
        number = int(teacher.removeprefix("teacher"))
        color = "crimson" if kind == "wait" else f"C{number % 10}"
        axes.barh(lane, max(stop - start, 0.0), left=start, height=0.8, color=color, edgecolor="white", linewidth=0.5)
        if kind in ("read", "lease"):
            axes.text(
                (max(start, 0) + stop) / 2, lane, str(number), ha="center", va="center", fontsize=7, color="white"
            )
    axes.set_yticks(range(len(LANES)), list(LANES.values()))
    axes.set_xlim(0, max(stop for *_, stop in batch))
    axes.set_xlabel(f"seconds of one batch, {results['teachers']} teachers of {results['teacher_bytes'] / 1e9:.2g} GB")
    axes.set_title(f"scoring / loading = {ratio}, {results['device']}", fontsize=9)
    figure.tight_layout()
    figure.savefig(path)
    pyplot.close(figure)
