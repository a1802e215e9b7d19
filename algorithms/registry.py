"""Algorithms by name: ``build("dis", options)`` imports ``algorithms.dis``; a new module needs no edit here."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Mapping
from types import ModuleType
from typing import Any

from pydantic import ValidationError

import algorithms
from algorithms.types import Algorithm, AlgorithmConfig


def names() -> list[str]:
    """Every module of this package that holds an algorithm: one with ``Config`` and ``build``."""
    modules = [module.name for module in pkgutil.iter_modules(algorithms.__path__)]
    return sorted(name for name in modules if _is_algorithm(importlib.import_module(f"algorithms.{name}")))


def load_config(name: str, options: Mapping[str, Any]) -> AlgorithmConfig:
    """The checked options of one algorithm. ``options`` may repeat ``name``, as the config files do.

    Raises:
        ValueError: for an unknown algorithm, an unknown option, or a value that makes no sense, by its name.
    """
    config_class: type[AlgorithmConfig] = _module(name).Config
    try:
        return config_class.model_validate({key: value for key, value in options.items() if key != "name"})
    except ValidationError as error:
        problems = [f"{'.'.join(map(str, ('algorithm', *e['loc'])))}: {e['msg']}" for e in error.errors()]
        raise ValueError(f"algorithm {name!r}: " + "; ".join(problems)) from error


def build(name: str, options: Mapping[str, Any]) -> Algorithm:
    algorithm: Algorithm = _module(name).build(load_config(name, options))
    return algorithm


def _module(name: str) -> ModuleType:
    unknown = f"algorithm.name: there is no algorithm {name!r}; there are: "
    if not name.isidentifier():
        raise ValueError(unknown + ", ".join(names()))
    try:
        module = importlib.import_module(f"algorithms.{name}")
    except ModuleNotFoundError as error:
        if error.name != f"algorithms.{name}":
            raise  # the algorithm exists, something that it imports does not
        raise ValueError(unknown + ", ".join(names())) from None
    if not _is_algorithm(module):
        raise ValueError(unknown + ", ".join(names()))
    return module


def _is_algorithm(module: ModuleType) -> bool:
    return hasattr(module, "Config") and hasattr(module, "build")
