"""On a real GPU, in bfloat16: teachers kept as differences score what the same ones kept whole score, bit for bit; fp8
is measured; and the device's memory is the budget's while they score, and nobody's while the trainer is away."""

from __future__ import annotations

import gc

import numpy as np
import pytest
import torch

from rl.fresh_model import FreshModel, create_model
from rl.teachers.config import DistillationConfig, TeacherConfig
from rl.teachers.sources import resolve_all
from rl.teachers.teaching import TeacherSetup
from teachers.store import TeacherStore
from tests.trainer.common import make_trajectories
from tests.trainer.test_teacher_codecs import scored, tune

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.usefixtures("uncompiled"),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]
NAMES = ("ann", "bob")
MIB = 2**20


@pytest.fixture(scope="module")
def family(tmp_path_factory):
    """A base model of 32 MB in bfloat16, and two that were fine-tuned from it."""
    folder = tmp_path_factory.mktemp("family")
    shape = FreshModel(hidden_size=512, intermediate_size=1536, heads=8, kv_heads=4, head_dim=64, layers=5)
    create_model(folder / "base", shape, seed=3)
    for seed, name in enumerate(NAMES):
        tune(folder / "base", folder / name, 0.05, seed)
    return folder


@pytest.fixture
def student(session_worker, family):
    config = session_worker.config
    session_worker.config = config.model_copy(update={"dtype": "bfloat16"})
    session_worker.load_model(family / "base")
    yield session_worker
    session_worker.config = config


def setup_of(family, store, **distillation):
    """With room for one teacher at a time on the device."""
    teachers = {name: TeacherConfig(source=family / name) for name in NAMES}
    sources = resolve_all(teachers, DistillationConfig(**distillation))
    size = sources[0].parameters * 2
    return TeacherSetup(sources, str(store), hbm_bytes=int(1.3 * size) + 34 * MIB, pinned_bytes=6 * size)


def scores(worker, trajectories):
    return [np.concatenate(scored(worker, trajectories, name)[0]) for name in (*NAMES, *NAMES)]


def test_differences_are_applied_on_the_gpu_and_give_the_same_bits(student, family, tmp_path):
    trajectories = make_trajectories(temperature=0.7)
    found = []
    for name, base in (("whole", None), ("differences", str(family / "base"))):
        student.load_teachers(setup_of(family, tmp_path / name, base=base))
        found.append(scores(student, trajectories))
    entries = [entry for entry in TeacherStore(tmp_path / "differences").list() if entry.teacher in NAMES]
    assert all(entry.stored_bytes < 0.3 * entry.device_bytes for entry in entries)
    for whole, difference in zip(*found, strict=True):
        assert np.array_equal(whole, difference)


def test_fp8_is_measured(student, family, tmp_path):
    student.load_teachers(setup_of(family, tmp_path / "store", codec="fp8"))
    _, metrics = scored(student, make_trajectories(temperature=0.7), "ann")
    error = {kind: metrics[f"teacher/ann/fp8_error_{kind}"].value() for kind in ("mean", "p99", "max")}
    print(error)
    assert 0 < error["mean"] < error["p99"] <= error["max"] < 2


def test_memory_is_the_budgets_and_goes_with_the_trainers(student, family, tmp_path):
    trajectories = make_trajectories(temperature=0.7)
    setup = setup_of(family, tmp_path / "store", base=str(family / "base"))
    student.load_teachers(setup)
    gc.collect()
    student.offload()  # with what an earlier test's teachers left
    nothing = torch.cuda.memory_allocated()
    student.onload()
    before = scores(student, trajectories)
    tiers = student._teachers._tiers
    assert 0 < tiers.memory()[0] <= setup.hbm_bytes
    free = torch.cuda.mem_get_info()[0]
    gained = student.offload()
    assert gained > tiers.memory()[0] == 0
    assert torch.cuda.memory_allocated() <= nothing + MIB
    assert torch.cuda.mem_get_info()[0] >= free + gained // 2  # other processes can have it
    student.onload()
    for a, b in zip(before, scores(student, trajectories), strict=True):
        assert np.array_equal(a, b)


@pytest.mark.parametrize("source", ["directory", "checkpoint"])
def test_one_that_streams_never_takes_more_of_the_device_than_the_budget(student, tmp_path, source):
    """Not while its model is built, nor while it is imported: all of it would be five times as much."""
    shape = FreshModel(hidden_size=512, intermediate_size=1536, heads=8, kv_heads=4, head_dim=64, layers=16)
    create_model(tmp_path / "model", shape, seed=5)
    student.load_model(tmp_path / "model")
    path, budget = tmp_path / "model", 20 * MIB
    if source == "checkpoint":
        path = tmp_path / "step_000001"
        student.save_checkpoint(path, {"initial_model": str(tmp_path / "model")})
    sources = resolve_all({"big": TeacherConfig(source=path)}, DistillationConfig())
    assert sources[0].parameters * 2 > 4.5 * budget
    trajectories = make_trajectories(temperature=0.7)
    expected = student.logprobs(trajectories)  # makes what products need on the device, too
    for _ in range(2):  # with and without an import
        gc.collect()
        before = allocated()
        student.load_teachers(TeacherSetup(sources, str(tmp_path / "store"), budget, 512 * MIB))
        assert peak() - before < MIB
        values, _ = scored(student, trajectories, "big")
        print(f"{source}: {(peak() - before) / MIB:.1f} MiB at most")
        assert peak() - before < budget + 16 * MIB  # with activations
        for t, found, wanted in zip(trajectories, values, expected, strict=True):
            assert np.abs(found - wanted)[t.action_mask].max() < 0.1


def allocated():
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    return torch.cuda.memory_allocated()


def peak():
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated()
