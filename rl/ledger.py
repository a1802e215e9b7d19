"""The account of prompts: one line for each (epoch, prompt) that was trained or dropped, by step."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

from rollout.prompts import PromptRef
from rollout.scheduler import DroppedGroup, TakenGroup


class Ledger:
    """``ledger.jsonl`` of a run."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def record(self, step: int, trained: Sequence[TakenGroup], dropped: Sequence[DroppedGroup]) -> None:
        """Called once the step's weights exist; flushed before the checkpoint that contains them."""
        rows = [(group.ref, "trained") for group in trained]
        rows += [(group.ref, f"dropped:{group.reason}") for group in dropped]
        with self.path.open("a") as file:
            for ref, fate in rows:
                line = {"step": step, "task": ref.task, "epoch": ref.epoch, "prompt_id": ref.prompt_id, "fate": fate}
                file.write(json.dumps(line) + "\n")


def read_fates(path: Path) -> dict[PromptRef, list[str]]:
    """Every fate that each prompt met; exactly-once means that each list has one entry."""
    fates: dict[PromptRef, list[str]] = {}
    for line in path.read_text().splitlines():
        row = json.loads(line)
        fates.setdefault(PromptRef(row["task"], row["epoch"], row["prompt_id"]), []).append(row["fate"])
    return fates


def count_dropped(fates: Iterable[list[str]]) -> dict[str, int]:
    """Dropped prompts by reason."""
    reasons = Counter(fate.partition(":")[2] for met in fates for fate in met if fate.startswith("dropped:"))
    return dict(sorted(reasons.items()))
