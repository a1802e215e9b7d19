"""The folder of one run: where everything is, and its small files."""

from __future__ import annotations

import json
import shutil
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ConfigDict

from rl.config import ConfigError, RunConfig
from rl.files import drop_lines_after, write_atomically


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

    def prepare(self, config: RunConfig, resume_step: int | None) -> None:
        """Make the folder for this run. On a resume, take back what the run did after that checkpoint: its prompts are
        outstanding in it, and come again.

        Raises:
            ConfigError: it holds a run that would be lost.
        """
        if self.occupied and resume_step is None:
            if not config.overwrite and config.resume != "auto":
                raise ConfigError(
                    f"run_dir: {self.path} holds a run already; choose another run_dir, or go on with resume=auto, or "
                    "replace it with overwrite=true"
                )
            shutil.rmtree(self.path)  # with resume=auto: it came to no checkpoint, so it begins anew
        self.path.mkdir(parents=True, exist_ok=True)
        if resume_step is not None:
            self._take_back_after(resume_step)
        text = yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False, allow_unicode=True)
        write_atomically(self.path / "config.yaml", text)

    def _take_back_after(self, step: int) -> None:
        drop_lines_after(self.metrics, step)
        drop_lines_after(self.ledger, step)
        for path in [*self.checkpoints.glob("step_*"), *(self.path / "trajectories").glob("step_*.npz")]:
            if int(path.stem.partition("_")[2]) > step:
                shutil.rmtree(path) if path.is_dir() else path.unlink()
        self.summary.unlink(missing_ok=True)
        if self.final_model.exists():
            shutil.rmtree(self.final_model)

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
