"""What can be known to be wrong before anything is started; nothing here takes seconds, unless the engine has
``extra_args``: of those SGLang is asked."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash

from algorithms import registry as algorithms
from algorithms.types import Algorithm
from rl.config import SUPERVISED, ConfigError, RunConfig
from rl.run_folder import RunFolder
from rl.teachers.checks import TeachingPlan, check_teachers
from rl.trainer.manifest import CheckpointError, read_manifest
from rl.trainer.result import COMPUTED_NEEDS, RECORDED_NEEDS
from rl.trainer.stages import stage_problem
from rollout.engine import fit, router_settings
from rollout.engine.arguments import ArgumentsError, check_extra_args
from rollout.engine.disaggregation import transfer_problem
from rollout.engine.launch import server_specs
from rollout.engine.model_shape import ModelShapeError, read_model_shape
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
    teaching: TeachingPlan | None = None

    def lineage(self) -> dict[str, Any]:
        """What must be the same for a checkpoint to be gone on from with every prompt accounted for."""
        config = self.config
        ids = {name: [p.prompt_id for p in task.prompts("train")] for name, task in self.tasks.items()}
        digest = xxhash.xxh3_64(json.dumps(ids, sort_keys=True).encode()).hexdigest()
        return {
            "stage": config.stage,
            "seed": config.seed,
            "rollout.groups_per_step": config.rollout.groups_per_step,
            "tasks": sorted(config.tasks),
            "prompts": digest,
        }

    def evaluation_sets(self) -> Mapping[str, tuple[str, Sequence[tuple[str, Mapping[str, Any]]]]]:
        """Prompts to evaluate on: ``{label: (task, prompts)}``, a set a task, or one for each group of prompts that has
        its own teachers."""
        size = self.config.evaluation.prompts
        if self.teaching is not None:
            return self.teaching.evaluation_sets(self.tasks, size)
        return {
            name: (name, [(p.prompt_id, p.data) for p in task.prompts("eval")[:size]])
            for name, task in sorted(self.tasks.items())
        }

    @property
    def top_logprobs(self) -> int:
        """How many of the likeliest tokens the engine returns at each position, for the algorithm."""
        return 0 if self.config.stage in SUPERVISED else self.algorithm.rollout_top_k or 0

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
    _stages(config)
    _engine(config)
    _needs(config, algorithm)
    teaching = check_teachers(config, algorithm, tasks)
    _batch(config, algorithm)
    _resources(config)
    _ports(config)
    folder = RunFolder(config.run_dir)
    _replay(config)
    checkpoint = _checkpoint(config, folder)
    plan = Plan(config, folder, algorithm, tasks, checkpoint, _read_state(checkpoint), teaching)
    _same_lineage(plan)
    return plan


def _replay(config: RunConfig) -> None:
    if config.replay is None:
        return
    if not any((config.replay / "trajectories").glob("step_*.npz")):
        raise ConfigError(f"replay: {config.replay} has no trajectories (trajectories/step_*.npz); name a run's folder")
    if not (config.replay / "run.json").is_file():
        raise ConfigError(f"replay: {config.replay} has no run.json, which says what weights the run began with")


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


def _stages(config: RunConfig) -> None:
    parallel = config.trainer.parallel
    if parallel.stages == 1:
        return
    if config.model.checkpoint is None:
        assert config.model.fresh is not None, "a model has either"
        layers, indexers = config.model.fresh.layers, None
    else:
        from transformers import AutoConfig  # seconds, which a model that is not cut into stages needn't wait for

        try:
            model = AutoConfig.from_pretrained(config.model.checkpoint, local_files_only=True)
        except (OSError, ValueError) as error:
            raise ConfigError(f"model.checkpoint: {config.model.checkpoint}: {error}") from error
        layers = model.num_hidden_layers
        indexers = model.indexer_types if hasattr(model, "indexer_types") else None
    try:
        problem = stage_problem(layers, indexers, parallel.stages)
    except ValueError as error:
        raise ConfigError(f"model.checkpoint: {config.model.checkpoint}: {error}") from error
    if problem is not None:
        raise ConfigError(
            f"trainer.parallel.pipeline={parallel.pipeline} · virtual_pipeline={parallel.virtual_pipeline}: {problem}"
        )


def _engine(config: RunConfig) -> None:
    try:
        check_extra_args(config.engine)
    except ArgumentsError as error:
        raise ConfigError(str(error)) from error
    if config.engine.sglang_router is not None and (problem := router_settings.missing()) is not None:
        raise ConfigError(problem)
    apart = config.engine.disaggregation if config.engine.placement == "local" else None
    if apart is not None and (problem := transfer_problem(apart.transfer_backend)) is not None:
        raise ConfigError(f"engine.{problem}")
    if config.model.checkpoint is None:
        return
    try:
        shape = read_model_shape(config.model.checkpoint)
    except ModelShapeError as error:
        logging.getLogger(__name__).warning("whether the engine fits the model is left to SGLang: %s", error)
        return
    for problem in fit.problems(config.engine, shape):
        raise ConfigError(problem)


def _needs(config: RunConfig, algorithm: Algorithm) -> None:
    missing = sorted(algorithm.needs - COMPUTED_NEEDS - RECORDED_NEEDS)
    if missing:
        raise ConfigError(
            f"algorithm={config.algorithm['name']} with these options needs {', '.join(missing)}, which no stage "
            "computes yet; choose another algorithm, or options that don't need them"
        )


def _resources(config: RunConfig) -> None:
    wanted = config.trainer.world_size * config.trainer.cpus_per_rank
    if config.cluster.address is None and wanted > config.cluster.cpus:
        raise ConfigError(
            f"trainer.world_size={config.trainer.world_size} · cpus_per_rank={config.trainer.cpus_per_rank:g} = "
            f"{wanted:g} CPUs are more than cluster.cpus={config.cluster.cpus}: raise it, or lower the others"
        )


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
        wanted += [("engine.port", config.engine.port + s.index, "127.0.0.1") for s in server_specs(config.engine)]
    if config.engine.sglang_router is not None:
        wanted.append(("engine.sglang_router.port", config.engine.sglang_router.port or 0, "127.0.0.1"))
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
    path = Path(config.resume).resolve()
    if not path.is_dir():
        raise ConfigError(f"resume: {path} does not exist; give a checkpoint's folder (runs/NAME/checkpoints/step_N)")
    if path.parent != folder.checkpoints and folder.occupied:
        raise ConfigError(
            f"resume: {path} belongs to another run than run_dir={folder.path}, which holds one already; choose a new "
            "run_dir to branch off from that checkpoint"
        )
    return path


def _read_state(checkpoint: Path | None) -> Mapping[str, Any] | None:
    if checkpoint is None:
        return None
    try:
        state: Mapping[str, Any] = read_manifest(checkpoint)["extra"]
    except CheckpointError as error:
        raise ConfigError(f"resume: {error}") from error
    if "initial_model" not in state:
        raise ConfigError(f"resume: {checkpoint} was not saved by a run of an RL stage")
    if not Path(state["initial_model"]).is_dir():
        raise ConfigError(f"resume: {state['initial_model']}, which that run's model was loaded from, does not exist")
    return state


def _same_lineage(plan: Plan) -> None:
    if plan.resumed is None:
        return
    for key, value in plan.lineage().items():
        before = plan.resumed[key]
        if before == value:
            continue
        if key == "prompts":
            raise ConfigError("resume: the tasks' train prompts are not those of the run that is resumed: check tasks")
        raise ConfigError(
            f"{key}={value}: the run that is resumed has {before}; with another value its prompts could not be "
            "accounted for"
        )
    if plan.resumed["step"] > plan.config.steps:
        raise ConfigError(f"steps={plan.config.steps}: the run that is resumed has done {plan.resumed['step']} already")
