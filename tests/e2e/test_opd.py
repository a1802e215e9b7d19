"""A whole run of the stage opd: its metrics say of each teacher what Hugging Face's forward of that teacher says of the
recorded trajectories; one teacher is a directory, one a checkpoint, and there is memory for one at a time."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from rl.ledger import read_fates
from rollout.trajectory_file import load_trajectories
from teachers.store import TeacherStore
from tests.e2e.conftest import start

pytestmark = pytest.mark.timeout(1500)

STEPS = 4


@pytest.fixture(scope="module")
def distilled(finished, tmp_path_factory):
    run = start(
        tmp_path_factory.mktemp("opd") / "student",
        f"model.checkpoint={finished.folder / 'sft_model'}",
        "+teacher=[calculator,sorting]",
        f"teachers.calculator.source={finished.folder / 'fresh_model'}",
        f"teachers.sorting.source={finished.folder / 'checkpoints' / 'step_000004'}",
        "algorithm.group_size=1",
        "rollout.groups_per_step=16",
        f"steps={STEPS}",
        "distillation.hbm_bytes=600000",
        "distillation.pinned_bytes=16777216",
        stage="opd",
    )
    yield run
    run.stop()


def hugging_faces_kl(model, trajectories):
    """Mean of log π_inf − log π_T over the action tokens."""
    gaps = []
    for t in trajectories:
        ids = torch.from_numpy(t.token_ids).long()
        with torch.no_grad():
            logprobs = model(ids[None]).logits[0, :-1].log_softmax(-1).gather(1, ids[1:, None]).squeeze(1).numpy()
        gaps.append((t.rollout_logprobs[1:] - logprobs)[t.action_mask[1:]])
    return float(np.concatenate(gaps).mean())


def test_each_teacher_scores_its_own_prompts_with_its_own_weights(distilled, finished):
    assert distilled.wait(500) == 0, distilled.text()[-3000:]
    rows = [row for row in distilled.rows() if row["phase"] == "rl"]
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    # The last checkpoint has the weights of the final model.
    teachers = {"calculator": finished.folder / "fresh_model", "sorting": finished.folder / "model"}
    models = {name: AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32) for name, path in teachers.items()}
    seen: Counter[str] = Counter()
    for row in rows:
        trajectories, *_ = load_trajectories(distilled.folder / "trajectories" / f"step_{row['step']:06d}.npz")
        for name, model in models.items():
            own = [t for t in trajectories if t.task == name]
            seen[name] += len(own)
            assert row.get(f"teacher/{name}/prompts", 0) == len(own)
            if not own:  # the groups that were ready first were all the other task's
                continue
            assert row[f"teacher/{name}/kl"] == pytest.approx(hugging_faces_kl(model, own), abs=1e-4)
            assert row[f"teacher/{name}/exposed_s"] >= 0
        assert row["logprob_gap_max"] < 1e-4
        assert row["grad_norm"] > 0
    assert set(seen) == set(models)
    # Room for one of two: they were brought in more than once each.
    assert sum(row["teachers/copied_bytes"] for row in rows) > 2 * 4 * models["sorting"].num_parameters()


def test_the_run_is_whole(distilled):
    assert TeacherStore(distilled.folder / "teachers").names() == ("calculator", "sorting")
    fates = read_fates(distilled.folder / "ledger.jsonl")
    assert sum(fate == ["trained"] for fate in fates.values()) == 16 * STEPS
    assert set(distilled.summary()["reward_after"]) == {"calculator", "sorting"}
    assert distilled.survivors() == []
