"""The manifest of a checkpoint. Light: the driver reads the state that it saved without Megatron."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

FORMAT = 2
MANIFEST = "manifest.json"


class CheckpointError(ValueError):
    """A checkpoint cannot be loaded; the message names the file or the number that is wrong."""


def read_manifest(directory: Path) -> dict[str, Any]:
    """``format``, ``step``, ``adam_steps``, ``layout``, ``extra`` and ``files``, without checking the files that it
    lists.

    Raises:
        CheckpointError: there is none, it is not JSON, or it is of another format.
    """
    path = directory / MANIFEST
    if not path.is_file():
        raise CheckpointError(f"{directory} has no {MANIFEST}: it is not a checkpoint, or not a complete one")
    try:
        manifest = json.loads(path.read_text())
    except ValueError as error:
        raise CheckpointError(f"{path} is not JSON: {error}") from error
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise CheckpointError(f"{path} is not a manifest of format {FORMAT}")
    return manifest
