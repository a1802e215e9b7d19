"""How a model takes its weights from a memory, recorded once and repeated.

SGLang's ``load_weights`` goes through the tensors in Python and finds for each where it belongs in a fused or sharded
parameter. All of that comes out the same each time that the same tensors lie in the same places of the memory. So it
runs once while the copies that it makes are recorded, and from then on only these are made, neighbours in one piece.

What a model derives from its loaded parameters in ``post_load_weights`` (MLA's absorbed projections) it derives again.
Otherwise nothing is planned that is not certain: a model whose loader does anything else than copy from that memory
into its own parameters (computes, reads a value, loads in other threads) has no plan, and its loader runs each time.
Each copy of a plan is tried on the spot, and must leave the bits that the loader left.
"""

from __future__ import annotations

import contextlib
import functools
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

aten = torch.ops.aten
AFTER = "post_load_weights"
"""SGLang's name for what a model derives from its parameters, after ``load_weights`` or whoever else wrote them."""
TRIALS = 2
"""Of each way to copy; the fastest counts."""


class NoPlanError(ValueError):
    """Why this model's loading is not repeated from a plan. It was loaded all the same."""


@dataclass(frozen=True)
class Piece:
    """A tensor in a memory, wherever that is opened; or at an address."""

    begin: int
    """Byte."""
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    @classmethod
    def of(cls, tensor: Tensor, memory: Tensor | None = None) -> Piece:
        begin = tensor.data_ptr() - (0 if memory is None else memory.data_ptr())
        return cls(begin, tensor.dtype, tuple(tensor.shape), tensor.stride())

    def view(self, memory: Tensor) -> Tensor:
        begin = (memory.storage_offset() + self.begin) // self.dtype.itemsize
        empty = torch.empty(0, dtype=self.dtype, device=memory.device)
        return empty.set_(memory.untyped_storage(), begin, self.shape, self.stride)


@dataclass(frozen=True)
class Copy:
    target: Tensor
    source: Piece | float


@dataclass(frozen=True)
class Owner:
    """Where a module keeps a tensor that is written to, and at which address it was."""

    tensors: dict[str, Tensor | None]
    name: str
    tensor: Tensor
    address: int

    @property
    def unchanged(self) -> bool:
        return self.tensor.data_ptr() == self.address and self.tensors.get(self.name) is self.tensor


class Bound:
    """A plan's copies from one memory, and what the model does after them."""

    @torch.inference_mode()
    def __init__(self, copies: Sequence[Copy], memory: Tensor, after: Sequence[Callable[[], object]] = ()) -> None:
        pairs = [(copy.target, copy.source.view(memory)) for copy in copies if isinstance(copy.source, Piece)]
        self.targets, self.sources = [target for target, _ in pairs], [source for _, source in pairs]
        self._filled = [(copy.target, copy.source) for copy in copies if not isinstance(copy.source, Piece)]
        self._after = after

    def run(self, batched: bool = False) -> None:
        """Returns when the device has been asked for it, not when it is done.

        Args:
            batched: many copies a kernel.
        """
        self.copy(batched)
        for derive in self._after:
            derive()

    @torch.inference_mode()
    def copy(self, batched: bool) -> None:
        if batched:
            torch._foreach_copy_(self.targets, self.sources, non_blocking=True)
        else:
            for target, source in zip(self.targets, self.sources, strict=True):
                target.copy_(source, non_blocking=True)
        for target, value in self._filled:
            target.fill_(value)


@dataclass
class Plan:
    copies: Sequence[Copy]
    owners: Sequence[Owner]
    after: Sequence[Callable[[], object]]
    batched: bool = False
    """Many copies a kernel, where that was found to be faster."""

    def holds(self) -> bool:
        """Whether the model still has its tensors where they were."""
        return all(owner.unchanged for owner in self.owners)

    def bind(self, memory: Tensor) -> Bound:
        return Bound(self.copies, memory, self.after)


def load_and_plan(model: nn.Module, named: Sequence[tuple[str, Tensor]], memory: Tensor) -> Plan:
    """Load the weights by the model's own loader, and plan how to do it again.

    Args:
        named: what the loader takes: views of ``memory``.

    Raises:
        NoPlanError: says why there is none. The weights are loaded.
    """
    owners = _owners(model)
    recorder = _Recorder(memory, set(owners))
    with recorder, recorder.aside(model, AFTER):
        model.load_weights(named)
    try:
        return _plan(named, memory, owners, recorder)
    except NoPlanError:
        raise
    except Exception as error:  # the weights are loaded, whatever goes wrong from here on
        raise NoPlanError(f"{type(error).__name__}: {error}") from error


def _plan(
    named: Sequence[tuple[str, Tensor]], memory: Tensor, owners: Mapping[int, Sequence[Owner]], recorder: _Recorder
) -> Plan:
    if recorder.obstacle:
        raise NoPlanError(recorder.obstacle)
    if not all(owner.unchanged for held in owners.values() for owner in held):
        raise NoPlanError("loading replaced a parameter by another")
    _check_all_read([(name, Piece.of(tensor, memory)) for name, tensor in named], recorder.copies)
    copies = join(recorder.copies)
    with torch.inference_mode():
        for copy in copies:
            _try(copy, memory)
    written = {_address(copy.target) for copy in copies}
    plan = Plan(copies, [owner for address in written for owner in owners[address]], recorder.after)
    if memory.device.type == "cuda" and copies:
        plan.batched = _batching_is_faster(plan.bind(memory))
        torch.cuda.empty_cache()  # what the checks took: a trainer may share the device
    return plan


def _owners(model: nn.Module) -> dict[int, list[Owner]]:
    """By the address of their storage."""
    found: dict[int, list[Owner]] = {}
    for module in model.modules():
        for tensors in (module._parameters, module._buffers):
            for name, tensor in tensors.items():
                if tensor is not None and tensor.numel() and not tensor.is_meta:
                    owner = Owner(tensors, name, tensor, tensor.data_ptr())
                    found.setdefault(tensor.untyped_storage().data_ptr(), []).append(owner)
    return found


class _Recorder(TorchDispatchMode):
    def __init__(self, memory: Tensor, targets: set[int]) -> None:
        """
        Args:
            targets: addresses of the storages that may be copied to.
        """
        super().__init__()
        self._memory, self._targets = memory, targets
        self._aside = False
        self._joints: dict[int, _Joint] = {}
        """By address."""
        self.copies: list[Copy] = []
        self.after: list[Callable[[], object]] = []
        self.obstacle = ""

    @contextlib.contextmanager
    def aside(self, model: nn.Module, name: str) -> Iterator[None]:
        """Note the calls of a method, and nothing of what it does."""
        method = getattr(model, name, None)
        if method is None:
            yield
            return

        def called(*args: Any, **kwargs: Any) -> Any:
            self.after.append(functools.partial(method, *args, **kwargs))
            self._aside = True
            try:
                return method(*args, **kwargs)
            finally:
                self._aside = False

        setattr(model, name, called)
        try:
            yield
        finally:
            delattr(model, name)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if not self.obstacle and not self._aside:
            try:
                self.obstacle = self._note(func, args, kwargs or {}, result)
            except Exception as error:  # noqa: BLE001  (what is not understood is no reason not to load)
                self.obstacle = f"{func} is not understood: {error}"
        return result

    def _note(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> str:
        """Record a copy; returns what stands against a plan."""
        given = [_address(value) for value in tree_leaves((args, kwargs)) if isinstance(value, Tensor)]
        if func is aten.cat.default and all(self._may_join(part) for part in args[0]):
            self._joints[_address(result)] = _Joint(
                result, [Piece.of(part, self._memory) for part in args[0]], *args[1:]
            )
        elif func is aten.copy_.default and given[0] in self._targets and self._is_joint(args[1], args[0]):
            self.copies += self._joints[given[1]].copies(args[0].detach())
        elif func is aten.copy_.default:
            if given[0] not in self._targets or given[1] != _address(self._memory):
                return f"{func} copies between tensors that are not the model's or the memory's"
            self.copies.append(Copy(args[0].detach(), Piece.of(args[1], self._memory)))
        elif func in (aten.fill_.Scalar, aten.zero_.default):
            if given[0] not in self._targets:
                return f"{func} fills a tensor that is not the model's"
            self.copies.append(Copy(args[0].detach(), 0.0 if func is aten.zero_.default else args[1]))
        elif func._schema.is_mutable:
            return f"{func} changes a tensor"
        elif given and not all(isinstance(x, Tensor) and _address(x) in given for x in tree_leaves(result)):
            return f"{func} computes something"
        return ""

    def _may_join(self, part: Tensor) -> bool:
        return _address(part) == _address(self._memory) and part.dim() > 0

    def _is_joint(self, source: Tensor, target: Tensor) -> bool:
        joint = self._joints.get(_address(source))
        return joint is not None and source.shape == joint.whole.shape == target.shape and source.is_contiguous()


@dataclass(frozen=True)
class _Joint:
    """Pieces of the memory that a loader put together before it copied them."""

    whole: Tensor
    """Kept, so that no other tensor comes to its address."""
    pieces: Sequence[Piece]
    axis: int = 0

    def copies(self, target: Tensor) -> Iterator[Copy]:
        at = 0
        for piece in self.pieces:
            size = piece.shape[self.axis]
            yield Copy(target.narrow(self.axis, at, size), piece)
            at += size


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _check_all_read(named: Sequence[tuple[str, Piece]], copies: Sequence[Copy]) -> None:
    """What no recorded copy reads may have been read unseen, in another thread."""
    read = sorted({copy.source.begin for copy in copies if isinstance(copy.source, Piece)})
    at = 0
    for name, piece in sorted(named, key=lambda each: each[1].begin):
        while at < len(read) and read[at] < piece.begin:
            at += 1
        end = _end(piece.begin, piece)
        if piece.begin < end and (at == len(read) or read[at] >= end):
            raise NoPlanError(f"no copy of {name} was seen")


def join(copies: Sequence[Copy]) -> list[Copy]:
    """Neighbours at both ends become one copy, and the same copy twice (of tied embeddings) one.

    Raises:
        NoPlanError: two copies write different things to the same place, so that their order matters.
    """
    different = {(Piece.of(copy.target), copy.source): copy for copy in copies if copy.target.numel()}
    groups: list[list[Copy]] = []
    reach = 0
    for copy in sorted(different.values(), key=lambda copy: copy.target.data_ptr()):
        if copy.target.data_ptr() >= reach:
            groups.append([])
        groups[-1].append(copy)
        reach = max(reach, _end(copy.target.data_ptr(), copy.target))
    joined: list[Copy] = []
    for group in groups:
        both = _joined(joined[-1], group[0]) if joined and len(group) == 1 else None
        if both is None:
            _check_apart(group)
            joined += group
        else:
            joined[-1] = both
    return joined


def _check_apart(group: Sequence[Copy]) -> None:
    """Copies whose targets lie in the same stretch of memory may still write to different places, as columns do.

    Raises:
        NoPlanError: they do not.
    """
    if len(group) == 1:
        return
    pieces = [Piece.of(copy.target) for copy in group]
    begin, end = pieces[0].begin, max(_end(piece.begin, piece) for piece in pieces)
    size = pieces[0].dtype.itemsize
    written = torch.zeros((end - begin) // size, dtype=torch.uint8, device=group[0].target.device)
    for piece in pieces:
        place, rest = divmod(piece.begin - begin, size)
        if piece.dtype.itemsize != size or rest:
            raise NoPlanError("two copies may write to the same place")
        written.as_strided(piece.shape, piece.stride, place).add_(1)
    if int(written.max()) > 1:
        raise NoPlanError("two copies write to the same place")


def _end(begin: int, tensor: Tensor | Piece) -> int:
    """The byte after the last one of a tensor that begins there."""
    stride = tensor.stride if isinstance(tensor, Piece) else tensor.stride()
    if 0 in tensor.shape:
        return begin
    last = sum((size - 1) * step for size, step in zip(tensor.shape, stride, strict=True))
    return begin + (last + 1) * tensor.dtype.itemsize


def _joined(first: Copy, second: Copy) -> Copy | None:
    """Both as one, if they are neighbours at both ends."""
    one, two, onto, next_to = first.source, second.source, first.target, second.target
    if not isinstance(one, Piece) or not isinstance(two, Piece):
        return None
    sizes = math.prod(one.shape), math.prod(two.shape)
    if (
        (one.dtype, onto.dtype, _address(onto)) != (two.dtype, next_to.dtype, _address(next_to))
        or sizes != (onto.numel(), next_to.numel())  # else it is spread over the target
        or not all(_is_dense(tensor) for tensor in (one, two, onto, next_to))
        or _end(one.begin, one) != two.begin
        or _end(onto.data_ptr(), onto) != next_to.data_ptr()
    ):
        return None
    target = onto.new_empty(0).set_(onto.untyped_storage(), onto.storage_offset(), (sum(sizes),), (1,))
    return Copy(target, Piece(one.begin, one.dtype, (sum(sizes),), (1,)))


def _is_dense(tensor: Tensor | Piece) -> bool:
    """Whether its values lie one after another in the order of its indices."""
    if isinstance(tensor, Tensor):
        return tensor.is_contiguous()
    expected = 1
    for size, step in zip(reversed(tensor.shape), reversed(tensor.stride), strict=True):
        if size != 1 and step != expected:
            return False
        expected *= size
    return True


def _try(copy: Copy, memory: Tensor) -> None:
    """Make a copy again into zeros.

    Raises:
        NoPlanError: what it leaves is not what the loader had left, which is put back; or no memory is left to compare.
    """
    try:
        expected = copy.target.clone()
    except torch.OutOfMemoryError as error:
        raise NoPlanError(f"there is no memory to check a copy of {copy.target.nbytes} bytes in") from error
    try:
        copy.target.zero_()
        Bound([copy], memory).run()
        if not torch.equal(_bits(copy.target), _bits(expected)):
            raise NoPlanError("a copy made again leaves other values than the loader")
    except Exception:
        copy.target.copy_(expected)
        raise


def _bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)


def _batching_is_faster(bound: Bound) -> bool:
    """Try both, which changes nothing: each writes what is there already."""
    best = {False: float("inf"), True: float("inf")}
    for batched in (False, True) * TRIALS:
        torch.cuda.synchronize()
        begin = time.perf_counter()
        bound.copy(batched)
        torch.cuda.synchronize()
        best[batched] = min(best[batched], time.perf_counter() - begin)
    return best[True] < best[False]
