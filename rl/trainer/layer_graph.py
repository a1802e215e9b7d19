"""CUDA graphs of a run of layers, forward and backward: two launches in place of a thousand.

A graph replays fixed operations on fixed addresses. Its inputs are copied to where it reads them; a micro-batch is
padded to one of a few sizes, each recorded when it first comes. The backward graph adds the parameters' gradients to
Megatron's fp32 buffers itself, so that no hook runs for each of them.

The graphs of a run share their memory: between a forward and its backward pass no other forward pass may go through the
run. A backward pass that comes too late is refused.

    tokens   x_0 … x_{n−1} │ zeros: one more sample, whose gradient is zero, so that it adds nothing to any weight's
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from jaxtyping import Float, Int32
from torch import Tensor

from rl.trainer.flash import length_bound
from rl.trainer.layer_passes import Passes

Replay = Callable[[], None]
Record = Callable[[Replay], Replay]
"""Makes of an action that is done once now something that does it again and again."""

LEAST_STEP, LEAST_SPANS = 256, 8
WARM_UPS = 2
"""Passes before a recording: compilers and libraries set themselves up in the first ones."""


class StaleGraphError(RuntimeError):
    """Another forward pass has overwritten what a backward pass needs."""


def padded_size(tokens: int) -> int:
    """Tokens of the graph that takes so many: an eighth more at most, above the smallest sizes."""
    step = max(LEAST_STEP, 1 << max(0, tokens.bit_length() - 4))
    return -(-tokens // step) * step


class LayerGraphs:
    """The recordings of one run of layers."""

    def __init__(self, passes: Passes, parameters: Sequence[Tensor], record: Record | None = None) -> None:
        """
        Args:
            record: captures CUDA graphs if it is not given.
        """
        self._passes, self._parameters, self._record = passes, list(parameters), record
        self._recorded: dict[tuple[int, int, int, bool], _Recorded] = {}
        self._pool: Any = None
        self.passes = 0
        """Forward passes so far."""

    def __call__(
        self,
        x: Float[Tensor, "tokens 1 hidden"],
        cos: Float[Tensor, "tokens dim"],
        sin: Float[Tensor, "tokens dim"],
        edges: Int32[Tensor, " samples+1"],
        longest: int,
    ) -> Float[Tensor, "tokens 1 hidden"]:
        """What the passes compute, on the device of ``x``."""
        backward = torch.is_grad_enabled()
        if backward and not x.requires_grad:
            x = x.detach().requires_grad_()  # or autograd would not come back here for the parameters' gradients
        size = padded_size(len(x))
        spans = 1 << max(LEAST_SPANS - 1, len(edges)).bit_length()
        longest = max(longest, length_bound(size - len(x)))
        key = (size, spans, longest, backward)
        recorded = self._recorded.get(key)
        if recorded is None:
            recorded = self._recorded[key] = _Recorded(x, cos, sin, spans, longest)
            recorded.load(x, cos, sin, edges)
            recorded.record(self._passes, self._parameters, backward, self._record or self._capture)
        self.passes += 1
        if not backward:
            return recorded.forward(x, cos, sin, edges)
        return _Replay.apply(x, cos, sin, edges, recorded, self)

    def release(self) -> None:
        """Forget all recordings, whose addresses are about to change, and their memory."""
        self._recorded.clear()
        self._pool = None

    def _capture(self, action: Replay) -> Replay:
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        # Other threads (NCCL's) may go on with what a capture of all threads would forbid.
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            action()
        return graph.replay


class _Recorded:
    """One size: where it reads and writes, and its two replays."""

    def __init__(self, x: Tensor, cos: Tensor, sin: Tensor, spans: int, longest: int) -> None:
        size = padded_size(len(x))
        self.x, self.cos, self.sin = (t.new_zeros(size, *t.shape[1:]) for t in (x.detach(), cos, sin))
        self.edges = torch.zeros(spans, dtype=torch.int32, device=x.device)
        self.output, self.grad_output, self.grad_x = (torch.zeros_like(self.x) for _ in range(3))
        self.longest = longest
        self._kept: Any = None
        self._replay_forward: Replay
        self._replay_backward: Replay

    @torch.no_grad()
    def load(self, x: Tensor, cos: Tensor, sin: Tensor, edges: Tensor) -> None:
        tokens = len(x)
        for held, given in ((self.x, x), (self.cos, cos), (self.sin, sin)):
            held[:tokens].copy_(given)
        if tokens < len(self.x):  # what a longer micro-batch left
            self.x[tokens:].zero_()
        self.edges[: len(edges)].copy_(edges)
        self.edges[len(edges) :].fill_(len(self.x))

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, edges: Tensor) -> Tensor:
        self.load(x, cos, sin, edges)
        self._replay_forward()
        return self.output[: len(x)].clone()

    def backward(self, gradient: Tensor) -> Tensor:
        tokens = len(gradient)
        self.grad_output[:tokens].copy_(gradient)
        self.grad_output[tokens:].zero_()
        self._replay_backward()
        return self.grad_x[:tokens].clone()

    def record(self, passes: Passes, parameters: Sequence[Tensor], backward: bool, record: Record) -> None:
        # Aliases: autograd does what concerns a leaf on the stream that first used it, and Megatron's hooks have used
        # the parameters on another one than that of the recording.
        aliases = [parameter.detach().requires_grad_(parameter.requires_grad) for parameter in parameters]
        buffers = [parameter.main_grad if parameter.requires_grad else None for parameter in parameters]

        def pass_forward() -> None:
            result, kept = passes.forward(self.x, self.cos, self.sin, self.edges, self.longest, aliases, keep=backward)
            self.output.copy_(result)
            self._kept = kept if backward else None

        def pass_backward() -> None:
            kept, self._kept = self._kept, None
            self.grad_x.copy_(passes.backward(kept, self.grad_output, buffers))

        def pass_without_effect() -> None:
            pass_forward()
            if backward:  # of a gradient that is zero yet, so that zeros are added to the buffers
                pass_backward()

        _warm_up(pass_without_effect, self.x.device)
        self._replay_forward = record(pass_forward)
        if backward:
            self._replay_backward = record(pass_backward)
        self._kept = None


def _warm_up(action: Callable[[], object], device: torch.device) -> None:
    if device.type != "cuda":
        return
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(WARM_UPS):
            action()
    torch.cuda.current_stream().wait_stream(stream)


class _Replay(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, cos: Tensor, sin: Tensor, edges: Tensor, recorded: _Recorded, graphs: LayerGraphs
    ) -> Tensor:
        ctx.recorded, ctx.graphs, ctx.own = recorded, graphs, graphs.passes
        return recorded.forward(x, cos, sin, edges)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.own != ctx.graphs.passes:
            raise StaleGraphError("a forward pass went through these layers before the backward pass of the last one")
        return ctx.recorded.backward(gradient), None, None, None, None, None
