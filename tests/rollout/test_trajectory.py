"""Trajectories refuse arrays that do not fit together, and survive the disk exactly."""

from __future__ import annotations

import numpy as np
import pytest

from rollout.trajectory import StopReason, Trajectory
from rollout.trajectory_file import ARRAYS, load_trajectories, save_trajectories


def trajectory(length=4, **changes):
    mask = np.arange(length) % 2 == 1
    values = {
        "token_ids": np.arange(length, dtype=np.int32),
        "action_mask": mask,
        "rollout_logprobs": np.linspace(-1, 0, length, dtype=np.float32) * mask,
        "weight_versions": np.where(mask, 2, -1).astype(np.int32),
        "turn_index": np.zeros(length, dtype=np.int32),
        "temperature": 0.7,
        "reward": 1 / 3,
        "task": "calculator",
        "epoch": 1,
        "prompt_id": "1+2",
        "group_id": 3,
        "sample_id": 0,
        "stop_reason": StopReason.MAX_TURNS,
        "metrics": {"turns": 2.0},
    } | changes
    return Trajectory(**values)


def top(length, shift=0):
    """Two likeliest tokens at every sampled position, or ``shift`` beside it."""
    mask = (np.arange(length) + shift) % 2 == 1
    ids = np.where(mask[:, None], [[5, 6]], -1).astype(np.int32)
    return {"top_ids": ids, "top_logprobs": (ids / 100 * mask[:, None]).astype(np.float32)}


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"rollout_logprobs": np.zeros(3, np.float32)}, r"rollout_logprobs is float32\(3,\), it must be float32\(4,\)"),
        ({"token_ids": np.zeros(4, np.int64)}, "token_ids is int64"),
        ({"weight_versions": np.full(4, -1, np.int32)}, "an action token has no weight version"),
        ({"routed_experts": np.zeros((3, 2, 1), np.int32)}, "routed_experts has 3 rows"),
        ({"top_ids": np.zeros((4, 2), np.int32)}, "top_ids and top_logprobs go together"),
        ({"top_logprobs": np.zeros((4, 2), np.float32)}, "top_ids and top_logprobs go together"),
        (top(3), r"the ids are int32\(3, 2\), they must be int32\(4, k\)"),
        (top(4) | {"top_ids": np.zeros((4, 2), np.int64)}, "the ids are int64"),
        (top(4) | {"top_logprobs": np.zeros((4, 3), np.float32)}, r"the log-probs are float32\(4, 3\)"),
        (top(4, shift=1), "must be of the sampled tokens, and of no others"),
    ],
)
def test_arrays_that_do_not_fit_are_refused_by_name(changes, says):
    with pytest.raises(ValueError, match=says):
        trajectory(**changes)


def test_the_disk_keeps_every_bit(tmp_path):
    experts = np.arange(7 * 2 * 3, dtype=np.int32).reshape(7, 2, 3)
    written = [
        trajectory(),
        trajectory(7, segment=1, repeated=True, routed_experts=experts, **top(7)),
        trajectory(3, segment=2),
        trajectory(5, segment=3, **top(5)),
    ]
    save_trajectories(tmp_path / "step.npz", written, [False, True, False, False], version=5)
    read, stale, version = load_trajectories(tmp_path / "step.npz")
    assert (stale, version) == ([False, True, False, False], 5)
    for before, after in zip(written, read, strict=True):
        for name in Trajectory.__dataclass_fields__:
            a, b = getattr(before, name), getattr(after, name)
            assert (a.tobytes() == b.tobytes() and a.dtype == b.dtype) if isinstance(a, np.ndarray) else a == b, name


def test_no_array_is_stored_that_no_trajectory_has(tmp_path):
    save_trajectories(tmp_path / "step.npz", [trajectory()], [False], version=0)
    with np.load(tmp_path / "step.npz") as file:
        assert set(file) == {"header", *ARRAYS}


def test_a_cut_file_is_named(tmp_path):
    path = tmp_path / "step.npz"
    save_trajectories(path, [trajectory()], [False], version=0)
    path.write_bytes(path.read_bytes()[:-40])
    with pytest.raises(ValueError, match=r"step\.npz is no file of trajectories"):
        load_trajectories(path)
