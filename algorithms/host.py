"""The whole batch on the host, in NumPy: sums by sample, rollout and group, and a sample's value at its tokens.

``prepare`` takes dozens of steps on a few numbers each, while the device has nothing to do: a call of PyTorch costs
several times as much as one of NumPy, whatever the size.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np
from jaxtyping import Bool, Float32, Float64, Int, Shaped


def sample_counts(
    mask: Bool[np.ndarray, " tokens"], cu_seqlens: Int[np.ndarray, " samples+1"]
) -> Float64[np.ndarray, " samples"]:
    """Marked tokens of each sample. Counting runs at the memory's speed, summing bools does not."""
    edges = pairwise(cu_seqlens.tolist())
    return np.array([np.count_nonzero(mask[begin:end]) for begin, end in edges], dtype=np.float64)


def sums(
    x: Shaped[np.ndarray, " entries"], index: Int[np.ndarray, " entries"], size: int = 0
) -> Float64[np.ndarray, " sums"]:
    """Σ of the entries with each index, in their order: 0..size-1, or as far as the indices go."""
    return np.bincount(index, weights=x, minlength=size)


def spread(
    x: Shaped[np.ndarray, " samples"], cu_seqlens: Int[np.ndarray, " samples+1"]
) -> Shaped[np.ndarray, " tokens"]:
    """Each sample's value at each of its tokens."""
    return np.repeat(x, np.diff(cu_seqlens))


def mask_(x: Float32[np.ndarray, " tokens"], mask: Bool[np.ndarray, " tokens"]) -> Float32[np.ndarray, " tokens"]:
    """x times mask, in place."""
    return np.multiply(x, mask, out=x)
