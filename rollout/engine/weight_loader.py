"""Inside a server: copies weights from memory of the trainer. SGLang is started with ``--custom-weight-loader`` and
calls ``load`` from ``/update_weights_from_tensor``.

    a layout that is new        ─► the model's own loader, recorded ─► a plan (``rollout.engine.load_plan``)
    one that was there before   ─► the plan's copies
    a memory that is not open   ─► open it, and keep it open if the request says so

One layout is known and one memory is open at a time: those of the trainer that spoke last.
"""

from __future__ import annotations

import hashlib
import itertools
import logging
import time
import traceback
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from rollout.engine.load_plan import Bound, NoPlanError, Plan, load_and_plan
from rollout.engine.opened_memory import Answer, Layout, Request

log = logging.getLogger(__name__)

ERROR_CHARACTERS = 2000
CHUNK = 2**22
BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integers by their size in bytes."""
Rounds = tuple[int, ...]


class _Known:
    """A layout, and for each model and rounds how to load from it."""

    def __init__(self, layout_id: str, layout: Layout) -> None:
        self.layout_id, self.layout = layout_id, layout
        self.plans: weakref.WeakKeyDictionary[nn.Module, dict[Rounds, Plan | NoPlanError]] = weakref.WeakKeyDictionary()

    def named(self, rounds: Rounds, memory: Tensor) -> list[tuple[str, Tensor]]:
        return [(placed.name, placed.view(memory)) for index in rounds for placed in self.layout.rounds[index]]


class _Opened:
    """A memory, and the copies that plans make of it."""

    def __init__(self, memory_id: str, memory: Tensor) -> None:
        self.memory_id, self.memory = memory_id, memory
        self._bound: list[tuple[Plan, Bound]] = []

    def bound(self, plan: Plan) -> Bound:
        for known, bound in self._bound:
            if known is plan:
                return bound
        self._bound.append((plan, plan.bind(self.memory)))
        return self._bound[-1][1]


class WeightLoader:
    """One process's."""

    def __init__(self, open_handle: Callable[[str], Tensor]) -> None:
        self._open_handle = open_handle
        self._known: _Known | None = None
        self._opened: _Opened | None = None

    def load(self, model: nn.Module, named: Sequence[tuple[str, Any]]) -> None:
        """Do what the request asks, which stands for the first tensor's name, and answer. Raises nothing, at which
        SGLang's scheduler would end: whoever asked misses the answer."""
        began = time.monotonic()
        try:
            request = Request.model_validate_json(named[0][0])
        except ValueError:
            log.exception("this is no request to load weights from memory: %.200s", named[0][0])
            return
        answer: dict[str, Any] = {"seconds": {}}
        try:
            self._load(model, request, answer)
        except Exception as error:  # noqa: BLE001  (the answer says it)
            answer["error"] = f"{type(error).__name__}: {error}\n{traceback.format_exc()[-ERROR_CHARACTERS:]}"
        line = Answer(began=began, ended=time.monotonic(), **answer).model_dump_json()
        try:
            with request.answers.open("ab", buffering=0) as stream:  # at one go: other ranks write to it, too
                stream.write(f"{line}\n".encode())
        except OSError:  # the folder went with the trainer
            log.exception("weights were asked for by who no longer wants the answer: %.200s", line)

    def _load(self, model: nn.Module, request: Request, answer: dict[str, Any]) -> None:
        times = [time.monotonic()]
        known, opened = self._know(request), self._open(request)
        times.append(time.monotonic())
        answer |= self._copy(model, request.rounds, known, opened)
        if opened.memory.device.type == "cuda":
            torch.cuda.synchronize(opened.memory.device)
        times.append(time.monotonic())
        if request.checksums:
            answer["checksums"] = checksums(model)
        if not request.keep:
            self._opened = opened = None  # type: ignore[assignment]
        times.append(time.monotonic())
        steps = zip(("open", "copy", "close"), itertools.pairwise(times), strict=True)
        answer["seconds"] = {name: end - begin for name, (begin, end) in steps}

    def _copy(self, model: nn.Module, rounds: Rounds, known: _Known, opened: _Opened) -> dict[str, Any]:
        """Returns how, for the answer."""
        plans = known.plans.setdefault(model, {})
        plan = plans.get(rounds)
        if isinstance(plan, Plan) and plan.holds():
            opened.bound(plan).run(plan.batched)
            return {"how": "batched plan" if plan.batched else "plan", "copies": len(plan.copies)}
        named = known.named(rounds, opened.memory)
        if isinstance(plan, NoPlanError):
            model.load_weights(named)
            return {"how": "loader", "why": str(plan)}
        plans.pop(rounds, None)
        try:
            plan = plans[rounds] = load_and_plan(model, named, opened.memory)
        except NoPlanError as none:
            plans[rounds] = NoPlanError(str(none))  # without the traceback, whose frames would keep the memory open
            return {"how": "loader, recorded", "why": str(none)}
        return {"how": "loader, recorded", "copies": len(plan.copies)}

    def _know(self, request: Request) -> _Known:
        """
        Raises:
            LookupError: the layout is not known, and the request does not have it.
        """
        if self._known is None or self._known.layout_id != request.layout_id:
            if request.layout is None:
                raise LookupError(f"layout {request.layout_id} is not known here")
            self._opened = None  # what is bound to it belongs to the plans that go
            self._known = _Known(request.layout_id, request.layout)
        return self._known

    def _open(self, request: Request) -> _Opened:
        """
        Raises:
            LookupError: the memory is not open, and the request does not say how to open it.
        """
        if self._opened is None or self._opened.memory_id != request.memory_id:
            if request.handle is None:
                raise LookupError(f"memory {request.memory_id} is not open here")
            self._opened = None  # before another is opened: its owner may be gone
            self._opened = _Opened(request.memory_id, self._open_handle(request.handle))
        return self._opened


def checksums(model: nn.Module) -> dict[str, str]:
    """Of the bits of every parameter, by its name."""
    return {name: checksum(parameter.detach()) for name, parameter in model.named_parameters()}


def checksum(tensor: Tensor) -> str:
    """Made where the tensor lies. A value that differs, or two that are exchanged, change it."""
    bits = tensor.contiguous().view(-1).view(BITS[tensor.element_size()])
    weights = 2 * torch.arange(min(CHUNK, bits.numel()), device=tensor.device) + 1  # odd: none cancels a difference
    sums = [(chunk * weights[: chunk.numel()]).sum() for chunk in bits.split(CHUNK)]
    return hashlib.blake2b(repr(torch.stack(sums).tolist()).encode(), digest_size=16).hexdigest()


def _open_safely(handle: str) -> Tensor:
    """SGLang's own unpickling takes nothing but tensors."""
    from sglang.srt.utils import MultiprocessingSerializer

    tensor: Tensor = MultiprocessingSerializer.deserialize(handle)
    return tensor


load = WeightLoader(_open_safely).load
