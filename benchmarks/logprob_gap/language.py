"""A synthetic language that a small model learns in seconds, and that is not flat.

A token is followed by one of a few successors of its own, with Zipf's weights. Now and then a span is repeated from
anywhere before, so that attention, and an indexer, have something to find far back.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from jaxtyping import Float64, Int32, Int64

FIRST = 2
"""The lowest token of the language."""
SUCCESSORS = 8
EXPONENT = 1.5
REPEAT = 1 / 48
"""Probability that a repetition begins at a token that is not part of one."""
SPAN = (16, 48)
"""Least and largest length of a repetition."""


@dataclass(frozen=True)
class Language:
    words: int
    """Tokens that it uses: ``FIRST`` and those after it."""
    seed: int = 0
    successors: Int64[np.ndarray, "words successors"] = field(init=False, repr=False)
    weights: Float64[np.ndarray, " successors"] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        numbers = np.random.default_rng(self.seed)
        weights = 1.0 / np.arange(1, SUCCESSORS + 1) ** EXPONENT
        # Distinct ones: a shuffled circle, from a start of each token's own.
        circle, starts = numbers.permutation(self.words), numbers.permutation(self.words)
        places = (starts[:, None] + np.arange(SUCCESSORS)) % self.words
        object.__setattr__(self, "successors", circle[places])
        object.__setattr__(self, "weights", weights / weights.sum())

    @property
    def entropy(self) -> float:
        """Of the successor of a token, in nats; tokens inside of a repetition have almost none."""
        return float(-(self.weights * np.log(self.weights)).sum())

    def sample(self, count: int, length: int, seed: int) -> Int32[np.ndarray, "count length"]:
        """Sequences; the same for the same seed."""
        numbers = np.random.default_rng((self.seed, seed))
        rows = np.arange(count)
        drawn = numbers.choice(SUCCESSORS, size=(count, length), p=self.weights)
        begins = numbers.random((count, length)) < REPEAT
        spans = numbers.integers(SPAN[0], SPAN[1] + 1, size=(count, length))
        places = numbers.random((count, length))
        text = np.empty((count, length), np.int64)
        text[:, 0] = numbers.integers(self.words, size=count)
        left, source = np.zeros(count, np.int64), np.zeros(count, np.int64)
        for t in range(1, length):
            if t > SPAN[1]:
                begin = begins[:, t] & (left == 0)
                left = np.where(begin, spans[:, t], left)
                source = np.where(begin, (places[:, t] * (t - SPAN[1])).astype(np.int64), source)
            follows = self.successors[text[:, t - 1], drawn[:, t]]
            text[:, t] = np.where(left > 0, text[rows, source], follows)
            left, source = np.maximum(left - 1, 0), source + 1
        return (text + FIRST).astype(np.int32)
