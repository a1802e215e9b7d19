"""Speed and memory of the algorithms on CPU: ``python -m benchmarks.algorithms [--json FILE]``.

One update of 1,024 packed ragged sequences (1k to 32k tokens, 16 M in all; a prompt, then actions and observations in
turn): advantages, denominators, ratio masks, loss and gradient, without metrics. The measure is the time of a memcpy of
what the batch and the log-probs hold for each token, in the same process; the bar is 12 of them, within 2 GB (peak
resident memory of the process, with the inputs and torch in it). One thread and its CPU time unless told otherwise:
what else runs on the machine then counts least. For comparison: the same loss as a loop over samples with autograd, and
trl's; GAE as a loop over tokens. Those run on fewer sequences, and count the tokens of these.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import multiprocessing
import resource
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from algorithms import registry
from algorithms.types import LossInputs, Need, RolloutBatch

SEQUENCES, SHORTEST, LONGEST, GROUP = 1024, 1_000, 32_000, 8
PROMPT, ACTION, OBSERVATION = 500, 600, 300
NAMES = ("grpo", "dis", "gspo", "cispo", "sao", "opd")
BAR_MEMCPYS, BAR_BYTES = 12.0, 2e9
REPEATS = 7
COMPARED_SEQUENCES = 64
TRL = {"grpo": ("grpo", "token"), "gspo": ("grpo", "sequence"), "cispo": ("cispo", "token")}


def make_batch(sequences: int, longest: int) -> tuple[RolloutBatch, Tensor]:
    rng = np.random.default_rng(0)
    lengths = rng.integers(min(SHORTEST, longest // 32), longest, sequences)
    edges = np.concatenate([[0], lengths.cumsum()])
    tokens = int(edges[-1])
    spans = rng.geometric(1 / np.array([ACTION, OBSERVATION]), (4 * tokens // (ACTION + OBSERVATION) + 8, 2)).reshape(
        -1
    )
    mask = np.resize(np.repeat(np.resize([True, False], len(spans)), spans), tokens)
    for start in edges[:-1]:
        mask[start : start + PROMPT] = False
    action = torch.from_numpy(mask)

    def noise(scale: float) -> Tensor:
        return torch.from_numpy(rng.standard_normal(tokens, dtype=np.float32)).mul_(scale)

    old = noise(1).abs_().neg_()
    batch = RolloutBatch(
        cu_seqlens=torch.from_numpy(edges),
        action_mask=action,
        rollout_logprobs=(old + noise(0.05)) * action,
        weight_versions=torch.where(action, 10, -1).int(),
        current_version=11,
        rollout=torch.arange(sequences),
        segment=torch.zeros(sequences, dtype=torch.long),
        group=torch.arange(sequences) // GROUP,
        reward=torch.from_numpy(rng.integers(0, 2, sequences).astype(np.float64)),
        valid=torch.ones(sequences, dtype=torch.bool),
        truncated=torch.zeros(sequences, dtype=torch.bool),
        dropped=torch.zeros(sequences, dtype=torch.bool),
        old_logprobs=old,
    )
    return batch, old + noise(0.05)


def with_needs(batch: RolloutBatch, needs: frozenset[Need]) -> RolloutBatch:
    """Only what the algorithm reads."""
    extra = {}
    if Need.VALUES in needs:
        extra["values"] = torch.rand_like(batch.rollout_logprobs)
    if Need.TEACHER_LOGPROBS in needs:
        extra["teacher_logprobs"] = batch.rollout_logprobs - 0.1
    return dataclasses.replace(batch, old_logprobs=batch.old_logprobs if Need.OLD_LOGPROBS in needs else None, **extra)


def update(algorithm: Any, batch: RolloutBatch, logprobs: Tensor, observe: bool = False) -> Tensor:
    """What a trainer does with one micro-batch that is the whole batch; returns the gradient."""
    targets = algorithm.prepare(batch)
    inputs = LossInputs(
        cu_seqlens=batch.cu_seqlens,
        logprobs=logprobs,
        entropy=None,
        action_mask=batch.action_mask,
        rollout_logprobs=batch.rollout_logprobs,
        advantages=targets.advantages,
        weights=targets.weights,
        old_logprobs=batch.old_logprobs,
        teacher_logprobs=batch.teacher_logprobs,
        observe=observe,
    )
    (gradient,) = torch.autograd.grad(algorithm.loss(inputs).loss, logprobs)
    return gradient


def best_seconds(function: Callable[[], object], repeats: int = REPEATS) -> float:
    """The fastest of several runs, after one to warm up: what else runs on the machine only makes it slower."""
    clock = time.process_time if torch.get_num_threads() == 1 else time.perf_counter
    seconds = []
    for _ in range(repeats + 1):
        start = clock()
        function()
        seconds.append(clock() - start)
    return min(seconds[1:])


def peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def measure(name: str, sequences: int, longest: int) -> dict[str, float]:
    algorithm = registry.build(name, {})
    batch, logprobs = make_batch(sequences, longest)
    batch = with_needs(batch, algorithm.needs)
    per_token = [x for x in vars(batch).values() if isinstance(x, Tensor) and len(x) == len(logprobs)] + [logprobs]
    copies = [torch.empty_like(x) for x in per_token]
    memcpy = best_seconds(lambda: [copy.copy_(x) for copy, x in zip(copies, per_token, strict=True)])
    del copies
    logprobs.requires_grad_()
    before = peak_bytes()
    seconds = best_seconds(lambda: update(algorithm, batch, logprobs))
    peak = peak_bytes()
    observed = best_seconds(lambda: update(algorithm, batch, logprobs, observe=True), 2)
    return {
        "tokens": len(logprobs),
        "action_share": float(batch.action_mask.float().mean()),
        "input_bytes_per_token": sum(x.element_size() for x in per_token),
        "memcpy_seconds": memcpy,
        "seconds": seconds,
        "memcpys": seconds / memcpy,
        "tokens_per_second": len(logprobs) / seconds,
        "with_metrics_tokens_per_second": len(logprobs) / observed,
        "peak_bytes": peak,
        "inputs_peak_bytes": before,
    }


def loop_over_samples(name: str, sequences: int, longest: int) -> dict[str, float]:
    """The straightforward way: per sample, plain torch with autograd; for SAO, GAE token by token."""
    algorithm = registry.build(name, {})
    batch, logprobs = make_batch(sequences, longest)
    batch = with_needs(batch, algorithm.needs)
    logprobs.requires_grad_()
    advantages = [float(r) - 0.5 for r in batch.reward]

    def run() -> None:
        losses, total = [], batch.action_mask.sum()
        for s, advantage in enumerate(advantages):
            span = slice(int(batch.cu_seqlens[s]), int(batch.cu_seqlens[s + 1]))
            on = batch.action_mask[span].float()
            logp, inference = logprobs[span], batch.rollout_logprobs[span]
            a: float | Tensor = advantage
            if name == "sao":
                a = _gae_loop(batch.values[span], batch.action_mask[span], advantage + 0.5)
            if name in ("dis", "sao"):
                r = (logp - inference).exp().detach()
                loss = -torch.where((r > 0.7) & (r < 6), r, 0.0) * a * logp
            elif name == "opd":
                r = (logp - inference).exp().detach()
                gap = (batch.teacher_logprobs[span] - logp).detach()
                loss = -torch.where((r >= 0.5) & (r <= 2), r, 0.0) * gap * logp
            else:
                old = batch.old_logprobs[span]
                rho = (old - inference).exp()
                r = (logp - old).exp()
                if name == "gspo":
                    mean = ((logp - old) * on).sum() / on.sum()
                    r = mean.exp().expand_as(logp)
                if name == "cispo":
                    loss = -r.detach().clamp(0, 5) * a * logp
                else:
                    loss = -torch.minimum(r * a, r.clamp(0.8, 1.28) * a)
                loss = torch.where((rho >= 0.5) & (rho <= 2), rho, 0.0) * loss
            losses.append((loss * on).sum() / total)
        torch.stack(losses).sum().backward()

    seconds = best_seconds(run, 1 if name == "sao" else 3)
    return {"tokens": len(logprobs), "tokens_per_second": len(logprobs) / seconds, "peak_bytes": peak_bytes()}


def _gae_loop(values: Tensor, mask: Tensor, reward: float) -> Tensor:
    out, following, advantage, last = torch.zeros_like(values), 0.0, 0.0, reward
    length = int(mask.sum())
    lam = 1 - 1 / (1.5 * max(length, 1))
    for t in range(len(values) - 1, -1, -1):
        if mask[t]:
            value = float(values[t])
            advantage = last + following - value + lam * advantage
            out[t], following, last = advantage, value, 0.0
    return out


def trl_loss(name: str, sequences: int, longest: int) -> dict[str, float]:
    from tests.algorithms.trl_oracle import trl_loss as oracle

    batch, logprobs = make_batch(sequences, longest)
    loss_type, level = TRL[name]
    logprobs.requires_grad_()

    def run() -> None:
        advantages = batch.reward.float() - 0.5
        loss = oracle(
            batch, logprobs, advantages, loss_type=loss_type, importance_sampling_level=level, icepop_beta=2.0
        )
        loss.backward()

    seconds = best_seconds(run, 3)
    return {"tokens": len(logprobs), "tokens_per_second": len(logprobs) / seconds, "peak_bytes": peak_bytes()}


def in_process(threads: int, function: Callable[..., dict[str, float]], *arguments: object) -> dict[str, float]:
    """Each in a process of its own, for its peak memory."""
    with multiprocessing.get_context("spawn").Pool(1, torch.set_num_threads, (threads,)) as pool:
        return pool.apply(function, arguments)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="also write the numbers there")
    parser.add_argument("--names", nargs="+", default=NAMES, choices=NAMES)
    parser.add_argument("--sequences", type=int, default=SEQUENCES)
    parser.add_argument("--longest", type=int, default=LONGEST)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--no-comparison", action="store_true", help="leave out the loops and trl")
    args = parser.parse_args()
    results: dict[str, Any] = {"threads": args.threads, "torch": torch.__version__, "algorithms": {}}
    compared = min(COMPARED_SEQUENCES, args.sequences)
    print(
        f"{'':8}{'×memcpy':>9}{'M tokens/s':>12}{'+metrics':>10}{'peak GB':>9}{'loop':>8}{'GB':>6}{'trl':>8}{'GB':>6}"
    )
    met = True
    for name in args.names:
        row = in_process(args.threads, measure, name, args.sequences, args.longest)
        results["algorithms"][name] = entry = {"ours": row}
        numbers = [f"{row['memcpys']:9.1f}{row['tokens_per_second'] / 1e6:12.1f}"]
        numbers.append(f"{row['with_metrics_tokens_per_second'] / 1e6:10.1f}{row['peak_bytes'] / 1e9:9.2f}")
        if not args.no_comparison:
            entry["loop"] = in_process(
                args.threads, loop_over_samples, name, 4 if name == "sao" else compared, args.longest
            )
            if name in TRL:
                entry["trl"] = in_process(args.threads, trl_loss, name, compared, args.longest)
            others = [entry[other] for other in ("loop", "trl") if other in entry]
            numbers += [f"{other['tokens_per_second'] / 1e6:8.2f}{other['peak_bytes'] / 1e9:6.1f}" for other in others]
        print(f"{name:8}" + "".join(numbers), flush=True)
        met = met and row["memcpys"] <= BAR_MEMCPYS and row["peak_bytes"] <= BAR_BYTES
    results["bar_met"] = met
    print(f"bar: {BAR_MEMCPYS:.0f} memcpys of the inputs, {BAR_BYTES / 1e9:.0f} GB: {'met' if met else 'MISSED'}")
    if args.json:
        args.json.write_text(json.dumps(results, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
