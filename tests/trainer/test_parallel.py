"""Loss, gradient, log-probs and what comes after a resume do not depend on the layout."""

import signal

import pytest
import torch

from tests.trainer.common import Ratio, assert_close, capture_update, make_trajectories
from tests.trainer.launched import run_ranks
from tests.trainer.ranks import LAYOUTS, SCHEDULE, STEPS, main


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("two")


@pytest.fixture(scope="module")
def two(model_dir, folder):
    """They kill themselves in a save, which has a port too."""
    return run_ranks(main, LAYOUTS[2], model_dir, folder, timeout_s=240, extra_ports=1, ends_with=-signal.SIGKILL)


@pytest.fixture(scope="module")
def four(model_dir, tmp_path_factory):
    return run_ranks(main, LAYOUTS[4], model_dir, tmp_path_factory.mktemp("four"), timeout_s=240, world=4)


@pytest.fixture
def single(worker):
    trajectories = make_trajectories(temperature=0.7)
    found = {"logprobs": worker.logprobs(trajectories)}
    found["exported"] = {name: tensor.clone() for name, tensor in worker.export_weights()}
    found["result"], found["gradient"] = capture_update(worker, trajectories, Ratio())
    worker.update(trajectories[:1], 0, Ratio())
    found["after"] = [worker.update(trajectories, 0, Ratio()).grad_norm for _ in range(2)]
    return found


@pytest.mark.parametrize("world", ["two", "four"])
def test_every_layout_computes_and_resumes_to_the_same(world, request, single):
    for name, found in request.getfixturevalue(world).items():
        for a, b in zip(found["logprobs"], single["logprobs"], strict=True):
            assert abs(a - b).max() < 1e-5, name
        assert found["exported"].keys() == single["exported"].keys()
        assert all(torch.equal(found["exported"][key], tensor) for key, tensor in single["exported"].items()), name
        assert found["result"].loss == pytest.approx(single["result"].loss, rel=1e-5), name
        assert found["result"].grad_norm == pytest.approx(single["result"].grad_norm, rel=1e-5), name
        assert found["result"].metrics["prepared"].value() == 1
        entropy = single["result"].metrics["entropy"].value()
        assert found["result"].metrics["entropy"].value() == pytest.approx(entropy, rel=1e-5), name
        assert_close(found["gradient"], single["gradient"])
        assert found["after"] == pytest.approx(single["after"], rel=1e-5), name


def test_a_batch_smaller_than_the_ranks_trains(two):
    assert two["data"]["few"].samples == 1
    assert two["data"]["few"].loss == pytest.approx(two["tensor"]["few"].loss, rel=1e-4)


def test_a_killed_run_resumes_at_another_layout_to_six_digits(two, folder, worker, model_dir):
    trajectories = make_trajectories(temperature=0.7)
    worker.set_optimizer(SCHEDULE, STEPS)
    straight = [worker.update(trajectories, 0, Ratio()) for _ in range(STEPS)][STEPS // 2 :]
    expected = worker.logprobs(trajectories)

    # The ranks were killed while they saved another checkpoint, of which nothing counts.
    assert not (folder / "torn").exists()
    assert list((folder / ".torn.partial").glob("*.distcp"))
    worker.load_model(model_dir)
    worker.set_optimizer(SCHEDULE, STEPS)
    assert worker.load_checkpoint(folder / "half") == {"next": 3}
    resumed = [worker.update(trajectories, 0, Ratio()) for _ in range(STEPS // 2)]
    for found, wanted in zip(resumed, straight, strict=True):
        assert (found.step, found.lr) == (wanted.step, wanted.lr)
        assert found.loss == pytest.approx(wanted.loss, rel=1e-6)
        assert found.grad_norm == pytest.approx(wanted.grad_norm, rel=1e-6)
    for found, wanted in zip(worker.logprobs(trajectories), expected, strict=True):
        assert found == pytest.approx(wanted, rel=1e-5, abs=1e-6)
