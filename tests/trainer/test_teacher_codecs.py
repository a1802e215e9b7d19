"""How a run keeps its teachers: as differences to what they were fine-tuned from, exactly; in fp8, with the error of
the log-probs measured on the run's own tokens and kept beside the weights."""

from __future__ import annotations

import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from rl.fresh_model import FreshModel, create_model
from rl.teachers.config import DistillationConfig, TeacherConfig
from rl.teachers.fidelity import LogprobError
from rl.teachers.sources import resolve_all, with_bases
from rl.teachers.teaching import TeacherSetup, Teaching
from teachers.errors import TierFullError
from teachers.store import TeacherStore
from teachers.upkeep import verify
from tests.trainer.common import make_trajectories
from tests.trainer.test_teachers import build, hf, make

BUDGET = 2**25


def tune(source, target, share, seed):
    """A copy with a share of each matrix's elements changed."""
    shutil.copytree(source, target)
    g = torch.Generator().manual_seed(seed)
    tensors = load_file(target / "model.safetensors")
    for tensor in tensors.values():
        if tensor.dim() == 2:
            mask = torch.rand(tensor.shape, generator=g) < share
            tensor[mask] += 0.1 * torch.randn(int(mask.sum()), generator=g)
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})


@pytest.fixture(scope="module")
def family(tmp_path_factory):
    """A base model and two that were fine-tuned from it."""
    folder = tmp_path_factory.mktemp("family")
    create_model(folder / "base", FreshModel(layers=4, kv_heads=2, initializer_range=0.1), seed=3)
    for seed, name in enumerate(("ann", "bob")):
        tune(folder / "base", folder / name, 0.05, seed)
    return folder


def sources(family, names=("ann", "bob"), distillation=None, **teachers):
    configs = {name: TeacherConfig(source=family / name, **teachers.get(name, {})) for name in names}
    return resolve_all(configs, DistillationConfig(**(distillation or {})))


def scored(worker, trajectories, name):
    teaching = Teaching([{name: 1.0}] * len(trajectories))
    result = worker._score(trajectories, build(trajectories), make(), teaching)
    return np.split(result.logprobs.numpy(), np.cumsum([len(t) for t in trajectories])[:-1]), result.metrics


@pytest.mark.parametrize("base", ["a directory", "a teacher"])
def test_teachers_on_a_base_take_less_and_score_the_same(worker, family, tmp_path, base):
    names = ("ann", "bob") if base == "a directory" else ("ann", "base", "bob")
    found = sources(family, names, {"base": str(family / "base") if base == "a directory" else "base"})
    worker.load_teachers(TeacherSetup(found, str(tmp_path / "store"), BUDGET, BUDGET))
    entries = {entry.teacher: entry for entry in TeacherStore(tmp_path / "store").list()}
    (root,) = entries.keys() - {"ann", "bob"}
    assert {entries[name].base for name in ("ann", "bob")} == {root}
    assert entries["ann"].stored_bytes < 0.4 * entries[root].stored_bytes
    trajectories = make_trajectories(temperature=0.7)
    for name in names:
        expected = hf(family / name, trajectories)
        for t, values, wanted in zip(trajectories, scored(worker, trajectories, name)[0], expected, strict=True):
            assert np.abs(values - wanted)[t.action_mask].max() <= 1e-5


def test_a_base_that_has_changed_is_imported_again_with_all_that_is_kept_as_a_difference_to_it(
    worker, family, tmp_path
):
    found = sources(family, ("ann", "base", "bob"), {"base": "base"})
    setup = TeacherSetup(found, str(tmp_path / "store"), BUDGET, BUDGET)
    worker.load_teachers(setup)
    assert worker._teachers.imported == ["base", "ann", "bob"]
    worker.load_teachers(setup)
    assert worker._teachers.imported == []
    newer = replace(next(s for s in found if s.name == "base"), fingerprint="newer")
    changed = [newer if s.name == "base" else replace(s, base=newer) for s in found]
    worker.load_teachers(replace(setup, sources=changed))
    assert worker._teachers.imported == ["base", "ann", "bob"]
    worker.load_teachers(replace(setup, sources=sources(family, ("ann", "bob"))))  # whole again
    assert worker._teachers.imported == ["ann", "bob"]
    assert {entry.base for entry in TeacherStore(tmp_path / "store").list()} == {None}


def test_pinned_memory_that_does_not_hold_a_difference_beside_its_base_is_refused_at_the_start(
    worker, family, tmp_path
):
    found = sources(family, ("ann",), {"base": str(family / "base")})
    size = with_bases(found)[0].parameters * 4
    with pytest.raises(TierFullError, match=r"distillation\.pinned_bytes=\d+: teacher ann .* its base base-"):
        worker.load_teachers(TeacherSetup(found, str(tmp_path / "store"), BUDGET, int(1.1 * size)))


def test_measuring_needs_no_more_memory_than_teaching(worker, family, tmp_path):
    """Of a teacher with a base, in fp8 where no difference is kept: the exact one would not fit beside the base."""
    create_model(tmp_path / "other", FreshModel(layers=4, kv_heads=2, initializer_range=0.1), seed=9)
    shutil.copy(family / "base" / "tokenizer.json", tmp_path / "other")
    (teacher,) = resolve_all(
        {"other": TeacherConfig(source=tmp_path / "other")},
        DistillationConfig(base=str(family / "base"), codec="fp8"),
    )
    size = teacher.parameters * 4
    worker.load_teachers(TeacherSetup([teacher], str(tmp_path / "store"), BUDGET, int(1.7 * size)))
    _, metrics = scored(worker, make_trajectories(), "other")
    assert metrics["teacher/other/fp8_error_max"].value() > 0


@pytest.mark.parametrize("hbm_bytes", [BUDGET, 1_200_000], ids=["whole", "streamed"])
def test_fp8_is_measured_once_on_the_runs_own_tokens(worker, family, tmp_path, hbm_bytes):
    found = sources(family, ("ann", "bob"), ann={"codec": "fp8"})
    setup = TeacherSetup(found, str(tmp_path / "store"), hbm_bytes, BUDGET)
    worker.load_teachers(setup)
    store = TeacherStore(tmp_path / "store")
    assert store.names() == ("ann", "ann.exact", "bob")
    trajectories = make_trajectories(temperature=0.7)
    assert bool(worker._teachers._streaming) == (hbm_bytes < BUDGET)
    values, metrics = scored(worker, trajectories, "ann")
    gaps = np.concatenate(
        [
            np.abs(ours - exact)[t.action_mask]
            for t, ours, exact in zip(trajectories, values, hf(family / "ann", trajectories), strict=True)
        ]
    )
    assert metrics["teacher/ann/fp8_error_mean"].value() == pytest.approx(gaps.mean(), abs=1e-5)
    assert metrics["teacher/ann/fp8_error_max"].value() == pytest.approx(gaps.max(), abs=1e-5)
    assert gaps.mean() < metrics["teacher/ann/fp8_error_p99"].value() <= gaps.max() + 1e-5
    assert 1e-4 < gaps.max() < 1
    assert not any(name.startswith("teacher/ann.exact") for name in metrics)
    # The exact weights are gone, the result stays.
    assert store.names() == ("ann", "bob")
    assert verify(store) == []
    (entry,) = (entry for entry in store.list() if entry.teacher == "ann")
    noted = LogprobError.noted(entry.meta)
    assert noted.tokens == len(gaps)
    assert "fp8_error_mean" not in str(scored(worker, trajectories, "bob")[1])
    worker.load_teachers(setup)
    assert worker._teachers.imported == []
    assert store.names() == ("ann", "bob")
    assert f"log-prob error of ann in fp8: {noted}" in worker._teachers.describe()
    again, metrics = scored(worker, trajectories, "ann")
    assert metrics["teacher/ann/fp8_error_max"].value() == noted.max
    assert all(np.array_equal(a, b) for a, b in zip(again, values, strict=True))


def test_an_exact_copy_that_another_run_removed_costs_the_measurement_alone(worker, family, tmp_path, caplog):
    found = sources(family, ("ann",), {"codec": "fp8"})
    worker.load_teachers(TeacherSetup(found, str(tmp_path / "store"), BUDGET, BUDGET))
    store = TeacherStore(tmp_path / "store")
    (shard,) = store.shards("ann.exact")
    for path in {
        store.open("ann.exact", shard).pack_path(e) for e in store.open("ann.exact", shard).manifest.extents.values()
    }:
        if path.name.removesuffix(".pack") not in {e.pack for e in store.open("ann", shard).manifest.extents.values()}:
            path.unlink()
    _, metrics = scored(worker, make_trajectories(), "ann")
    assert "teacher/ann/fp8_error_mean" not in metrics
    assert "teacher/ann/kl" in metrics
    assert "was not measured: teacher ann.exact" in caplog.text


def test_teachers_leave_the_device_with_the_trainer_and_come_back(worker, family, tmp_path):
    found = sources(family)
    size = max(source.parameters for source in found) * 4 * 5 // 4
    worker.load_teachers(TeacherSetup(found, str(tmp_path / "store"), size, 3 * size))
    trajectories = make_trajectories(temperature=0.7)
    before = [scored(worker, trajectories, name)[0] for name in ("ann", "bob")]
    tiers = worker._teachers._tiers
    held = tiers.memory()[0]
    gained = worker.offload()
    worker.onload()
    assert gained - worker.offload() == held > 0  # the second time the teachers had not come back
    assert tiers.memory()[0] == 0
    worker.prefetch_teachers({"bob": 3, "ann": 1})  # as the loop does while the engines generate
    assert tiers.memory()[0] == 0
    worker.onload()
    after = [scored(worker, trajectories, name)[0] for name in ("ann", "bob")]
    for a, b in zip(before, after, strict=True):
        assert all(np.array_equal(x, y) for x, y in zip(a, b, strict=True))
