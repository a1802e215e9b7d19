"""Loss and gradient with teachers do not depend on the layout, in any mode; one store holds the shards of several, and
what ``atelier teachers add`` puts there is what the ranks of a run would."""

import shutil
import sys
from functools import partial

import pytest

from rl import cli
from rl.fresh_model import FreshModel, create_model
from rl.teachers.fidelity import LogprobError
from rl.teachers.sources import resolve
from rl.teachers.teaching import TeacherSetup
from teachers.errors import CorruptTeacherError
from teachers.store import TeacherStore
from tests.trainer.common import assert_close
from tests.trainer.launched import run_ranks, start
from tests.trainer.models import save_model
from tests.trainer.teacher_ranks import CASES, DAMAGED, LAYOUTS, MODES, TEACHERS, go_through, main


@pytest.fixture(scope="module")
def models(model_dir, tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    shutil.copytree(model_dir, folder / "student")
    for seed, name in enumerate(TEACHERS, start=1):
        create_model(folder / name, FreshModel(layers=4, kv_heads=2, initializer_range=0.1), seed=seed)
    save_model("qwen3_moe", folder / "moe")
    for path in model_dir.glob("*token*"):
        shutil.copy(path, folder / "moe")
    return folder


@pytest.fixture(scope="module")
def output(tmp_path_factory):
    return tmp_path_factory.mktemp("ranks")


@pytest.fixture(scope="module")
def ranks(models, output):
    return run_ranks(main, CASES, models, output, timeout_s=270)


def test_layouts_learn_the_same_from_their_teachers(ranks, models, session_worker, tmp_path):
    single = go_through(session_worker, models, tmp_path / "store")
    for name, found in ((name, ranks[name]) for name in LAYOUTS):
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


def test_ranks_measure_fp8_together_once_for_each_layout(ranks, output):
    store = TeacherStore(output / "fp8")
    assert store.names() == ("ann",)  # the exact weights are gone
    notes = {entry.shard: LogprobError.noted(entry.meta) for entry in store.list()}
    assert len(notes) == 2 + 2 + 1
    for name, found in ((name, ranks[name]) for name in LAYOUTS):
        for metrics in found["fp8"]:
            error = {kind: metrics[f"teacher/ann/fp8_error_{kind}"].value() for kind in ("mean", "p99", "max")}
            assert 0 < error["mean"] < error["p99"] <= error["max"] < 1, name
            assert error["max"] in {note.max for note in notes.values()}
    cut = {note for shard, note in notes.items() if shard.startswith(("tp0of2", "tp1of2"))}
    assert len(cut) == 1  # both ranks noted the same
    # A pipeline cuts no matrix, so that its parts have the scales of the whole.
    others = [note.mean for shard, note in notes.items() if shard.startswith("tp0of1")]
    assert others == pytest.approx([others[0]] * 3, rel=1e-3)


@pytest.mark.parametrize("name", DAMAGED)
@pytest.mark.parametrize("whole", [True, False], ids=["read before its turn", "read in its turn"])
def test_a_layer_that_one_rank_cannot_read_fails_on_all_by_name_and_harms_nothing(ranks, name, whole):
    found = ranks[name][whole]
    for error, same in found["ranks"]:
        assert isinstance(error, CorruptTeacherError), repr(error)
        assert "teacher bob: " in str(error)
        assert str(found["file"]) in str(error)
        assert same
    assert found["kl"] == pytest.approx(ranks[name][not whole]["kl"], rel=1e-6)
    assert found["kl"] == pytest.approx(ranks[next(iter(DAMAGED))][True]["kl"], rel=1e-5)


def test_one_that_is_too_large_for_one_rank_alone_streams_on_all(ranks):
    for found in (ranks[name] for name in DAMAGED):
        assert found["uneven"]["streams"] == [False, True]
        assert found["uneven"]["kl"] == pytest.approx(found[True]["kl"], rel=1e-6)


def contents(store, name, shards):
    """Of each shard, what is kept of each tensor, found by its content, and what it was made from."""
    found = {}
    for shard in shards:
        manifest = store.open(name, shard).manifest
        found[shard] = [(t.name, t.shape, t.dtype, t.encoding, t.extent) for t in manifest.tensors], manifest.meta
    return found


def teachers_add(log, *arguments):
    """What the command says; it runs in a fork, which needs not import PyTorch and Megatron."""
    command = start(log, call_command, ["teachers", "add", *map(str, arguments)])
    command.join(240)
    said = log.read_text()
    assert command.exitcode == 0, said[-3000:]
    return said


def call_command(arguments):
    sys.exit(cli.main(arguments))


def test_the_command_imports_what_the_ranks_of_a_run_do(ranks, models, output, tmp_path, session_worker):
    add, theirs = partial(teachers_add, output / "add.log"), TeacherStore(output / "store")
    for layout in (["tensor=2"], ["pipeline=2"], []):
        add("ann", models / "ann", "--store", tmp_path, "--layout", "dtype=float32", *layout)
    mine = TeacherStore(tmp_path)
    assert mine.shards("ann") == theirs.shards("ann")
    assert contents(mine, "ann", mine.shards("ann")) == contents(theirs, "ann", theirs.shards("ann"))
    assert "there already" in add("ann", models / "ann", "--store", tmp_path)
    # A teacher with experts too, of which each rank has half.
    assert "written" in add("moe", models / "moe", "--store", tmp_path, "--layout", "dtype=float32", "expert=2")
    shards = theirs.shards("moe")
    assert [part.split(".")[2] for part in shards] == ["ep0of2", "ep1of2"]
    assert mine.shards("moe") == shards
    assert contents(mine, "moe", shards) == contents(theirs, "moe", shards)
    halves = [{name for name, *_ in contents(mine, "moe", shards)[part][0]} for part in shards]
    assert halves[0] == halves[1]
    extents = [{extent for *_, extent in contents(mine, "moe", shards)[part][0]} for part in shards]
    assert extents[0] & extents[1]  # what is not an expert's
    assert extents[0] - extents[1]
    session_worker.load_model(models / "student")
    # Also of a checkpoint, which any layout can be cut from.
    checkpoint = tmp_path / "step_000001"
    session_worker.save_checkpoint(checkpoint, {"initial_model": str(models / "student")})
    for layout in (["tensor=2"], ["dtype=float32"]):
        assert "written" in add("earlier", checkpoint, "--store", tmp_path, "--layout", *layout)
    assert len(mine.shards("earlier")) == 3
    sources = [resolve("ann", models / "ann"), resolve("earlier", checkpoint)]
    session_worker.load_teachers(TeacherSetup(sources, str(tmp_path), 2**24, 2**24))
    assert session_worker._teachers.imported == []
