"""Loss and gradient with teachers do not depend on the layout, in any mode; one store holds the shards of several."""

import shutil
import subprocess
import sys
import time

import pytest
import torch

from rl.fresh_model import FreshModel, create_model
from rollout.processes import free_port
from teachers.store import TeacherStore
from tests.trainer.common import assert_close
from tests.trainer.teacher_ranks import LAYOUTS, MODES, TEACHERS, go_through


@pytest.fixture(scope="module")
def models(model_dir, tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    shutil.copytree(model_dir, folder / "student")
    for seed, name in enumerate(TEACHERS, start=1):
        create_model(folder / name, FreshModel(layers=4, kv_heads=2, initializer_range=0.1), seed=seed)
    return folder


@pytest.fixture(scope="module")
def output(tmp_path_factory):
    return tmp_path_factory.mktemp("ranks")


@pytest.fixture(scope="module")
def ranks(models, output):
    """What rank 0 found in each layout."""
    ports = ",".join(str(free_port()) for _ in LAYOUTS)
    command = [sys.executable, "-W", "ignore", "-m", "tests.trainer.teacher_ranks"]
    logs = [(output / f"{rank}.log").open("w") for rank in range(2)]
    processes = [
        subprocess.Popen([*command, str(rank), ports, str(models), str(output)], stdout=log, stderr=subprocess.STDOUT)
        for rank, log in enumerate(logs)
    ]
    try:
        deadline = time.monotonic() + 240
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


def test_layouts_learn_the_same_from_their_teachers(ranks, models, session_worker, tmp_path):
    single = go_through(session_worker, models, tmp_path / "store")
    for name, found in ranks.items():
        for mode in MODES:
            (result, gradient), (expected, wanted) = found[mode], single[mode]
            assert result.loss == pytest.approx(expected.loss, rel=2e-5), (name, mode)
            for metric in ("teacher/ann/kl", "teacher/bob/kl", "teacher/ann/entropy", "teacher/bob/prompts"):
                value = expected.metrics[metric].value()
                assert result.metrics[metric].value() == pytest.approx(value, rel=1e-5), (name, mode, metric)
            assert_close(gradient, wanted, relative=5e-5)


def test_every_part_is_in_the_store_once(ranks, output):
    shards = {entry.shard for entry in TeacherStore(output / "store").list() if entry.teacher == "ann"}
    assert {shard.split(".")[0] for shard in shards} == {"tp0of1", "tp0of2", "tp1of2"}
    assert len(shards) == 2 + 2 + 1  # tensor ranks, pipeline ranks, and the whole model for data and context ranks
