"""Where a run's figures go. The rest of the code knows the ``Tracker`` protocol only."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Protocol

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from rl.config import ConfigError, RunConfig, TrackingConfig

LOGIN_S = 15
FINISH_S = 600.0
"""For W&B to upload what is left when a run ends; the files stay, for `wandb sync`."""

Figures = Mapping[str, float]


@dataclass(frozen=True)
class Sample:
    """A trajectory as people read it."""

    task: str
    prompt_id: str
    text: str
    reward: float
    tokens: int


class Tracker(Protocol):
    def log(self, phase: str, step: int, figures: Figures) -> None:
        """Figures of one step of a phase (``sft``, ``rl``, ``eval``)."""
        ...

    def samples(self, step: int, rows: Sequence[Sample]) -> None: ...

    def finish(self, summary: Mapping[str, Any], failed: bool) -> None: ...


class JsonLinesTracker:
    """``metrics.jsonl``: one object a step, with the Unix time, flushed at once."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file: IO[str] = path.open("a")

    def log(self, phase: str, step: int, figures: Figures) -> None:
        self._file.write(json.dumps({"phase": phase, "step": step, "time": time.time(), **figures}) + "\n")
        self._file.flush()

    def samples(self, step: int, rows: Sequence[Sample]) -> None:
        """Trajectories have files of their own."""

    def finish(self, summary: Mapping[str, Any], failed: bool) -> None:
        self._file.close()


class ConsoleTracker:
    """A progress bar a phase, with the figures that people look at."""

    SHOWN = ("reward", "loss", "tokens_per_second", "logprob_gap_max", "staleness_max", "seconds/step")
    LABELS = ("reward", "loss", "tok/s", "log-prob gap", "staleness", "s/step")

    def __init__(self, totals: Mapping[str, int], console: Console) -> None:
        self.console = console
        self.totals = totals
        self._progress = Progress(
            TextColumn("{task.description:>5}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[figures]}"),
            console=console,
            refresh_per_second=2,
            disable=not console.is_terminal,  # a file gets a line now and then instead
        )
        self._bars: dict[str, TaskID] = {}
        self._progress.start()

    def log(self, phase: str, step: int, figures: Figures) -> None:
        text = "  ".join(
            f"{label} {figures[name]:.4g}"
            for name, label in zip(self.SHOWN, self.LABELS, strict=True)
            if name in figures
        )
        if phase not in self.totals:
            self.console.print(
                f"{phase} after step {step}: " + "  ".join(f"{k} {v:.3f}" for k, v in figures.items()), soft_wrap=True
            )
            return
        if phase not in self._bars:
            self._bars[phase] = self._progress.add_task(phase, total=self.totals[phase], figures="")
        self._progress.update(self._bars[phase], completed=step, figures=text)
        if not self.console.is_terminal and (step % 5 == 0 or step == self.totals[phase] or step == 1):
            self.console.print(f"{phase} {step}/{self.totals[phase]}  {text}", soft_wrap=True)

    def samples(self, step: int, rows: Sequence[Sample]) -> None:
        """Not shown: see the tracker's table or the trajectory files."""

    def finish(self, summary: Mapping[str, Any], failed: bool) -> None:
        self._progress.stop()


def check_login(config: TrackingConfig) -> None:
    """Before anything is started or replaced.

    Raises:
        ConfigError: W&B is to be online, and can't be reached or knows no key of ours.
    """
    if config.wandb != "online":
        return
    import wandb

    try:
        known = wandb.login(verify=True, timeout=LOGIN_S)
    except wandb.errors.Error as error:
        raise ConfigError(_not_online(str(error).splitlines()[0])) from error
    if not known:
        raise ConfigError(_not_online("no API key is known"))


def _not_online(why: str) -> str:
    return (
        f"tracking.wandb=online: {why}; `wandb login` keeps a key, and tracking=offline writes files into the run's "
        "folder, which `wandb sync` uploads later"
    )


class WandbTracker:
    """Weights & Biases, offline or online. Each phase has its own step axis."""

    def __init__(self, config: RunConfig, run_id: str, mode: str) -> None:
        import wandb

        self._wandb = wandb
        tracking = config.tracking
        self._run = wandb.init(
            project=tracking.project,
            name=tracking.name or f"{config.stage}-{config.run_dir.name}",
            id=run_id,
            resume="allow" if mode == "online" else None,
            mode="online" if mode == "online" else "offline",
            dir=str(config.run_dir),
            config=config.model_dump(mode="json"),
            settings=wandb.Settings(
                console="off", silent=True, init_timeout=60, finish_timeout=FINISH_S, x_disable_stats=True
            ),
        )
        for phase in ("sft", "rl", "eval"):
            self._run.define_metric(f"{phase}/step")
            self._run.define_metric(f"{phase}/*", step_metric=f"{phase}/step")
        self._rows: list[list[Any]] = []

    def log(self, phase: str, step: int, figures: Figures) -> None:
        self._run.log({f"{phase}/step": step} | {f"{phase}/{name}": value for name, value in figures.items()})

    def samples(self, step: int, rows: Sequence[Sample]) -> None:
        self._rows += [[step, row.task, row.prompt_id, row.text, row.reward, row.tokens] for row in rows]

    def finish(self, summary: Mapping[str, Any], failed: bool) -> None:
        columns = ["step", "task", "prompt", "text", "reward", "tokens"]
        self._run.log({"trajectories": self._wandb.Table(columns=columns, data=self._rows)})
        self._run.summary.update(dict(summary))
        self._run.finish(exit_code=1 if failed else 0)


class Trackers:
    """Several as one."""

    def __init__(self, trackers: Sequence[Tracker]) -> None:
        self.trackers = trackers

    def log(self, phase: str, step: int, figures: Figures) -> None:
        for tracker in self.trackers:
            tracker.log(phase, step, figures)

    def samples(self, step: int, rows: Sequence[Sample]) -> None:
        for tracker in self.trackers:
            tracker.samples(step, rows)

    def finish(self, summary: Mapping[str, Any], failed: bool) -> None:
        for tracker in self.trackers:
            tracker.finish(summary, failed)


def build_trackers(config: RunConfig, run_id: str, totals: Mapping[str, int], console: Console) -> Trackers:
    """The trackers that the config asks for. ``totals``: steps of each phase that has a bar."""
    trackers: list[Tracker] = [JsonLinesTracker(config.run_dir / "metrics.jsonl")]
    if config.tracking.console:
        trackers.append(ConsoleTracker(totals, console))
    if config.tracking.wandb != "off":
        trackers.append(WandbTracker(config, run_id, config.tracking.wandb))
    return Trackers(trackers)
