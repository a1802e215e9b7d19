"""Directories that appear whole or not at all."""

from __future__ import annotations

import os
import shutil
from pathlib import Path


def start_partial(final: Path) -> Path:
    """An empty directory beside ``final`` to write into; what an earlier crash left there is removed.

    Raises:
        FileExistsError: ``final`` exists.
    """
    if final.exists():
        raise FileExistsError(f"{final} exists; it is not overwritten")
    partial = partial_path(final)
    if partial.exists():
        shutil.rmtree(partial)
    partial.mkdir(parents=True)
    return partial


def partial_path(final: Path) -> Path:
    return final.with_name(f".{final.name}.partial")


def fsync_path(path: Path) -> None:
    """Force a file's content, or a directory's list of names, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def fsync_tree(directory: Path) -> None:
    for path in sorted(directory.rglob("*")):
        fsync_path(path)
    fsync_path(directory)


def finish_partial(final: Path) -> None:
    """Give the partial directory its final name; its content must be on the disk already (``fsync_tree``)."""
    os.rename(partial_path(final), final)
    fsync_path(final.parent)
