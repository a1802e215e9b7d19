"""The benchmark runs, and what it times as the straightforward way is the same loss."""

from __future__ import annotations

import pytest
import torch

from benchmarks import algorithms as benchmark


@pytest.mark.parametrize("name", benchmark.NAMES)
def test_a_small_run(name, monkeypatch):
    monkeypatch.setattr(benchmark, "REPEATS", 1)
    monkeypatch.setattr(benchmark, "PROMPT", 3)
    row = benchmark.measure(name, 16, 64)
    assert row["tokens_per_second"] > 0
    assert row["memcpys"] > 0
    assert 0.1 < row["action_share"] < 1
    assert benchmark.loop_over_samples(name, 2, 64)["tokens"] > 0


def test_the_batch():
    batch, logprobs = benchmark.make_batch(16, 640)
    lengths = batch.lengths()
    assert int(lengths.min()) >= 20
    assert int(lengths.max()) < 640
    assert len(logprobs) == int(lengths.sum())
    assert torch.equal(batch.action_mask, batch.weight_versions >= 0)
