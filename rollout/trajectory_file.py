"""A step's trajectories on disk: one compressed file, from which the step can be replayed exactly."""

from __future__ import annotations

import json
import os
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from rollout.trajectory import StopReason, Trajectory

ARRAYS = ("token_ids", "action_mask", "rollout_logprobs", "weight_versions", "turn_index")
OPTIONAL = ("routed_experts", "top_ids", "top_logprobs")
"""Arrays of the trajectories that have them."""
SCALARS = (
    "temperature",
    "reward",
    "task",
    "epoch",
    "prompt_id",
    "group_id",
    "sample_id",
    "stop_reason",
    "segment",
    "repeated",
)


def save_trajectories(path: Path, trajectories: Sequence[Trajectory], stale: Sequence[bool], version: int) -> None:
    """Write a ``.npz``: arrays concatenated, the rest as JSON. Written beside and renamed, so never half a file."""
    rows = [
        {name: getattr(t, name) for name in SCALARS}
        | {"length": len(t), "metrics": dict(t.metrics), "stale": is_stale}
        | {"optional": [name for name in OPTIONAL if getattr(t, name) is not None]}
        for t, is_stale in zip(trajectories, stale, strict=True)
    ]
    arrays: dict[str, Any] = {name: np.concatenate([getattr(t, name) for t in trajectories]) for name in ARRAYS}
    for name in OPTIONAL:
        if present := [getattr(t, name) for t in trajectories if getattr(t, name) is not None]:
            arrays[name] = np.concatenate(present)
    header = json.dumps({"current_version": version, "rows": rows})
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    with partial.open("wb") as file:
        np.savez_compressed(file, header=np.frombuffer(header.encode(), dtype=np.uint8), **arrays)
    os.replace(partial, path)


def load_trajectories(path: Path) -> tuple[list[Trajectory], list[bool], int]:
    """Trajectories, which of them are stale, and the weight version that trained on them."""
    try:
        with np.load(path) as file:
            header = json.loads(file["header"].tobytes())
            arrays = {name: file[name] for name in ARRAYS}
            optional = {name: file[name] for name in OPTIONAL if name in file}
    except (OSError, ValueError, KeyError, zipfile.BadZipFile) as error:
        raise ValueError(f"{path} is no file of trajectories: {error}") from None
    ends = np.cumsum([row["length"] for row in header["rows"]])[:-1]
    parts: dict[str, Any] = {name: np.split(array, ends) for name, array in arrays.items()}
    present = {name: _apart(array, header["rows"], name) for name, array in optional.items()}
    trajectories = [
        Trajectory(
            **{name: parts[name][index] for name in ARRAYS},
            **{name: row[name] for name in SCALARS if name != "stop_reason"},
            stop_reason=StopReason(row["stop_reason"]),
            metrics=row["metrics"],
            **{name: present[name][index] for name in row.get("optional", ())},
        )
        for index, row in enumerate(header["rows"])
    ]
    return trajectories, [row["stale"] for row in header["rows"]], header["current_version"]


def _apart(joined: np.ndarray, rows: Sequence[Mapping[str, Any]], name: str) -> dict[int, Any]:
    """An optional array of each trajectory that has it, by the trajectory's index."""
    owners = [index for index, row in enumerate(rows) if name in row["optional"]]
    ends = np.cumsum([rows[index]["length"] for index in owners])[:-1]
    return dict(zip(owners, np.split(joined, ends), strict=True))
