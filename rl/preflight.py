"""What can be known to be wrong before anything is started; nothing here takes seconds, unless the engine has
``extra_args``: of those SGLang is asked."""

from __future__ import annotations

import json
import logging
import shutil
import socket
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import xxhash

from algorithms import registry as algorithms
from algorithms.types import Algorithm
from rl.cluster import demand
from rl.config import DISTILLING, SUPERVISED, ConfigError, RunConfig
from rl.model_dir import ModelDirError, check_model_dir, tensor_elements
from rl.run_folder import RunFolder
from rl.teachers.checks import TEACHER_NEEDS, TeachingPlan, check_teachers
from rl.trainer.manifest import CheckpointError, read_manifest
from rl.trainer.result import COMPUTED_NEEDS, RECORDED_NEEDS
from rl.trainer.stages import stage_problem
from rollout.engine import fit, router_settings
from rollout.engine.arguments import ArgumentsError, check_extra_args
from rollout.engine.disaggregation import transfer_problem
from rollout.engine.fit import gpus_needed
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


def check_run(config: RunConfig) -> Plan:
    """Everything that the types can't say.

    Raises:
        ConfigError: names the key or the file, what is wrong, and what would be right.
    """
    tasks = _tasks(config)
    algorithm = _algorithm(config)
    if config.model.checkpoint is not None:
        try:
            check_model_dir(config.model.checkpoint)
        except ModelDirError as error:
            raise ConfigError(f"model.checkpoint: {error}") from error
    _indexers(config)
    _stages(config)
    _engine(config)
    _needs(config, algorithm)
    teaching = check_teachers(config, algorithm, tasks)
    _batch(config, algorithm)
    _resources(config)
    _gateway_host(config)
    _ports(config)
    folder = RunFolder(config.run_dir)
    _replay(config)
    checkpoint = _checkpoint(config, folder)
    state = _read_state(checkpoint)
    folder.check(config, state["step"] if state else None)
    _inputs_stay(config, folder, state)
    _disk(config, folder)
    plan = Plan(config, folder, algorithm, tasks, checkpoint, state, teaching)
    _same_lineage(plan)
    return plan


def _replay(config: RunConfig) -> None:
    if config.replay is None:
        return
    if not any((config.replay / "trajectories").glob("step_*.npz")):
        raise ConfigError(f"replay: {config.replay} has no trajectories (trajectories/step_*.npz); name a run's folder")
    if not (config.replay / "run.json").is_file():
        raise ConfigError(f"replay: {config.replay} has no run.json, which says what weights the run began with")


def _inputs_stay(config: RunConfig, folder: RunFolder, state: Mapping[str, Any] | None) -> None:
    """What this run reads is not of the run that it replaces."""
    if state is not None or not folder.occupied:
        return
    inputs = {"model.checkpoint": config.model.checkpoint, "replay": config.replay}
    inputs |= {f"teachers.{name}.source": teacher.source for name, teacher in config.teachers.items()}
    for key, path in inputs.items():
        if path is not None and folder.loses(path):
            raise ConfigError(
                f"{key}: {path} is of the run that run_dir={folder.path} holds, which this one would replace; choose "
                "another run_dir"
            )


def _tasks(config: RunConfig) -> dict[str, Task]:
    try:
        tasks = {name: load_task(name, task.options).options for name, task in config.tasks.items()}
    except TaskError as error:
        raise ConfigError(str(error)) from error
    for name, task in tasks.items():
        available = len(task.prompts("eval"))
        if config.evaluation.prompts > available:
            raise ConfigError(
                f"evaluation.prompts={config.evaluation.prompts}: the eval split of task {name} has {available}; lower "
                "it, or choose options with more prompts"
            )
        _check_prompts(name, task)
        _check_demonstrations(config, name, task)
    return tasks


def _check_prompts(name: str, task: Task) -> None:
    ids = Counter(prompt.prompt_id for prompt in task.prompts("train"))
    if not ids:
        raise ConfigError(f'tasks.{name}: prompts("train") of tasks/{name}/task.py is empty')
    (common, count), *_ = ids.most_common(1)
    if count > 1:
        raise ConfigError(
            f'tasks.{name}: prompts("train") of tasks/{name}/task.py has prompt_id {common!r} {count} times; each must '
            "be there once, since it says which prompts an epoch has trained"
        )


def _check_demonstrations(config: RunConfig, name: str, task: Task) -> None:
    """SFT trains on them: as a stage, and before RL from fresh weights."""
    if config.replay is not None or (config.stage not in SUPERVISED and config.model.checkpoint is not None):
        return
    try:
        next(iter(task.demonstrations(config.seed)))
    except (NotImplementedError, StopIteration) as error:
        why = f"stage {config.stage}" if config.stage in SUPERVISED else "a fresh model (no model.checkpoint)"
        raise ConfigError(
            f"tasks.{name}: {why} is trained on demonstrations, and tasks/{name}/task.py has none; give it some, or "
            "leave the task out" + ("" if config.stage in SUPERVISED else ", or give model.checkpoint")
        ) from error


def _algorithm(config: RunConfig) -> Algorithm:
    name = config.algorithm.get("name")
    if not isinstance(name, str):
        raise ConfigError("algorithm.name: required, but not set; choose one with algorithm=NAME")
    try:
        algorithm = algorithms.build(name, config.algorithm)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    if (config.stage in SUPERVISED) != (name == "sft"):
        wanted = "algorithm=sft" if config.stage in SUPERVISED else "dis, grpo, gspo or cispo; sft is +stage=sft"
        raise ConfigError(f"algorithm={name} is not for stage {config.stage}, which trains with {wanted}")
    if config.stage in DISTILLING and not algorithm.needs & TEACHER_NEEDS and not config.teachers:
        raise ConfigError(
            f"algorithm={name} asks no teacher, and stage {config.stage} is for them: choose algorithm=opd"
        )
    return algorithm


def _indexers(config: RunConfig) -> None:
    if config.trainer.trained == "model":
        return
    given = config.model.checkpoint
    if given is None or "index_topk" not in json.loads((given / "config.json").read_text()):
        raise ConfigError(
            f"stage {config.stage} trains the indexers of sparse attention (GLM-5), which "
            f"{given or 'a fresh model'} has not; give such a model as model.checkpoint"
        )


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
    trainer, engine = config.trainer, config.engine
    from_ray = demand(config) if config.cluster.address is None else {"CPU": 0, "GPU": 0}
    placed = " and the servers that Ray places" if config.needs_engine and engine.placement == "ray" else ""
    if from_ray["CPU"] > config.cluster.cpus:
        raise ConfigError(
            f"trainer.world_size={trainer.world_size} · cpus_per_rank={trainer.cpus_per_rank:g}{placed} = "
            f"{from_ray['CPU']:g} CPUs are more than cluster.cpus={config.cluster.cpus}: raise it, or lower the others"
        )
    local = config.needs_engine and engine.device == "cuda" and engine.placement == "local"
    servers = gpus_needed(engine) if local else 0
    if not servers and not from_ray["GPU"]:
        return
    if config.cluster.colocated and servers > trainer.world_size:
        raise ConfigError(
            f"cluster.colocated=true: the servers take {servers} GPUs (servers x tensor_parallel), and weights are "
            f"there on those of trainer.world_size={trainer.world_size} ranks: raise that, or lower the others"
        )
    import torch  # which is imported by now, with the algorithm

    here = torch.cuda.device_count()
    if servers > here:
        raise ConfigError(
            f"engine.device=cuda: the servers take {servers} GPUs (servers x tensor_parallel), this machine has "
            f"{here}: choose engine=cpu, lower them, or spread them over a cluster with engine.placement=ray"
        )
    if from_ray["GPU"] > here:
        raise ConfigError(
            f"trainer.world_size={trainer.world_size} · gpus_per_rank={trainer.gpus_per_rank:g}{placed} = "
            f"{from_ray['GPU']:g} GPUs, this machine has {here}: lower them, or join a cluster with cluster.address"
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


def _ports(config: RunConfig) -> None:
    wanted = [("rollout.gateway_port", config.rollout.gateway_port, config.rollout.gateway_host)]
    if config.engine.port is not None and config.engine.placement == "local":
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


CHECKPOINT_BYTES = 12
"""Of a parameter, at least: fp32 weights and Adam's two moments."""


def _disk(config: RunConfig, folder: RunFolder) -> None:
    """Room for the final model, and for the checkpoints that are kept and the one that is being saved. Of a folder that
    holds a run already nothing is known: its files go."""
    if config.model.checkpoint is None or folder.occupied or config.replay is not None:
        return
    parameters = sum(tensor_elements(file) for file in config.model.checkpoint.glob("*.safetensors"))
    saved = 0 if config.stage in SUPERVISED else config.checkpoint.keep + 1
    needed = parameters * ((2 if config.trainer.dtype == "bfloat16" else 4) + saved * CHECKPOINT_BYTES)
    there = next(path for path in (folder.path, *folder.path.parents) if path.exists())
    free = shutil.disk_usage(there).free
    if needed > free:
        raise ConfigError(
            f"run_dir: {there} has {free / 1e9:.1f} GB free, and this run writes at least {needed / 1e9:.1f} GB (its "
            f"model, and checkpoint.keep={config.checkpoint.keep} checkpoints and one more); choose another disk, or "
            "lower checkpoint.keep"
        )


EVERYWHERE = ("0.0.0.0", "::", "")


def _gateway_host(config: RunConfig) -> None:
    """Task servers are told it, and one that runs elsewhere reaches neither this machine's loopback nor 0.0.0.0."""
    host = config.rollout.gateway_host
    remote = [f"tasks.{name}.url" for name, task in sorted(config.tasks.items()) if any(map(_elsewhere, task.urls))]
    loopback = host == "localhost" or host.startswith("127.")
    if remote and (host in EVERYWHERE or (loopback and not config.rollout.gateway_port)):
        raise ConfigError(
            f"rollout.gateway_host={host} can't be reached by the servers of {', '.join(remote)}: give an address of "
            "this machine that they reach"
        )
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        try:
            probe.bind((host, 0))
        except OSError as error:
            raise ConfigError(
                f"rollout.gateway_host={host} is no address of this machine ({error.strerror}); give one that the task "
                "servers reach, or 127.0.0.1 where all run here"
            ) from error


def _elsewhere(url: str) -> bool:
    """Whether a URL's host is another machine: one of this machine's addresses can be bound."""
    host = urlsplit(url).hostname or ""
    try:
        addresses = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)
    except OSError:
        return False  # that it can't be reached is said where it is asked
    for family, kind, _, _, address in addresses:
        try:
            with socket.socket(family, kind) as probe:
                probe.bind((address[0], 0))
        except OSError:
            return True
    return False


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
    given, began = plan.config.model.checkpoint, Path(plan.resumed["initial_model"])
    if given is not None and given.resolve() != began.resolve():
        raise ConfigError(
            f"model.checkpoint={given}: the run that is resumed began with {began}; give that, or leave resume out"
        )
    if plan.resumed["step"] > plan.config.steps:
        raise ConfigError(f"steps={plan.config.steps}: the run that is resumed has done {plan.resumed['step']} already")
