"""Which family a Hugging Face config belongs to."""

from __future__ import annotations

from transformers import PretrainedConfig

from rl.trainer.families.base import Family, UnsupportedModelError
from rl.trainer.families.glm_moe_dsa import GlmMoeDsa
from rl.trainer.families.grouped_query import Llama, Qwen3
from rl.trainer.families.moe import Glm4Moe, Qwen3Moe

FAMILIES: dict[str, Family] = {f.architecture: f for f in (Qwen3(), Llama(), Qwen3Moe(), Glm4Moe(), GlmMoeDsa())}


def family_of(hf: PretrainedConfig) -> Family:
    """The family of a model.

    Raises:
        UnsupportedModelError: names the architecture and those that are supported.
    """
    architecture = (hf.architectures or ["none"])[0]
    family = FAMILIES.get(architecture)
    if family is None:
        raise UnsupportedModelError(f"architecture {architecture} is not supported; supported: {sorted(FAMILIES)}")
    return family
