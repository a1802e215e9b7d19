"""Where a teacher's weights come from, and whether they can teach this student. Reads configs and headers only."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from transformers import AutoConfig, AutoTokenizer, PretrainedConfig

from rl.model_dir import ModelDirError, tensor_elements
from rl.teachers.config import Codec, DistillationConfig, TeacherConfig
from rl.trainer.config import TrainerConfig
from rl.trainer.manifest import MANIFEST, CheckpointError, read_manifest
from teachers.store import is_name

SHOWN = 3
"""Tokens, or keys of a config, that a message names."""
NOT_OF_THE_ARCHITECTURE = (
    "_name_or_path",
    "dtype",
    "torch_dtype",
    "transformers_version",
    "architectures",
    "use_cache",
)
"""Keys of a config that two models of one architecture may differ in."""


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
    codec: Codec = "exact"
    base: TeacherSource | None = None
    """What it is kept as a difference to, where that is smaller."""

    @property
    def mark(self) -> str:
        """Differs when what the store should hold of it does."""
        base = () if self.base is None else (f"on {self.base.name} {self.base.fingerprint}",)
        return ", ".join([self.fingerprint, *base, *((self.codec,) if self.codec != "exact" else ())])

    def least_bytes(self, config: TrainerConfig) -> int:
        """What a rank computes with, at least; the exact size is known once the ranks have cut it."""
        return self._least_elements(config) * (2 if config.dtype == "bfloat16" else 4)

    def least_stored_bytes(self, config: TrainerConfig) -> int:
        """What a rank's part takes on disk and in pinned memory, at least."""
        if self.base is not None:
            return 0  # it may be equal to its base
        return self._least_elements(config) if self.codec == "fp8" else self.least_bytes(config)

    def _least_elements(self, config: TrainerConfig) -> int:
        parallel = config.parallel
        return self.parameters // (parallel.pipeline * max(parallel.tensor, parallel.expert * parallel.expert_tensor))


def resolve(name: str, path: Path, key: str | None = None) -> TeacherSource:
    """
    Args:
        key: of the config, for messages.

    Raises:
        TeacherSourceError: it is neither an HF directory, nor a finished run's folder, nor a checkpoint.
    """
    key = key or f"teachers.{name}.source"
    path = path.resolve()
    if not is_name(name):
        raise TeacherSourceError(f"teachers.{name}: a teacher's name is letters, digits, . _ - (it names files)")
    if not path.is_dir():
        what = "is no directory" if path.exists() else "does not exist"
        raise TeacherSourceError(
            f"{key}: {path} {what}; give an HF directory, the folder of a finished run, or a checkpoint"
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
    _check_config(key, path / "config.json")
    files = sorted(path.glob("*.safetensors"))
    if not files:
        raise TeacherSourceError(f"{key}: {path} has no *.safetensors file")
    parameters = sum(_elements(key, file) for file in files)
    return TeacherSource(name, path, None, _fingerprint([path / "config.json", *files]), parameters)


def resolve_all(teachers: Mapping[str, TeacherConfig], distillation: DistillationConfig) -> tuple[TeacherSource, ...]:
    """Of all teachers whose weights the run holds, by name, and how each is to be kept.

    Raises:
        TeacherSourceError: a source or a base can't be one.
    """
    plain = {name: resolve(name, teacher.source) for name, teacher in sorted(teachers.items()) if teacher.source}
    keys = {
        name: (f"teachers.{name}.base", own)
        if (own := teachers[name].base)
        else ("distillation.base", distillation.base)
        for name in plain
    }
    bases: dict[str, TeacherSource] = {}
    for name, (key, wanted) in keys.items():
        if wanted is not None and (wanted != name or key != "distillation.base"):
            bases[name] = _base(name, key, wanted, plain)
    whole = {base.name for base in bases.values()}
    kept = []
    for name, source in plain.items():
        codec = teachers[name].codec or ("exact" if name in whole else distillation.codec)
        if name in whole and (codec != "exact" or name in bases):
            how = f"codec={codec}" if codec != "exact" else f"base={keys[name][1]}"
            raise TeacherSourceError(
                f"teachers.{name}: others are kept as differences to it, so it has to be kept whole, and has {how}"
            )
        kept.append(replace(source, codec=codec, base=bases.get(name)))
    return tuple(kept)


def _base(name: str, key: str, wanted: str, teachers: Mapping[str, TeacherSource]) -> TeacherSource:
    if wanted == name:
        raise TeacherSourceError(f"{key}={wanted}: a teacher can't be its own base; name another, or a source")
    base = teachers.get(wanted)
    if base is None:
        if not Path(wanted).is_dir():
            known = ", ".join(teachers)
            raise TeacherSourceError(
                f"{key}={wanted}: there is neither a teacher of this name with weights in this run ({known}) nor such "
                "a directory"
            )
        found = resolve("base", Path(wanted), key)
        # Named by what it is: stores are shared, and the base of others can't be replaced.
        base = replace(found, name=f"base-{found.fingerprint[:12]}")
    same_architecture(key, teachers[name].model, base.model)
    return base


def with_bases(sources: Iterable[TeacherSource]) -> list[TeacherSource]:
    """These and what they are kept as differences to, each once, bases first."""
    sources = list(sources)
    found = {source.base.name: source.base for source in sources if source.base is not None}
    found |= {source.name: source for source in sources if source.name not in found}
    return list(found.values())


def architecture(hf: PretrainedConfig) -> dict[str, str]:
    """Equal for configs whose models have the same code and shapes."""
    settings = {k: v for k, v in hf.to_dict().items() if k not in NOT_OF_THE_ARCHITECTURE and "token_id" not in k}
    return {key: repr(value) for key, value in sorted((settings | {"class": hf.architectures}).items())}


def same_architecture(key: str, model: Path, base: Path) -> None:
    """
    Raises:
        TeacherSourceError: tensors of the one can't be compared with those of the other.
    """
    theirs, ours = (architecture(AutoConfig.from_pretrained(path, local_files_only=True)) for path in (base, model))
    differing = [name for name in sorted(ours.keys() | theirs.keys()) if ours.get(name) != theirs.get(name)]
    if differing:
        some = ", ".join(f"{name} {theirs.get(name)} in place of {ours.get(name)}" for name in differing[:SHOWN])
        raise TeacherSourceError(
            f"{key}: {base} is of another architecture than {model}: {some}; name the model that it was fine-tuned from"
        )


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
    try:
        return tensor_elements(path)
    except ModelDirError as error:
        raise TeacherSourceError(f"{key}: {error}") from error


def _check_config(key: str, path: Path) -> None:
    try:
        config = json.loads(path.read_bytes())
    except ValueError as error:
        raise TeacherSourceError(f"{key}: {path} is not JSON: {error}") from error
    if not isinstance(config, dict) or "model_type" not in config:
        raise TeacherSourceError(f"{key}: {path} names no model_type; give the config.json of a Hugging Face model")


def _fingerprint(files: list[Path]) -> str:
    facts = [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in files]
    return hashlib.sha256(json.dumps([str(files[0].parent), facts]).encode()).hexdigest()[:32]


def vocabulary(key: str, directory: Path) -> Mapping[str, int]:
    """Token ids of a directory's tokenizer, added tokens included.

    Raises:
        TeacherSourceError: it has none that can be read.
    """
    try:
        return dict(AutoTokenizer.from_pretrained(directory, local_files_only=True).get_vocab())
    except Exception as error:  # whatever the tokenizer's own code, and tokenizers' bare Exception, raise
        raise TeacherSourceError(f"{key}: the tokenizer of {directory} can't be read: {error}") from error


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
