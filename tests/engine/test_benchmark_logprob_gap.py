"""What rollout and trainer disagree by, and what is masked because of it."""

import json

import numpy as np
import pytest

from benchmarks import logprob_gap


def test_gap_statistics_mask_what_the_objectives_mask():
    rollout = np.full(5, -1.0, np.float32)
    trainer = rollout + np.log(np.array([1.0, 1.9, 2.1, 0.45, 0.6], np.float32))
    found = logprob_gap.gap_statistics(trainer, rollout)
    assert found["icepop_masked"] == pytest.approx(2 / 5)  # 2.1 and 0.45
    assert found["dis_masked"] == pytest.approx(2 / 5)  # 0.45 and 0.6
    assert found["max_abs"] == pytest.approx(-np.log(0.45))
    assert found["kl_rollout_trainer"] > 0


def test_log_prob_gap_is_rounding_on_the_cpu(tmp_path):
    lines = tmp_path / "lines.jsonl"
    arguments = ["--requests", "4", "--output", "32", "--work", str(tmp_path), "--device", "cpu"]
    assert logprob_gap.main(["--json", str(lines), *arguments]) == 0
    (found,) = [json.loads(line) for line in lines.read_text().splitlines()]
    assert found["tokens"] == 4 * 32
    assert 0 < found["max_abs"] < 1e-5
    assert found["icepop_masked"] == found["dis_masked"] == 0
