"""A whole run of the stage opd: a student with random weights learns from two stages of another run, one by its folder
and one by its checkpoint, with memory for one teacher at a time."""

from __future__ import annotations

import pytest

from rl.ledger import read_fates
from teachers.store import TeacherStore
from tests.e2e.conftest import start

pytestmark = pytest.mark.timeout(600)

STEPS = 8


@pytest.fixture(scope="module")
def distilled(finished, tmp_path_factory):
    """From the fresh model, towards the finished run's."""
    run = start(
        tmp_path_factory.mktemp("opd") / "student",
        f"model.checkpoint={finished.folder / 'fresh_model'}",
        "+teacher=[calculator,sorting]",
        f"teachers.calculator.source={finished.folder}",
        f"teachers.sorting.source={finished.folder / 'checkpoints' / 'step_000004'}",
        "algorithm.group_size=1",
        "algorithm.mode=full_vocab",
        "rollout.groups_per_step=16",
        f"steps={STEPS}",
        "trainer.optimizer.lr=3e-3",
        "distillation.hbm_bytes=600000",
        "distillation.pinned_bytes=16777216",
        stage="opd",
    )
    yield run
    run.stop()


def test_the_student_comes_nearer_to_each_teacher_on_its_own_prompts(distilled, finished):
    assert distilled.wait(500) == 0, distilled.text()[-3000:]
    rows = [row for row in distilled.rows() if row["phase"] == "rl"]
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    for row in rows:
        assert row["teacher/calculator/prompts"] + row["teacher/sorting/prompts"] == 16
        assert row["logprob_gap_max"] < 1e-4
        for name in ("kl", "entropy", "exposed_s", "score_s"):
            assert f"teacher/sorting/{name}" in row
    assert sum(row["opd/reverse_kl"] for row in rows[-3:]) < 0.7 * sum(row["opd/reverse_kl"] for row in rows[:3])
    # Two teachers and room for one: each batch had to bring at least one of them in.
    loads = [row["teachers/pinned_hits"] + row["teachers/disk_loads"] for row in rows]
    assert sum(loads) >= STEPS
    assert TeacherStore(distilled.folder / "teachers").names() == ("calculator", "sorting")
    fates = read_fates(distilled.folder / "ledger.jsonl")
    assert sum(fate == ["trained"] for fate in fates.values()) == 16 * STEPS
    assert set(distilled.summary()["reward_after"]) == {"calculator", "sorting"}
    assert distilled.survivors() == []
