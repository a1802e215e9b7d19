"""A run that kill -9 ended leaves nothing behind, and what it had finished is not lost."""

from __future__ import annotations

import os
import signal
import socket

import pytest

from rl.ledger import read_fates

pytestmark = pytest.mark.timeout(1500)  # several whole runs, beside others, on machines of two cores

LONG = ("steps=500", "evaluation.prompts=0", "rollout.save_trajectories=false", "checkpoint.every=2")


def listening(ports):
    found = []
    for port in ports:
        with socket.socket() as probe:
            probe.settimeout(1)
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                found.append(port)
    return found


def test_kill_9_leaves_nothing_and_a_resume_trains_each_prompt_once(launch):
    run = launch("killed", *LONG)
    run.wait_for_step(3)
    ports = run.ports()
    assert ports
    run.look()
    os.kill(run.process.pid, signal.SIGKILL)
    run.process.wait()
    assert run.survivors() == []
    assert listening(ports) == []

    resumed = launch("killed", *LONG, "steps=6", "resume=auto")
    assert resumed.wait() == 0, resumed.text()[-3000:]
    assert "resuming after step" in resumed.text()
    rows = [row for row in resumed.rows() if row["phase"] == "rl"]
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5, 6]
    assert all(row["logprob_gap_max"] < 1e-4 for row in rows)  # the servers, too, have the checkpoint's weights
    runs = list((resumed.folder / "wandb").glob("offline-run-*"))
    assert len(runs) == 2
    assert len({path.name.rpartition("-")[2] for path in runs}) == 1  # one W&B run, gone on with
    fates = read_fates(resumed.folder / "ledger.jsonl")
    assert all(len(fate) == 1 for fate in fates.values())
    assert sum(fate == ["trained"] for fate in fates.values()) == 6 * 4
