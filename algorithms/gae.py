"""Generalised advantage estimation over action tokens alone, for packed samples, as a blocked scan.

GAE is the recurrence Â_n = δ_n + γλ Â_{n+1}. A loop over tokens is slow, and dividing a running sum by (γλ)^n
underflows near 2,000 tokens. Here tokens are taken a tile at a time, from the last to the first, each small enough for
the cache. A tile is laid out as columns of ``ROWS`` successive tokens each; all columns are scanned at once by a tree
over the rows (2·log₂ ROWS steps), the columns' heads by doubling, and each column is then completed with what follows
it. In float64: over 32k tokens the rounding of λ in float32 alone changes λ^n by 10⁻³.
"""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float32, Float64, Int
from torch import Tensor
from torch.nn.functional import pad

from algorithms.packed import empty_like, nonzero

ROWS = 256
COLUMNS = 2048


def skip_observation_gae(
    values: Float32[Tensor, " tokens"],
    action_mask: Bool[Tensor, " tokens"],
    cu_seqlens: Int[Tensor, " samples+1"],
    terminal_reward: Float64[Tensor, " samples"],
    gamma: float,
    lam: Float64[Tensor, " samples"],
) -> Float32[Tensor, " tokens"]:
    """Advantages at the action tokens, 0 elsewhere (SAO, arXiv 2607.07508).

    Ordinary GAE on each sample compacted to its action tokens: after the last token before an observation comes the
    next action's first.

        δ = γ V(a_{n+1}) − V(a_n), at the last action token R − V(a_n);      Â(a_n) = δ + γλ Â(a_{n+1})
    """
    advantages = empty_like(values).zero_()
    edges, decay, terminal = cu_seqlens.long(), gamma * lam, terminal_reward.to(values.dtype)
    next_value, next_advantage, next_sample = values.new_zeros(1), decay.new_zeros(1), -1
    # One tile's arrays, used again for each: the system takes longer to hand out new ones than we to fill them.
    flat, turned = values.new_empty(2, ROWS * COLUMNS)
    space = decay.new_empty(2, ROWS * COLUMNS)
    for start in reversed(range(0, len(values), ROWS * COLUMNS)):
        tile = slice(start, min(start + ROWS * COLUMNS, len(values)))
        index = nonzero(action_mask[tile])
        if not len(index):
            continue
        count, columns = len(index), -(-len(index) // ROWS)
        before = torch.searchsorted(index, (edges - start).clamp(0, tile.stop - start))  # action tokens before an edge
        samples = before.diff().nonzero().flatten()
        last = before[1:][samples] - 1
        # The tile's last sample may go on in the tile after it.
        closed = len(samples) - int(samples[-1] == next_sample)

        value = values[tile].index_select(0, index)
        delta = flat[: columns * ROWS]
        torch.mul(value[1:], gamma, out=delta[: count - 1])
        delta[count - 1] = gamma * next_value[0]
        delta[last[:closed]] = terminal[samples[:closed]]
        delta[:count] -= value
        delta[count:] = 0.0

        by_column = delta.view(columns, ROWS)
        y, products = space[:, : columns * ROWS].view(2, ROWS, columns)
        y.copy_(turned[: columns * ROWS].view(ROWS, columns).copy_(by_column.t()))
        _fill_decay(products, decay, before, last, closed)
        _scan_columns(y, products, next_advantage)
        advantages[tile].scatter_(0, index, by_column.copy_(y.t()).view(-1)[:count])
        next_value, next_advantage, next_sample = value[:1], y[0, :1].clone(), samples[0]
    return advantages


def _fill_decay(
    products: Float64[Tensor, "rows columns"],
    decay: Float64[Tensor, " samples"],
    before: Int[Tensor, " samples+1"],
    last: Int[Tensor, " filled"],
    closed: int,
) -> None:
    """γλ of each token's sample, 0 at a sample's last token, 1 after the tile's last (to let through what follows)."""
    rows, columns = products.shape

    def sample_of(token: Int[Tensor, ...]) -> Int[Tensor, ...]:
        return (torch.searchsorted(before, token, right=True) - 1).clamp(max=len(decay) - 1)

    # All of a column belongs to one sample, except where a sample ends in it.
    products.copy_(decay[sample_of(torch.arange(columns, device=decay.device) * rows)])
    mixed = (last // rows).unique()
    products[:, mixed] = decay[sample_of(mixed * rows + torch.arange(rows, device=decay.device)[:, None])]
    products[int(last[-1]) % rows + 1 :, -1] = 1.0
    products[last[:closed] % rows, last[:closed] // rows] = 0.0


def _scan_columns(
    y: Float64[Tensor, "rows columns"], decay: Float64[Tensor, "rows columns"], following: Float64[Tensor, " 1"]
) -> None:
    """y_n = x_n + decay_n · y_{n+1} along the columns and from each to the next, in place; ``following`` comes last.

    Afterwards ``decay`` holds the products down to the end of each column.
    """
    rows, step = len(y), 1
    while step < rows:  # row 0, 2s, 4s… takes in the s rows below it
        y[:: 2 * step].addcmul_(decay[:: 2 * step], y[step :: 2 * step])
        decay[:: 2 * step].mul_(decay[step :: 2 * step])
        step *= 2
    step //= 4
    while step:  # the rows between take in the completed one below them
        between, below = slice(step, rows - step, 2 * step), slice(2 * step, rows, 2 * step)
        y[between].addcmul_(decay[between], y[below])
        decay[between].mul_(decay[below])
        step //= 2
    heads = _scan_by_doubling(torch.cat([y[0], following]), pad(decay[0], (0, 1)))
    y.addcmul_(decay, heads[1:])


def _scan_by_doubling(y: Float64[Tensor, " n"], decay: Float64[Tensor, " n"]) -> Float64[Tensor, " n"]:
    step = 1
    while step < len(y):
        y = torch.cat([torch.addcmul(y[:-step], decay[:-step], y[step:]), y[-step:]])
        decay = torch.cat([decay[:-step] * decay[step:], decay[-step:]])
        step *= 2
    return y
