"""The last versions as HF directories: what a publication that fails goes back to, what an engine that was started anew
loads, and the base of a patch.

The folder is in shared memory unless the config says otherwise. It belongs to one run and goes with it.
"""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

SHARED_MEMORY = Path("/dev/shm")


class Archive:
    def __init__(self, parent: Path | None = None) -> None:
        """
        Args:
            parent: where the run's own folder is made; None is shared memory.
        """
        parent = SHARED_MEMORY if parent is None else parent
        parent.mkdir(parents=True, exist_ok=True)
        self.root = Path(tempfile.mkdtemp(prefix="atelier-weights-", dir=parent))
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
