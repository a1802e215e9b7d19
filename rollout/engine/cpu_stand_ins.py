"""What lets SGLang 0.5.23 run where its GPU packages are missing: stand-ins, in this process and those it forks.

Nothing is written into site-packages. ``sgl_kernel``, ``triton`` and ``torchvision`` become importable; what SGLang
calls of them on a CPU is either a decorator, which changes nothing, or a kernel, which raises by name.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import sys
import types
from collections.abc import Sequence
from typing import Any, NoReturn

import torch


class _AnyMeta(type):
    def __getattr__(cls, name: str) -> str:
        if name.startswith("__"):
            raise AttributeError(name)
        return name


class _Any(metaclass=_AnyMeta):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Takes what the real class would take."""


class _StandIn(types.ModuleType):
    """A module whose attributes are classes (capitalised) or further stand-ins; called, it is a decorator."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__path__: list[str] = []
        self.__version__ = "3.0.0"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        value = _AnyMeta(name, (_Any,), {}) if name[0].isupper() else _StandIn(f"{self.__name__}.{name}")
        setattr(self, name, value)
        return value

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if len(args) == 1 and callable(args[0]) and not kwargs:
            return args[0]
        return lambda function: function


class _Kernels(types.ModuleType):
    """``sgl_kernel``: every name imports, and raises only when called."""

    __version__ = "0.0.0"

    def __init__(self) -> None:
        super().__init__("sgl_kernel")
        self.__path__: list[str] = []
        self.__spec__ = importlib.machinery.ModuleSpec("sgl_kernel", None, is_package=True)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)

        def missing(*args: Any, **kwargs: Any) -> NoReturn:
            raise NotImplementedError(f"sgl_kernel.{name} does not exist on a CPU")

        return missing


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def __init__(self, roots: set[str]) -> None:
        self.roots = roots

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname.partition(".")[0] in self.roots:
            return importlib.machinery.ModuleSpec(fullname, self, is_package=True)
        return None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return _StandIn(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        """The attributes appear on demand."""


def install() -> None:
    """Make the missing packages importable; packages that are installed are left alone. Call before SGLang's import."""
    if any(isinstance(finder, _Finder) for finder in sys.meta_path):
        return
    from transformers.utils import is_torchvision_available

    is_torchvision_available()  # cached: transformers must not take the stand-in for the real package
    missing = {name for name in ("triton", "torchvision") if importlib.util.find_spec(name) is None}
    if importlib.util.find_spec("sgl_kernel") is None:
        sys.modules["sgl_kernel"] = _Kernels()
    sys.meta_path.insert(0, _Finder(missing))


def transfer_from_host_memory() -> None:
    """Let a prefill server (PD disaggregation) send its KV cache from a CPU: with the list of its pages as it is, which
    on a GPU goes to pinned memory behind the forward pass first."""
    from sglang.srt.disaggregation.mooncake.conn import MooncakeKVSender

    MooncakeKVSender.supports_host_tensor_indices = False


def record_experts_in_plain_memory() -> None:
    """Let ``--enable-return-routed-experts`` run on a CPU: SGLang keeps the record in memory that CUDA pins."""
    from sglang.srt.mem_cache.pool_host import common

    def plain(dims: tuple[int, ...], dtype: torch.dtype, **unused: Any) -> torch.Tensor:
        return torch.empty(dims, dtype=dtype)

    common.ALLOC_MEMORY_FUNCS["cpu"] = plain


def murmur_hash32(seed: torch.Tensor, positions: torch.Tensor, cols: torch.Tensor) -> torch.Tensor:
    """Hash of (seed, position) for each column, [rows, cols] int64: that of SGLang's Triton kernel, which draws the
    noise of seeded sampling."""
    mask = 0xFFFFFFFF

    def mix(h: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        k = k * 0xCC9E2D51 & mask
        k = (k << 15 | k >> 17) & mask
        h = h ^ k * 0x1B873593 & mask
        h = (h << 13 | h >> 19) & mask
        return h * 5 + 0xE6546B64 & mask

    seed = seed.long()
    h = mix(mix(seed * 0, seed & mask), seed >> 32 & mask)
    h = mix(h, positions.long() & mask)
    h = mix(h[:, None], cols.long()[None, :] & mask) ^ 16
    h = (h ^ h >> 16) * 0x85EBCA6B & mask
    h = (h ^ h >> 13) * 0xC2B2AE35 & mask
    return h ^ h >> 16


def enable_deterministic_inference() -> torch.library.Library:
    """Let ``--enable-deterministic-inference``, without which SGLang ignores ``sampling_seed``, run on a CPU.

    Returns the library that holds the sampling kernel: the caller keeps it alive.
    """
    from sglang.srt import batch_invariant_ops
    from sglang.srt.arg_groups import choices

    choices.add_deterministic_attention_backend_choices(["torch_native"])
    choices.add_radix_supported_deterministic_attention_backend_choices(["torch_native"])
    batch_invariant_ops.enable_batch_invariant_mode = lambda *args, **kwargs: None  # Triton kernels
    library = torch.library.Library("sgl_kernel", "FRAGMENT")
    library.define("murmur_hash32_cpu(Tensor seed, Tensor positions, Tensor cols) -> Tensor")
    library.impl("murmur_hash32_cpu", murmur_hash32, "CPU")
    return library
