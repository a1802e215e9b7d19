"""``atelier teachers``: what it imports a run finds, for any layout; what it refuses, it names."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

import pytest
from safetensors.torch import load_file, save_file

from rl.commands import teachers as command
from rl.commands.exits import EXIT_BAD_CONFIG
from rl.fresh_model import FreshModel, create_model
from rl.teachers import layouts
from rl.teachers.fidelity import LogprobError
from teachers.store import TeacherStore


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """A base, one that was fine-tuned from it, and one of another architecture."""
    folder = tmp_path_factory.mktemp("models")
    create_model(folder / "base", FreshModel(), seed=0)
    create_model(folder / "deep", FreshModel(layers=3), seed=0)
    shutil.copytree(folder / "base", folder / "unreadable")
    (folder / "unreadable" / "config.json").write_text("{")
    (folder / "file").write_text("")
    shutil.copytree(folder / "base", folder / "tuned")
    tensors = load_file(folder / "tuned" / "model.safetensors")
    for tensor in tensors.values():
        if tensor.dim() == 2:
            tensor[::20] += 0.1
    save_file(tensors, folder / "tuned" / "model.safetensors", metadata={"format": "pt"})
    return folder


def add(*arguments):
    """In a process of its own, as always: it makes process groups."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "rl.cli", "teachers", "add", *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=240,
    )
    return done.returncode, done.stdout, done.stderr


@pytest.fixture(scope="module")
def store(models, tmp_path_factory):
    """The tuned one as a difference to the base, for two tensor-parallel ranks; and in fp8."""
    root = tmp_path_factory.mktemp("store")
    code, said, err = add("tuned", models / "tuned", "--store", root, "--base", models / "base", "--layout", "tensor=2")
    assert code == 0, err
    assert "delta" in said
    code, said, err = add("small", models / "tuned", "--store", root, "--codec", "fp8")
    assert code == 0, err
    assert "largest relative RMS error of a matrix in fp8: 0.0" in said
    return root


def test_a_base_is_imported_too_for_the_same_layout(store):
    found = TeacherStore(store)
    (base,) = (name for name in found.names() if name.startswith("base-"))
    assert len(found.shards("tuned")) == len(found.shards(base)) == 2
    entries = [entry for entry in found.list() if entry.teacher == "tuned"]
    assert {entry.base for entry in entries} == {base}
    assert all("delta" in entry.encodings for entry in entries)


def test_list_and_verify_say_how_each_is_kept_and_what_was_measured(store, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "250")
    assert command.main(["list", "--store", str(store)]) == 0
    said = capsys.readouterr().out
    assert "not measured" in said
    assert "delta" in said
    found = TeacherStore(store)
    (shard,) = found.shards("small")
    found.annotate("small", shard, LogprobError(0.01, 0.05, 0.125, 321).note())
    assert command.main(["list", "--store", str(store)]) == 0
    assert "0.01 mean, 0.05 p99, 0.12 max over 321 tokens" in capsys.readouterr().out
    assert command.main(["verify", "--store", str(store)]) == 0
    said = capsys.readouterr().out
    assert f"small {shard}: log-prob error in fp8: 0.01 mean" in said
    assert "all as it was written" in said


def test_verify_finds_damage_and_gc_frees_what_is_removed(store, capsys, tmp_path):
    shutil.copytree(store, tmp_path / "copy")
    root = tmp_path / "copy"
    extent = next(
        iter(TeacherStore(root).open("small", TeacherStore(root).shards("small")[0]).manifest.extents.values())
    )
    with (root / "packs" / f"{extent.pack}.pack").open("r+b") as file:
        file.seek(extent.offset)
        file.write(b"\xff\xfe\xfd")
    assert command.main(["verify", "small", "--store", str(root)]) == 1
    assert "small: " in (said := capsys.readouterr().out)
    assert "is damaged between bytes" in said
    (base,) = (name for name in TeacherStore(root).names() if name.startswith("base-"))
    assert command.main(["gc", "--remove", base, "--store", str(root)]) == 1
    assert f"teacher {base} is the base of tuned" in capsys.readouterr().err
    assert command.main(["gc", "--remove", "tuned", "small", base, "--store", str(root)]) == 0
    assert os.listdir(root / "teachers") == os.listdir(root / "packs") == []


def test_one_damaged_manifest_is_named_and_the_other_teachers_are_listed(store, models, capsys, tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "250")
    shutil.copytree(store, root := tmp_path / "copy")
    (manifest,) = (root / "teachers" / "small").iterdir()
    whole = manifest.read_bytes()
    manifest.write_bytes(whole.replace(b"small", b"smell", 1))
    for arguments in (["list"], ["gc"], ["verify"]):
        assert command.main([*arguments, "--store", str(root)]) == 1
        said = capsys.readouterr()
        assert f"teacher small: {manifest} is damaged: its checksum does not match" in said.out + said.err
        assert ("tuned" in said.out) == (arguments == ["list"])
        assert ("import that teacher again, or remove it too" in said.err) == (arguments == ["gc"])
    assert command.main(["gc", "--remove", "small", "--store", str(root)]) == 0
    assert command.main(["list", "--store", str(root)]) == 0


def test_what_is_there_is_not_built_again_unless_its_files_are_damaged(models, tmp_path, monkeypatch, caplog):
    root = tmp_path / "store"
    add = ["add", "tuned", str(models / "tuned"), "--store", str(root), "--base", str(models / "base")]
    assert command.main(add) == 0
    built = []
    model = layouts.TeacherModel

    def noted(*args):
        built.append(args)
        return model(*args)

    monkeypatch.setattr(layouts, "TeacherModel", noted)
    assert command.main(add) == 0
    assert not built
    found = TeacherStore(root)
    shard = found.open("tuned", found.shards("tuned")[0])
    pack = shard.base.pack_path(next(iter(shard.base.manifest.extents.values())))
    os.truncate(pack, 4096)
    assert command.main(add) == 0  # both: what was kept of the one is a difference to the other
    assert len(built) == 2
    assert f"{pack} ends at byte 4096" in caplog.text
    assert command.main(["gc", "--store", str(root)]) == 0
    assert command.main(["verify", "--store", str(root)]) == 0


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["tuned"], "give NAME SOURCE --store DIR"),
        (["x", "NOWHERE", "--store", "STORE"], "teachers.x.source: NOWHERE does not exist"),
        (["x", "MODELS/file", "--store", "STORE"], "teachers.x.source: MODELS/file is no directory; give an HF"),
        (["x", "MODELS/unreadable", "--store", "STORE"], "MODELS/unreadable/config.json is not JSON"),
        (["x/y", "MODELS/base", "--store", "STORE"], "teachers.x/y: a teacher's name is letters, digits"),
        (
            ["x", "MODELS/base", "--store", "MODELS/file"],
            "MODELS/file can't be a store of teachers: MODELS/file/packs: Not a directory",
        ),
        (
            ["x", "MODELS/tuned", "--store", "STORE", "--base", "what"],
            "teachers.x.base=what: there is neither a teacher",
        ),
        (
            ["x", "MODELS/tuned", "--store", "STORE", "--base", "MODELS/deep"],
            "teachers.x.base: MODELS/deep is of another architecture than MODELS/tuned",
        ),
        (
            ["x", "MODELS/tuned", "--store", "STORE", "--layout", "tensors=2"],
            "--layout tensors: no such key; known: ten",
        ),
        (["x", "MODELS/tuned", "--store", "STORE", "--layout", "tensor=0"], "--layout tensor: Input should be greater"),
        (
            ["x", "MODELS/tuned", "--store", "STORE", "--layout", "dtype=int8"],
            "--layout dtype: Input should be 'float32'",
        ),
        (["small", "MODELS/base", "--store", "STORE"], "teacher small is in STORE already, of MODELS/tuned"),
        (["x", "--run", "+stage=opd"], "leave out NAME, SOURCE and --store"),
        (["--run", "+stage=opd", "task=sorting"], "teachers: none is given, and algorithm=opd needs some"),
        (
            ["--run", "+stage=opd", "task=sorting", "+teachers.sorting.source=MODELS/tuned"],
            "distillation.store: required, but not set",
        ),
    ],
)
def test_what_can_t_be_added_is_refused_by_name(store, models, capsys, arguments, says):
    def named(text):
        return text.replace("STORE", str(store)).replace("MODELS", str(models)).replace("NOWHERE", "/nowhere")

    before = TeacherStore(store).names()
    assert command.main(["add", *map(named, arguments)]) == EXIT_BAD_CONFIG
    assert named(says) in " ".join(capsys.readouterr().err.split())
    assert TeacherStore(store).names() == before


def test_a_runs_command_line_imports_all_its_teachers_for_its_layout(models, tmp_path):
    run = [
        *("--run", "+stage=opd", "task=[sorting,calculator]", f"distillation.store={tmp_path}"),
        *(f"+teachers.sorting.source={models / 'tuned'}", f"+teachers.calculator.source={models / 'base'}"),
        *("distillation.base=calculator", "trainer.world_size=2", "+trainer.parallel.pipeline=2"),
        f"run_dir={tmp_path / 'run'}",
    ]
    code, said, err = add(*run)
    assert code == 0, err
    store = TeacherStore(tmp_path)
    assert store.names() == ("calculator", "sorting")
    assert all(len(store.shards(name)) == 2 for name in store.names())
    assert {entry.base for entry in store.list() if entry.teacher == "sorting"} == {"calculator"}
    assert said.count("written") == 4
    assert not (tmp_path / "run").exists()
