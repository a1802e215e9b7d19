"""The lines of a run, and their tables in Markdown."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

SHOWN = (
    ("rollout-trainer", "rollout, trainer"),
    ("rollout-float32", "rollout, fp32"),
    ("trainer-float32", "trainer, fp32"),
    ("rollout-trainer+fp8", "rollout, trainer with its indexer in fp8"),
    ("rollout-trainer+experts", "rollout, trainer with the engine's experts"),
)
"""Pairs of the table, in the order of its rows."""
Line = Mapping[str, Any]


def append(path: Path, line: Line) -> None:
    with path.open("a") as file:
        file.write(json.dumps(line) + "\n")
    print(json.dumps(line), flush=True)


def tables(path: Path) -> str:
    """Of a run's file: what was trained, the gaps, and what failed."""
    lines = [json.loads(text) for text in path.read_text().splitlines() if text.strip()]
    lines = [line for line in lines if line.get("section") in ("training", "gap")]
    failed = [line for line in lines if "error" in line]
    parts = [_training(line for line in lines if line["section"] == "training" and "error" not in line)]
    parts.append(_gaps(line for line in lines if line["section"] == "gap" and "error" not in line))
    parts += [f"{_key(line)}: **failed**: {line['error'].strip().splitlines()[-1]}" for line in failed]
    return "\n\n".join(part for part in parts if part) + "\n"


def _key(line: Line) -> str:
    return ", ".join(str(line[name]) for name in ("weights", "model", "case", "server") if name in line)


def _training(lines: Iterable[Line]) -> str:
    rows = [
        "| model | trained on | seconds | loss before | after | successor's entropy | indexers' KL before | after |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for line in lines:
        kl = [f"{line[name]:.2f}" if name in line else "–" for name in ("indexer_kl_before", "indexer_kl_after")]
        learned = [f"{line[name]:.2f}" for name in ("loss_before", "loss_after", "language_entropy")]
        cells = [line["model"], f"{line['tokens'] / 1e6:.2f}M tokens", f"{line['wall_s']:.0f}", *learned, *kl]
        rows.append("| " + " | ".join(cells) + " |")
    return "\n".join(rows) if len(rows) > 2 else ""


def _gaps(lines: Iterable[Line]) -> str:
    """The last line of a case counts: earlier ones lack the reference."""
    last = {(line["weights"], line["case"], line["server"]): line for line in lines}
    rows = [
        "| weights | case | server | tokens | log π | pair | mean | mean abs | p99 | max | KL | IcePop | DIS cuts |",
        "|" + "---|" * 13,
    ]
    for line in last.values():
        where = [line["weights"], line["case"], line["server"]]
        for name, title in SHOWN:
            if name not in line["pairs"]:
                continue
            gap = line["pairs"][name]
            where_or_blank = [*where, str(gap["tokens"]), f"{line['mean_logprob']['rollout']:.2f}"]
            numbers = [f"{gap[key]:.2g}" for key in ("mean", "mean_abs", "p99_abs", "max_abs", "kl")]
            shares = [f"{100 * gap[key]:.2f} %" for key in ("icepop_masked", "dis_masked")]
            rows.append("| " + " | ".join([*where_or_blank, title, *numbers, *shares]) + " |")
    return "\n".join(rows) if len(rows) > 2 else ""
