"""Flat buckets: bounded, of one dtype, complete; and the archive of versions."""

import subprocess
import sys

import pytest
import torch

from rl.weights.archive import Archive
from rl.weights.flat import TensorSpec, bucket_nbytes, fill, plan_buckets, spans
from rl.weights.sender import WeightSender
from rl.weights.serialize import make_buckets


def spec(name, *shape, dtype=torch.bfloat16):
    return TensorSpec(name, dtype, shape)


def test_buckets_have_one_dtype_and_so_many_bytes():
    tensors = [spec("a", 10), spec("b", 10), spec("c", 3, dtype=torch.float32), spec("d", 1), spec("e", 100), spec("f")]
    buckets = plan_buckets(tensors, 50)
    assert [bucket.names for bucket in buckets] == [("a", "b"), ("c",), ("d",), ("e",), ("f",)]
    assert [bucket_nbytes(bucket) for bucket in buckets] == [40, 12, 2, 200, 2]
    assert spans(buckets[0]) == [(0, 20), (20, 40)]
    for bucket in buckets:
        for (begin, _), dtype in zip(spans(bucket), bucket.dtypes, strict=True):
            assert begin % getattr(torch, dtype).itemsize == 0


def test_the_tensors_of_one_attention_stay_together():
    names = [f"layers.{layer}.{name}" for layer in (1, 11) for name in ("self_attn.q_a", "self_attn.kv_a", "mlp.up")]
    together = [names[:2], names[2:3], names[3:5], names[5:]]
    assert [list(bucket.names) for bucket in plan_buckets([spec(name, 10) for name in names], 20)] == together
    named = [(name, torch.zeros(5)) for name in names]
    assert [list(bucket.shapes) for bucket in make_buckets(named, 20)] == together


def test_what_no_plan_can_be_made_of():
    with pytest.raises(ValueError, match="must be positive"):
        plan_buckets([spec("a", 1)], 0)
    with pytest.raises(ValueError, match="a comes twice"):
        plan_buckets([spec("a", 1), spec("a", 1)], 10)


def test_a_bucket_holds_the_bits_of_its_tensors():
    named = [("a", torch.randn(3, 5).T), ("b", torch.randn(2))]
    (bucket,) = plan_buckets([TensorSpec(n, t.dtype, tuple(t.shape)) for n, t in named], 1000)
    flat = fill(torch.zeros(100, dtype=torch.uint8), bucket, named)
    for (_, tensor), (begin, end) in zip(named, spans(bucket), strict=True):
        assert torch.equal(flat[begin:end].clone().view(torch.float32).reshape(tensor.shape), tensor)
    with pytest.raises(ValueError, match="comes where"):
        fill(torch.zeros(100, dtype=torch.uint8), bucket, named[::-1])


def test_a_sender_goes_through_all_weights_again_after_a_failure():
    weights = [("a", torch.zeros(4)), ("b", torch.ones(4)), ("c", torch.full((4,), 2.0))]
    sender = WeightSender(lambda: iter(weights), torch.device("cpu"))
    plan = sender.plan(16)
    assert len(plan) == 3
    sender.rewind()
    sender.fill()
    sender.rewind()
    seen = []
    for _ in plan:
        sender.fill()
        seen += sender.bucket.names
    assert seen == ["a", "b", "c"]
    weights.append(("d", torch.zeros(1)))
    sender.rewind()
    sender.fill()
    sender.fill()
    with pytest.raises(ValueError, match="d comes after the last"):
        sender.fill()


def test_the_archive_keeps_what_the_engines_hold(tmp_path):
    archive = Archive(tmp_path)
    held = None
    for version in range(3):
        archive.target(version, held).mkdir()
        held = version
    assert sorted(path.name for path in archive.root.glob("v*")) == ["v1", "v2"]
    archive.target(3, 1).mkdir()  # 2 was not published
    assert sorted(path.name for path in archive.root.glob("v*")) == ["v1", "v3"]
    archive.target(3, 1).mkdir()  # written again after a failed publication
    assert sorted(path.name for path in archive.root.glob("v*")) == ["v1", "v3"]
    archive.close()
    assert list(tmp_path.iterdir()) == []


def test_what_a_killed_run_left_goes_when_the_next_begins(tmp_path):
    begin = "import os, pathlib; from rl.weights.archive import Archive"
    rest = f"Archive(pathlib.Path({str(tmp_path)!r})).target(1, None).mkdir(); os._exit(9)"
    subprocess.run([sys.executable, "-c", f"{begin}; {rest}"], check=False, timeout=60)
    left = list(tmp_path.iterdir())
    assert len(left) == 1
    alive = Archive(tmp_path)
    assert not left[0].exists()
    beside = Archive(tmp_path)
    assert alive.root.exists()
    for archive in (alive, beside):
        archive.close()
    assert list(tmp_path.iterdir()) == []
