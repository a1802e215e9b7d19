"""Whole runs of ``train.py`` with every part real, small enough for CI."""

from __future__ import annotations

import functools
import json
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pytest

from rl.config import FreshModel
from rl.fresh_model import create_model

ROOT = Path(__file__).parents[2]
SMALL = (
    "task=[calculator,sorting]",
    "sft.steps=250",  # below that nothing is rewarded, and without a reward there is no gradient
    "sft.conversations_per_step=32",
    "steps=4",
    "rollout.groups_per_step=4",
    "evaluation.prompts=8",
    "checkpoint.every=1",
)
SMALL_GROUPS = ("algorithm.group_size=4",)
"""Of the stages that have groups."""
RUN_TIMEOUT_S = 500


@dataclass
class Run:
    """One ``train.py`` and everything that it started."""

    folder: Path
    process: psutil.Popen
    log: Path
    seen: set[psutil.Process] = field(default_factory=set)

    def look(self) -> set[psutil.Process]:
        """Remember its descendants of this moment, so that they can be looked for when it is gone."""
        try:
            self.seen |= set(self.process.children(recursive=True))
        except psutil.NoSuchProcess:
            return self.seen
        return self.seen

    def wait(self, timeout_s: float = RUN_TIMEOUT_S) -> int:
        deadline = time.monotonic() + timeout_s
        while self.process.poll() is None:
            self.look()
            if time.monotonic() > deadline:
                self.stop()
                raise AssertionError(f"the run did not end:\n{self.text()[-3000:]}")
            time.sleep(0.3)
        return self.process.returncode

    def wait_for_step(self, step: int, phase: str = "rl") -> None:
        """Until this process has logged a step, not one that it resumed after."""
        deadline = time.monotonic() + RUN_TIMEOUT_S
        begun = self.process.create_time()
        while not any(row["phase"] == phase and row["step"] >= step and row["time"] > begun for row in self.rows()):
            self.look()
            assert self.process.poll() is None, self.text()[-3000:]
            assert time.monotonic() < deadline, self.text()[-3000:]
            time.sleep(0.1)

    def stop(self) -> None:
        for process in [*self.look(), self.process]:
            if process.is_running():
                process.kill()

    def survivors(self, within_s: float = 10.0) -> list[str]:
        """What of it still runs after so many seconds."""
        _, alive = psutil.wait_procs([p for p in self.seen if p.is_running()], timeout=within_s)
        return [f"{p.pid} {p.name()}" for p in alive if p.status() != psutil.STATUS_ZOMBIE]

    def find(self, *words: str) -> list[psutil.Process]:
        """Its processes whose command line has all these words."""
        found = []
        for process in self.look():
            try:
                if set(words) <= set(process.cmdline()):
                    found.append(process)
            except (psutil.NoSuchProcess, FileNotFoundError):
                continue
        return found

    def ports(self) -> set[int]:
        """Where it listens now."""
        found = set()
        for process in [*self.look(), self.process]:
            try:
                connections = process.net_connections(kind="tcp")
            except psutil.NoSuchProcess:
                continue
            found |= {c.laddr.port for c in connections if c.status == psutil.CONN_LISTEN}
        return found

    def rows(self) -> list[dict]:
        path = self.folder / "metrics.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        return [json.loads(line) for line in lines if line.endswith("}")]

    def summary(self) -> dict:
        return json.loads((self.folder / "summary.json").read_text())

    def text(self) -> str:
        return self.log.read_text()


def start(folder: Path, *overrides: str, stage: str = "agent_rl") -> Run:
    log, small = folder.with_suffix(".log"), SMALL if stage == "sft" else (*SMALL, *SMALL_GROUPS)
    with log.open("ab") as output:
        process = psutil.Popen(
            [sys.executable, "train.py", f"+stage={stage}", *small, f"run_dir={folder}", *overrides],
            cwd=ROOT,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    return Run(folder, process, log)


@pytest.fixture(scope="session")
def finished(tmp_path_factory) -> Run:
    """A whole small run, from fresh weights to the summary."""
    run = start(tmp_path_factory.mktemp("e2e") / "main", "+algorithm.rollout_top_k=4")
    assert run.wait() == 0, run.text()[-3000:]
    return run


@pytest.fixture(scope="session")
def untrained(tmp_path_factory) -> Path:
    """The demo's model as it begins, for runs whose rewards do not matter."""
    directory = tmp_path_factory.mktemp("untrained") / "model"
    create_model(directory, FreshModel(), seed=0)
    return directory


@pytest.fixture
def starter(tmp_path):
    """Starts runs from a model's directory; none outlives the test."""
    runs = []

    def launcher(checkpoint: Path, name: str, *overrides: str, stage: str = "agent_rl") -> Run:
        runs.append(start(tmp_path / name, f"model.checkpoint={checkpoint}", *overrides, stage=stage))
        return runs[-1]

    yield launcher
    for run in runs:
        run.stop()


@pytest.fixture
def launch(starter, finished):
    """Starts runs from the finished one's SFT weights."""
    return functools.partial(starter, finished.folder / "sft_model")


@pytest.fixture
def launch_untrained(starter, untrained):
    return functools.partial(starter, untrained)


__all__ = ["Run", "signal", "start"]
