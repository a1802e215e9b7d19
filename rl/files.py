"""Small files: whole or not there, and taken back after a crash."""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path

log = logging.getLogger(__name__)


def folder_problem(folder: Path) -> str | None:
    """Why a folder can't be made or written to, or None: the nearest one that is there must be a folder of ours."""
    folder = folder.resolve()
    # Not ``Path.exists``, which raises PermissionError below a folder that this user may not enter.
    there = next(path for path in (folder, *folder.parents) if os.path.exists(path))
    if not there.is_dir():
        return f"{folder} can't be made or written to, since {there} is no folder; choose another"
    if not os.access(there, os.W_OK | os.X_OK):
        return f"{folder} can't be made or written to, since this user may not write to {there}; choose another"
    return None


def write_atomically(path: Path, text: str) -> None:
    """Never half a file: written beside, then renamed."""
    partial = path.with_name(f".{path.name}.partial")
    partial.write_text(text)
    os.replace(partial, path)


def drop_lines_after(path: Path, step: int) -> None:
    """Take back what a run logged after the checkpoint that it resumes from (and a last line that was cut)."""
    if not path.exists():
        return
    kept = []
    for line in path.read_text().splitlines():
        try:
            row = json.loads(line)
        except json.JSONDecodeError:
            log.warning("%s: dropped a line that was cut by a crash", path)
            continue
        if row.get("phase") == "sft" or row["step"] <= step:
            kept.append(line)
    write_atomically(path, "".join(line + "\n" for line in kept))
