"""Loss and gradient with teachers do not depend on the layout, in any mode; one store holds the shards of several."""

import shutil

import pytest

from rl.fresh_model import FreshModel, create_model
from teachers.store import TeacherStore
from tests.trainer.common import assert_close
from tests.trainer.launched import run_ranks
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
    return run_ranks("tests.trainer.teacher_ranks", LAYOUTS, models, output, timeout_s=240)


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
