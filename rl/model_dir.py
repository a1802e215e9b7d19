"""Whether a directory holds a model that can be trained: by its file names, configs and headers, in milliseconds."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

ARCHITECTURES = (
    "Qwen3ForCausalLM",
    "LlamaForCausalLM",
    "Qwen3MoeForCausalLM",
    "Glm4MoeForCausalLM",
    "GlmMoeDsaForCausalLM",
)
"""Those of ``rl.trainer.families.registry``, which takes Megatron to import."""
INDEX = "model.safetensors.index.json"
TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json", "*.tiktoken")


class ModelDirError(ValueError):
    """It can't be trained; the message names the file, what is wrong, and what would be right."""


def check_model_dir(directory: Path) -> None:
    """An HF directory of a supported architecture, with whole weights, tokenizer and chat template.

    Raises:
        ModelDirError: naming the file that is missing, wrong, or not to be read by this user.
    """
    try:
        _check(directory)
    except OSError as error:
        raise ModelDirError(f"{error.filename or directory} can't be read: {error.strerror}") from error


def _check(directory: Path) -> None:
    if not directory.is_dir():
        what = "is no directory" if directory.exists() else "does not exist"
        raise ModelDirError(f"{directory} {what}; give the HF directory of a model")
    if not (directory / "config.json").is_file():
        raise ModelDirError(f"{directory} has no config.json; give the HF directory of a model")
    found = (_json(directory / "config.json").get("architectures") or ["none"])[0]
    if found not in ARCHITECTURES:
        raise ModelDirError(f"{directory} is of architecture {found}; supported: {', '.join(ARCHITECTURES)}")
    _check_weights(directory)
    settings = directory / "tokenizer_config.json"
    if not settings.is_file():
        raise ModelDirError(f"{directory} has no tokenizer_config.json; save the tokenizer beside the weights")
    if not any(path for pattern in TOKENIZERS for path in directory.glob(pattern)):
        raise ModelDirError(f"{directory} has none of {', '.join(TOKENIZERS)}; save the tokenizer beside the weights")
    if not (directory / "chat_template.jinja").is_file() and not _json(settings).get("chat_template"):
        raise ModelDirError(
            f"the tokenizer in {directory} has no chat template; add chat_template.jinja, or chat_template in "
            "tokenizer_config.json"
        )


def _check_weights(directory: Path) -> None:
    files = sorted(directory.glob("*.safetensors"))
    if not files:
        raise ModelDirError(f"{directory} has no *.safetensors file")
    if (directory / INDEX).is_file():
        wanted = set(_json(directory / INDEX).get("weight_map", {}).values())
        if missing := sorted(wanted - {file.name for file in files}):
            raise ModelDirError(
                f"{directory} lacks {', '.join(missing[:3])}, which {INDEX} names; fetch what is missing"
            )
    for file in files:
        tensor_elements(file)


def tensor_elements(path: Path) -> int:
    """Elements of a safetensors file, by its header.

    Raises:
        ModelDirError: the file is not whole, can't be read, or is a link that leads nowhere.
    """
    try:
        size = path.stat().st_size
        with path.open("rb") as opened:
            length = int.from_bytes(opened.read(8), "little")
            if length > size:
                raise ValueError("the header is longer than the file")
            header = json.loads(opened.read(length))
        header.pop("__metadata__", None)
        end = max((entry["data_offsets"][1] for entry in header.values()), default=0)
        if 8 + length + end != size:
            raise ValueError(f"it has {size} bytes, its header says {8 + length + end}")
        return sum(math.prod(entry["shape"]) for entry in header.values())
    except OSError as error:
        raise ModelDirError(f"{path} can't be read: {error.strerror}") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelDirError(f"{path} is not a whole safetensors file: {error}") from error


def _json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_bytes())
    except ValueError as error:
        raise ModelDirError(f"{path} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise ModelDirError(f"{path} is not a JSON object")
    return value
