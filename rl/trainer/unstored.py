"""Building a module without memory for its weights, on the host or the device: others' will be put in their place.

Megatron makes weights by ``torch.empty``, on a device that it names itself (so that PyTorch's device contexts don't
apply), and on the CPU makes a whole layer's before it takes a rank's part.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

META = torch.device("meta")


class UnstoredTensors(TorchDispatchMode):
    """Inside of it ``torch.empty`` makes tensors on the meta device, whatever the caller asks for."""

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        named = dict(kwargs or {})
        if func is torch.ops.aten.empty.memory_format:
            named |= {"device": META, "pin_memory": False}
        return func(*args, **named)


def nothing(shape: torch.Size, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Of one number, which is none, so that no result could pass for that of weights."""
    return torch.full((), torch.nan, dtype=dtype, device=device).expand(shape)


def place(module: nn.Module, device: torch.device) -> None:
    """Put ``nothing`` in the place of each parameter that was made in ``UnstoredTensors``; its marks stay.

    Raises:
        RuntimeError: something else than a parameter was.
    """
    placed: dict[Tensor, nn.Parameter] = {}
    for part in module.modules():
        for name, parameter in part.named_parameters(recurse=False, remove_duplicate=False):
            if parameter.is_meta:
                if parameter not in placed:
                    held = nothing(parameter.shape, parameter.dtype, device)
                    placed[parameter] = nn.Parameter(held, requires_grad=parameter.requires_grad)
                    placed[parameter].__dict__.update(parameter.__dict__)
                part.register_parameter(name, placed[parameter])
    unplaced = [name for name, buffer in module.named_buffers() if buffer.is_meta]
    if unplaced:
        raise RuntimeError(f"buffers without memory: {unplaced}")
