"""Elementwise work that is fused by ``torch.compile`` on CUDA; on the CPU the same functions run as they are."""

from __future__ import annotations

from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch
from torch import Tensor

P = ParamSpec("P")
R = TypeVar("R")

RECOMPILE_LIMIT = 64
"""Of one function: it compiles once for each model shape, with and without gradient."""


def compiled(function: Callable[P, R]) -> Callable[P, R]:
    """``function`` (of tensors, without side effects), compiled at its first call where there is CUDA.

    On the CPU a compiler would cost more time than short runs take, so that it is left out there.
    """
    if not torch.cuda.is_available():
        return function
    from torch._dynamo import config

    config.recompile_limit = RECOMPILE_LIMIT
    config.accumulated_recompile_limit = 8 * RECOMPILE_LIMIT
    return torch.compile(function)


def vary_rows(*tensors: Tensor) -> None:
    """Say that the first dimension of these differs from call to call, so that one compiled kernel serves all, and that
    the others are properties of the model: a kernel that took them as they come would be several times slower, as soon
    as a process has seen two models."""
    if torch.cuda.is_available() and not torch.compiler.is_compiling():
        from torch._dynamo import mark_static, maybe_mark_dynamic

        for tensor in tensors:
            maybe_mark_dynamic(tensor, 0)
            if tensor.dim() > 1:
                mark_static(tensor, list(range(1, tensor.dim())))
