"""The same seed gives the same curve; recorded trajectories give the same gradients, bit by bit."""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.timeout(1500)  # several whole runs, beside others, on machines of two cores

MEASURED = ("seconds", "tokens_per_second", "time", "engine/")


def curve(run):
    """Every figure of every step, but for times and what is read off the server at some moment."""
    rows = [row for row in run.rows() if row["phase"] in ("rl", "eval")]
    return [{key: value for key, value in row.items() if not key.startswith(MEASURED)} for row in rows]


def test_two_synchronous_runs_are_equal_to_the_digit_and_a_replay_has_their_gradients(launch):
    settings = (
        "rollout.staleness=0",
        "rollout.max_rollouts=1",
        "engine.deterministic=true",
        "trainer.digest_gradients=true",
        "steps=2",
        "evaluation.prompts=2",
        "evaluation.concurrency=1",
    )
    first = launch("first", *settings)
    assert first.wait() == 0, first.text()[-3000:]
    second = launch("second", *settings)
    assert second.wait() == 0, second.text()[-3000:]
    assert curve(first) == curve(second)
    assert len(curve(first)) == 4
    assert all(row.get("staleness_max", 0) == 0 for row in curve(first))

    replayed = launch("replayed", *settings, f"replay={first.folder}")
    assert replayed.wait() == 0, replayed.text()[-3000:]
    digests = [[row["gradient_digest"] for row in run.rows() if row["phase"] == "rl"] for run in (first, replayed)]
    assert digests[0] == digests[1]
    assert len(set(digests[0])) == 2
    assert not (replayed.folder / "logs").exists()  # no server was started
    assert (first.folder / "model" / "model.safetensors").read_bytes() == (
        replayed.folder / "model" / "model.safetensors"
    ).read_bytes()
