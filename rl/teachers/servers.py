"""Whether a server that teaches has the tokenizer that the run's config says: it is sent token ids.

It is asked to decode tokens one by one (SGLang's ``/detokenize``). One that was started without its tokenizer says
where that is (``/model_info``), which helps where this machine has that directory.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import aiohttp
from transformers import AutoTokenizer

from rl.teachers.sources import TeacherSourceError, check_tokenizer, vocabulary

SAMPLE = 4096
"""Tokens that a server decodes: the last ones, which were added to the others, and some of the rest."""

log = logging.getLogger(__name__)


async def check_server_tokenizer(name: str, url: str, directory: Path, timeout_s: float) -> None:
    """
    Args:
        directory: ``teachers.NAME.tokenizer``.

    Raises:
        TeacherSourceError: the server has another tokenizer; names tokens that differ.
    """
    key, tokenizer = f"teachers.{name}.url: {url}", AutoTokenizer.from_pretrained(directory, local_files_only=True)
    ours = dict(tokenizer.get_vocab())
    ids = sampled(sorted(ours.values()))
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=timeout_s)) as session:
        texts = await _decoded(session, url, ids)
        path = await _tokenizer_path(session, url) if texts is None else None
    if texts is not None:
        mine = [tokenizer.decode([token], skip_special_tokens=False) for token in ids]
        differing = [(token, a, b) for token, a, b in zip(ids, texts, mine, strict=True) if a != b]
        if differing:
            some = ", ".join(f"{token} ({theirs!r} in place of {here!r})" for token, theirs, here in differing[:3])
            raise TeacherSourceError(
                f"{key} decodes {len(differing)} of {len(ids)} tokens otherwise than teachers.{name}.tokenizer="
                f"{directory}, such as {some}; a teacher must have the student's tokenizer"
            )
    elif path is not None and path.is_dir():
        check_tokenizer(key, path, vocabulary(key, path), ours)
    else:
        log.warning("%s does not decode tokens: that its tokenizer is that of %s is taken on trust", key, directory)


def sampled(ids: Sequence[int]) -> list[int]:
    """At most ``SAMPLE``: the last quarter of it, the rest evenly spread."""
    if len(ids) <= SAMPLE:
        return list(ids)
    last, rest = ids[-SAMPLE // 4 :], ids[: -SAMPLE // 4]
    count = SAMPLE - len(last)
    return [rest[index * len(rest) // count] for index in range(count)] + list(last)


async def _decoded(session: aiohttp.ClientSession, url: str, ids: Sequence[int]) -> list[str] | None:
    body = {"tokens": [[token] for token in ids], "skip_special_tokens": False}
    answer = await _asked(session.post(f"{url}/detokenize", json=body))
    texts = answer.get("text")
    return texts if isinstance(texts, list) and len(texts) == len(ids) else None


async def _tokenizer_path(session: aiohttp.ClientSession, url: str) -> Path | None:
    path = (await _asked(session.get(f"{url}/model_info"))).get("tokenizer_path")
    return Path(path) if isinstance(path, str) else None


async def _asked(request: Any) -> Mapping[str, Any]:
    """A JSON object; empty where the server has none to give."""
    try:
        async with request as response:
            answer = await response.json()
    except (aiohttp.ClientError, TimeoutError, ValueError) as error:
        log.debug("a teacher's server did not answer: %s", error)
        return {}
    return answer if response.status == 200 and isinstance(answer, dict) else {}
