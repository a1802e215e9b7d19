"""The output head against the naive ``log_softmax`` and against the bare matrix product."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.trainer.measure import median_seconds, peak_bytes, settle
from rl.trainer import token_logprobs
from rl.trainer.token_logprobs import TokenLogprobs

CHUNKS = {"cuda": (1024, 2048, 4096), "cpu": (256,)}


def head_section(tokens: int, hidden_size: int, vocab: int, dtype: torch.dtype, device: str) -> dict[str, Any]:
    """Time and memory of forward and backward: log-probs and entropies of ``tokens`` tokens, gradients of both inputs.

    Ours adds the weights' gradient to an fp32 buffer that exists anyway, as training does; ``alone`` is the same
    without the buffer, whose gradient is then a tensor of its own. ``naive`` computes the log-probs and the entropies
    from ``log_softmax`` of the fp32 logits; ``bare`` is the product with the weights alone, forward and backward, from
    a given gradient of its output.
    """
    torch.manual_seed(0)
    hidden = torch.randn(tokens, hidden_size, dtype=dtype, device=device, requires_grad=True)
    weight = (torch.randn(vocab, hidden_size, device=device) * 2 / hidden_size**0.5).to(dtype).requires_grad_()
    targets = torch.randint(0, vocab, (tokens,), device=device)
    upstream = torch.randn(tokens, device=device)

    def clear() -> None:
        hidden.grad = weight.grad = None

    def naive() -> tuple[Tensor, Tensor]:
        clear()
        logprobs = F.linear(hidden, weight).float().log_softmax(-1)
        with torch.no_grad():
            entropy = -(logprobs.exp() * logprobs).sum(-1)
        chosen = logprobs.gather(1, targets[:, None]).squeeze(1)
        del logprobs
        chosen.backward(upstream)
        return chosen.detach(), entropy

    buffer = torch.zeros(vocab, hidden_size, device=device)

    def ours(chunk: int, gradient: Tensor | None = buffer) -> tuple[Tensor, Tensor]:
        clear()
        ones = torch.ones_like(upstream)
        chosen, entropy = TokenLogprobs.apply(hidden, weight, targets, ones, 0, chunk, None, gradient)
        chosen.backward(upstream)
        return chosen.detach(), entropy

    def bare(gradient: Tensor) -> None:
        clear()
        F.linear(hidden, weight).backward(gradient)

    result: dict[str, Any] = {"tokens": tokens, "hidden": hidden_size, "vocab": vocab, "dtype": str(dtype)}
    expected, expected_entropy = naive()
    gradients = [x.grad.clone() for x in (hidden, weight)]
    result["naive_seconds"] = median_seconds(naive, 5)
    clear()
    if device == "cuda":  # the resident size of a process says too little of so short a life
        result["naive_peak_bytes"] = peak_bytes(naive)
    gradient = torch.full((tokens, vocab), 1e-3, dtype=dtype, device=device)
    result["bare_seconds"] = median_seconds(lambda: bare(gradient), 5)
    del gradient
    result["chunks"] = {}
    for chunk in CHUNKS[device]:
        buffer.zero_()
        found, entropy = ours(chunk)
        errors = {
            "logprobs": float((found - expected).abs().max()),
            "entropy": float((entropy - expected_entropy).abs().max()),
            "hidden_gradient": _relative(hidden.grad, gradients[0]),
            "weight_gradient": _relative(buffer, gradients[1]),
        }
        time = median_seconds(lambda chunk=chunk: ours(chunk), 5)
        clear()
        part = result["chunks"][str(chunk)] = {
            "seconds": time,
            "seconds_over_bare": time / result["bare_seconds"],
            "differences_from_naive": errors,
        }
        if device == "cuda":
            part["peak_bytes"] = peak_bytes(lambda chunk=chunk: ours(chunk))
            part["peak_over_naive"] = part["peak_bytes"] / result["naive_peak_bytes"]
            part["alone_seconds"] = median_seconds(lambda chunk=chunk: ours(chunk, None), 5)
            clear()
            alone = peak_bytes(lambda chunk=chunk: ours(chunk, None))
            part["alone_peak_over_naive"] = alone / result["naive_peak_bytes"]
    clear()
    settle()
    if device == "cuda":
        result["pieces_seconds"] = _pieces(hidden.detach(), weight.detach(), targets)
    return result


def _pieces(hidden: Tensor, weight: Tensor, targets: Tensor) -> dict[str, float]:
    """What one chunk's steps cost, alone."""
    chunk = min(2048, len(hidden))
    hidden, targets, ones = hidden[:chunk], targets[:chunk], torch.ones(chunk, device=hidden.device)
    logits = token_logprobs._product(hidden, weight.T)
    normalizer = logits.logsumexp(-1)
    slopes = token_logprobs._probabilities(logits, ones, normalizer, weight.dtype)
    total = token_logprobs._product(slopes.T, hidden)
    actions = {
        "logits, bf16": lambda: torch.mm(hidden, weight.T),
        "logits, fp32": lambda: token_logprobs._product(hidden, weight.T),
        "statistics": lambda: token_logprobs._statistics(logits, targets, ones),
        "slopes": lambda: token_logprobs._probabilities(logits, ones, normalizer, weight.dtype),
        "hidden gradient": lambda: token_logprobs._product(slopes, weight),
        "weight gradient": lambda: token_logprobs._product(slopes.T, hidden),
        "weight gradient, added": lambda: token_logprobs._add_product(total, slopes.T, hidden),
        "weight gradient, rounded": lambda: total.to(weight.dtype),
    }
    return {name: median_seconds(action, 10) for name, action in actions.items()}


def _relative(found: Tensor | None, expected: Tensor) -> float:
    assert found is not None
    return float((found.float() - expected.float()).norm() / expected.float().norm())
