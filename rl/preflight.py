"""What can be known to be wrong before anything is started; nothing here takes seconds."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from algorithms import registry as algorithms
from algorithms.types import Algorithm
from rl.config import SUPERVISED, ConfigError, RunConfig
from rl.run_folder import RunFolder
from rl.trainer.manifest import CheckpointError, read_manifest
from rollout.processes import ProcessError, require_free_port
from tasks.protocol import Task
from tasks.registry import TaskError, load_task


@dataclass(frozen=True)
class Plan:
    """A checked run."""

    config: RunConfig
    folder: RunFolder
    algorithm: Algorithm
    tasks: Mapping[str, Task]
    checkpoint: Path | None
    """To resume from."""
    resumed: Mapping[str, Any] | None
    """What that checkpoint says of the run."""

    @property
    def group_size(self) -> int:
        return self.algorithm.group_size

    @property
    def needs_engine(self) -> bool:
        if self.config.replay is not None:
            return False
        return self.config.stage not in SUPERVISED or self.config.evaluation.prompts > 0


def check_run(config: RunConfig) -> Plan:
    """Everything that the types can't say.

    Raises:
        ConfigError: names the key or the file, what is wrong, and what would be right.
    """
    tasks = _tasks(config)
    algorithm = _algorithm(config)
    if config.model.checkpoint is not None:
        check_model_dir(config.model.checkpoint, "model.checkpoint")
    _batch(config, algorithm)
    _ports(config)
    folder = RunFolder(config.run_dir)
    if config.replay is not None and not sorted((config.replay / "trajectories").glob("step_*.npz")):
        raise ConfigError(f"replay: {config.replay} has no trajectories (trajectories/step_*.npz); name a run's folder")
    checkpoint = _checkpoint(config, folder)
    return Plan(config, folder, algorithm, tasks, checkpoint, _resumed(config, checkpoint))


def _tasks(config: RunConfig) -> dict[str, Task]:
    try:
        tasks = {name: load_task(name, task.options).options for name, task in config.tasks.items()}
    except TaskError as error:
        raise ConfigError(str(error)) from error
    for name, task in tasks.items():
        available = len(task.prompts("eval"))
        if config.evaluation.prompts > available:
            raise ConfigError(
                f"evaluation.prompts={config.evaluation.prompts}: the eval split of task {name} has {available}"
            )
    return tasks


def _algorithm(config: RunConfig) -> Algorithm:
    name = config.algorithm.get("name")
    if not isinstance(name, str):
        raise ConfigError("algorithm.name: required, but not set; choose one with algorithm=NAME")
    try:
        return algorithms.build(name, config.algorithm)
    except ValueError as error:
        raise ConfigError(str(error)) from error


def _batch(config: RunConfig, algorithm: Algorithm) -> None:
    ranks = config.trainer.data_parallel
    if config.stage in SUPERVISED:
        if config.sft.conversations_per_step % ranks:
            raise ConfigError(
                f"sft.conversations_per_step={config.sft.conversations_per_step} is not divisible by the "
                f"{ranks} data-parallel ranks"
            )
        return
    size = config.rollout.groups_per_step * algorithm.group_size
    if size % ranks:
        raise ConfigError(
            f"rollout.groups_per_step={config.rollout.groups_per_step} · group size {algorithm.group_size} = {size} "
            f"rollouts a step are not divisible by the {ranks} data-parallel ranks of trainer.world_size"
        )
    if algorithm.max_staleness is not None and config.rollout.staleness > algorithm.max_staleness:
        raise ConfigError(
            f"rollout.staleness={config.rollout.staleness} lets generation run further ahead than "
            f"algorithm.max_staleness={algorithm.max_staleness} lets train: lower the one or raise the other"
        )


def check_model_dir(directory: Path, key: str) -> None:
    """An HF directory with weights, tokenizer and chat template.

    Raises:
        ConfigError: naming the file that is missing.
    """
    if not directory.is_dir():
        raise ConfigError(f"{key}: {directory} does not exist; give the HF directory of a model")
    if not (directory / "config.json").is_file():
        raise ConfigError(f"{key}: {directory} has no config.json; give the HF directory of a model")
    if not any(directory.glob("*.safetensors")):
        raise ConfigError(f"{key}: {directory} has no *.safetensors file")
    settings = directory / "tokenizer_config.json"
    if not settings.is_file():
        raise ConfigError(f"{key}: {directory} has no tokenizer_config.json; save the tokenizer beside the weights")
    if not (directory / "chat_template.jinja").is_file() and not json.loads(settings.read_text()).get("chat_template"):
        raise ConfigError(
            f"{key}: the tokenizer in {directory} has no chat template; add chat_template.jinja, or chat_template in "
            "tokenizer_config.json"
        )


def _ports(config: RunConfig) -> None:
    wanted = [("rollout.gateway_port", config.rollout.gateway_port, config.rollout.gateway_host)]
    if config.engine.port is not None:
        wanted += [("engine.port", config.engine.port + index, "127.0.0.1") for index in range(config.engine.servers)]
    for key, port, host in wanted:
        if port == 0:
            continue
        try:
            require_free_port(key, port, host)
        except ProcessError as error:
            raise ConfigError(f"{error}; choose another, or leave it out to take a free one") from error


def _checkpoint(config: RunConfig, folder: RunFolder) -> Path | None:
    if config.resume == "no":
        return None
    if config.resume == "auto":
        return folder.newest_checkpoint()
    path = Path(config.resume)
    if not path.is_dir():
        raise ConfigError(f"resume: {path} does not exist; give a checkpoint's folder (runs/NAME/checkpoints/step_N)")
    return path


def _resumed(config: RunConfig, checkpoint: Path | None) -> Mapping[str, Any] | None:
    if checkpoint is None:
        return None
    try:
        state: Mapping[str, Any] = read_manifest(checkpoint)["extra"]
    except CheckpointError as error:
        raise ConfigError(f"resume: {error}") from error
    same = {"seed": config.seed, "groups_per_step": config.rollout.groups_per_step}
    for key, value in same.items():
        if state[key] != value:
            name = "rollout.groups_per_step" if key == "groups_per_step" else key
            raise ConfigError(
                f"{name}={value}: the run that is resumed has {state[key]}; with another value its prompts could not "
                "be accounted for"
            )
    return state
