"""``atelier plot RUN...``: reward curves of several runs in one picture."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

SUMMARY = "reward curves of several runs in one picture"


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="atelier plot", description=SUMMARY)
    parser.add_argument("runs", type=Path, nargs="+", help="run folders")
    parser.add_argument("--out", type=Path, default=Path("rewards.png"))
    options = parser.parse_args(arguments)
    missing = [str(run) for run in options.runs if not (run / "metrics.jsonl").is_file()]
    if missing:
        parser.error(f"no metrics.jsonl in {', '.join(missing)}")
    from rl.plot import compare_runs

    compare_runs(options.runs, options.out)
    return 0
