"""What can be known to be wrong with a run's teachers before anything is started."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from algorithms.types import Algorithm, Need
from rl.config import ConfigError, RunConfig
from rl.files import folder_problem
from rl.fresh_model import character_tokenizer
from rl.teachers.routing import RouteError, Routing
from rl.teachers.sources import (
    TeacherSource,
    TeacherSourceError,
    check_tokenizer,
    resolve_all,
    vocabulary,
    with_bases,
)
from tasks.protocol import Task

TEACHER_NEEDS = frozenset({Need.TEACHER_LOGPROBS, Need.TEACHER_VIEWS})


@dataclass(frozen=True)
class TeachingPlan:
    """A run's checked teachers."""

    routing: Routing
    sources: tuple[TeacherSource, ...]
    urls: Mapping[str, str]

    def evaluation_sets(self, tasks: Mapping[str, Task], size: int) -> dict[str, tuple[str, list[tuple[str, dict]]]]:
        """Prompts to evaluate on, so that each value of the route has its own reward: ``{label: (task, prompts)}``."""
        sets: dict[str, tuple[str, list[tuple[str, dict]]]] = {}
        for name, task in sorted(tasks.items()):
            for prompt in task.prompts("eval"):
                value = self.routing.value(name, prompt.data)
                label = name if value == name else f"{name}/{value}"
                chosen = sets.setdefault(label, (name, []))[1]
                if len(chosen) < size:
                    chosen.append((prompt.prompt_id, prompt.data))
        return sets


def check_teachers(config: RunConfig, algorithm: Algorithm, tasks: Mapping[str, Task]) -> TeachingPlan | None:
    """
    Raises:
        ConfigError: names the teacher and the key or file, what is wrong, and what would be right.
    """
    taught = bool(algorithm.needs & TEACHER_NEEDS)
    if taught and not config.teachers:
        raise ConfigError(
            f"teachers: none is given, and algorithm={config.algorithm['name']} needs some: add +teacher=[NAME,...] "
            "(configs/teacher), or +teachers.NAME.source=DIRECTORY"
        )
    if not config.teachers:
        return None
    if not taught:
        raise ConfigError(
            f"teachers: algorithm={config.algorithm['name']} asks no teacher; choose algorithm=opd, or leave them out"
        )
    routing = Routing(config.teachers, config.distillation.route)
    try:
        for split in ("train", "eval") if config.evaluation.prompts else ("train",):
            routing.check({name: task.prompts(split) for name, task in tasks.items()})
        sources = resolve_all(config.teachers, config.distillation)
        _tokenizers(config, sources)
        if Need.TEACHER_VIEWS in algorithm.needs:
            _logits(config, sources)
    except (RouteError, TeacherSourceError) as error:
        raise ConfigError(str(error)) from error
    _sizes(config, sources)
    _store(config.distillation.store)
    return TeachingPlan(routing, sources, _urls(config, algorithm))


def _tokenizers(config: RunConfig, sources: Iterable[TeacherSource]) -> None:
    if config.model.checkpoint is not None:
        ours = vocabulary("model.checkpoint", config.model.checkpoint)
    else:
        assert config.model.fresh is not None
        ours = dict(character_tokenizer(config.model.fresh.context_length).get_vocab())
    directories = {f"teachers.{source.name}.source": source.model for source in sources}
    directories |= {f"teachers.{n}.tokenizer": t.tokenizer for n, t in config.teachers.items() if t.tokenizer}
    known: dict[Path, Mapping[str, int]] = {}
    for key, directory in sorted(directories.items()):
        if not directory.is_dir():
            raise TeacherSourceError(f"{key}: {directory} does not exist; give an HF directory with a tokenizer")
        if directory not in known:
            known[directory] = vocabulary(key, directory)
        check_tokenizer(key, directory, known[directory], ours)


def _logits(config: RunConfig, sources: Iterable[TeacherSource]) -> None:
    """Whole distributions are compared token by token, the rows that pad a vocabulary included."""
    if config.model.checkpoint is None:
        return
    ours = _vocabulary_size(config.model.checkpoint)
    for source in sources:
        theirs = _vocabulary_size(source.model)
        if theirs != ours:
            raise TeacherSourceError(
                f"teachers.{source.name}.source: {source.model} has logits for {theirs} tokens, the student for "
                f"{ours}; algorithm.mode=sampled compares log-probs of the sampled tokens only"
            )


def _vocabulary_size(directory: Path) -> int:
    size: int = json.loads((directory / "config.json").read_text())["vocab_size"]
    return size


def _sizes(config: RunConfig, sources: Iterable[TeacherSource]) -> None:
    """A teacher, as it is kept, must fit into pinned memory; into GPU memory it need not, since it can stream."""
    for source in with_bases(sources):
        least, budget = source.least_stored_bytes(config.trainer), config.distillation.pinned_bytes
        if least > budget:
            kept = config.trainer.dtype if source.codec == "exact" else source.codec
            raise ConfigError(
                f"distillation.pinned_bytes={budget}: teacher {source.name} takes at least {least} bytes of each rank "
                f"in {kept}; raise it, or spread the model over more ranks (trainer.parallel)"
            )


def _store(folder: Path | None) -> None:
    if folder is not None and (problem := folder_problem(folder)):
        raise ConfigError(f"distillation.store: {problem}, on local disk")


def _urls(config: RunConfig, algorithm: Algorithm) -> dict[str, str]:
    urls = {name: teacher.url for name, teacher in sorted(config.teachers.items()) if teacher.url is not None}
    for name in urls:
        if config.rollout.temperature != 1.0:
            raise ConfigError(
                f"teachers.{name}.url: an SGLang server scores at temperature 1 only, and rollout.temperature="
                f"{config.rollout.temperature:g}; sample at 1, or give the teacher's weights as source"
            )
        if Need.TEACHER_VIEWS in algorithm.needs:
            raise ConfigError(
                f"teachers.{name}.url: a server gives the log-probs of sampled tokens only; algorithm.mode=sampled, or "
                "give the teacher's weights as source"
            )
    return urls
