"""Hydra composes ``configs/`` and the command line's overrides; its errors become one or two lines."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from hydra.errors import HydraException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import BaseModel

from rl.config import STAGES, ConfigError, RunConfig, TaskConfig, fields_of
from rl.plan import PlanConfig
from rl.teachers.config import TeacherConfig
from tasks.registry import load_task

CONFIG_DIR = Path(__file__).resolve().parent.parent / "configs"
TYPED: Mapping[str, type[BaseModel]] = {"config": RunConfig, "plan": PlanConfig}
"""What ``configs/NAME.yaml`` is checked as."""


def compose_config(overrides: Sequence[str], config_dir: Path = CONFIG_DIR) -> dict[str, Any]:
    """The composed config as plain data, interpolations resolved.

    Raises:
        ConfigError: no stage or several, an unknown key, group or option, or a required value that is missing.
    """
    _check_stage(overrides)
    return _compose("config", overrides, config_dir, required=True)


def compose_plan(overrides: Sequence[str], config_dir: Path = CONFIG_DIR) -> dict[str, Any]:
    """The planner's config (``configs/plan.yaml``); what is required but not set is ``???``: a plan may do without.

    Raises:
        ConfigError: an unknown key, group or option.
    """
    return _compose("plan", overrides, config_dir, required=False)


def _compose(name: str, overrides: Sequence[str], config_dir: Path, required: bool) -> dict[str, Any]:
    _check_words(overrides)
    plain: Any = None
    while plain is None:
        try:
            with initialize_config_dir(version_base=None, config_dir=str(config_dir)):
                composed = compose(config_name=name, overrides=list(overrides))
                plain = OmegaConf.to_container(composed, resolve=True, throw_on_missing=required)
        except (HydraException, OmegaConfBaseException, ValueError) as error:
            left_out = re.search(r"Could not override '([^']+)'", str(error))
            if left_out is None or not _is_ours(left_out[1], overrides, config_dir, name):
                raise ConfigError(_explain(error, overrides, config_dir, name)) from error
            # Hydra wants a + before a key that the files leave out; that it is one of ours is known without.
            added = [f"++{text}" if text.startswith(f"{left_out[1]}=") else text for text in overrides]
            if added == list(overrides):
                raise ConfigError(_explain(error, overrides, config_dir, name)) from error
            overrides = added
    assert isinstance(plain, dict)
    return {str(key): value for key, value in plain.items()}


def _is_ours(key: str, overrides: Sequence[str], config_dir: Path, name: str) -> bool:
    """Whether a key that the files leave out is one of the typed config's, or an option of what is chosen."""
    section, _, last = key.rpartition(".")
    if last in fields_of(section, TYPED[name]):
        return True
    return last in _fields(section, _chosen(overrides, config_dir, name), name)


def _chosen(overrides: Sequence[str], config_dir: Path, name: str) -> dict[str, Any]:
    """What the files give, with the configs that the command line chooses; {} where it chooses wrongly, which is said
    in its turn."""
    choices = [text for text in overrides if (config_dir / text.partition("=")[0].lstrip("+")).is_dir()]
    try:
        with initialize_config_dir(version_base=None, config_dir=str(config_dir)):
            plain = OmegaConf.to_container(compose(config_name=name, overrides=choices), resolve=False)
    except (HydraException, OmegaConfBaseException):
        return {}
    assert isinstance(plain, dict)
    return {str(key): value for key, value in plain.items()}


def _fields(section: str, chosen: Mapping[str, Any], name: str) -> list[str]:
    """Keys that a section may have."""
    match section.split("."):
        case ["algorithm"] if "algorithm" in chosen:
            from algorithms import registry  # with PyTorch, which takes a second

            return sorted(type(registry.load_config(chosen["algorithm"]["name"], {})).model_fields)
        case ["tasks", task] if task in chosen.get("tasks", {}):
            return sorted(TaskConfig.model_fields)
        case ["tasks", task, "options"] if task in chosen.get("tasks", {}):
            return sorted(type(load_task(task, {}).options).model_fields)
        case ["teachers", teacher] if teacher in chosen.get("teachers", {}):
            return sorted(TeacherConfig.model_fields)
    return fields_of(section, TYPED[name])


def _check_words(overrides: Sequence[str]) -> None:
    """Hydra's parser answers what is no override with the name of its own exception."""
    for word in overrides:
        if word.startswith("-"):
            raise ConfigError(f"{word}: there is no such option; --help names those there are, and keys are KEY=VALUE")
        if "=" not in word and not word.startswith("~"):
            raise ConfigError(f"{word}: not KEY=VALUE (without spaces around the =)")
        if word.startswith("="):
            raise ConfigError(f"{word}: no key before the =")


def _check_stage(overrides: Sequence[str]) -> None:
    available = f"one of {', '.join(STAGES)}"
    chosen = [text for text in overrides if re.match(r"\+*stage=", text)]
    if not chosen:
        raise ConfigError(f"no stage is chosen: add +stage=NAME, {available}")
    name = chosen[0].partition("=")[2]
    if len(chosen) > 1 or name.startswith("["):
        raise ConfigError(f"{' '.join(chosen)}: a run has one stage, {available}")
    if not chosen[0].startswith("+"):
        raise ConfigError(f"{chosen[0]}: write +{chosen[0]}")
    if name not in STAGES:
        raise ConfigError(f"{chosen[0]}: there is no such stage; {available}")


def _explain(error: Exception, overrides: Sequence[str], config_dir: Path, name: str) -> str:
    text = str(error)
    override = re.search(r"Could not override '([^']+)'", text)
    if override:
        return f"{override[1]}: unknown key{_suggest(override[1], config_dir, overrides, name)}"
    choice = re.search(r"Could not find '([^']+)'", text) or re.search(r"Could not load '([^']+)'", text)
    if choice:
        group = choice[1].rpartition("/")[0]
        options = sorted(path.stem for path in (config_dir / group).glob("*.yaml"))
        return f"{choice[1].replace('/', '=')}: there is no such config; configs/{group} has: {', '.join(options)}"
    missing = re.search(r"Missing mandatory value: (\S+)", text)
    if missing:
        key = error.full_key if isinstance(error, OmegaConfBaseException) and error.full_key else missing[1]
        return f"{key}: required, but not set"
    index = re.search(r"invalid literal for int\(\) with base 10: '(.*)'", text)  # OmegaConf's own, of a list
    if index:
        wrong = [word for word in overrides if word.partition("=")[0].endswith(f".{index[1]}")]
        return f"{' '.join(wrong)}: what stands before .{index[1]} is a list; set the whole of it, as KEY=[A,B]"
    several = re.search(r"Ambiguous value for argument '([^=']+)=([^']+)'", text)
    if several:
        return f"{several[1]}={several[2]}: write a list as {several[1]}=[{several[2]}]; a run takes one value of a key"
    section = re.search(r"Error merging override (([^=]+)=\S*)", text)
    if section:
        group = section[2].removesuffix("s")
        chosen = f"; choose with {group}=[NAME,...] of configs/{group}" if (config_dir / group).is_dir() else ""
        return f"{section[1]}: {section[2]} is a section, whose keys are set as {section[2]}.KEY=VALUE{chosen}"
    first, *rest = [line.strip() for line in text.splitlines() if line.strip()]
    return first + (f" ({rest[0]})" if rest else "")


def _suggest(key: str, config_dir: Path, overrides: Sequence[str], name: str) -> str:
    """What was meant: of a config that was not chosen, with the same last word, or spelt alike."""
    if (config_dir / key).is_dir():
        return f"; write +{key}=..."
    section, _, rest = key.partition(".")
    group, chosen = section.removesuffix("s"), rest.partition(".")[0]
    composed = _chosen(overrides, config_dir, name)
    known = _keys(composed, "")
    if group != section and (config_dir / group / f"{chosen}.yaml").is_file() and f"{section}.{chosen}" not in known:
        added = "" if any(group in entry for entry in OmegaConf.load(config_dir / f"{name}.yaml").defaults) else "+"
        return f"; {chosen} is not chosen: add it to {added}{group}=[...]"
    parent, _, last = key.rpartition(".")
    beside = _fields(parent, composed, name) if parent else []
    known += [other for other in (f"{parent}.{field}" for field in beside) if other not in known]
    ends = [other for other in known if other.rpartition(".")[2] == last]
    inside = [other for other in ends if other.startswith(f"{section}.")] or ends
    if beside:
        alike = [f"{parent}.{field}" for field in difflib.get_close_matches(last, beside, n=1, cutoff=0.7)]
    else:
        alike = difflib.get_close_matches(key, known, n=1, cutoff=0.75)
    if meant := inside[:3] or alike:
        return f"; did you mean {' or '.join(meant)}?"
    return f"; {parent} has {', '.join(beside)}" if beside else ""


def _keys(node: Any, prefix: str) -> list[str]:
    if not isinstance(node, dict):
        return []
    names: list[str] = []
    for key, value in node.items():
        names += [f"{prefix}{key}", *_keys(value, f"{prefix}{key}.")]
    return names
