"""What rollout and trainer disagree by, and what is masked because of it."""

import json
import os
import signal
import time

import numpy as np
import pytest
import torch

from benchmarks.logprob_gap import report, run
from benchmarks.logprob_gap.child import Child, ChildError
from benchmarks.logprob_gap.fp8_indexer import fp8_indexer, rounded
from benchmarks.logprob_gap.language import FIRST, Language
from benchmarks.logprob_gap.statistics import all_pairs, gap_statistics
from rl.trainer.indexer import Indexer


def test_gap_statistics_mask_what_the_objectives_mask():
    rollout = np.full(5, -1.0, np.float32)
    trainer = rollout + np.log(np.array([1.0, 1.9, 2.1, 0.45, 0.6], np.float32))
    found = gap_statistics(trainer, rollout)
    assert found["icepop_masked"] == pytest.approx(2 / 5)  # 2.1 and 0.45
    assert found["dis_masked"] == pytest.approx(2 / 5)  # 0.45 and 0.6
    assert found["max_abs"] == pytest.approx(-np.log(0.45))
    assert found["kl"] > 0


def test_pairs_are_the_later_side_minus_the_earlier_one():
    sides = {"rollout": np.array([-1.0, -2.0], np.float32), "trainer": np.array([-1.5, -2.5], np.float32)}
    found = all_pairs(sides | {"float32": np.array([-1.0, -2.0], np.float32)})
    assert {name: pair["mean"] for name, pair in found.items()} == {
        "rollout-trainer": -0.5,
        "rollout-float32": 0.0,
        "trainer-float32": 0.5,
    }


def test_the_language_is_its_successors_and_repetitions():
    language = Language(64)
    text = language.sample(8, 400, seed=3) - FIRST
    assert np.array_equal(text + FIRST, language.sample(8, 400, seed=3))
    assert not np.array_equal(text, language.sample(8, 400, seed=4) - FIRST)
    assert text.min() >= 0
    assert text.max() < 64
    assert all(len(set(row)) == len(row) for row in language.successors)
    follows = (language.successors[text[:, :-1]] == text[:, 1:, None]).any(-1)
    assert 0.9 < follows.mean() < 1.0  # a repetition's first token is the only one that is no successor
    assert 0 < language.entropy < np.log(8)


def test_a_child_tells_what_failed_and_is_killed_when_it_takes_too_long():
    child = Child("test")
    try:
        with pytest.raises(ChildError, match="invalid literal"):
            child.call(60.0, int, "x")
        first = child.call(60.0, os.getpid)
        assert first == child.call(60.0, os.getpid) != os.getpid()
        with pytest.raises(ChildError, match="killed after"):
            child.call(0.2, time.sleep, 60)
        second = child.call(60.0, os.getpid)
        assert second != first
        os.kill(second, signal.SIGKILL)  # by somebody else, while it does nothing
        with pytest.raises(ChildError, match="the process died"):
            child.call(60.0, os.getpid)
        assert child.call(60.0, os.getpid) != second
    finally:
        child.close()


def test_the_indexer_rounds_to_fp8_only_meanwhile():
    x = torch.randn(64, 128, generator=torch.Generator().manual_seed(0)) * 3
    error = (rounded(x) - x).abs()
    assert 0 < error.max() <= (x.abs().amax(-1) / 28).max()  # half a step of the highest of e4m3's octaves
    assert torch.equal(rounded(torch.zeros(2, 8)), torch.zeros(2, 8))
    rows = Indexer.rows
    with fp8_indexer():
        assert Indexer.rows is not rows
    assert Indexer.rows is rows


def test_tables_show_the_last_line_of_a_case_and_what_failed(tmp_path):
    path = tmp_path / "lines.jsonl"
    facts = {"section": "gap", "weights": "trained", "model": "dense", "case": "dense", "server": "dense"}
    sides = {"rollout": np.full(4, -1.0, np.float32), "trainer": np.full(4, -1.5, np.float32)}
    early = {**facts, "pairs": all_pairs(sides), "mean_logprob": {"rollout": -1.0}}
    report.append(path, early)
    report.append(path, early | {"pairs": all_pairs(sides | {"float32": np.full(4, -1.0, np.float32)})})
    report.append(path, {"section": "gap", "weights": "random", "server": "hisparse", "error": "Trace\nKeyError: 3"})
    found = report.tables(path)
    assert found.count("| rollout, trainer |") == 1
    assert "| trained | dense | dense | 4 | -1.00 | rollout, fp32 | 0 |" in found
    assert "random, hisparse: **failed**: KeyError: 3" in found


def test_unknown_models_and_weights_are_refused(capsys):
    for option, wrong in (("--models", "dense,moe"), ("--weights", "tuned")):
        with pytest.raises(SystemExit):
            run.main(["--json", "x", option, wrong])
        assert f"{option}: ['{wrong.split(',')[-1]}'] not among" in capsys.readouterr().err


@pytest.mark.timeout(600)
def test_a_run_on_the_cpu_trains_publishes_samples_and_compares(tmp_path):
    lines = tmp_path / "lines.jsonl"
    (tmp_path / "work").mkdir()
    (tmp_path / "work" / "mine").write_text("")
    arguments = ["--requests", "4", "--train-seconds", "3", "--seconds", "550", "--work", str(tmp_path / "work")]
    assert run.main(["--json", str(lines), "--device", "cpu", *arguments]) == 0
    assert (tmp_path / "work" / "mine").exists()
    found = [json.loads(line) for line in lines.read_text().splitlines()]
    (learned,) = [line for line in found if line["section"] == "training"]
    assert learned["loss_after"] < learned["loss_before"]
    last = {line["weights"]: line for line in found if line["section"] == "gap"}
    assert set(last) == {"trained", "random"}
    for line in last.values():
        assert set(line["pairs"]) == {"rollout-trainer", "rollout-float32", "trainer-float32"}
        gap = line["pairs"]["rollout-trainer"]
        assert gap["tokens"] == 4 * 32
        assert 0 < gap["max_abs"] < 1e-4
        assert gap["icepop_masked"] == gap["dis_masked"] == 0
    # The server has the weights that were published, not those it started with.
    assert last["trained"]["mean_logprob"]["rollout"] != last["random"]["mean_logprob"]["rollout"]
