"""The objectives as loops over tokens in float64, straight from their formulas. Slow and obvious on purpose."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from algorithms.types import RolloutBatch

Term = Callable[[int, int], Tensor]
"""(rollout, token) → its term of the objective that is maximised."""


def samples_of(batch: RolloutBatch, rollout: int) -> list[int]:
    mine = [s for s in range(batch.samples) if batch.rollout[s] == rollout]
    return sorted(mine, key=lambda s: int(batch.segment[s]))


def action_tokens(batch: RolloutBatch, sample: int) -> list[int]:
    return [t for t in range(int(batch.cu_seqlens[sample]), int(batch.cu_seqlens[sample + 1])) if batch.action_mask[t]]


def trained(batch: RolloutBatch, config: Any) -> list[list[int]]:
    """Trained tokens of each rollout."""
    result = []
    for i in range(batch.rollouts):
        tokens = [t for s in samples_of(batch, i) for t in action_tokens(batch, s)]
        stale = [t for t in tokens if batch.current_version - int(batch.weight_versions[t]) > config.max_staleness]
        out = not batch.valid[i] or batch.dropped[i] or (config.mask_truncated and batch.truncated[i])
        if config.stale == "drop" and stale:
            out = True
        result.append([] if out else [t for t in tokens if t not in stale])
    return result


def advantages(batch: RolloutBatch, config: Any) -> list[float]:
    result = []
    for i in range(batch.rollouts):
        members = [j for j in range(batch.rollouts) if batch.group[j] == batch.group[i]]
        rewards = [float(batch.reward[j]) for j in members if batch.valid[j] and not batch.repeated[j]]
        if not rewards or not batch.valid[i]:
            result.append(0.0)
            continue
        advantage = float(batch.reward[i]) - statistics.fmean(rewards)
        if config.baseline == "leave_one_out" and len(rewards) > 1:
            advantage *= len(rewards) / (len(rewards) - 1)
        if config.normalize_std:
            deviation = statistics.stdev if config.unbiased_std else statistics.pstdev
            advantage /= (deviation(rewards) if len(rewards) > 1 else 0.0) + config.std_epsilon
        result.append(advantage)
    return result


def aggregate(batch: RolloutBatch, tokens: list[list[int]], aggregation: str, term: Term) -> Tensor:
    """The loss: minus the objective."""
    zero = torch.zeros((), dtype=torch.float64)
    if aggregation == "token_mean":
        terms = [term(i, t) for i, mine in enumerate(tokens) for t in mine]
        return -sum(terms, zero) / max(len(terms), 1)
    groups: dict[int, list[Tensor]] = {}
    for i, mine in enumerate(tokens):
        if mine:
            mean = sum((term(i, t) for t in mine), zero) / len(mine)
            groups.setdefault(int(batch.group[i]), []).append(mean)
    return -sum((sum(means, zero) / len(means) for means in groups.values()), zero) / max(len(groups), 1)


def pop(rho: float, beta: float | None) -> float:
    return 1.0 if beta is None else rho if 1 / beta <= rho <= beta else 0.0


def clip(r: Tensor, low: float, high: float) -> Tensor:
    return torch.clamp(r, 1 - low, 1 + high)


def loss(name: str, config: Any, batch: RolloutBatch, logprobs: Tensor) -> Tensor:
    """``logprobs`` is float64 and carries the gradient."""
    old, inference = batch.old_logprobs.double(), batch.rollout_logprobs.double()
    teacher, ref = batch.teacher_logprobs.double(), batch.ref_logprobs.double()
    tokens = trained(batch, config)
    sao = name == "sao"
    group_advantage = [] if sao else advantages(batch, config)
    token_advantage = sao_advantages(batch, config)[0] if sao else {}

    def rho(t: int) -> float:
        return pop(math.exp(old[t] - inference[t]), config.beta)

    def grpo(i: int, t: int) -> Tensor:
        r, a = (logprobs[t] - old[t]).exp(), group_advantage[i]
        return rho(t) * torch.minimum(r * a, clip(r, config.epsilon_low, config.epsilon_high) * a)

    def dis(i: int, t: int) -> Tensor:
        r = (logprobs[t].detach() - inference[t]).exp()
        f = r if 1 - config.epsilon_low < r < 1 + config.epsilon_high else 0.0
        return f * (token_advantage[t] if sao else group_advantage[i]) * logprobs[t]

    def cispo(i: int, t: int) -> Tensor:
        r = (logprobs[t].detach() - old[t]).exp()
        return rho(t) * clip(r, config.epsilon_low, config.epsilon_high) * group_advantage[i] * logprobs[t]

    def gspo(i: int, t: int) -> Tensor:
        (sample,) = [s for s in samples_of(batch, i) if batch.cu_seqlens[s] <= t < batch.cu_seqlens[s + 1]]
        mine = [u for u in tokens[i] if batch.cu_seqlens[sample] <= u < batch.cu_seqlens[sample + 1]]
        s, a = torch.stack([logprobs[u] - old[u] for u in mine]).mean().exp(), group_advantage[i]
        token = s.detach() * (logprobs[t] - logprobs[t].detach()).exp()  # GSPO-token, §4.3: same value, same gradient
        return rho(t) * torch.minimum(token * a, clip(token, config.epsilon_low, config.epsilon_high) * a)

    def opd(i: int, t: int) -> Tensor:
        a = config.coefficient * (teacher[t] - logprobs[t].detach()) + config.outcome_coefficient * group_advantage[i]
        if config.correction == "clipped":
            r = (logprobs[t] - old[t]).exp()
            return rho(t) * torch.minimum(r * a, clip(r, config.epsilon_low, config.epsilon_high) * a)
        w = (logprobs[t].detach() - inference[t]).exp()
        return (w if config.bound_low <= w <= config.bound_high else 0.0) * a * logprobs[t]

    def with_kl(i: int, t: int) -> Tensor:
        term = {"grpo": grpo, "dis": dis, "sao": dis, "cispo": cispo, "gspo": gspo, "opd": opd}[name](i, t)
        coefficient = getattr(config, "kl_coefficient", 0.0)
        if not coefficient:
            return term
        d = logprobs[t] - ref[t]
        k1_with_k2_gradient = d.detach() + d.detach() * (logprobs[t] - logprobs[t].detach())
        kl = {"k1": k1_with_k2_gradient, "k2": d**2 / 2, "k3": (-d).exp() + d - 1}[config.kl_estimator]
        return term - coefficient * kl

    return aggregate(batch, tokens, "token_mean" if sao else config.aggregation, with_kl)


def gae(values: list[float], rewards: list[float], gamma: float, lam: float) -> list[float]:
    """Ordinary GAE over a sequence of action tokens."""
    result, following, advantage = [], 0.0, 0.0
    for value, reward in zip(reversed(values), reversed(rewards), strict=True):
        advantage = reward + gamma * following - value + gamma * lam * advantage
        following = value
        result.append(advantage)
    return result[::-1]


def sao_advantages(batch: RolloutBatch, config: Any) -> tuple[dict[int, float], dict[int, float]]:
    """Advantage and return of every action token."""
    advantage, returns = {}, {}
    for i in range(batch.rollouts):
        segments = [action_tokens(batch, s) for s in samples_of(batch, i)]
        length = sum(len(mine) for mine in segments)
        reward = float(batch.reward[i]) if batch.valid[i] else 0.0
        for number, mine in enumerate(segments):
            if not mine:
                continue
            lam = config.lambda_policy
            if lam is None:
                lam = 1 - 1 / (config.lambda_alpha * length)
            after = sum(len(later) for later in segments[number + 1 :])
            values = [float(batch.values[t]) for t in mine]
            local = gae(values, [0.0] * (len(mine) - 1) + [reward], config.gamma, lam)
            last = reward * config.gamma**after
            targets = gae(values, [0.0] * (len(mine) - 1) + [last], config.gamma, config.lambda_critic)
            for t, a, g, v in zip(mine, local, targets, values, strict=True):
                advantage[t] = a * (config.gamma * lam) ** after
                returns[t] = g + v
    return advantage, returns


def reverse_kl(logits: Tensor, teachers: list[tuple[float, Tensor, list[int] | None]]) -> Tensor:
    """One token. A teacher is (weight, log-probs, ids of its top-k or None); float64."""
    logp = logits - logits.logsumexp(0)
    total = torch.zeros((), dtype=torch.float64)
    for weight, log_q, ids in teachers:
        if ids is None:
            kl = sum(logp[v].exp() * (logp[v] - log_q[v]) for v in range(len(logits)))
        else:
            kl = sum(logp[v].exp() * (logp[v] - log_q[n]) for n, v in enumerate(ids))
            tail = sum(logp[v].exp() for v in range(len(logits)) if v not in ids)
            kl = kl + tail * (tail.log() - math.log(1 - sum(math.exp(x) for x in log_q)))
        total = total + weight * kl
    return total / sum(weight for weight, _, _ in teachers)
