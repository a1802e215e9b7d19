"""The folder of one run: where everything is, and its small files."""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import os
import shutil
import socket
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ConfigDict

from rl.config import ConfigError, RunConfig
from rl.files import drop_lines_after, folder_problem, write_atomically

MADE = (
    *("config.yaml", "run.json", "metrics.jsonl", "ledger.jsonl", "summary.json", "reward.png"),
    *("fresh_model", "sft_model", "model", "checkpoints", "trajectories", "teachers", "logs", "wandb"),
)
"""What a run makes in its folder. When it is replaced these go, and nothing else that lies there."""
LOCK = ".lock"
LOCKED = (errno.EACCES, errno.EAGAIN)

log = logging.getLogger(__name__)


class RunIdentity(BaseModel):
    """``run.json``: what stays the same over resumes."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    run_id: str
    stage: str
    seed: int
    initial_model: str
    """HF directory of the weights that the stage began with."""


@dataclass(frozen=True)
class RunFolder:
    path: Path

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def logs(self) -> Path:
        return self.path / "logs"

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def ledger(self) -> Path:
        return self.path / "ledger.jsonl"

    @property
    def summary(self) -> Path:
        return self.path / "summary.json"

    @property
    def fresh_model(self) -> Path:
        return self.path / "fresh_model"

    @property
    def sft_model(self) -> Path:
        return self.path / "sft_model"

    @property
    def final_model(self) -> Path:
        """HF directory of the weights at the end."""
        return self.path / "model"

    def trajectories(self, step: int) -> Path:
        return self.path / "trajectories" / f"step_{step:06d}.npz"

    def checkpoint(self, step: int) -> Path:
        return self.checkpoints / f"step_{step:06d}"

    def newest_checkpoint(self) -> Path | None:
        """The last complete one; a save that a crash cut has a hidden name."""
        found = sorted(self.checkpoints.glob("step_*")) if self.checkpoints.is_dir() else []
        return found[-1] if found else None

    def prune_checkpoints(self, keep: int) -> None:
        for old in sorted(self.checkpoints.glob("step_*"))[:-keep]:
            shutil.rmtree(old)

    @property
    def occupied(self) -> bool:
        return (self.path / "run.json").exists() or self.metrics.exists()

    def check(self, config: RunConfig, resume_step: int | None) -> None:
        """
        Raises:
            ConfigError: it can't be written to, or holds a run that would be lost.
        """
        if problem := folder_problem(self.path):
            raise ConfigError(f"run_dir: {problem}")
        if not self.occupied or resume_step is not None or config.overwrite:
            return
        if config.resume != "auto":
            raise ConfigError(
                f"run_dir: {self.path} holds a run already; choose another run_dir, or go on with resume=auto, or "
                "replace it with overwrite=true"
            )
        if self.summary.exists():
            raise ConfigError(
                f"run_dir: {self.path} holds a finished run without checkpoints, which resume=auto would begin anew; "
                "choose another run_dir, or replace it with overwrite=true"
            )

    @contextmanager
    def held(self) -> Iterator[None]:
        """No other run writes into the folder meanwhile. The lock is the kernel's, and ends with this process, however
        that ends.

        Raises:
            ConfigError: another run has it, or the folder can't be made.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            file = (self.path / LOCK).open("a+")
        except OSError as error:
            raise ConfigError(f"run_dir: {error.filename} can't be made: {error.strerror}") from error
        with file:
            try:
                fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                if error.errno in LOCKED:
                    file.seek(0)
                    raise ConfigError(
                        f"run_dir: {self.path} is in use by {file.read().strip() or 'another run'}; wait for its end, "
                        "or choose another run_dir"
                    ) from error
                log.warning("%s has no locks (%s): nothing keeps a second run out of it", self.path, error.strerror)
            file.truncate(0)
            file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
            file.flush()
            yield

    def prepare(self, config: RunConfig, resume_step: int | None) -> None:
        """Make the folder for this run. On a resume, take back what the run did after that checkpoint: its prompts are
        outstanding in it, and come again.

        Raises:
            ConfigError: as ``check``.
        """
        self.check(config, resume_step)
        if resume_step is None and self.occupied:
            self._clear()  # with resume=auto: it came to no checkpoint, so it begins anew
        self.path.mkdir(parents=True, exist_ok=True)
        if resume_step is not None:
            self._take_back_after(resume_step)
        text = yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False, allow_unicode=True)
        write_atomically(self.path / "config.yaml", text)

    def loses(self, path: Path) -> bool:
        """Whether a file or folder would go, were this run replaced."""
        path, run = path.resolve(), self.path.resolve()
        return path == run or any(path.is_relative_to(run / name) for name in MADE)

    def _clear(self) -> None:
        for path in (self.path / name for name in MADE):
            _remove(path)

    def _take_back_after(self, step: int) -> None:
        drop_lines_after(self.metrics, step)
        drop_lines_after(self.ledger, step)
        for path in [*self.checkpoints.glob("step_*"), *(self.path / "trajectories").glob("step_*.npz")]:
            if int(path.stem.partition("_")[2]) > step:
                _remove(path)
        _remove(self.summary)
        _remove(self.final_model)

    def identity(self) -> RunIdentity | None:
        path = self.path / "run.json"
        return RunIdentity.model_validate_json(path.read_text()) if path.exists() else None

    def begin(self, config: RunConfig, initial_model: Path) -> RunIdentity:
        """Write ``run.json`` unless a resumed run has one."""
        known = self.identity()
        if known is not None:
            return known
        identity = RunIdentity(
            run_id=uuid.uuid4().hex[:8],
            stage=config.stage,
            seed=config.seed,
            initial_model=str(initial_model.resolve()),
        )
        write_atomically(self.path / "run.json", identity.model_dump_json(indent=1) + "\n")
        return identity

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        write_atomically(self.summary, json.dumps(summary, indent=1) + "\n")


def _remove(path: Path) -> None:
    """Whatever is there; of a link, the link."""
    shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink(missing_ok=True)
