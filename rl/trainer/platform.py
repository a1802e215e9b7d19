"""The one place that knows whether this process trains on CUDA or on the CPU.

Megatron-core calls ``torch.cuda`` unconditionally (current device, streams, RNG states, ``device="cuda"`` in tensor
factories). Without CUDA, ``install`` replaces those calls, in this process alone, by ones that do the same on the CPU.
With CUDA it changes nothing.
"""

from __future__ import annotations

import contextlib
import ctypes
import datetime
import functools
import os
import sys
from collections.abc import Callable
from typing import Any

import psutil
import torch
import torch.distributed as dist
from torch.utils._device import _device_constructors

from rl.trainer.config import ParallelConfig

_FACTORIES = ("tensor", "zeros", "ones", "empty", "full", "arange", "rand", "randn", "as_tensor")
_installed = False
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
"""Of glibc's ``mallopt(3)``."""
_KEPT_BYTES, _LARGEST_KEPT_BYTES = 1 << 28, 1 << 25
"""At the heap's end, and of one allocation; the second is the most that glibc takes."""


class _NoStream:
    """Stands in for a CUDA stream or event: work on the CPU is already in order."""

    def __init__(self, *args: object, **kwargs: object) -> None: ...

    def __enter__(self) -> _NoStream:
        return self

    def __exit__(self, *exception: object) -> None: ...

    def wait_stream(self, stream: object) -> None: ...

    def wait_event(self, event: object) -> None: ...

    def record_event(self, event: object = None) -> _NoStream:
        return self

    def record(self, stream: object = None) -> None: ...

    def synchronize(self) -> None: ...


def device() -> torch.device:
    """The device of this process's model."""
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


def device_bytes() -> int:
    """Memory of this process's device: the GPU's, or all of the host's."""
    if torch.cuda.is_available():
        return torch.cuda.mem_get_info()[1]
    return psutil.virtual_memory().total


def install() -> None:
    """Make Megatron-core importable and usable here. Call it before the first ``import megatron``; idempotent."""
    global _installed
    if _installed or torch.cuda.is_available():
        return
    # Megatron decorates dozens of small functions with torch.compile; on the CPU each would start a C++ compiler.
    os.environ["TORCHDYNAMO_DISABLE"] = "1"
    if "torch._dynamo" in sys.modules:
        sys.modules["torch._dynamo"].config.disable = True
    _replace_cuda_calls()
    _replace_tensor_calls()
    _installed = True
    _replace_megatron_rng()
    _replace_all_to_all()


def _replace_cuda_calls() -> None:
    cpu = torch.device("cpu")
    replacements: dict[str, Any] = {
        "current_device": lambda: cpu,
        "synchronize": lambda device=None: None,
        "Stream": _NoStream,
        "Event": _NoStream,
        "current_stream": lambda device=None: _NoStream(),
        "default_stream": lambda device=None: _NoStream(),
        "stream": lambda stream: contextlib.nullcontext(),
        "manual_seed": torch.manual_seed,
        "get_rng_state": lambda device=None: torch.get_rng_state(),
        "set_rng_state": lambda state, device=None: torch.set_rng_state(state),
        "memory_allocated": lambda device=None: 0,
        "max_memory_allocated": lambda device=None: 0,
        "memory_reserved": lambda device=None: 0,
    }
    for name, replacement in replacements.items():
        setattr(torch.cuda, name, replacement)
    torch.cuda.nvtx.range_push = lambda message: None
    torch.cuda.nvtx.range_pop = lambda: None


def _replace_tensor_calls() -> None:
    def on_cpu(factory: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        @functools.wraps(factory)
        def wrapped(*args: Any, **kwargs: Any) -> torch.Tensor:
            if str(kwargs.get("device", "")).startswith("cuda"):
                kwargs["device"] = "cpu"
                kwargs.pop("pin_memory", None)
            return factory(*args, **kwargs)

        return wrapped

    # PyTorch's device contexts know the factories by identity, from a set made at its first use: make it now, or
    # ``with torch.device("meta")`` (Hugging Face's model loading) would no longer recognise them.
    _device_constructors()
    for name in _FACTORIES:
        setattr(torch, name, on_cpu(getattr(torch, name)))
    torch.Tensor.cuda = lambda self, *args, **kwargs: self
    torch.nn.Module.cuda = lambda self, *args, **kwargs: self

    original_type = torch.Tensor.type

    def type_as_on_cuda(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        # Megatron's optimizer compares parameter.type() with names such as "torch.cuda.FloatTensor".
        result = original_type(self, *args, **kwargs)
        if isinstance(result, str) and not result.startswith("torch.cuda."):
            return result.replace("torch.", "torch.cuda.", 1)
        return result

    torch.Tensor.type = type_as_on_cuda


def _replace_megatron_rng() -> None:
    import megatron.core.tensor_parallel.random as megatron_random

    megatron_random._get_cuda_rng_state = lambda *args, **kwargs: torch.get_rng_state()
    megatron_random._set_cuda_rng_state = lambda state, *args, **kwargs: torch.set_rng_state(state)


def _replace_all_to_all() -> None:
    original = dist.all_to_all_single

    @functools.wraps(original)
    def all_to_all_single(
        output: torch.Tensor,
        input: torch.Tensor,
        output_split_sizes: Any = None,
        input_split_sizes: Any = None,
        **kwargs: Any,
    ) -> Any:
        # Megatron's expert dispatcher turns the sizes into host integers only where they come from CUDA.
        sizes = (s.tolist() if isinstance(s, torch.Tensor) else s for s in (output_split_sizes, input_split_sizes))
        return original(output, input, *sizes, **kwargs)

    dist.all_to_all_single = all_to_all_single


def keep_freed_memory() -> None:
    """On the CPU, let the C library keep what a step has freed for the next one. By default it gives its heap's end
    back to the system at every chance, and each page that it takes again is a fault: hundreds a step. (CUDA's allocator
    keeps what was freed anyway.) Without effect where the library isn't glibc."""
    if torch.cuda.is_available() or not hasattr(ctypes.CDLL(None), "mallopt"):
        return
    for option, bytes_ in ((_M_TRIM_THRESHOLD, _KEPT_BYTES), (_M_MMAP_THRESHOLD, _LARGEST_KEPT_BYTES)):
        ctypes.CDLL(None).mallopt(option, bytes_)


def init_distributed(
    parallel: ParallelConfig, rank: int, world_size: int, address: str, port: int, timeout_s: float, seed: int
) -> None:
    """Join the process group (NCCL on CUDA, gloo on the CPU) and build Megatron's groups and RNG.

    Raises:
        RuntimeError: this process has joined a group already.
        torch.distributed.DistError: the other ranks did not come within ``timeout_s``.
    """
    if dist.is_initialized():
        raise RuntimeError("this process is a rank of a process group already; use one process for each rank")
    keep_freed_memory()
    timeout = datetime.timedelta(seconds=timeout_s)
    if torch.cuda.is_available():
        torch.cuda.set_device(rank % torch.cuda.device_count())
    dist.init_process_group(
        "nccl" if torch.cuda.is_available() else "gloo",
        init_method=f"tcp://{address}:{port}",
        rank=rank,
        world_size=world_size,
        timeout=timeout,
    )
    init_model_parallel(parallel, timeout_s, seed)


def init_model_parallel(parallel: ParallelConfig, timeout_s: float, seed: int) -> None:
    """Megatron's groups and RNG, in the process group that was joined."""
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=parallel.tensor,
        pipeline_model_parallel_size=parallel.pipeline,
        virtual_pipeline_model_parallel_size=parallel.virtual_pipeline if parallel.virtual_pipeline > 1 else None,
        context_parallel_size=parallel.context,
        expert_model_parallel_size=parallel.expert,
        expert_tensor_parallel_size=parallel.expert_tensor,
        distributed_timeout_minutes=max(1, round(timeout_s / 60)),
        create_gloo_process_groups=False,
    )
    torch.manual_seed(seed)
    model_parallel_cuda_manual_seed(seed)


def shutdown_distributed() -> None:
    """Leave the process group. Idempotent."""
    if not dist.is_initialized():
        return
    from megatron.core import parallel_state

    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()
