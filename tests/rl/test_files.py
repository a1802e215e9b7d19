"""Folders that a run can't write to are told before it starts."""

import contextlib
import os
import tempfile
from pathlib import Path

import pytest

from rl.config import ConfigError
from rl.files import folder_problem
from rl.teachers.checks import _store

NOBODY = 65534


@contextlib.contextmanager
def as_nobody():
    """Root may write everywhere."""
    if os.getuid() != 0:
        yield
        return
    os.setresuid(NOBODY, NOBODY, 0)
    try:
        yield
    finally:
        os.setresuid(0, 0, 0)


@pytest.fixture
def locked():
    """A folder that may not be entered, with one inside that can't be seen from here."""
    with tempfile.TemporaryDirectory() as name:
        inside = Path(name, "there")
        inside.mkdir()
        os.chmod(name, 0)
        with as_nobody():
            yield inside
        os.chmod(name, 0o700)


def test_a_folder_below_one_that_may_not_be_entered_is_told(locked):
    for folder in (locked.parent, locked, locked / "new"):
        told = f"{folder} can't be made or written to, since this user may not write to {locked.parent};"
        assert told in str(folder_problem(folder))


def test_a_store_names_its_key(locked):
    with pytest.raises(ConfigError, match=rf"distillation\.store: {locked} can't be made or written to"):
        _store(locked)


def test_a_new_folder_and_a_file(tmp_path):
    assert folder_problem(tmp_path / "new" / "newer") is None
    (tmp_path / "file").touch()
    assert f"since {tmp_path}/file is no folder" in str(folder_problem(tmp_path / "file" / "below"))
