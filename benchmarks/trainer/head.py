"""The output head against the naive ``log_softmax`` and against the bare matrix product."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.trainer.measure import median_seconds, peak_bytes, settle
from rl.trainer import token_logprobs
from rl.trainer.products import add_product, product
from rl.trainer.token_logprobs import TokenLogprobs

CHUNKS = {"cuda": (1024, 2048, 4096), "cpu": (256,)}


class _Sides:
    """Inputs, and the three ways from them to gradients."""

    def __init__(self, tokens: int, hidden_size: int, vocab: int, dtype: torch.dtype, device: str) -> None:
        torch.manual_seed(0)
        self.hidden = torch.randn(tokens, hidden_size, dtype=dtype, device=device, requires_grad=True)
        weight = torch.randn(vocab, hidden_size, device=device) * 2 / hidden_size**0.5
        self.weight = weight.to(dtype).requires_grad_()
        self.targets = torch.randint(0, vocab, (tokens,), device=device)
        self.upstream = torch.randn(tokens, device=device)
        self.buffer = torch.zeros(vocab, hidden_size, device=device)
        """Of fp32, to which ours adds the weights' gradient."""

    def clear(self) -> None:
        self.hidden.grad = self.weight.grad = None

    def naive(self) -> tuple[Tensor, Tensor]:
        self.clear()
        logprobs = F.linear(self.hidden, self.weight).float().log_softmax(-1)
        with torch.no_grad():
            entropy = -(logprobs.exp() * logprobs).sum(-1)
        chosen = logprobs.gather(1, self.targets[:, None]).squeeze(1)
        del logprobs
        chosen.backward(self.upstream)
        return chosen.detach(), entropy

    def ours(self, chunk: int, alone: bool = False) -> tuple[Tensor, Tensor]:
        self.clear()
        ones, buffer = torch.ones_like(self.upstream), None if alone else self.buffer
        chosen, entropy = TokenLogprobs.apply(self.hidden, self.weight, self.targets, ones, 0, chunk, None, buffer)
        chosen.backward(self.upstream)
        return chosen.detach(), entropy

    def bare(self, gradient: Tensor) -> None:
        self.clear()
        F.linear(self.hidden, self.weight).backward(gradient)


def head_section(tokens: int, hidden_size: int, vocab: int, dtype: torch.dtype, device: str) -> dict[str, Any]:
    """Time and memory of forward and backward: log-probs and entropies of ``tokens`` tokens, gradients of both inputs.

    Ours adds the weights' gradient to an fp32 buffer that exists anyway, as training does; ``alone`` is the same
    without the buffer, whose gradient is then a tensor of its own. ``naive`` computes the log-probs and the entropies
    from ``log_softmax`` of the fp32 logits; ``bare`` is the product with the weights alone, forward and backward, from
    a given gradient of its output.
    """
    sides = _Sides(tokens, hidden_size, vocab, dtype, device)
    result: dict[str, Any] = {"tokens": tokens, "hidden": hidden_size, "vocab": vocab, "dtype": str(dtype)}
    logprobs, entropy = sides.naive()
    expected = {"logprobs": logprobs, "entropy": entropy}
    gradients = {
        "hidden_gradient": _copied(sides.hidden.grad),
        "weight_gradient": _copied(sides.weight.grad),
    }
    result["naive_seconds"] = median_seconds(sides.naive, 5)
    sides.clear()
    if device == "cuda":  # the resident size of a process says too little of so short a life
        result["naive_peak_bytes"] = peak_bytes(sides.naive)
    gradient = torch.full((tokens, vocab), 1e-3, dtype=dtype, device=device)
    result["bare_seconds"] = median_seconds(lambda: sides.bare(gradient), 5)
    del gradient
    result["chunks"] = {}
    for chunk in CHUNKS[device]:
        part = result["chunks"][str(chunk)] = {
            "differences_from_naive": _differences(sides, chunk, expected, gradients)
        }
        part["seconds"] = median_seconds(lambda chunk=chunk: sides.ours(chunk), 5)
        part["seconds_over_bare"] = part["seconds"] / result["bare_seconds"]
        sides.clear()
        if device == "cuda":
            part |= _memory(sides, chunk, result["naive_peak_bytes"])
    sides.clear()
    settle()
    if device == "cuda":
        result["pieces_seconds"] = _pieces(sides.hidden.detach(), sides.weight.detach(), sides.targets)
    return result


def _differences(
    sides: _Sides, chunk: int, expected: dict[str, Tensor], gradients: dict[str, Tensor]
) -> dict[str, float]:
    """Largest ones of the outputs, relative ones of the gradients."""
    sides.buffer.zero_()
    found = dict(zip(expected, sides.ours(chunk), strict=True))
    differences = {name: float((found[name] - tensor).abs().max()) for name, tensor in expected.items()}
    ours = zip(gradients.items(), (sides.hidden.grad, sides.buffer), strict=True)
    return differences | {name: _relative(gradient, tensor) for (name, tensor), gradient in ours}


def _memory(sides: _Sides, chunk: int, naive: int) -> dict[str, float]:
    """Peaks on CUDA, with the buffer and alone, and the time alone."""
    found: dict[str, float] = {"peak_bytes": peak_bytes(lambda: sides.ours(chunk))}
    found["peak_over_naive"] = found["peak_bytes"] / naive
    found["alone_seconds"] = median_seconds(lambda: sides.ours(chunk, alone=True), 5)
    sides.clear()
    found["alone_peak_over_naive"] = peak_bytes(lambda: sides.ours(chunk, alone=True)) / naive
    return found


def _pieces(hidden: Tensor, weight: Tensor, targets: Tensor) -> dict[str, float]:
    """What one chunk's steps cost, alone."""
    chunk = min(2048, len(hidden))
    hidden, targets, ones = hidden[:chunk], targets[:chunk], torch.ones(chunk, device=hidden.device)
    logits = product(hidden, weight.T)
    normalizer = logits.logsumexp(-1)
    slopes = token_logprobs._probabilities(logits, ones, normalizer, weight.dtype)
    total = product(slopes.T, hidden)
    actions = {
        "logits, bf16": lambda: torch.mm(hidden, weight.T),
        "logits, fp32": lambda: product(hidden, weight.T),
        "statistics": lambda: token_logprobs._statistics(logits, targets, ones),
        "slopes": lambda: token_logprobs._probabilities(logits, ones, normalizer, weight.dtype),
        "hidden gradient": lambda: product(slopes, weight),
        "weight gradient": lambda: product(slopes.T, hidden),
        "weight gradient, added": lambda: add_product(total, slopes.T, hidden),
        "weight gradient, rounded": lambda: total.to(weight.dtype),
    }
    return {name: median_seconds(action, 10) for name, action in actions.items()}


def _copied(gradient: Tensor | None) -> Tensor:
    assert gradient is not None
    return gradient.clone()


def _relative(found: Tensor | None, expected: Tensor) -> float:
    assert found is not None
    return float((found.float() - expected.float()).norm() / expected.float().norm())
