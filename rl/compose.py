"""Hydra composes ``configs/`` and the command line's overrides; its errors become one or two lines."""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from hydra.errors import HydraException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from rl.config import STAGES, ConfigError

CONFIG_DIR = Path(__file__).resolve().parent.parent / "configs"


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
    try:
        with initialize_config_dir(version_base=None, config_dir=str(config_dir)):
            composed = compose(config_name=name, overrides=list(overrides))
            plain = OmegaConf.to_container(composed, resolve=True, throw_on_missing=required)
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigError(_explain(error, overrides, config_dir, name)) from error
    assert isinstance(plain, dict)
    return {str(key): value for key, value in plain.items()}


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
    first, *rest = [line.strip() for line in text.splitlines() if line.strip()]
    return first + (f" ({rest[0]})" if rest else "")


def _suggest(key: str, config_dir: Path, overrides: Sequence[str], name: str) -> str:
    stage = [text for text in overrides if text.startswith("+stage=")]
    with initialize_config_dir(version_base=None, config_dir=str(config_dir)):
        known = _keys(OmegaConf.to_container(compose(config_name=name, overrides=stage), resolve=False), "")
    close = difflib.get_close_matches(key, known, n=1, cutoff=0.6)
    return f"; did you mean {close[0]}?" if close else " (a key that the files leave out is added with +key=value)"


def _keys(node: Any, prefix: str) -> list[str]:
    if not isinstance(node, dict):
        return []
    names: list[str] = []
    for key, value in node.items():
        names += [f"{prefix}{key}", *_keys(value, f"{prefix}{key}.")]
    return names
