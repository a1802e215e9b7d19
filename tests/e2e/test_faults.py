"""However a run ends, nothing of it stays behind, and what it had finished is not lost."""

from __future__ import annotations

import os
import signal
import socket

import pytest

from rl.commands.exits import EXIT_FAILED, EXIT_INTERRUPTED
from rl.ledger import read_fates

pytestmark = pytest.mark.timeout(600)  # several whole runs, on machines of two cores

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
    assert [row["step"] for row in resumed.rows() if row["phase"] == "rl"] == [1, 2, 3, 4, 5, 6]
    runs = list((resumed.folder / "wandb").glob("offline-run-*"))
    assert len(runs) == 2
    assert len({path.name.rpartition("-")[2] for path in runs}) == 1  # one W&B run, gone on with
    fates = read_fates(resumed.folder / "ledger.jsonl")
    assert all(len(fate) == 1 for fate in fates.values())
    assert sum(fate == ["trained"] for fate in fates.values()) == 6 * 4


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signals_end_the_run_in_order(launch, number):
    run = launch("interrupted", *LONG)
    run.wait_for_step(1)
    run.look()
    run.process.send_signal(number)
    assert run.wait(60) == EXIT_INTERRUPTED
    assert "go on with resume=auto" in run.text()
    assert run.survivors() == []


def test_a_lost_task_server_fails_the_run_by_name_and_ends_it(launch):
    run = launch("lost", *LONG, "rollout.max_failures_in_a_row=8")
    run.wait_for_step(1)
    (server,) = run.find("tasks.serve", "sorting")
    server.kill()
    assert run.wait(120) == EXIT_FAILED
    said = run.text().replace("\n", " ")
    assert "task sorting: 8 episodes in a row failed" in said
    assert "Traceback" not in said
    assert run.survivors() == []


def test_an_engine_that_does_not_start_is_named_with_the_end_of_its_log(launch):
    run = launch("refused", *LONG, "+engine.extra_args={quantization: awq}")  # which these weights are not in
    assert run.wait() == EXIT_FAILED
    said = run.text()
    assert "run failed: engine-0" in said
    assert "quantization" in said
    assert run.survivors() == []


def test_a_lost_engine_starts_again_and_the_run_goes_on_until_it_is_lost_too_often(launch):
    run = launch("engine", *LONG, "rollout.max_failures_in_a_row=8", "+engine.recovery.max_restarts=1")
    run.wait_for_step(1)
    for server in run.find("rollout.engine.cpu_launch"):
        server.kill()
    run.wait_for_step(max(row["step"] for row in run.rows() if row["phase"] == "rl") + 2)
    for server in run.find("rollout.engine.cpu_launch"):
        server.kill()
    assert run.wait() == EXIT_FAILED
    said = run.text()
    assert "engine-0 takes requests" in said
    assert "run failed: " in said
    assert run.survivors() == []
