"""Where a teacher's weights come from, and whether they can teach this student. Reads configs and headers only."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from transformers import AutoTokenizer

from rl.trainer.config import TrainerConfig
from rl.trainer.manifest import MANIFEST, CheckpointError, read_manifest

SHOWN = 3
"""Tokens that a message names."""


class TeacherSourceError(ValueError):
    """A teacher can't be used; the message names it and the file, and what would be right."""


@dataclass(frozen=True)
class TeacherSource:
    """Checked weights of one teacher."""

    name: str
    model: Path
    """HF directory: config, tokenizer, and the weights unless ``checkpoint`` has them."""
    checkpoint: Path | None
    fingerprint: str
    """Differs when the source's files do: names, sizes and times of change."""
    parameters: int
    """Elements of its tensors."""

    def least_bytes(self, config: TrainerConfig) -> int:
        """What a rank holds of it at least; the exact size is known once the ranks have cut it."""
        parallel = config.parallel
        ranks = parallel.pipeline * max(parallel.tensor, parallel.expert * parallel.expert_tensor)
        return self.parameters * (2 if config.dtype == "bfloat16" else 4) // ranks


def resolve(name: str, path: Path) -> TeacherSource:
    """
    Raises:
        TeacherSourceError: it is neither an HF directory, nor a finished run's folder, nor a checkpoint.
    """
    key = f"teachers.{name}.source"
    path = path.resolve()
    if not path.is_dir():
        raise TeacherSourceError(
            f"{key}: {path} does not exist; give an HF directory, the folder of a finished run, or a checkpoint"
        )
    if (path / MANIFEST).is_file():
        return _of_checkpoint(name, key, path)
    if (path / "run.json").is_file():
        path = path / "model"
        if not path.is_dir():
            raise TeacherSourceError(f"{key}: the run has no {path} yet; finish it, or name one of its checkpoints")
    for wanted in ("config.json", "tokenizer_config.json"):
        if not (path / wanted).is_file():
            raise TeacherSourceError(f"{key}: {path} has no {wanted}; give an HF directory with weights and tokenizer")
    files = sorted(path.glob("*.safetensors"))
    if not files:
        raise TeacherSourceError(f"{key}: {path} has no *.safetensors file")
    parameters = sum(_elements(key, file) for file in files)
    return TeacherSource(name, path, None, _fingerprint([path / "config.json", *files]), parameters)


def _of_checkpoint(name: str, key: str, path: Path) -> TeacherSource:
    try:
        extra = read_manifest(path)["extra"]
    except CheckpointError as error:
        raise TeacherSourceError(f"{key}: {error}") from error
    model = Path(extra.get("initial_model", ""))
    if not extra.get("initial_model") or not model.is_dir():
        raise TeacherSourceError(
            f"{key}: {path} says that its run began with {model}, which does not exist; name the run's folder, whose "
            "model/ has the weights at its end"
        )
    parameters = sum(_elements(key, file) for file in model.glob("*.safetensors"))
    return TeacherSource(name, model, path, _fingerprint([path / MANIFEST]), parameters)


def _elements(key: str, path: Path) -> int:
    """Of a safetensors file, by its header."""
    try:
        with path.open("rb") as opened:
            length = int.from_bytes(opened.read(8), "little")
            if length > path.stat().st_size:
                raise ValueError("the header is longer than the file")
            header = json.loads(opened.read(length))
        header.pop("__metadata__", None)
        end = max((entry["data_offsets"][1] for entry in header.values()), default=0)
        if 8 + length + end != path.stat().st_size:
            raise ValueError(f"it has {path.stat().st_size} bytes, its header says {8 + length + end}")
    except (ValueError, KeyError, TypeError) as error:
        raise TeacherSourceError(f"{key}: {path} is not a whole safetensors file: {error}") from error
    total = 0
    for entry in header.values():
        count = 1
        for size in entry["shape"]:
            count *= size
        total += count
    return total


def _fingerprint(files: list[Path]) -> str:
    facts = [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in files]
    return hashlib.sha256(json.dumps([str(files[0].parent), facts]).encode()).hexdigest()[:32]


def vocabulary(directory: Path) -> Mapping[str, int]:
    """Token ids of a directory's tokenizer, added tokens included."""
    return dict(AutoTokenizer.from_pretrained(directory, local_files_only=True).get_vocab())


def check_tokenizer(key: str, directory: Path, theirs: Mapping[str, int], ours: Mapping[str, int]) -> None:
    """A teacher is sent the student's token ids, so that each id must be the same token to both.

    Raises:
        TeacherSourceError: names tokens that differ.
    """
    if theirs == ours:
        return
    differing = sorted(token for token in ours.keys() | theirs.keys() if ours.get(token) != theirs.get(token))
    some = ", ".join(
        f"{token!r} (student {ours.get(token)}, teacher {theirs.get(token)})" for token in differing[:SHOWN]
    )
    raise TeacherSourceError(
        f"{key}: the tokenizer of {directory} is not the student's: {len(differing)} tokens differ, such as {some}; "
        "a teacher must have the student's tokenizer"
    )
