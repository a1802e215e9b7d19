"""A run's folder: what is replaced, what stays, and that two runs do not write into one."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
from types import SimpleNamespace

import pytest
from safetensors import SafetensorError

from rl.commands.train import _how_to_go_on, _said
from rl.compose import compose_config
from rl.config import ConfigError, FreshModel, check
from rl.fresh_model import create_model
from rl.model_dir import tensor_elements
from rl.preflight import check_run
from rl.run_folder import LOCK, RunFolder

HOLD = """
import sys
from pathlib import Path
from rl.run_folder import RunFolder
with RunFolder(Path(sys.argv[1])).held():
    print("held", flush=True)
    sys.stdin.read()
"""


def config_of(path, *overrides):
    return check(compose_config(["+stage=sft", f"run_dir={path}", *overrides]))


@pytest.fixture
def run(tmp_path):
    """A folder with a run and with something that is not of it."""
    (tmp_path / "run.json").write_text("{}")
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "engine-0.log").touch()
    (tmp_path / "notes.txt").write_text("mine")
    return RunFolder(tmp_path)


@pytest.mark.parametrize("override", ["overwrite=true", "resume=auto"])
def test_a_run_is_replaced_and_what_else_lies_there_stays(run, override):
    run.prepare(config_of(run.path, override), None)
    assert sorted(path.name for path in run.path.iterdir()) == ["config.yaml", "notes.txt"]


def test_without_a_run_nothing_is_removed(tmp_path):
    (tmp_path / "model").mkdir()
    RunFolder(tmp_path).prepare(config_of(tmp_path, "overwrite=true"), None)
    assert (tmp_path / "model").is_dir()


def test_a_link_is_removed_and_not_what_it_leads_to(run, tmp_path_factory):
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    (elsewhere / "weights").touch()
    (run.path / "model").symlink_to(elsewhere)
    run.prepare(config_of(run.path, "overwrite=true"), None)
    assert (elsewhere / "weights").exists()
    assert not (run.path / "model").is_symlink()
    (run.path / "model").symlink_to(elsewhere)
    run.prepare(config_of(run.path, "resume=auto"), 3)
    assert (elsewhere / "weights").exists()
    assert not (run.path / "model").is_symlink()


def test_going_on_does_not_begin_a_finished_run_anew(run):
    run.summary.write_text("{}")
    with pytest.raises(
        ConfigError, match="holds a finished run without checkpoints, which resume=auto would begin anew"
    ):
        run.prepare(config_of(run.path, "resume=auto"), None)
    assert run.summary.exists()


def test_two_runs_do_not_write_into_one_folder_and_a_dead_one_does_not_hold_it(run):
    other = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(run.path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert other.stdout.readline() == "held\n"
    with pytest.raises(ConfigError, match=f"is in use by process {other.pid} on .*; wait for its end"), run.held():
        pass
    other.kill()
    other.communicate(timeout=30)
    with run.held():
        assert f"process {os.getpid()} on" in (run.path / LOCK).read_text()


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_that_may_not_be_written_is_named(tmp_path):
    tmp_path.chmod(0o500)
    with pytest.raises(ConfigError, match=f"this user may not write to {tmp_path}"):
        RunFolder(tmp_path / "run").check(config_of(tmp_path / "run"), None)


def test_a_file_in_the_place_of_a_folder_is_named(tmp_path):
    (tmp_path / "file").touch()
    path = tmp_path / "file" / "run"
    with pytest.raises(ConfigError, match=f"since {tmp_path / 'file'} is no folder"):
        RunFolder(path).check(config_of(path), None)
    with pytest.raises(ConfigError, match=r"run_dir: .* can't be made: Not a directory"), RunFolder(path).held():
        pass


@pytest.mark.parametrize("where", [".", "..", "~", "/"])
def test_a_folder_that_holds_more_than_the_run_is_refused(where):
    with pytest.raises(ConfigError, match="run_dir: must be a folder of the run's own"):
        config_of(os.path.expanduser(where))


def test_how_to_go_on(tmp_path):
    folder = RunFolder(tmp_path)
    assert _how_to_go_on(folder) == f"no checkpoint was saved yet: resume=auto run_dir={tmp_path} begins the run anew"
    folder.checkpoint(20).mkdir(parents=True)
    assert _how_to_go_on(folder) == f"go on with resume=auto run_dir={tmp_path}, after step_000020"


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)),
        OSError(errno.EDQUOT, os.strerror(errno.EDQUOT)),
        SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)"),  # seen
    ],
    ids=["disk", "quota", "safetensors"],
)
def test_a_full_disk_is_named(tmp_path, error):
    wanted = f"no space left where {tmp_path} is; make some, or lower checkpoint.keep"
    assert _said(error, RunFolder(tmp_path)) == wanted


def test_other_failures_say_what_they_say(tmp_path):
    assert _said(FileNotFoundError(errno.ENOENT, "gone"), RunFolder(tmp_path)) == "[Errno 2] gone"


def test_a_disk_that_is_too_small_for_the_runs_model_is_said_before(tmp_path, monkeypatch):
    create_model(tmp_path / "hf", FreshModel(), seed=0)
    parameters = tensor_elements(tmp_path / "hf" / "model.safetensors")
    needed = parameters * (4 + 3 * 12)
    run = [f"run_dir={tmp_path / 'run'}", f"model.checkpoint={tmp_path / 'hf'}"]
    config = check(compose_config(["+stage=agent_rl", *run]))

    def free(count):
        monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=count))

    free(needed)
    assert check_run(config)
    free(needed - 1)
    with pytest.raises(ConfigError, match=r"run_dir: .* has 0.0 GB free, and this run writes at least 0.0 GB"):
        check_run(config)
