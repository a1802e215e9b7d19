import json
import multiprocessing

import psutil
import pytest
import torch

from rl.trainer.checkpoint import CheckpointError
from rl.trainer.config import OptimizerConfig
from rl.trainer.manifest import read_manifest
from tests.trainer.common import Ratio, make_trajectories

TRAJECTORIES = make_trajectories(groups=2)


@pytest.fixture
def saved(worker, tmp_path):
    worker.set_optimizer(OptimizerConfig(lr=1e-3, decay="linear"), 10)
    for _ in range(2):
        worker.update(TRAJECTORIES, 0, Ratio())
    worker.save_checkpoint(tmp_path / "checkpoint", {"scheduler": {"next": 5}})
    return tmp_path / "checkpoint"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_training_goes_on_as_if_it_had_not_stopped(worker, model_dir, tmp_path, dtype):
    options = OptimizerConfig(lr=1e-2, decay="linear")
    worker.config = worker.config.model_copy(update={"dtype": dtype})
    worker.load_model(model_dir)
    worker.set_optimizer(options, 10)
    for _ in range(2):
        worker.update(TRAJECTORIES, 0, Ratio())
    worker.save_checkpoint(tmp_path / "a", {})
    expected = [worker.update(TRAJECTORIES, 0, Ratio()) for _ in range(3)]
    worker.load_model(model_dir)
    worker.set_optimizer(options, 10)
    assert worker.load_checkpoint(tmp_path / "a") == {}
    found = [worker.update(TRAJECTORIES, 0, Ratio()) for _ in range(3)]
    for a, b in zip(found, expected, strict=True):
        assert (a.step, a.lr) == (b.step, b.lr)
        assert a.loss == pytest.approx(b.loss, rel=1e-6)
        assert a.grad_norm == pytest.approx(b.grad_norm, rel=1e-6)


def test_before_the_first_update(worker, tmp_path):
    worker.save_checkpoint(tmp_path / "zero", {})
    worker.update(TRAJECTORIES, 0, Ratio())
    worker.load_checkpoint(tmp_path / "zero")
    assert worker.update(TRAJECTORIES, 0, Ratio()).step == 1


def test_extra_state_comes_back_and_nothing_is_left_behind(saved, worker):
    assert worker.load_checkpoint(saved) == {"scheduler": {"next": 5}}
    assert read_manifest(saved)["extra"] == {"scheduler": {"next": 5}}
    assert read_manifest(saved)["step"] == 2
    assert [path.name for path in saved.parent.iterdir()] == [saved.name]
    assert multiprocessing.active_children() == []
    commands = [" ".join(child.cmdline()) for child in psutil.Process().children(recursive=True)]
    # Python's own tracker of shared memory, which other tests need, lives as long as the process.
    assert not [said for said in commands if "multiprocessing" in said and "resource_tracker" not in said]


def test_random_numbers_go_on(saved, worker):
    state = torch.get_rng_state()
    torch.rand(3)
    worker.load_checkpoint(saved)
    assert torch.equal(torch.get_rng_state(), state)


def test_damage_is_named(saved, worker):
    data = next(path for path in sorted(saved.glob("*.distcp")) if path.stat().st_size > 1000)
    content = data.read_bytes()
    before = {name: tensor.clone() for name, tensor in worker.export_weights()}
    for damage, message in (
        (content[:-1], f"{data.name} has {len(content) - 1} bytes, not {len(content)}"),
        (bytes([content[0] ^ 1]) + content[1:], f"{data.name} has changed"),
    ):
        data.write_bytes(damage)
        with pytest.raises(CheckpointError, match=message):
            worker.load_checkpoint(saved)
    data.unlink()
    with pytest.raises(CheckpointError, match=f"{data.name} is missing"):
        worker.load_checkpoint(saved)
    (saved / "manifest.json").unlink()
    with pytest.raises(CheckpointError, match=r"no manifest\.json"):
        worker.load_checkpoint(saved)
    assert all(torch.equal(before[name], tensor) for name, tensor in worker.export_weights())


def test_manifests_of_another_kind_are_refused(saved, worker, model_dir):
    path = saved / "manifest.json"
    manifest = json.loads(path.read_text())
    path.write_text(json.dumps(manifest | {"format": 99}))
    with pytest.raises(CheckpointError, match="format 2"):
        worker.load_checkpoint(saved)
    path.write_text("{")
    with pytest.raises(CheckpointError, match="not JSON"):
        worker.load_checkpoint(saved)
    path.write_text(json.dumps(manifest))
    worker.config = worker.config.model_copy(update={"dtype": "bfloat16"})
    worker.load_model(model_dir)
    with pytest.raises(CheckpointError, match="float32 weights, not bfloat16"):
        worker.load_checkpoint(saved)


def test_saving_refuses_what_it_would_destroy_or_cannot_write(saved, worker):
    with pytest.raises(FileExistsError, match="checkpoint exists"):
        worker.save_checkpoint(saved, {})
    with pytest.raises(TypeError, match="not JSON serializable"):
        worker.save_checkpoint(saved.with_name("other"), {"x": object()})
    leftover = saved.with_name(".third.partial")
    leftover.mkdir()
    (leftover / "half").write_text("of a crash")
    worker.save_checkpoint(saved.with_name("third"), {})
    assert {path.name for path in saved.parent.iterdir()} == {"checkpoint", "third"}
    assert "half" not in read_manifest(saved.with_name("third"))["files"]


def test_a_save_in_the_background_keeps_the_state_of_its_start(worker, model_dir, tmp_path):
    worker.set_optimizer(OptimizerConfig(lr=1e-2), 10)
    worker.save_checkpoint(tmp_path / "a", {}, background=True)
    expected = worker.update(TRAJECTORIES, 0, Ratio())
    worker.wait_for_checkpoint()
    worker.load_model(model_dir)
    worker.load_checkpoint(tmp_path / "a")
    assert worker.update(TRAJECTORIES, 0, Ratio()).grad_norm == expected.grad_norm


@pytest.mark.parametrize("step", ["_hash_file", "fsync_tree", "finish_partial"])
@pytest.mark.parametrize("background", [False, True])
def test_a_save_that_fails_says_so_and_harms_nothing(saved, worker, monkeypatch, step, background):
    def fail(*_):
        raise OSError("no space left")

    before = {path.name: path.read_bytes() for path in saved.iterdir()}
    monkeypatch.setattr(f"rl.trainer.checkpoint.{step}", fail)
    with pytest.raises(OSError, match="no space left"):  # noqa: PT012
        worker.save_checkpoint(saved.with_name("next"), {}, background=background)
        worker.wait_for_checkpoint()
    monkeypatch.undo()
    assert not saved.with_name("next").exists()
    assert {path.name: path.read_bytes() for path in saved.iterdir()} == before
    worker.save_checkpoint(saved.with_name("next"), {})
    assert worker.load_checkpoint(saved.with_name("next")) == {}
