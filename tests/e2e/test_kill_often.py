"""Five times kill -9 in a run of twelve steps: each prompt is trained once or counted as dropped; the model learns."""

from __future__ import annotations

import math
import os
import random
import signal
import time

import pytest

from rl.ledger import read_fates

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3000)]

STEPS, GROUPS, PROMPTS = 12, 12, 96
SETTINGS = (
    f"steps={STEPS}",
    f"rollout.groups_per_step={GROUPS}",
    "algorithm.group_size=8",
    f"evaluation.prompts={PROMPTS}",
    "checkpoint.every=2",
)


def mean_reward(summary):
    return sum(rewards["sampled"] for rewards in summary["reward_after"].values()) / len(summary["reward_after"])


def test_five_kills_cost_no_prompt_and_no_skill(launch):
    # With the demo's SFT, so that twelve steps have something to learn from.
    sft = ("model.checkpoint=null", "sft.steps=600", "sft.conversations_per_step=64")
    undisturbed = launch("undisturbed", *SETTINGS, *sft)
    assert undisturbed.wait(900) == 0, undisturbed.text()[-3000:]

    start = (f"model.checkpoint={undisturbed.folder / 'sft_model'}", "resume=auto")
    chance = random.Random(5)
    moments = sorted(chance.sample(range(1, STEPS), 5))
    for step in moments:
        run = launch("killed", *SETTINGS, *start)
        run.wait_for_step(step)
        time.sleep(chance.uniform(0, 2))
        run.look()
        os.kill(run.process.pid, signal.SIGKILL)
        run.process.wait()
        assert run.survivors() == []
    run = launch("killed", *SETTINGS, *start)
    assert run.wait(900) == 0, run.text()[-3000:]

    assert [row["step"] for row in run.rows() if row["phase"] == "rl"] == list(range(1, STEPS + 1))
    for finished in (undisturbed, run):
        fates = read_fates(finished.folder / "ledger.jsonl")
        assert all(len(fate) == 1 for fate in fates.values())
        assert sum(fate == ["trained"] for fate in fates.values()) == STEPS * GROUPS
        assert len({ref.epoch for ref in fates}) == 1  # nothing came twice by way of another epoch

    rewards = [mean_reward(finished.summary()) for finished in (undisturbed, run)]
    print(f"killed after steps {moments}; sampled reward undisturbed {rewards[0]:.3f}, killed {rewards[1]:.3f}")
    # Two means of 2 · PROMPTS Bernoulli rewards, four standard deviations; and the noise of two trainings.
    assert abs(rewards[0] - rewards[1]) < 4 * math.sqrt(2 * 0.25 / (2 * PROMPTS)) + 0.1
