"""Training and evaluation prompts that never meet, whatever the options."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Literal

EVAL_SHARE = 0.1


def split_ids(prompt_ids: Iterable[str], split: Literal["train", "eval"]) -> list[str]:
    """The ids of a split, in the order of their hashes.

    The hash of an id alone decides, so that an id stays on its side when the options give other prompts; and the first
    N of a split are a fair sample of it.
    """
    places = sorted((_place(prompt_id), prompt_id) for prompt_id in prompt_ids)
    return [prompt_id for place, prompt_id in places if (place < EVAL_SHARE) == (split == "eval")]


def _place(prompt_id: str) -> float:
    """A number in [0, 1) that depends on the id alone."""
    return int.from_bytes(hashlib.sha256(prompt_id.encode()).digest()[:6], "big") / 2**48
