"""Loss, gradient and log-probs do not depend on the layout."""

import subprocess
import sys
import time

import pytest
import torch

from rl.trainer.actor import free_port
from tests.trainer.common import Ratio, assert_close, capture_update, make_trajectories
from tests.trainer.ranks import LAYOUTS


@pytest.fixture(scope="module")
def ranks(model_dir, tmp_path_factory):
    output = tmp_path_factory.mktemp("ranks")
    ports = ",".join(str(free_port()) for _ in LAYOUTS)
    logs = [(output / f"{rank}.log").open("w") for rank in range(2)]
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.trainer.ranks", str(rank), ports, str(model_dir), str(output)],
            stdout=logs[rank],
            stderr=subprocess.STDOUT,
        )
        for rank in range(2)
    ]
    try:
        deadline = time.monotonic() + 150
        while (codes := [process.poll() for process in processes]) != [0, 0]:
            assert time.monotonic() < deadline, "the ranks take too long"
            if any(codes):  # the other one waits in vain
                break
            time.sleep(0.2)
    finally:
        for process, opened in zip(processes, logs, strict=True):
            process.kill()
            opened.close()
    assert codes == [0, 0], (output / "0.log").read_text()[-3000:] + (output / "1.log").read_text()[-3000:]
    return {name: torch.load(output / f"{name}.pt", weights_only=False) for name in LAYOUTS}


@pytest.fixture
def single(worker):
    trajectories = make_trajectories(temperature=0.7)
    found = {"logprobs": worker.logprobs(trajectories)}
    found["exported"] = {name: tensor.clone() for name, tensor in worker.export_weights()}
    found["result"], found["gradient"] = capture_update(worker, trajectories, Ratio())
    worker.update(trajectories[:1], 0, Ratio())
    found["after"] = [worker.update(trajectories, 0, Ratio()).loss for _ in range(2)]
    return found


def test_every_layout_computes_the_same(ranks, single):
    for name, found in ranks.items():
        for a, b in zip(found["logprobs"], single["logprobs"], strict=True):
            assert abs(a - b).max() < 1e-5, name
        assert found["exported"].keys() == single["exported"].keys()
        assert all(torch.equal(found["exported"][key], tensor) for key, tensor in single["exported"].items()), name
        assert found["result"].loss == pytest.approx(single["result"].loss, rel=1e-5), name
        assert found["result"].grad_norm == pytest.approx(single["result"].grad_norm, rel=1e-5), name
        assert found["result"].metrics["prepared"].value() == 1
        assert found["result"].metrics["entropy"].value() == pytest.approx(
            single["result"].metrics["entropy"].value(), rel=1e-5
        )
        assert_close(found["gradient"], single["gradient"])


def test_a_batch_smaller_than_the_ranks_trains(ranks):
    assert ranks["data"]["few"].samples == 1
    assert ranks["data"]["few"].loss == pytest.approx(ranks["tensor"]["few"].loss, rel=1e-4)


def test_other_layouts_resume_to_the_same_losses(ranks, single):
    for name, found in ranks.items():
        assert found["after"] == pytest.approx(single["after"], rel=1e-5), name
