"""However a run ends, it says why, and nothing of it stays behind."""

from __future__ import annotations

import signal

import pytest

from rl.commands.exits import EXIT_FAILED, EXIT_INTERRUPTED

pytestmark = pytest.mark.timeout(1500)  # several whole runs, beside others, on machines of two cores

LONG = ("steps=5000", "evaluation.prompts=0", "rollout.save_trajectories=false")


@pytest.mark.parametrize(
    ("number", "stage", "phase", "settings"),
    [
        (signal.SIGINT, "agent_rl", "rl", LONG),
        (signal.SIGTERM, "sft", "sft", ("sft.steps=100000",)),  # without servers
    ],
)
def test_signals_end_the_run_in_order(launch_untrained, number, stage, phase, settings):
    run = launch_untrained("interrupted", *settings, stage=stage)
    run.wait_for_step(1, phase)
    run.look()
    run.process.send_signal(number)
    assert run.wait(120) == EXIT_INTERRUPTED
    assert "resume=auto run_dir=" in run.text()
    assert run.survivors() == []


def test_a_lost_task_server_fails_the_run_by_name_and_ends_it(launch_untrained):
    run = launch_untrained("lost", *LONG, "rollout.max_failures_in_a_row=8")
    run.wait_for_step(1)
    (server,) = run.find("tasks.serve", "sorting")
    server.kill()
    assert run.wait() == EXIT_FAILED
    said = run.text().replace("\n", " ")
    assert "task sorting: 8 episodes in a row failed" in said
    assert "Traceback" not in said
    assert run.survivors() == []


def test_an_engine_that_does_not_start_is_named_with_the_end_of_its_log(launch_untrained):
    run = launch_untrained("refused", *LONG, "+engine.extra_args={quantization: awq}")  # which these weights are not in
    assert run.wait() == EXIT_FAILED
    said = run.text()
    assert "run failed: engine-0" in said
    assert "quantization" in said
    assert run.survivors() == []


def test_a_lost_engine_starts_again_and_the_run_goes_on_until_it_is_lost_too_often(launch_untrained):
    run = launch_untrained("engine", *LONG, "rollout.max_failures_in_a_row=8", "+engine.recovery.max_restarts=1")
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
