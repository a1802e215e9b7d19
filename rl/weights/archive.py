"""The last versions as HF directories: what a publication that fails goes back to, what an engine that was started anew
loads, and the base of a patch.

The folder is in shared memory unless the config says otherwise. It belongs to one run and goes with it.
"""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

SHARED_MEMORY = Path("/dev/shm")
KEPT = 2
"""Versions: the one that the engines have, and the one that they are to have."""


class Archive:
    def __init__(self, parent: Path | None = None) -> None:
        """
        Args:
            parent: where the run's own folder is made; None is shared memory.
        """
        parent = SHARED_MEMORY if parent is None else parent
        parent.mkdir(parents=True, exist_ok=True)
        self.root = Path(tempfile.mkdtemp(prefix="atelier-weights-", dir=parent))
        self._versions: list[int] = []

    def target(self, version: int) -> Path:
        """Where a version is to be written; what an earlier attempt left there is removed."""
        directory = self.root / f"v{version}"
        shutil.rmtree(directory, ignore_errors=True)
        return directory

    def written(self, version: int) -> None:
        """A version lies at its target; what is older than the newest ones is removed."""
        self._versions = [kept for kept in self._versions if kept != version] + [version]
        for old in self._versions[:-KEPT]:
            shutil.rmtree(self.root / f"v{old}")
        self._versions = self._versions[-KEPT:]

    def close(self) -> None:
        shutil.rmtree(self.root, ignore_errors=True)
