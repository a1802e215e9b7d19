"""Decoding speed over concurrency as a picture: ``python -m benchmarks.engine.picture FILE OUT.png``.

Measured points of a run's steady section, and what the planner says of each (``benchmarks.engine.prediction``).
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.engine.prediction import compare

NAMES = {"plain": "without HiSparse", "hisparse": "HiSparse"}


def draw(lines: Sequence[Mapping[str, Any]], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    points = [line for line in compare(lines) if line["section"] == "prediction"]
    last = max(point["concurrency"] for point in points)
    figure, axes = pyplot.subplots(figsize=(6.5, 4), dpi=120)
    for number, (side, name) in enumerate(NAMES.items()):
        first = next(point["locality"] for point in points if point["side"] == side)
        sweep = [p for p in points if p["side"] == side and abs(p["locality"] - first) < 0.01]
        at = [min(point["concurrency"], point["running"]) for point in sweep]
        measured, planned = ([point[key] for point in sweep] for key in ("measured", "predicted"))
        axes.plot(at, measured, f"C{number}o-", label=f"{name}, measured")
        axes.plot(at, planned, f"C{number}x:", label=f"{name}, planned")
        axes.plot([at[-1], last], [measured[-1]] * 2, f"C{number}--", linewidth=1)  # full: more requests wait
    for point in points:
        if point["side"] == "hisparse" and abs(point["locality"] - first) >= 0.01:
            axes.plot(point["concurrency"], point["measured"], "k.")
            axes.plot(point["concurrency"], point["predicted"], "kx")
            place = {"textcoords": "offset points", "xytext": (-8, -3), "ha": "right", "fontsize": 8}
            axes.annotate(f"{point['locality']:.0%}", (point["concurrency"], point["measured"]), **place)
    axes.set_xscale("log", base=2)
    ticks = sorted({min(point["concurrency"], point["running"]) for point in points})
    axes.set_xticks(ticks, [str(tick) for tick in ticks])
    axes.set_xlabel("concurrent requests")
    axes.set_ylabel("output tokens / s")
    axes.set_title(
        f"equal GPU bytes, locality {first:.0%}; black: other localities; dashed: full, more wait", fontsize=9
    )
    axes.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path)
    pyplot.close(figure)


if __name__ == "__main__":
    draw([json.loads(line) for line in Path(sys.argv[1]).read_text().splitlines()], Path(sys.argv[2]))
