"""The operations of ``rl.trainer.layer_kernels`` as Triton kernels: each reads its inputs and writes its outputs once.

Compiled by Inductor for any number of tokens, the same operations ran at a quarter to a tenth of an H200's memory speed
(docs/performance.md). These take the number of tokens as an argument and all else as constants: one kernel a model.
"""

# ruff: noqa: ANN001, ANN202  (a kernel's arguments are typed when it is compiled)
# mypy: disallow-untyped-defs=False

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

ROWS = 8
"""Tokens of a program of the norms; it adds up the gradient of the scale over them."""
TOKENS = 16
"""Tokens of a program of the rotation, which works on one head of them."""
COLUMNS = 1024


@triton.jit
def _add_norm(
    x,
    delta,
    weight,
    total,
    normed,
    inverse,
    tokens,
    eps,
    HIDDEN: tl.constexpr,
    ADDS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    lanes = tl.arange(0, BLOCK)
    inside = lanes < HIDDEN
    scale = tl.load(weight + lanes, mask=inside, other=0.0).to(tl.float32)
    for step in range(ROWS):
        row = tl.program_id(0) * ROWS + step
        mask = inside & (row < tokens)
        place = row.to(tl.int64) * HIDDEN + lanes
        value = tl.load(x + place, mask=mask, other=0.0)
        if ADDS:
            value = (value.to(tl.float32) + tl.load(delta + place, mask=mask, other=0.0).to(tl.float32)).to(value.dtype)
            tl.store(total + place, value, mask=mask)
        wide = value.to(tl.float32)
        factor = 1.0 / tl.sqrt(tl.sum(wide * wide, 0) / HIDDEN + eps)
        rounded = (wide * factor).to(value.dtype).to(tl.float32)
        tl.store(normed + place, (rounded * scale).to(value.dtype), mask=mask)
        tl.store(inverse + row, factor, mask=row < tokens)


@triton.jit
def _norm_backward(
    gradient,
    x,
    inverse,
    weight,
    residual,
    result,
    normed,
    partial,
    tokens,
    HIDDEN: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    lanes = tl.arange(0, BLOCK)
    inside = lanes < HIDDEN
    scale = tl.load(weight + lanes, mask=inside, other=0.0).to(tl.float32)
    summed = tl.zeros([BLOCK], dtype=tl.float32)
    for step in range(ROWS):
        row = tl.program_id(0) * ROWS + step
        mask = inside & (row < tokens)
        place = row.to(tl.int64) * HIDDEN + lanes
        incoming = tl.load(gradient + place, mask=mask, other=0.0)
        factor = tl.load(inverse + row, mask=row < tokens, other=0.0)
        unit = tl.load(x + place, mask=mask, other=0.0).to(tl.float32) * factor
        rounded = unit.to(incoming.dtype).to(tl.float32)
        wide = incoming.to(tl.float32)
        summed += wide * rounded
        scaled = wide * scale
        slope = factor * (scaled - unit * (tl.sum(scaled * unit, 0) / HIDDEN))
        slope += tl.load(residual + place, mask=mask, other=0.0).to(tl.float32)
        tl.store(result + place, slope.to(incoming.dtype), mask=mask)
        tl.store(normed + place, (rounded * scale).to(incoming.dtype), mask=mask)
    tl.store(partial + tl.program_id(0) * HIDDEN + lanes, summed, mask=inside)


@triton.jit
def _split_rotate(
    mixed,
    cos,
    sin,
    query_norm,
    key_norm,
    query,
    key,
    value,
    tokens,
    eps,
    GROUPS: tl.constexpr,
    QUERIES: tl.constexpr,
    DIM: tl.constexpr,
    NORMS: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One slot (a head of the queries, keys or values) of some tokens. A slot's halves are loaded apart."""
    slot = tl.program_id(1)
    group = slot // (QUERIES + 2)
    member = slot % (QUERIES + 2)
    half = DIM // 2
    row = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)[:, None]
    lane = tl.arange(0, BLOCK)[None, :]
    mask = (row < tokens) & (lane < half)
    place = row.to(tl.int64) * (GROUPS * (QUERIES + 2) * DIM) + slot * DIM + lane
    first = tl.load(mixed + place, mask=mask, other=0.0)
    second = tl.load(mixed + place + half, mask=mask, other=0.0)
    kept = row.to(tl.int64) * (GROUPS * DIM) + group * DIM + lane
    if member == QUERIES + 1:
        tl.store(value + kept, first, mask=mask)
        tl.store(value + kept + half, second, mask=mask)
    else:
        a = first.to(tl.float32)
        b = second.to(tl.float32)
        if NORMS:
            factor = 1.0 / tl.sqrt((tl.sum(a * a, 1) + tl.sum(b * b, 1)) / DIM + eps)
            a = (a * factor[:, None]).to(first.dtype).to(tl.float32)
            b = (b * factor[:, None]).to(first.dtype).to(tl.float32)
            scale = query_norm
            if member == QUERIES:
                scale = key_norm
            low = lane < half
            a = (a * tl.load(scale + lane, mask=low, other=0.0).to(tl.float32)).to(first.dtype).to(tl.float32)
            b = (b * tl.load(scale + lane + half, mask=low, other=0.0).to(tl.float32)).to(first.dtype).to(tl.float32)
        angle = row.to(tl.int64) * DIM + lane
        c = tl.load(cos + angle, mask=mask, other=0.0).to(tl.float32)
        s = tl.load(sin + angle, mask=mask, other=0.0).to(tl.float32)
        turned_a = (a * c - b * s).to(first.dtype)
        turned_b = (b * c + a * s).to(first.dtype)
        if member == QUERIES:
            tl.store(key + kept, turned_a, mask=mask)
            tl.store(key + kept + half, turned_b, mask=mask)
        else:
            asked = row.to(tl.int64) * (GROUPS * QUERIES * DIM) + (group * QUERIES + member) * DIM + lane
            tl.store(query + asked, turned_a, mask=mask)
            tl.store(query + asked + half, turned_b, mask=mask)


@triton.jit
def _split_rotate_backward(
    grad_query,
    grad_key,
    grad_value,
    mixed,
    cos,
    sin,
    query_norm,
    key_norm,
    result,
    partial,
    tokens,
    eps,
    GROUPS: tl.constexpr,
    QUERIES: tl.constexpr,
    DIM: tl.constexpr,
    NORMS: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    slot = tl.program_id(1)
    group = slot // (QUERIES + 2)
    member = slot % (QUERIES + 2)
    half = DIM // 2
    row = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)[:, None]
    lane = tl.arange(0, BLOCK)[None, :]
    mask = (row < tokens) & (lane < half)
    place = row.to(tl.int64) * (GROUPS * (QUERIES + 2) * DIM) + slot * DIM + lane
    kept = row.to(tl.int64) * (GROUPS * DIM) + group * DIM + lane
    if member == QUERIES + 1:
        tl.store(result + place, tl.load(grad_value + kept, mask=mask, other=0.0), mask=mask)
        tl.store(result + place + half, tl.load(grad_value + kept + half, mask=mask, other=0.0), mask=mask)
    else:
        asked = row.to(tl.int64) * (GROUPS * QUERIES * DIM) + (group * QUERIES + member) * DIM + lane
        if member == QUERIES:
            first = tl.load(grad_key + kept, mask=mask, other=0.0)
            second = tl.load(grad_key + kept + half, mask=mask, other=0.0)
        else:
            first = tl.load(grad_query + asked, mask=mask, other=0.0)
            second = tl.load(grad_query + asked + half, mask=mask, other=0.0)
        angle = row.to(tl.int64) * DIM + lane
        c = tl.load(cos + angle, mask=mask, other=0.0).to(tl.float32)
        s = tl.load(sin + angle, mask=mask, other=0.0).to(tl.float32)
        da = first.to(tl.float32) * c + second.to(tl.float32) * s
        db = second.to(tl.float32) * c - first.to(tl.float32) * s
        if NORMS:
            a = tl.load(mixed + place, mask=mask, other=0.0).to(tl.float32)
            b = tl.load(mixed + place + half, mask=mask, other=0.0).to(tl.float32)
            factor = (1.0 / tl.sqrt((tl.sum(a * a, 1) + tl.sum(b * b, 1)) / DIM + eps))[:, None]
            a = a * factor
            b = b * factor
            low = lane < half
            lanes = tl.arange(0, BLOCK)
            sums = partial + (tl.program_id(0) * (GROUPS * (QUERIES + 2)) + slot) * DIM + lanes
            tl.store(sums, tl.sum(da * a.to(first.dtype).to(tl.float32), 0), mask=lanes < half)
            tl.store(sums + half, tl.sum(db * b.to(first.dtype).to(tl.float32), 0), mask=lanes < half)
            scale = query_norm
            if member == QUERIES:
                scale = key_norm
            da = da * tl.load(scale + lane, mask=low, other=0.0).to(tl.float32)
            db = db * tl.load(scale + lane + half, mask=low, other=0.0).to(tl.float32)
            mean = ((tl.sum(da * a, 1) + tl.sum(db * b, 1)) / DIM)[:, None]
            da = factor * (da - a * mean)
            db = factor * (db - b * mean)
        tl.store(result + place, da.to(first.dtype), mask=mask)
        tl.store(result + place + half, db.to(first.dtype), mask=mask)


@triton.jit
def _swiglu(mixed, result, FFN: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    lane = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = lane < FFN
    gate = tl.load(mixed + row * (2 * FFN) + lane, mask=mask, other=0.0)
    up = tl.load(mixed + row * (2 * FFN) + FFN + lane, mask=mask, other=0.0).to(tl.float32)
    wide = gate.to(tl.float32)
    tl.store(result + row * FFN + lane, (wide / (1.0 + tl.exp(-wide)) * up).to(gate.dtype), mask=mask)


@triton.jit
def _swiglu_backward(mixed, gradient, slopes, result, FFN: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    lane = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = lane < FFN
    gate = tl.load(mixed + row * (2 * FFN) + lane, mask=mask, other=0.0)
    up = tl.load(mixed + row * (2 * FFN) + FFN + lane, mask=mask, other=0.0).to(tl.float32)
    incoming = tl.load(gradient + row * FFN + lane, mask=mask, other=0.0).to(tl.float32)
    wide = gate.to(tl.float32)
    share = 1.0 / (1.0 + tl.exp(-wide))
    active = wide * share
    tl.store(result + row * FFN + lane, (active * up).to(gate.dtype), mask=mask)
    slope = incoming * up * share * (1.0 + wide * (1.0 - share))
    tl.store(slopes + row * (2 * FFN) + lane, slope.to(gate.dtype), mask=mask)
    tl.store(slopes + row * (2 * FFN) + FFN + lane, (incoming * active).to(gate.dtype), mask=mask)


def _power(size: int) -> int:
    return 1 << max(0, size - 1).bit_length()


def add_norm(x: Tensor, delta: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    tokens, hidden = x.shape
    total = x if delta is None else torch.empty_like(x)
    normed, inverse = torch.empty_like(x), torch.empty(tokens, dtype=torch.float32, device=x.device)
    adds, block = delta is not None, _power(hidden)
    _add_norm[(triton.cdiv(tokens, ROWS),)](
        *(x, delta if delta is not None else x, weight, total, normed, inverse, tokens, eps),
        HIDDEN=hidden, ADDS=adds, ROWS=ROWS, BLOCK=block, num_warps=_warps(block),
    )  # fmt: skip
    return total, normed, inverse


def norm_backward(
    gradient: Tensor, x: Tensor, inverse: Tensor, weight: Tensor, residual: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    tokens, hidden = x.shape
    result, normed = torch.empty_like(x), torch.empty_like(x)
    programs, block = triton.cdiv(tokens, ROWS), _power(hidden)
    partial = torch.empty(programs, hidden, dtype=torch.float32, device=x.device)
    _norm_backward[(programs,)](
        *(gradient, x, inverse, weight, residual, result, normed, partial, tokens),
        HIDDEN=hidden, ROWS=ROWS, BLOCK=block, num_warps=_warps(block),
    )  # fmt: skip
    return result, normed, partial.sum(0)


def split_rotate(
    mixed: Tensor, cos: Tensor, sin: Tensor, query_norm: Tensor | None, key_norm: Tensor | None, groups: int, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    shape = _slots(mixed, cos, groups)
    tokens, queries, dim = len(mixed), shape["QUERIES"], shape["DIM"]
    query = mixed.new_empty(tokens, groups * queries, dim)
    key, value = mixed.new_empty(tokens, groups, dim), mixed.new_empty(tokens, groups, dim)
    norms = query_norm is not None
    _split_rotate[(triton.cdiv(tokens, TOKENS), groups * (queries + 2))](
        *(mixed, cos, sin, query_norm if norms else cos, key_norm if norms else cos, query, key, value, tokens, eps),
        **shape, NORMS=norms, num_warps=4,
    )  # fmt: skip
    return query, key, value


def split_rotate_backward(
    gradients: tuple[Tensor, Tensor, Tensor],
    mixed: Tensor,
    cos: Tensor,
    sin: Tensor,
    query_norm: Tensor | None,
    key_norm: Tensor | None,
    eps: float,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    groups = gradients[1].size(1)
    shape = _slots(mixed, cos, groups)
    tokens, queries, dim = len(mixed), shape["QUERIES"], shape["DIM"]
    programs, norms = triton.cdiv(tokens, TOKENS), query_norm is not None
    result = torch.empty_like(mixed)
    sums = torch.empty(programs if norms else 1, groups, queries + 2, dim, dtype=torch.float32, device=mixed.device)
    _split_rotate_backward[(programs, groups * (queries + 2))](
        *gradients,
        *(mixed, cos, sin, query_norm if norms else cos, key_norm if norms else cos, result, sums, tokens, eps),
        **shape, NORMS=norms, num_warps=4,
    )  # fmt: skip
    if not norms:
        return result, None, None
    return result, sums[:, :, :queries].sum((0, 1, 2)), sums[:, :, queries].sum((0, 1))


def swiglu(mixed: Tensor) -> Tensor:
    tokens, ffn = len(mixed), mixed.size(1) // 2
    result = mixed.new_empty(tokens, ffn)
    _swiglu[(tokens, triton.cdiv(ffn, COLUMNS))](mixed, result, FFN=ffn, BLOCK=COLUMNS, num_warps=4)
    return result


def swiglu_backward(mixed: Tensor, gradient: Tensor) -> tuple[Tensor, Tensor]:
    tokens, ffn = gradient.shape
    slopes, result = torch.empty_like(mixed), torch.empty_like(gradient)
    _swiglu_backward[(tokens, triton.cdiv(ffn, COLUMNS))](
        mixed, gradient, slopes, result, FFN=ffn, BLOCK=COLUMNS, num_warps=4
    )
    return slopes, result


def _warps(block: int) -> int:
    """Eight elements a thread."""
    return max(1, min(8, block // 256))


def _slots(mixed: Tensor, cos: Tensor, groups: int) -> dict[str, Any]:
    dim = cos.size(1)
    queries = mixed.size(1) // (groups * dim) - 2
    return {"GROUPS": groups, "QUERIES": queries, "DIM": dim, "TOKENS": TOKENS, "BLOCK": _power(dim // 2)}
