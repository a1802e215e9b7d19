"""The main job leaves what it promises: figures that add up, weights that load, prompts accounted for."""

from __future__ import annotations

import itertools
import json

import numpy as np
import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM, AutoTokenizer

from rl.ledger import read_fates
from rl.trainer.manifest import read_manifest
from rollout.trajectory_file import load_trajectories
from tests.e2e.wandb_file import records
from tests.rl.test_docs import undocumented

pytestmark = pytest.mark.timeout(1500)  # several whole runs, beside others, on machines of two cores

PHASES = ("generate", "wait", "train", "publish", "checkpoint", "evaluate", "other")


def test_the_folder_holds_all_of_the_run(finished):
    folder = finished.folder
    summary = finished.summary()
    assert (summary["stage"], summary["seed"], summary["steps"]) == ("agent_rl", 0, 4)
    for moment in ("reward_before", "reward_after"):
        assert set(summary[moment]) == {"calculator", "sorting"}
        for rewards in summary[moment].values():
            assert set(rewards) == {"sampled", "greedy"}
            assert all(0 <= reward <= 1 for reward in rewards.values())
    assert yaml.safe_load((folder / "config.yaml").read_text())["rollout"]["groups_per_step"] == 4
    assert (folder / "reward.png").stat().st_size > 1000
    assert [row["step"] for row in finished.rows() if row["phase"] == "rl"] == [1, 2, 3, 4]
    assert len([row for row in finished.rows() if row["phase"] == "sft"]) == 250
    assert list((folder / "wandb").glob("offline-run-*/run-*.wandb"))
    assert read_manifest(folder / "checkpoints" / "step_000004")["extra"]["step"] == 4


def test_log_probs_of_engine_and_trainer_agree_at_every_step(finished):
    gaps = [row.get("logprob_gap_max") for row in finished.rows() if row["phase"] == "rl"]
    assert all(gap is not None and gap < 1e-4 for gap in gaps), gaps


def test_every_second_of_a_step_has_a_phase(finished):
    rows = [row for row in finished.rows() if row["phase"] == "rl"]
    for before, row in itertools.pairwise(rows):
        parts = {name: row.get(f"seconds/{name}", 0.0) for name in PHASES}
        assert abs(sum(parts.values()) - row["seconds/step"]) < 1e-6
        assert abs(row["time"] - before["time"] - row["seconds/step"]) < 0.1  # the clock on the wall
        assert parts["train"] > 0
        assert parts["publish"] > 0
    summary = finished.summary()
    assert abs(sum(summary["seconds_by_phase"].values()) - summary["seconds"]) < 0.1
    assert summary["turns"] > 4 * 16


def test_trajectories_are_recorded_and_the_ledger_has_each_prompt_once(finished):
    seen = set()
    for step in range(1, 5):
        trajectories, _, version = load_trajectories(finished.folder / "trajectories" / f"step_{step:06d}.npz")
        assert version == step - 1
        assert len(trajectories) == 16
        seen |= {(t.task, t.epoch, t.prompt_id) for t in trajectories}
        for t in trajectories:
            assert t.weight_versions[t.action_mask].max() <= version
    fates = read_fates(finished.folder / "ledger.jsonl")
    assert all(len(fate) == 1 for fate in fates.values())
    assert {(r.task, r.epoch, r.prompt_id) for r, fate in fates.items() if fate == ["trained"]} == seen


def test_the_engines_likeliest_tokens_are_recorded_at_the_sampled_ones_and_logged(finished):
    for row in (row for row in finished.rows() if row["phase"] == "rl"):
        path = finished.folder / "trajectories" / f"step_{row['step']:06d}.npz"
        trajectories, *_ = load_trajectories(path)
        ids, top, token_ids, logprobs = (
            np.concatenate([getattr(t, name)[t.action_mask] for t in trajectories])
            for name in ("top_ids", "top_logprobs", "token_ids", "rollout_logprobs")
        )
        assert ids.shape == (len(token_ids), 4)
        assert (np.diff(top) <= 0).all()
        place = ids == token_ids[:, None]
        assert place.any(-1).mean() > 0.5
        np.testing.assert_allclose(top[place], logprobs[place.any(-1)], atol=1e-5)
        assert (logprobs[~place.any(-1)] <= top[~place.any(-1), -1] + 1e-5).all()
        assert row["rollout/top_k_mass"] == pytest.approx(np.exp(top).sum(-1).mean(), rel=1e-4)
        assert row["rollout/outside_share"] == pytest.approx(1 - place.any(-1).mean(), abs=0.01)


def test_the_final_model_is_a_hugging_face_directory_that_differs_from_the_sft_one(finished):
    final = AutoModelForCausalLM.from_pretrained(finished.folder / "model")
    before = AutoModelForCausalLM.from_pretrained(finished.folder / "sft_model")
    tokenizer = AutoTokenizer.from_pretrained(finished.folder / "model")
    assert tokenizer.chat_template
    changed = [not torch.equal(a, b) for a, b in zip(final.parameters(), before.parameters(), strict=True)]
    assert any(changed)


def test_every_figure_is_documented(finished):
    assert undocumented(finished.rows()) == []


def test_nothing_is_left_running(finished):
    assert finished.survivors() == []


def test_the_offline_wandb_run_is_complete(finished):
    """Config, figures on axes of their own, and a table of sampled trajectories."""
    (path,) = (finished.folder / "wandb").glob("offline-run-*/run-*.wandb")
    found = list(records(path))
    run = next(record.run for record in found if record.WhichOneof("record_type") == "run")
    config = {update.key: json.loads(update.value_json) for update in run.config.update}
    assert config["rollout"]["groups_per_step"] == 4
    axes = {r.metric.glob_name: r.metric.step_metric for r in found if r.WhichOneof("record_type") == "metric"}
    assert {"sft/*": "sft/step", "rl/*": "rl/step", "eval/*": "eval/step"}.items() <= axes.items()
    logged = [
        {item.key or "/".join(item.nested_key) for item in record.history.item}
        for record in found
        if record.WhichOneof("record_type") == "history"
    ]
    assert sum("rl/reward" in keys for keys in logged) == 4
    (table,) = path.parent.glob("files/media/table/trajectories_*.table.json")
    rows = json.loads(table.read_text())
    assert rows["columns"] == ["step", "task", "prompt", "text", "reward", "tokens"]
    assert len(rows["data"]) == 4 * 4
    assert all("<assistant>" in row[3] for row in rows["data"])
