"""The last versions as HF directories: what a publication that fails goes back to, what an engine that was started anew
loads, and the base of a patch.

The folder is in shared memory unless the config says otherwise. It belongs to one run and goes with it; what a run that
was killed left behind goes when the next one starts. A run holds a lock in its folder, which ends with it however it
dies.
"""

from __future__ import annotations

import fcntl
import shutil
import tempfile
from pathlib import Path

PREFIX = "atelier-weights-"
LOCK = "lock"
SHARED_MEMORY = Path("/dev/shm")


class Archive:
    def __init__(self, parent: Path | None = None) -> None:
        """
        Args:
            parent: where the run's own folder is made; None is shared memory.
        """
        parent = SHARED_MEMORY if parent is None else parent
        parent.mkdir(parents=True, exist_ok=True)
        for folder in parent.glob(f"{PREFIX}*"):
            _remove_if_abandoned(folder)
        self.root = Path(tempfile.mkdtemp(prefix=PREFIX, dir=parent))
        self._lock = (self.root / LOCK).open("w")
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        self._versions: set[int] = set()

    def directory(self, version: int) -> Path:
        return self.root / f"v{version}"

    def target(self, version: int, held: int | None) -> Path:
        """Where a version is to be written. Only the one that the engines hold is kept beside it; so also what an
        earlier attempt left there is removed."""
        for old in self._versions - {held} | {version}:
            shutil.rmtree(self.directory(old), ignore_errors=True)
        self._versions = {version} if held is None else {version, held}
        return self.directory(version)

    def close(self) -> None:
        shutil.rmtree(self.root, ignore_errors=True)
        self._lock.close()


def _remove_if_abandoned(folder: Path) -> None:
    lock = folder / LOCK
    if not lock.is_file():
        return  # another run is making it just now
    with lock.open("r+") as stream:
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return
        shutil.rmtree(folder, ignore_errors=True)
