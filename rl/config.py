"""The whole configuration of a run. Hydra composes it from ``configs/``; ``check`` types it before anything starts."""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, Self, get_args, get_origin

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from rl.teachers.config import DistillationConfig, TeacherConfig
from rl.trainer.config import OptimizerConfig, TrainerConfig
from rl.weights.choose import Topology, Wanted, choose
from rollout.engine.config import EngineConfig

STAGES = ("sft", "agent_rl", "reasoning_rl", "indexer_warmup", "opd", "cross_stage")
Stage = Literal["sft", "agent_rl", "reasoning_rl", "indexer_warmup", "opd", "cross_stage"]
SUPERVISED = ("sft", "indexer_warmup")
"""Stages that train on the tasks' demonstrations alone, with the settings under ``sft``."""
DISTILLING = ("opd", "cross_stage")
"""Stages that learn from teachers."""


class ConfigError(ValueError):
    """The configuration can't be run; every line names a key, what is wrong, and what would be right."""


class Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class FreshModel(Section):
    """Shape of a small model with random weights (``rl.fresh_model`` makes it)."""

    hidden_size: int = Field(64, gt=0)
    intermediate_size: int = Field(168, gt=0)
    layers: int = Field(2, gt=0)
    heads: int = Field(4, gt=0)
    kv_heads: int = Field(4, gt=0)
    head_dim: int = Field(16, gt=0)
    context_length: int = Field(256, gt=0)
    rope_theta: float = Field(10_000.0, gt=0)
    initializer_range: float = Field(0.02, gt=0)


class ModelConfig(Section):
    """Where the weights come from: an HF directory, or a small random model that SFT trains first."""

    checkpoint: Path | None = None
    """HF directory with tokenizer and chat template."""
    fresh: FreshModel | None = None
    name: str = "policy"
    """What clients of the gateway call it."""
    hf_config: dict[str, Any] | None = None
    """Sizes as in its HF config.json, for ``atelier plan`` without the files."""

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        if self.checkpoint is None and self.fresh is None:
            raise ValueError("give model.checkpoint (an HF directory) or model.fresh (shape of a new small model)")
        return self


class TaskConfig(Section):
    """One task of the run and where its servers are."""

    options: dict[str, Any] = {}
    share: float = Field(1.0, gt=0)
    """Relative share of the groups."""
    slots: int = Field(256, gt=0)
    """Episodes that one server plays at once."""
    max_tokens: int = Field(gt=0)
    """Of one turn."""
    episode_timeout_s: float = Field(120.0, gt=0)
    url: str | list[str] | None = None
    """Servers that run elsewhere; null starts ``replicas`` of them here."""
    replicas: int = Field(1, gt=0)
    """Servers that are started here."""

    @property
    def urls(self) -> list[str]:
        """Of servers that run elsewhere."""
        if self.url is None:
            return []
        return [self.url] if isinstance(self.url, str) else self.url

    @field_validator("url")
    @classmethod
    def _reachable(cls, value: str | list[str] | None) -> str | list[str] | None:
        urls = [value] if isinstance(value, str) else value
        if urls is not None and (not urls or not all(re.match(r"https?://[^/]", url) for url in urls)):
            raise ValueError(f"must be http://HOST:PORT or a list of such, it is {value}; null starts a server here")
        return value


class SFTConfig(Section):
    """Supervised fine-tuning on the tasks' demonstrations: the stage ``sft``, and what the RL stages begin with when
    they are given no checkpoint."""

    steps: int = Field(gt=0)
    conversations_per_step: int = Field(gt=0)
    optimizer: OptimizerConfig


class RolloutConfig(Section):
    groups_per_step: int = Field(gt=0)
    """Prompts that one update trains on."""
    staleness: int = Field(1, ge=0)
    """Steps that generation may run ahead of training; 0 is synchronous."""
    temperature: float = Field(1.0, gt=0)
    max_rollouts: int = Field(gt=0)
    """Episodes in flight."""
    max_attempts: int = Field(3, gt=0)
    """Tries of an episode whose environment fails."""
    max_refusals: int = Field(50, gt=0)
    """Times in a row that an episode is refused by a full or unreachable server before it counts as failed."""
    max_failures_in_a_row: int = Field(64, gt=0)
    """Failed episodes of one task without a success between, after which the run stops."""
    max_dropped_groups: int = Field(1000, gt=0)
    """Groups dropped while one batch is waited for (all of one reward, failed), after which the run stops."""
    save_trajectories: bool = True
    gateway_host: str = "127.0.0.1"
    gateway_port: int = Field(0, ge=0, lt=65536)
    """0 takes a free one."""


class EvaluationConfig(Section):
    prompts: int = Field(ge=0)
    """Per task, from the eval split, each once sampled and once greedy; 0 turns evaluation off."""
    concurrency: int = Field(64, gt=0)
    every: int = Field(0, ge=0)
    """Steps between evaluations beside the ones before and after; 0: only those two."""


class CheckpointConfig(Section):
    every: int = Field(10, ge=0)
    """Steps between checkpoints; 0 saves only at the end."""
    keep: int = Field(2, ge=1)


class PublishConfig(Section):
    """How new weights reach the engines."""

    transport: Wanted = "auto"
    """auto follows from where trainer and engines run (``rl.weights.choose``); the run says what it took."""
    in_flight: Literal["exact", "in_place"] = "exact"
    """Of requests: exact goes on with the new weights on a prefix that they computed; in_place keeps what the old
    weights computed (faster, and log-probs are those of no single version)."""
    bucket_bytes: int = Field(512 * 2**20, gt=0)
    """Tensors that are sent together."""
    resident_bytes: int = Field(4 * 2**30, ge=0)
    """For ``ipc``: weights up to this size are staged on the device in whole while engines still generate, and copied
    from there at one request; larger ones go in rounds of this size, each a request (of ``bucket_bytes``, if that is
    more). The trainer's rank has the memory beside its weights."""
    directory: Path | None = None
    """Where the last versions are kept, for ``disk`` and for what fails or starts anew; null: this machine's shared
    memory."""
    receivers: list[str] = []
    """For ``delta``: URL of the receiver beside each engine, in the engines' order; empty starts them here."""
    attempts: int = Field(2, gt=0)
    timeout_s: float = Field(120.0, gt=0)
    """For one broadcast, and for one receiver to take one patch."""


class ClusterConfig(Section):
    """Ray: ``address`` null starts one on this machine."""

    address: str | None = None
    colocated: bool = False
    """Trainer and engines take turns on the same GPUs."""
    cpus: int = Field(2, gt=0)
    """That the local Ray is told it has."""
    object_store_bytes: int = Field(128 * 2**20, ge=80 * 2**20)


class TrackingConfig(Section):
    wandb: Literal["offline", "online", "off"] = "offline"
    project: str = "atelier"
    name: str | None = None
    console: bool = True
    samples_per_step: int = Field(4, ge=0)
    """Trajectories that are shown as text in the tracker's table, each step."""


class RunConfig(Section):
    """One run of one stage."""

    stage: Stage
    run_dir: Path
    seed: int = Field(0, ge=0, lt=2**31)
    steps: int = Field(gt=0)
    resume: Path | Literal["no", "auto"] = "no"
    """``auto``: from the newest checkpoint of ``run_dir`` if it has one; a path: from that checkpoint."""
    overwrite: bool = False
    """Let a new run replace the one that ``run_dir`` holds."""
    replay: Path | None = None
    """Train on the trajectories recorded by that run, without engine or task servers."""
    model: ModelConfig
    tasks: dict[str, TaskConfig] = Field(min_length=1)
    sft: SFTConfig
    algorithm: dict[str, Any]
    teachers: dict[str, TeacherConfig] = {}
    """By name; which prompts are whose is said by ``distillation.route``."""
    distillation: DistillationConfig = DistillationConfig.model_validate({})
    rollout: RolloutConfig
    evaluation: EvaluationConfig
    checkpoint: CheckpointConfig
    publish: PublishConfig = PublishConfig.model_validate({})
    trainer: TrainerConfig
    engine: EngineConfig
    cluster: ClusterConfig
    tracking: TrackingConfig

    @field_validator("resume", mode="before")
    @classmethod
    def _yaml_no(cls, value: object) -> object:
        if value is not False and not isinstance(value, str | Path):
            raise ValueError(
                f"must be no, auto, or a checkpoint's folder (runs/NAME/checkpoints/step_N), it is {value}"
            )
        return value or "no"  # YAML reads a bare no as false

    @field_validator("run_dir")
    @classmethod
    def _a_folder_of_its_own(cls, value: Path) -> Path:
        home = Path(os.path.expanduser("~"))  # a user without one, as in containers, gives "~", and no error
        if value.resolve() in (Path.cwd(), *Path.cwd().parents, home):
            raise ValueError(f"must be a folder of the run's own, as runs/mine, it is {value.resolve()}")
        return value

    @model_validator(mode="after")
    def _trains_what_the_stage_is_for(self) -> Self:
        if (self.stage == "indexer_warmup") != (self.trainer.trained != "model"):
            raise ValueError(
                f"trainer.trained={self.trainer.trained} does not fit stage {self.stage}: indexer_warmup trains "
                "indexer_dense or indexer_sparse, the other stages train model"
            )
        return self

    @property
    def needs_engine(self) -> bool:
        if self.replay is not None:
            return False
        return self.stage not in SUPERVISED or self.evaluation.prompts > 0

    @property
    def topology(self) -> Topology:
        """Where trainer and engines run."""
        return Topology(
            device=self.engine.device,
            colocated=self.cluster.colocated,
            one_machine=self.cluster.address is None,
            receivers=bool(self.publish.receivers),
        )

    @model_validator(mode="after")
    def _can_publish(self) -> Self:
        if self.cluster.colocated and not self.engine.memory_saver:
            raise ValueError(
                "cluster.colocated=true needs engine.memory_saver=true, which gives the engines' memory to the trainer"
            )
        way = choose(self.publish.transport, self.topology).way
        if way in ("ipc", "collective", "delta") and not self.topology.one_machine and self.publish.directory is None:
            raise ValueError(
                f"publish.transport={way} on several machines keeps the last version in publish.directory: name one "
                "that trainer and engines share"
            )
        servers = sum(map(self.engine.servers_of, self.engine.roles))
        if self.publish.receivers and len(self.publish.receivers) != servers:
            raise ValueError(
                f"publish.receivers names {len(self.publish.receivers)} receivers for the {servers} servers of the "
                "engine: give one for each, in their order"
            )
        return self

    @model_validator(mode="after")
    def _no_gpu_is_given_twice(self) -> Self:
        """Ray gives GPUs to the trainer's ranks, and to servers that it places; other servers take the first ones."""
        placement = self.engine.placement
        if self.engine.device != "cuda" or not self.trainer.gpus_per_rank:
            return self
        if self.cluster.colocated and placement == "ray":
            raise ValueError(
                "engine.placement=ray gives the servers GPUs of their own, but with cluster.colocated=true they share "
                "the trainer's: set engine.placement=local"
            )
        if not self.cluster.colocated and placement == "local":
            raise ValueError(
                "engine.placement=local starts the servers on this machine's first GPUs, which Ray also gives to the "
                "trainer's ranks: set engine.placement=ray, so that each has its own, or take cluster=colocated, where "
                "they share them in turns"
            )
        return self

    @model_validator(mode="after")
    def _fits_the_context(self) -> Self:
        for name, task in self.tasks.items():
            if task.max_tokens >= self.engine.context_length:
                raise ValueError(
                    f"tasks.{name}.max_tokens={task.max_tokens} does not fit into engine.context_length="
                    f"{self.engine.context_length}: raise the one or lower the other"
                )
        if self.model.fresh is not None and self.engine.context_length > self.model.fresh.context_length:
            raise ValueError(
                f"engine.context_length={self.engine.context_length} is more than the model has positions for: "
                f"model.fresh.context_length={self.model.fresh.context_length}"
            )
        return self


def check(composed: Mapping[str, Any]) -> RunConfig:
    """The typed config.

    Raises:
        ConfigError: naming each key that is unknown, missing or wrong.
    """
    if "stage" not in composed or composed["stage"] is None:
        raise ConfigError(f"no stage is chosen: add +stage=NAME, one of {', '.join(STAGES)}")
    try:
        return RunConfig.model_validate(dict(composed))
    except ValidationError as error:
        raise ConfigError("\n".join(_line(problem) for problem in error.errors(include_url=False))) from error


def _line(problem: Mapping[str, Any]) -> str:
    path = [str(part) for part in problem["loc"]]
    key = ".".join(path)
    if problem["type"] == "extra_forbidden":
        known = _fields_at(path[:-1])
        close = difflib.get_close_matches(path[-1], known, n=1)
        return f"{key}: unknown key" + (f"; did you mean {close[0]}?" if close else f"; known: {', '.join(known)}")
    if problem["type"] == "missing":
        return f"{key}: required, but not set" + ("; choose some with task=[NAME,...]" if key == "tasks" else "")
    message = problem["msg"].removeprefix("Value error, ")
    return f"{key}: {message}" if key else message


def fields_of(section: str, root: type[BaseModel] = RunConfig) -> list[str]:
    """The keys of a dotted section, which "" is the root itself; [] where there is no such section, and of what stands
    under a name (tasks, teachers) or is free-form (algorithm), of which nothing is known here."""
    model: type[BaseModel] | None = root
    for part in section.split(".") if section else []:
        field = model.model_fields.get(part) if model is not None else None
        named = field is not None and get_origin(field.annotation) is dict
        model = _section_of(field.annotation) if field is not None and not named else None
    return sorted(model.model_fields) if model is not None else []


def _fields_at(path: list[str]) -> list[str]:
    """The keys of the section that an error's path leads to; names are passed over."""
    model: type[BaseModel] = RunConfig
    for part in path:
        field = model.model_fields.get(part)
        model = (_section_of(field.annotation) if field is not None else None) or model
    return sorted(model.model_fields)


def _section_of(annotation: Any) -> type[BaseModel] | None:
    """What a field of this type holds, where that is a section."""
    found = [each for each in (annotation, *get_args(annotation)) if isinstance(each, type)]
    return next((each for each in reversed(found) if issubclass(each, BaseModel)), None)
